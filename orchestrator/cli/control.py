"""The commands by which a person acts on a running job: rollback, precision, exchange, pause.

Promises: each waits until it was done, and says at which step, or fails with why not;
``--no-wait`` returns once it is stored, which is enough for it to be done or answered. What a
paused job is asked is stored too, and done when it is resumed: nothing waits for that. A
``--key`` makes it safe to repeat: the same key is the same control.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import HomeOption, JobArgument, OutputOption, client_of, user
from orchestrator.cli.show import USAGE, CommandError, Output, print_json

if TYPE_CHECKING:
    from orchestrator.api.client import Client

MOST_BATCHES = 10_000

ReasonOption = Annotated[str, typer.Option("--reason", help="Kept with the action.")]
KeyOption = Annotated[
    str, typer.Option("--key", help="Yours; repeated with it, it is done once.", metavar="KEY")
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return once it was done, or once it is stored.")
]


class LayerPrecision(StrEnum):
    """What layers are moved to."""

    bf16 = "bf16"
    fp8 = "fp8"


class ExchangeWay(StrEnum):
    """What gradients cross the network in."""

    fp8 = "fp8"
    bf16 = "bf16"
    auto = "auto"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (rollback, precision, exchange, pause):
        app.command()(command)


def rollback(
    job: JobArgument,
    to_step: Annotated[int, typer.Option("--to-step", min=0, help="Of a snapshot or checkpoint.")],
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="B,B-C", help="Batches to leave out from there on."),
    ] = None,
    reason: ReasonOption = "",
    key: KeyOption = "",
    wait: WaitOption = True,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Take a job back to an earlier step; a paused one when it is resumed, before it trains."""
    batches = batches_of(skip or [])
    client = client_of(home)
    asked = client.rollback(job, to_step, batches, **_ask(reason, key))
    _tell(client, asked, wait=wait, output=output)


def precision(
    job: JobArgument,
    layer: Annotated[
        list[str], typer.Option("--layer", metavar="PATTERN", help="As 'layers.*.mlp.down'.")
    ],
    to: Annotated[LayerPrecision, typer.Option("--to", help="What they compute in from then on.")],
    reason: ReasonOption = "",
    key: KeyOption = "",
    wait: WaitOption = True,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Move layers of a job to BF16, where they stay until asked back, or to FP8; of a paused one
    when it is resumed."""
    client = client_of(home)
    asked = client.precision(job, layer, to.value, **_ask(reason, key))
    _tell(client, asked, wait=wait, output=output)


def exchange(
    job: JobArgument,
    to: Annotated[ExchangeWay, typer.Option("--to", help="auto: measure which is faster.")],
    reason: ReasonOption = "",
    key: KeyOption = "",
    wait: WaitOption = True,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Change what a job's gradients cross the network in; a paused one's when it is resumed."""
    client = client_of(home)
    asked = client.exchange(job, to.value, **_ask(reason, key))
    _tell(client, asked, wait=wait, output=output)


def pause(
    job: JobArgument,
    reason: ReasonOption = "",
    key: KeyOption = "",
    wait: WaitOption = True,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Stop a job after a checkpoint and give its nodes back; `octavo resume` lets it go on."""
    client = client_of(home)
    asked = client.pause(job, **_ask(reason, key))
    _tell(client, asked, wait=wait, output=output)


def batches_of(words: list[str]) -> list[int]:
    """``["3,7-9", "12"]`` → 3, 7, 8, 9, 12."""
    found: set[int] = set()
    for part in (part.strip() for word in words for part in word.split(",")):
        match = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", part)
        if match is None:
            raise CommandError(
                f"--skip: {part!r} is no batch", "batches are as 7, 9-12 or 3,7-9", USAGE
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise CommandError(f"--skip: {part!r} ends before it begins", "", USAGE)
        if last - first >= MOST_BATCHES or len(found) > MOST_BATCHES:
            raise CommandError(f"--skip: {part!r} is more than {MOST_BATCHES} batches", "", USAGE)
        found.update(range(first, last + 1))
    return sorted(found)


def _ask(reason: str, key: str) -> dict[str, str]:
    return {"by": user(), "reason": reason, **({"key": key} if key else {})}


def _tell(client: Client, asked: Mapping[str, Any], *, wait: bool, output: Output) -> None:
    """What became of it, or that it is stored."""
    found = dict(asked)
    # A paused job has none to wait for: the message says what it takes.
    if wait and found["state"] == "accepted" and not found["message"]:
        found = client.answer(found["job"], found["key"])
    if found["state"] == "refused":
        raise CommandError(f"{found['job']}: {found['message'].rstrip('. ')}")
    if output is Output.json:
        print_json(found)
    elif found["state"] == "accepted":
        waits = f": {found['message']}" if found["message"] else ""
        print(f"{found['job']} {found['kind']} accepted, key {found['key']}{waits}")
    else:
        print(f"{found['job']} {found['kind']} applied: {found['message']}")
