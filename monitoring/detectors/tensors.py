"""A step's per-tensor statistics as arrays, and the arrays that detectors keep of them.

Promises: pure; a record's table is made once however many detectors look at it; state is one
float32 matrix [fields, tensors] that is never written in place and goes through JSON exactly;
no Python loop over tensors of a record that came from ranks, whose columns it takes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from monitoring.amax import are_of_layers, split_name
from monitoring.records import StepRecord, Suspect
from monitoring.tensor_stats import TensorColumns

MOST_SUSPECTS = 8
"""Suspects named in an incident at most."""

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The statistics of one record, an entry a tensor, in the order of ``names``."""

    names: tuple[str, ...]
    amax: Floats
    scale: Floats
    saturated_pct: Floats
    underflow_pct: Floats
    calibrated: Bools
    """The scale was made from data."""
    octaves: Floats
    """log2(amax); NaN where the amax is 0 or not finite."""
    backward: Bools
    """Gradients: they follow what the forward operands and the loss do."""
    in_bf16: Bools
    """The layer computed in BF16."""


_newest: tuple[StepRecord, TensorTable] | None = None


def table_of(record: StepRecord) -> TensorTable:
    """The record's statistics; of a record without any, an empty table."""
    global _newest
    cached = _newest
    if cached is not None and cached[0] is record:
        return cached[1]
    columns = TensorColumns.of(record.tensors)
    amax, names = columns.amax, columns.names
    known = np.isfinite(amax) & (amax > 0.0)
    octaves = np.full(len(amax), np.nan)
    np.log2(amax, out=octaves, where=known)
    if cached is not None and cached[1].names == names:
        # The same names are the same tuple, which is told without looking into it.
        names = cached[1].names
    table = TensorTable(
        names=names,
        amax=amax,
        scale=columns.scale,
        saturated_pct=columns.saturated_pct,
        underflow_pct=columns.underflow_pct,
        calibrated=columns.calibrated,
        octaves=octaves,
        backward=are_backward(names),
        in_bf16=are_of_layers(names, record.high_precision_layers),
    )
    _newest = (record, table)
    return table


@lru_cache(maxsize=8)
def layers_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The layer of each tensor."""
    return tuple(split_name(name)[0] for name in names)


@lru_cache(maxsize=8)
def are_backward(names: tuple[str, ...]) -> Bools:
    """Which tensors are gradients: they follow what the forward operands and the loss do."""
    return np.array([name.endswith("/grad_output") for name in names], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class TensorRows:
    """What a detector keeps of each tensor: float32 [fields, tensors], NaN for nothing.

    Step numbers stand in it too: float32 holds them exactly up to 16,777,216.
    """

    names: tuple[str, ...]
    values: npt.NDArray[np.float32]

    @classmethod
    def of(cls, names: tuple[str, ...], fields: Sequence[Floats]) -> TensorRows:
        """Rows in the order in which the detector names its fields."""
        return cls(names, np.stack(fields).astype(np.float32))

    @classmethod
    def nothing(cls, fields: int) -> TensorRows:
        """Of no tensor yet."""
        return cls((), np.empty((fields, 0), dtype=np.float32))

    def named(self, names: tuple[str, ...]) -> TensorRows:
        """For another set of tensors: known ones keep their rows, new ones have NaN.

        So it is after a restart on other ranks: the order of the names is another one.
        """
        if names is self.names or names == self.names:
            return self
        known = {name: i for i, name in enumerate(self.names)}
        old = np.array([known.get(name, -1) for name in names], dtype=np.int64)
        values = np.full((len(self.values), len(names)), np.nan, dtype=np.float32)
        found = old >= 0
        values[:, found] = self.values[:, old[found]]
        return TensorRows(names, values)

    def fields(self) -> list[Floats]:
        """Float64 copies of the rows, for arithmetic."""
        return list(self.values.astype(np.float64))

    def dump(self) -> dict[str, Any]:
        """Strict JSON. Names and rows are packed: they are many, and much alike."""
        return {
            "names": _pack("\n".join(self.names).encode()),
            "fields": len(self.values),
            "values": _pack(np.ascontiguousarray(self.values, dtype="<f4").tobytes()),
        }

    @classmethod
    def load(cls, row: Mapping[str, Any], fields: int) -> TensorRows:
        """The inverse of ``dump``; ValueError for rows of another number of fields."""
        if row["fields"] != fields:
            raise ValueError(f"{row['fields']} fields a tensor are stored, {fields} are kept")
        text = _unpack(row["names"]).decode()
        names = tuple(text.split("\n")) if text else ()
        values = np.frombuffer(_unpack(row["values"]), dtype="<f4").reshape(fields, len(names))
        return cls(names, values.astype(np.float32))


def _pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def or_zero(values: Floats) -> Floats:
    """With 0 where there is nothing yet; a third of what ``np.nan_to_num`` takes."""
    return np.where(np.isnan(values), 0.0, values)


def since_when(flags: Bools, since: Floats, step: int) -> Floats:
    """First step of each present stretch of ``flags``; NaN where there is none."""
    return np.where(flags, np.where(np.isnan(since), float(step), since), np.nan)


def suspects(
    names: tuple[str, ...],
    involved: Bools,
    since: Floats,
    size: Floats,
    evidence: Mapping[str, Floats],
    layers: frozenset[str] | None = None,
) -> tuple[Suspect, ...]:
    """The layers of ``involved`` tensors, the one that moved first in front, each once.

    Among equals a forward operand comes before a gradient, which only follows it, then the one
    with the larger ``size``. ``evidence`` is an array each, of which a suspect gets its value.
    ``layers``: unset, every layer counts.
    """
    where = np.flatnonzero(involved)
    backward = are_backward(names)[where]
    first = np.where(np.isnan(since[where]), np.inf, since[where])
    order = np.lexsort((-or_zero(size[where]), backward, first))
    found: dict[str, Suspect] = {}
    for i in where[order].tolist():
        layer, role = split_name(names[i])
        if layer in found or (layers is not None and layer not in layers):
            continue
        values = {key: float(column[i]) for key, column in evidence.items()}
        if not np.isnan(since[i]):
            values["since_step"] = float(since[i])
        found[layer] = Suspect(layer, role, values)
        if len(found) == MOST_SUSPECTS:
            break
    return tuple(found.values())
