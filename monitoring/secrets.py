"""What looks like a secret, and texts and configurations without it.

Promises: pure; names and shapes of values decide, so that a secret that looks like neither passes;
what is masked says so, and where it stood.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_NAME = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|PAT)S?$", re.IGNORECASE
)
"""Of a setting or an environment variable."""
SECRET_VALUE = re.compile(
    r"^(sk-|ghp_|gho_|github_pat_|glpat-|hf_|xox[abp]-|AKIA|eyJ)|-----BEGIN |://[^/\s:@]+:[^/\s@]+@"
)
MASK = "(secret, left out)"
SHORTEST = 8
"""Characters of a value that is looked for in texts: a shorter one is part of any word."""


def masked(value: Any, name: str = "") -> Any:
    """A configuration without what looks like a secret, in the same shape."""
    if isinstance(value, Mapping):
        return {key: masked(part, str(key)) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(part, name) for part in value]
    if isinstance(value, str) and value and (
        SECRET_NAME.search(name) or SECRET_VALUE.search(value)
    ):  # fmt: skip
        return MASK
    return value


def secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values of an environment that must not be written anywhere, the longest first."""
    found = {
        value
        for name, value in environ.items()
        if len(value) >= SHORTEST and (SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }
    return tuple(sorted(found, key=len, reverse=True))


def without(text: str, secrets: Sequence[str]) -> str:
    """A text in which each of ``secrets`` is masked."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    return text
