"""What was heard while nodes were recorded, and when: what clients were told, and what nodes told each other. Pure.

Times are of the system's monotonic clock, which the recorder reads, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stele.model.ids import OPID_NONE, ClusterId, NodeId, OpId, ReplicaId, StreamKey, TabletId

NEVER_S = float("inf")


@dataclass(slots=True)
class Deed:
    """Something that a client asked for. `told_s`: when it heard that it is done. `value`: of a row from then on, None for a
    row that is deleted."""

    begun_s: float
    value: int | None = None
    told_s: float = NEVER_S


@dataclass(frozen=True, slots=True)
class Promise:
    """What a replica said of its log in a message: its term, its vote in that term, the entries it has."""

    at_s: float
    member: str
    tablet_id: TabletId
    replica_id: ReplicaId
    term: int
    voted_for: ReplicaId | None = None
    received: OpId = OPID_NONE


@dataclass(frozen=True, slots=True)
class Dropped:
    """An order to remove what a member has of a tablet."""

    at_s: float
    member: str
    tablet_id: TabletId


@dataclass(slots=True)
class Story:
    """One recording. `rows`: by table and key, in the order in which one client wrote them."""

    cluster_id: ClusterId
    network: str
    ids: dict[str, NodeId]
    ready_s: float = NEVER_S
    rows: dict[tuple[str, int], list[Deed]] = field(default_factory=dict)
    created: dict[str, Deed] = field(default_factory=dict)
    deleted: dict[str, Deed] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    incarnations: list[tuple[float, str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def said(self, member: str, by_s: float) -> dict[StreamKey, list[Promise]]:
        """What a member had said by then, but of what it was ordered to remove."""
        gone = {d.tablet_id for d in self.dropped if d.member == member and d.at_s <= by_s}
        said: dict[StreamKey, list[Promise]] = {}
        for promise in self.promises:
            if promise.at_s > by_s:
                break
            if promise.member == member and promise.tablet_id not in gone:
                said.setdefault(StreamKey(promise.tablet_id, promise.replica_id), []).append(promise)
        return said

    def incarnation(self, member: str, by_s: float) -> int:
        """The highest that a member had told by then; 0 if none."""
        return max((n for at_s, who, n in self.incarnations if who == member and at_s <= by_s), default=0)


def possible(history: Iterable[Deed], by_s: float) -> set[int | None]:
    """The values that a row may have when the power goes at `by_s`: that of the last write that was told, or of one after it
    that was under way."""
    values: set[int | None] = {None}
    for deed in history:
        if deed.told_s <= by_s:
            values = {deed.value}
        elif deed.begun_s <= by_s:
            values.add(deed.value)
    return values
