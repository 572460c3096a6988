"""A node's keeper, and its partners', as a rank sees them over Ray.

A snapshot is put into the node's object store once; the node's own keeper reads it there, and
Ray's object managers carry it to the partners, beside the rank. From keeper to keeper it would be
copied into the object store a second time, on the node that trains. What is lost with a rank that
dies meanwhile is a partner's newest copy, while the node's own keeper has that step.

Promises: nothing queues up at a keeper that doesn't answer: while a call to it is under way no
other is made, so that at most one snapshot a keeper is held for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from launch.digests import Payload
from launch.node_calls import named_actor
from launch.snapshots import (
    SnapshotError,
    SnapshotKey,
    SnapshotSource,
    StoredSnapshot,
    StoreGoneError,
)
from launch.stores import Stores

LEAST_RATE = 50e6
"""Bytes a second below which a transfer counts as stuck."""
REST_S = 60.0
"""How long a keeper is left alone after it failed."""
GONE_REST_S = 0.5
"""The same where it has died: another one takes its place in a moment, and until it is
found a rank's state is in no other process."""
ANSWER_S = 30.0
"""Seconds that a keeper may take to answer, beside the time that the bytes take."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperHandles:
    """The keeper actors that one rank has to do with."""

    own: Any
    """Of its node; None: its snapshots stay in its process."""
    partners: tuple[Any, ...] = ()
    """Of other nodes, which get copies of its snapshots."""
    sources: tuple[Any, ...] = ()
    """Of other nodes, which hold copies that it may start from."""
    own_is_source: bool = True
    """Whether its node's keeper holds one of those."""
    nbytes: int = 0
    """Size of the largest copy that it may start from."""
    held_nbytes: int = 0
    """What its node's keeper holds already."""
    own_name: str = ""
    partner_names: tuple[str, ...] = ()
    """By which those are found that take the place of keepers that died; "": none does."""


NO_KEEPERS = KeeperHandles(None, own_is_source=False)


def patience_s(nbytes: int) -> float:
    """Seconds that a call which carries ``nbytes`` may take."""
    return ANSWER_S + nbytes / LEAST_RATE


class Place:
    """A keeper actor, or the one of its name that has taken its place."""

    def __init__(self, keeper: Any, name: str = "") -> None:
        self._keeper = keeper
        self._name = name
        self._died = False

    def keeper(self) -> Any:
        """Whom to ask. Not for Ray's own threads, which must not ask Ray anything."""
        found = named_actor(self._name) if self._died and self._name else None
        if found is not None:
            self._keeper, self._died = found, False
        return self._keeper

    def died(self) -> None:
        """The one that was asked is gone for good; from any thread."""
        self._died = True


def _died(error: BaseException | None) -> bool:
    """Whether it says that the actor is gone for good."""
    import ray

    return isinstance(error, ray.exceptions.ActorDiedError)


class Parcels:
    """The rank's snapshot in the node's object store, put there once for all keepers."""

    def __init__(self) -> None:
        self._newest: tuple[SnapshotKey, Any] | None = None

    def put(self, key: SnapshotKey, payload: Payload) -> Any:
        """The reference; the same for a key until ``forget``."""
        import ray

        if self._newest is None or self._newest[0] != key:
            # Arrays go through shared memory without being pickled.
            self._newest = (key, ray.put(np.frombuffer(payload, dtype=np.uint8)))
        return self._newest[1]

    def forget(self) -> None:
        """Whoever is to read it has the reference; the object store gets its memory back then."""
        self._newest = None


class KeeperStore:
    """A node's Keeper as the ranks see it: the calls of SnapshotStore, over Ray."""

    def __init__(
        self,
        keeper: Any,
        parcels: Parcels,
        *,
        name: str = "",
        nbytes: int = 0,
        replicas: bool = False,
    ) -> None:
        """``name``: of the actor; ``nbytes``: of what will be fetched; ``replicas``: the parcel is
        for partners too."""
        self._place = Place(keeper, name)
        self._parcels = parcels
        self._nbytes = nbytes
        self._replicas = replicas
        self._unanswered: Any = None

    def put(
        self, key: SnapshotKey, payload: Payload, digest: str, *, replicated: bool = False
    ) -> None:
        """Blocks until the keeper has checked its copy; raises what it raised, StoreGoneError
        when it has died, or Ray's errors."""
        import ray

        if self._unanswered is not None and not ray.wait([self._unanswered], timeout=0)[0]:
            raise TimeoutError("the keeper hasn't answered the call before this one")
        parcel = self._parcels.put(key, payload)
        keeper = self._place.keeper()
        self._unanswered = keeper.put.remote(key, parcel, digest, replicated=replicated)
        if not (self._replicas and replicated):
            self._parcels.forget()
        nbytes = np.frombuffer(payload, dtype=np.uint8).nbytes
        try:
            with _own_errors():
                ray.get(self._unanswered, timeout=patience_s(nbytes))
        except ray.exceptions.ActorDiedError:
            self._unanswered = None
            self._place.died()
            raise StoreGoneError("the node's keeper has died") from None
        self._unanswered = None

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        """See Keeper.get; raises Ray's errors when the keeper is gone."""
        import ray

        with _own_errors():
            found: StoredSnapshot | None = ray.get(
                self._place.keeper().get.remote(key), timeout=patience_s(self._nbytes)
            )
        return found


