"""What was heard while nodes were recorded, and when: what clients were told, and what nodes told each other. Pure.

Times are of the system's monotonic clock, which the recorder reads, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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
class Sent:
    """A block that a client writes under a number, and sends again until it has an answer. `ended_s`: when it had one, or gave
    the block up. `timestamp`: the one of the answer; 0: there was none."""

    begun_s: float
    table: str
    tablet_id: TabletId
    client_id: bytes
    made_us: int
    sequence: int
    block: bytes
    ended_s: float = NEVER_S
    timestamp: int = 0


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
    sent: list[Sent] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def until(self, by_s: float) -> Story:
        """What of it had been when the power went at `by_s`: what ends later has no end."""

        def deeds(all_: dict[str, Deed]) -> dict[str, Deed]:
            return {name: _until(deed, by_s) for name, deed in all_.items() if deed.begun_s <= by_s}

        return replace(
            self,
            rows={
                row: [_until(deed, by_s) for deed in history if deed.begun_s <= by_s]
                for row, history in self.rows.items()
            },
            created=deeds(self.created),
            deleted=deeds(self.deleted),
            promises=[promise for promise in self.promises if promise.at_s <= by_s],
            dropped=[dropped for dropped in self.dropped if dropped.at_s <= by_s],
            incarnations=[told for told in self.incarnations if told[0] <= by_s],
            sent=[
                replace(sent) if sent.ended_s <= by_s else replace(sent, ended_s=NEVER_S, timestamp=0)
                for sent in self.sent
                if sent.begun_s <= by_s
            ],
        )

    def said(self, member: str) -> dict[StreamKey, list[Promise]]:
        """What a member has said, but of what it was ordered to remove."""
        gone = {d.tablet_id for d in self.dropped if d.member == member}
        said: dict[StreamKey, list[Promise]] = {}
        for promise in self.promises:
            if promise.member == member and promise.tablet_id not in gone:
                said.setdefault(StreamKey(promise.tablet_id, promise.replica_id), []).append(promise)
        return said

    def incarnation(self, member: str) -> int:
        """The highest that a member has told; 0 if none."""
        return max((n for _, who, n in self.incarnations if who == member), default=0)

    def unanswered(self) -> dict[tuple[TabletId, bytes], list[Sent]]:
        """What each client is still to send again to a tablet, in its order."""
        found: dict[tuple[TabletId, bytes], list[Sent]] = {}
        for sent in self.sent:
            if sent.ended_s == NEVER_S:
                found.setdefault((sent.tablet_id, sent.client_id), []).append(sent)
        return found


def _until(deed: Deed, by_s: float) -> Deed:
    return replace(deed) if deed.told_s <= by_s else replace(deed, told_s=NEVER_S)


def possible(history: Iterable[Deed]) -> set[int | None]:
    """The values that a row may have: that of the last write that was told, or of one after it that was under way."""
    values: set[int | None] = {None}
    for deed in history:
        if deed.told_s < NEVER_S:
            values = {deed.value}
        else:
            values.add(deed.value)
    return values
