"""What looks like a secret, and texts and configurations without it.

Promises: pure; names and shapes of values decide, so that a secret that looks like neither passes;
what is masked says so, and where it stood.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_NAME = re.compile(
    # Whole words, between dashes or at the end of an upper-case name as libpq's PGPASSWORD,
    r"(PASSWORD|PASSWD|PASSPHRASE|PASSCODE|SECRET|TOKEN|CREDENTIAL|API_?KEY|ACCESS_?KEY|"
    r"PRIVATE_?KEY|AUTH_?KEY|SIGNING_?KEY|ENCRYPTION_?KEY)S?$"
    # and those that end other words too, or are other things alone (PWD is the current folder).
    r"|(^|[_.-])(KEY|PAT|PEM|DSN|COOKIE)S?$|[_.-](PASS|PWD|PW|AUTH|CONNECTION_?STRING|CONN_?STR)$"
    r"|(^|[_.-])CONNECTION_?STRING$",
    re.IGNORECASE,
)
"""Of a setting or an environment variable."""
SECRET_VALUE = re.compile(
    r"^(sk-|ghp_|gho_|github_pat_|glpat-|hf_|xox[abp]-|AKIA|eyJ)|-----BEGIN |://[^/\s:@]+:[^/\s@]+@"
)
SECRET_WORD = re.compile(
    r"\b(?:sk-[\w-]{20,}|gh[po]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|xox[abp]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
"""The same within a text, as an error's: long enough to be no word."""
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
    """A text in which each of ``secrets``, and whatever looks like one, is masked."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    return SECRET_WORD.sub(MASK, text)


def without_in(value: Any, secrets: Sequence[str]) -> Any:
    """A value as JSON has it, whose texts are ``without`` secrets."""
    if isinstance(value, Mapping):
        return {key: without_in(part, secrets) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_in(part, secrets) for part in value]
    return without(value, secrets) if isinstance(value, str) else value
