"""Values that a cluster profile may have, and what is wrong with one that it may not.

Promises: pure; nothing that a shell, a unit, Docker's command line or Kubernetes would read
otherwise passes; a message says what such a value looks like.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_QUANTITY = re.compile(r"[1-9]\d{0,6}(Mi|Gi|Ti)")
_MIB = {"Mi": 1, "Gi": 1024, "Ti": 1024 * 1024}
_SECRET_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@=+,~-]+")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_REDIS = re.compile(r"(rediss?://)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):\d{1,5}")
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?")


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ValueError("is no amount of memory, which is as 512Mi, 64Gi or 2Ti")
    return text


def _secret_name(text: str) -> str:
    if not _SECRET_NAME.fullmatch(text):
        raise ValueError(
            "is no name of a Kubernetes secret (lower-case letters, digits, dashes): "
            "name the secret here, and put the value into it"
        )
    return text


def _object_name(text: str) -> str:
    if not _SECRET_NAME.fullmatch(text):
        raise ValueError("is no name of a Kubernetes object: lower-case letters, digits, dashes")
    return text


def _token_file(text: str) -> str:
    if not _plain(text).startswith(("/", "~/")):
        raise ValueError("must be a path from / or ~/, the same on every host")
    return text


def _plain(text: str) -> str:
    # What is rendered from it are shell scripts and units: a quote or blank would end a word.
    if not _PLAIN.fullmatch(text):
        raise ValueError("may have letters, digits and _./:@=+,~- only")
    return text


def _absolute(text: str) -> str:
    if not _plain(text).startswith("/"):
        raise ValueError("must be an absolute path, the same on every node")
    return text


def _volume_path(text: str) -> str:
    # A colon parts the two halves of a mount of Docker's, and Kubernetes refuses it.
    if ":" in _absolute(text) or "," in text or text.rstrip("/") == "":
        raise ValueError("must be a folder, without colon or comma: it is mounted into containers")
    return text.rstrip("/")


def _namespace(text: str) -> str:
    if not _NAMESPACE.fullmatch(text):
        raise ValueError("is no namespace: lower-case letters, digits and dashes, at most 63")
    return text


def _label_key(text: str) -> str:
    prefix, slash, name = text.rpartition("/")
    if not _LABEL_NAME.fullmatch(name) or (slash and not _SECRET_NAME.fullmatch(prefix)):
        raise ValueError("is no key of a label, which is as rack or example.com/rack")
    return text


def _label_value(text: str) -> str:
    if text and not _LABEL_NAME.fullmatch(text):
        raise ValueError("is no value of a label: letters, digits, dashes, dots, at most 63")
    return text


def _ray_label(text: str) -> str:
    if _label_key(text).startswith("ray.io/"):
        raise ValueError("is one of Ray's own labels: take another prefix")
    return text


def _resource(text: str) -> str:
    if "/" not in _label_key(text):
        raise ValueError("is no name of a device, which is as nvidia.com/gpu: see the node's")
    return text


def _redis(text: str) -> str:
    if not _REDIS.fullmatch(text):
        raise ValueError(
            "must be HOST:PORT, or rediss://HOST:PORT for TLS, and nothing else: "
            "its password belongs into password_secret or password_file"
        )
    return text


def _currency(text: str) -> str:
    if not re.fullmatch(r"[A-Z]{3}", text):
        raise ValueError("is no currency, which is three capitals as USD")
    return text


def _slurm_time(text: str) -> str:
    slurm_seconds(text)
    return text


def slurm_seconds(time: str) -> int:
    """``1-00:00:00`` → 86400: Slurm's minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises ValueError for what is none of them.
    """
    match = _SLURM_TIME.fullmatch(time)
    if match is None:
        raise ValueError("is no time of Slurm, which is as 90 (minutes), 12:00:00 or 2-00:00:00")
    days, first, second, third = match.groups()
    if days is not None:
        hours, minutes, seconds = int(first), int(second or 0), int(third or 0)
        return 86400 * int(days) + 3600 * hours + 60 * minutes + seconds
    if third is not None:
        return 3600 * int(first) + 60 * int(second) + int(third)
    return 60 * int(first) + int(second or 0)


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?", text):
        raise ValueError("is no address or host name")
    return text


def _image(text: str) -> str:
    name, _, tag = _plain(text).rpartition("/")[2].partition(":")
    if "@sha256:" not in text and (not name or not tag or tag == "latest"):
        raise ValueError("needs a tag of its own or a digest: every node must run the same image")
    return text


Quantity = Annotated[str, AfterValidator(_quantity)]
ObjectName = Annotated[str, AfterValidator(_object_name)]
TokenFile = Annotated[str, AfterValidator(_token_file)]
SecretName = Annotated[str, AfterValidator(_secret_name)]
Word = Annotated[str, AfterValidator(_plain)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
VolumePath = Annotated[str, AfterValidator(_volume_path)]
Namespace = Annotated[str, AfterValidator(_namespace)]
LabelKey = Annotated[str, AfterValidator(_label_key)]
RayLabel = Annotated[str, AfterValidator(_ray_label)]
LabelValue = Annotated[str, AfterValidator(_label_value)]
ResourceName = Annotated[str, AfterValidator(_resource)]
RedisAddress = Annotated[str, AfterValidator(_redis)]
Currency = Annotated[str, AfterValidator(_currency)]
SlurmTime = Annotated[str, AfterValidator(_slurm_time)]
HostName = Annotated[str, AfterValidator(_host)]
ImageName = Annotated[str, AfterValidator(_image)]


def mebibytes(quantity: str) -> int:
    """``64Gi`` → 65536."""
    return int(quantity[:-2]) * _MIB[quantity[-2:]]
