"""The help of every command: examples that are right, ``-o json``, and what a shell completes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from orchestrator.cli.examples import EXAMPLES
from orchestrator.cli.main import app
from orchestrator.home.folder import Home
from tests.unit.control_plane import ControlPlane

ROOT: Any = typer.main.get_command(app)


def commands(group: Any = ROOT, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{before}{name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")


COMMANDS = dict(commands())


def options(command: Any) -> set[str]:
    return {word for parameter in command.params for word in parameter.opts}


def test_every_command_has_examples_and_no_other_one() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_understood_by_its_command(example: str) -> None:
    first, *words = shlex.split(example)
    assert first == "octavo"
    command = ROOT
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        command = command.commands[name]
    # Parsed, with all that its options check, and not run.
    command.make_context(example, words)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_examples_and_how_to_get_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    context = COMMANDS[name].make_context(name, [], resilient_parsing=True)
    shown = COMMANDS[name].get_help(context)
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in f"{shown}\n"
    if name not in ("token", "deploy"):
        # A group alone shows nothing.
        assert "--output" in options(COMMANDS[name])


def test_what_asks_a_controller_takes_the_file_of_its_authority() -> None:
    for name, command in COMMANDS.items():
        assert ("--home" in options(command)) == ("--ca" in options(command)), name


def test_no_token_is_ever_a_word_of_a_command() -> None:
    """Every user of the machine could read it in its list of processes."""
    for name, command in COMMANDS.items():
        shown = {p.name for p in command.params}
        assert not any(word in str(o) for o in shown for word in ("token", "secret")), name


def completed(words: str, home: Home | None = None) -> list[str]:
    """What bash would offer after ``words``."""
    given = words.split(" ")
    asked = {
        "_OCTAVO_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(given) - 1),
    }
    code = "from orchestrator.cli.main import main; main([])"
    if home is not None:
        asked["OCTAVO_HOME"] = str(home.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True
    )
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_jobs(home: Home, plane: ControlPlane) -> None:
    assert {"rollback", "run", "report", "replay", "resume"} <= set(completed("octavo r"))
    assert "--since" in completed("octavo logs --s")
    job, _ = plane.submit("alpha"), plane.submit("beta")
    assert completed("octavo status al", home) == [job]


def test_completing_without_a_controller_offers_nothing_and_says_nothing(tmp_path: Any) -> None:
    assert completed("octavo status al", Home(tmp_path / "none")) == []