@contextmanager
def _own_errors() -> Iterator[None]:
    """A keeper's SnapshotError as it was raised: Ray's is of a class made for it, which takes
    other arguments and is not sent on."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SnapshotError):
            raise error.cause from None
        raise


class Partner(Protocol):
    """A keeper on another node."""

    def send(self, key: SnapshotKey, payload: Payload, digest: str) -> Future[Any]:
        """Begin to carry a copy there; the future has the keeper's answer, or what went wrong."""


class RayPartner:
    """A keeper actor on another node."""

    def __init__(self, keeper: Any, parcels: Parcels, name: str = "") -> None:
        self._place = Place(keeper, name)
        self._parcels = parcels

    def send(self, key: SnapshotKey, payload: Payload, digest: str) -> Future[Any]:
        """Its future settles in a thread of Ray's."""
        parcel = self._parcels.put(key, payload)
        put = self._place.keeper().put.remote(key, parcel, digest, replicated=True)
        sent: Future[Any] = put.future()
        sent.add_done_callback(self._settled)
        return sent

    def _settled(self, future: Future[Any]) -> None:
        # In a thread of Ray's, which answers nobody while this is done.
        if _died(future.exception()):
            self._place.died()


class Partners:
    """``launch.snapshots.PartnerCopies``: one copy a partner, one under way at a time each."""

    def __init__(
        self,
        partners: Sequence[Partner],
        forget: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``forget`` is called once a snapshot is on its way to all of them."""
        self._partners = partners
        self._forget = forget
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[int, float] = {}
        """By partner, until when its answer is waited for."""
        self._rests: dict[int, float] = {}
        """Partners that failed, and until when they are left alone."""
        self._told_stuck: set[int] = set()

    @property
    def behind(self) -> bool:
        """Whether one still has to answer, and may take its time."""
        now = self._clock()
        with self._lock:
            return any(now < until for until in self._under_way.values())

    def offer(
        self, key: SnapshotKey, payload: Payload, digest: str, told: Callable[[str, int], None]
    ) -> None:
        """Send a copy to each partner that has answered the call before; told once why, where not.

        One that failed is left alone for a while, without a word.
        """
        nbytes = np.frombuffer(payload, dtype=np.uint8).nbytes
        now = self._clock()
        try:
            for number, partner in enumerate(self._partners):
                with self._lock:
                    rests = now < self._rests.get(number, now)
                    stuck = number in self._under_way
                    news = stuck and number not in self._told_stuck
                    if news:
                        self._told_stuck.add(number)
                    if not (rests or stuck):
                        self._under_way[number] = now + patience_s(nbytes)
                if news:
                    told("the partner's keeper hasn't answered the call before this one", number)
                elif not (rests or stuck):
                    self._send(number, partner, key, payload, digest, told)
        finally:
            self._forget()

    def _send(
        self,
        number: int,
        partner: Partner,
        key: SnapshotKey,
        payload: Payload,
        digest: str,
        told: Callable[[str, int], None],
    ) -> None:
        def settled(future: Future[Any]) -> None:
            over(future.exception())

        def over(error: BaseException | None) -> None:
            with self._lock:
                del self._under_way[number]
                self._told_stuck.discard(number)
                if error is not None:
                    rest = GONE_REST_S if _died(error) else REST_S
                    self._rests[number] = self._clock() + rest
            told("" if error is None else _in_words(error), number)

        try:
            future = partner.send(key, payload, digest)
        except Exception as error:  # noqa: BLE001 - a copy less is reported, never fatal
            over(error)
        else:
            future.add_done_callback(settled)


def _in_words(error: BaseException) -> str:
    """Ray's own tell all that it knows of an actor."""
    if _died(error):
        return "the partner's keeper has died"
    return f"{type(error).__name__}: {error}"


def stores_of(handles: KeeperHandles) -> Stores:
    """The stores of a rank's training loop."""
    parcels = Parcels()
    replicas = bool(handles.partners)
    own = KeeperStore(
        handles.own, parcels, name=handles.own_name, nbytes=handles.nbytes, replicas=replicas
    )
    sources: list[tuple[str, SnapshotSource]] = []
    if handles.own is not None and handles.own_is_source:
        sources.append(("memory", own))
    sources += [
        ("partner", KeeperStore(keeper, Parcels(), nbytes=handles.nbytes))
        for keeper in handles.sources
    ]
    names = handles.partner_names or ("",) * len(handles.partners)
    partners = [
        RayPartner(keeper, parcels, name)
        for keeper, name in zip(handles.partners, names, strict=True)
    ]
    return Stores(
        own=own if handles.own is not None else None,
        partners=Partners(partners, parcels.forget) if partners else None,
        sources=tuple(sources),
        held_nbytes=handles.held_nbytes,
    )
