"""What looks like a secret is not shown, and what doesn't is."""

from __future__ import annotations

import pytest

from monitoring.secrets import MASK, masked, secrets_of, without


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
