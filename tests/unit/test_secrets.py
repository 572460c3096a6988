"""What looks like a secret is not shown, and what doesn't is."""

from __future__ import annotations

import pytest

from launch.worker import failure_of
from monitoring.secrets import MASK, masked, secrets_of, without
from orchestrator.spec.errors import Finding, Source
from tests.unit.scripted_job import Make


@pytest.mark.parametrize(
    "spec",
    [
        {"deepspeed": {"api_key": "abc"}},
        {"a": [{"hf_token": "abc"}]},
        {"PASSWORDS": ["one", "two"]},
        {"url": "postgresql://user:pass@host/db"},
        {"plain": "ghp_0123456789"},
        {"nested": {"text": "-----BEGIN PRIVATE KEY-----"}},
    ],
)
def test_secrets_are_masked_by_name_and_by_shape(spec: dict[str, object]) -> None:
    told = str(masked(spec))
    assert MASK in told
    for secret in ("abc", "one", "two", "pass@", "ghp_", "BEGIN"):
        assert secret not in told


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD",
        "MYSQL_PWD",
        "OPENAI_APIKEY",
        "DB_PASS",
        "MY_PASSPHRASE",
        "TLS_PEM",
        "SENTRY_DSN",
        "GH_PAT",
        "AZURE_STORAGE_CONNECTION_STRING",
        "registry.password",
        "AWS_SECRET_ACCESS_KEY",
    ],
)
def test_what_programs_call_their_secrets_is_known(name: str) -> None:
    assert masked({name: "hunter2secret"}) == {name: MASK}
    assert secrets_of({name: "hunter2secret"}) == ("hunter2secret",)


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "PATH", "COMPASS", "MONKEY", "PATTERN"])
def test_what_only_ends_like_a_secret_is_none(name: str) -> None:
    assert secrets_of({name: "/some/where/else"}) == ()


def test_the_rest_of_a_configuration_stays_as_it_is() -> None:
    spec = {"name": "demo", "tokens": 4096, "num_kv_heads": 4, "keys": [1, 2], "monkey": "x",
            "source": "https://host/path?a=1", "token": None, "empty_token": ""}  # fmt: skip
    assert masked(spec) == spec


def test_values_of_secret_variables_are_taken_out_of_texts() -> None:
    env = {"HF_TOKEN": "planted-token", "HOME": "/root/somewhere", "A_KEY": "short",
           "DB": "redis://me:planted-pass@host"}  # fmt: skip
    secrets = secrets_of(env)
    assert set(secrets) == {"planted-token", "redis://me:planted-pass@host"}
    told = without("GET /?t=planted-token from /root/somewhere", secrets)
    assert told == f"GET /?t={MASK} from /root/somewhere"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnop1234",
        "ghp_0123456789abcdefghij",
        "sk-proj-0123456789abcdefghij",
        "xoxb-12345678901",
        "AKIA0123456789ABCDEF",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
    ],
)
def test_what_looks_like_a_secret_is_taken_out_of_texts_wherever_it_comes_from(secret: str) -> None:
    assert without(f"refused ({secret}), try again", ()) == f"refused ({MASK}), try again"
    assert without(f"GET https://me:{secret}@host/x", ()) == f"GET https://{MASK}@host/x"


@pytest.mark.parametrize(
    "text",
    [
        "no module named hf_tokenizers_of_mine",
        "task-0123456789abcdefghijkl, disk-00000000000000000000000",
        "tcp://10.0.0.1:29500 was refused by worker@host",
        "at 2026-11-30T10:00:00Z: sk-learn is not there",
    ],
)
def test_what_only_begins_like_a_secret_stays(text: str) -> None:
    assert without(text, ()) == text


def test_what_a_rank_raised_is_told_without_the_secrets_of_its_environment() -> None:
    failed = failure_of(
        3, 7, RuntimeError("bad token planted-value"), {"MY_TOKEN": "planted-value"}
    )
    assert failed.cause == f"RuntimeError: bad token {MASK}"
    assert "planted-value" not in str(failed)


def test_no_event_incident_or_action_of_a_job_has_a_secret(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted-value")
    job = bench()
    job.train(3)
    job.ranks.fail(0, RuntimeError("bad token planted-value"))
    job.step()
    job.step(60.0)
    told = job.settled()
    assert MASK in told.actions[0].incidents[0].message
    assert "planted-value" not in repr((told.actions, told.events))


def test_a_problem_of_a_job_file_does_not_quote_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted-value")
    told = "importing mine raised RuntimeError: bad token planted-value"
    problem = Source("job.yaml", {}, {}).problem(Finding(("model", "factory"), told))
    assert MASK in problem.message and "planted" not in str(problem)
