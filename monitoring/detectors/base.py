"""The interface of a detector, and the registry of those there are.

A detector is a pure function (state, record) → (state, incidents). Its state is an
immutable value; ``dump`` and ``load`` carry it through JSON without loss, so that a
supervisor that died goes on exactly where it stopped.

Promises: ``observe`` reads no clock and keeps nothing outside the state; what is reported
as an incident never enters the baseline it was measured against.

A new detector is a new file with a class marked ``@register``, imported in
``monitoring.detectors``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from monitoring.amax import TensorScaling
from monitoring.config import DetectionConfig
from monitoring.detectors.tensors import TensorRows
from monitoring.records import Incident, IncidentKind, StepRecord, Suspect

State = TypeVar("State")


class Detector(ABC, Generic[State]):
    """Looks for one kind of trouble."""

    name: ClassVar[IncidentKind]
    """Kind of its incidents, and its word in ``Incident.detector`` and in stored states."""

    of_facts: ClassVar[bool] = False
    """Whether it compares facts, which stay what they are when all statistics begin anew."""

    def __init__(
        self,
        config: DetectionConfig,
        scaling: TensorScaling | None = None,
        guessing_loss: float | None = None,
    ) -> None:
        """``scaling``: unset, what a spec's ``fp8`` section is by default. ``guessing_loss``: nats
        a token of a model that guesses; unset, nobody knows, as for a loss of the user's own."""
        self.config = config
        self.scaling = scaling or TensorScaling()
        self.guessing_loss = guessing_loss

    @abstractmethod
    def initial(self) -> State:
        """The state before the first record."""

    @abstractmethod
    def observe(self, state: State, record: StepRecord) -> tuple[State, list[Incident]]:
        """Take in one record; records come with rising step numbers."""

    @abstractmethod
    def dump(self, state: State) -> Any:
        """The state as strict JSON values."""

    @abstractmethod
    def load(self, row: Any) -> State:
        """The inverse of ``dump``."""

    def incident(
        self,
        record: StepRecord,
        *,
        onset_step: int,
        message: str,
        evidence: Mapping[str, float],
        suspects: tuple[Suspect, ...] = (),
        ranks: tuple[int, ...] = (),
    ) -> Incident:
        """What ``record`` showed; the rest as ``Incident`` has it."""
        return Incident(
            kind=self.name,
            detector=self.name,
            attempt=record.attempt,
            timeline=record.timeline,
            step=record.step,
            onset_step=onset_step,
            time=record.time,
            message=message,
            evidence=evidence,
            suspects=suspects,
            ranks=ranks,
        )

    def counts_while_settling(self, incident: Incident) -> bool:
        """Whether an incident is reported within a settling window (spikes are not)."""
        return False

    def moved_before(self, state: State, step: int) -> tuple[Suspect, ...]:
        """Layers known to have moved before ``step``, the first in front.

        For incidents of detectors that see no tensors: what moved before the loss did is where
        to look.
        """
        return ()


class RowsDetector(Detector[TensorRows]):
    """One whose state is some numbers of each tensor."""

    fields: ClassVar[tuple[str, ...]]
    """What is kept of each."""

    def initial(self) -> TensorRows:
        return TensorRows.nothing(len(self.fields))

    def dump(self, state: TensorRows) -> Any:
        return state.dump()

    def load(self, row: Any) -> TensorRows:
        return TensorRows.load(row, len(self.fields))


DETECTORS: dict[str, type[Detector[Any]]] = {}
"""Every detector by name, in the order in which they look at a record."""


def register(cls: type[Detector[Any]]) -> type[Detector[Any]]:
    """Class decorator: add a detector to the registry; ValueError for a name taken."""
    if DETECTORS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"two detectors are named {cls.name}")
    return cls


def build_detectors(
    config: DetectionConfig,
    scaling: TensorScaling | None = None,
    guessing_loss: float | None = None,
) -> list[Detector[Any]]:
    """One of each registered detector."""
    return [cls(config, scaling, guessing_loss) for cls in DETECTORS.values()]
