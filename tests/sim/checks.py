"""What must never happen, watched over a whole run. Told of facts by the world; drives nothing.

Watches: one leader per term, leader completeness, state machine safety, one configuration step at a time, no
acknowledged write lost, linearizable reads, timestamps that rise under ceilings, snapshots that never change. The core's own state and steps are judged by `stele.raft.invariants`.
"""

from __future__ import annotations

from bisect import bisect_left

from stele.consensus.timestamps import decode_ceiling
from stele.model.config import Configuration, decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import ensure
from stele.model.ids import OpId, ReplicaId
from stele.raft.core import RaftCore
from stele.raft.effects import Role
from stele.raft.messages import Message, TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.ports import VoteRecord
from tests.sim.disk import SimLog


class History:
    """The group's story as an all-knowing observer would tell it."""

    def __init__(self, first_config: Configuration, *, timed: bool = False) -> None:
        self.committed: list[Entry] = []
        """Entry i stands at index i + 1, as soon as any replica has handed it out."""
        self._handed_terms: list[int] = []
        """The highest term seen when entry i + 1 was first handed out; it was committed in that or a lower one."""
        self.leaders: dict[int, int] = {}
        self.members: dict[int, bool] = {p.replica_id: True for p in first_config.peers}
        """Who ever stood in a committed configuration."""
        self.acknowledged_index = 0
        """No read that begins now may miss this index."""
        self.acknowledged: list[OpId] = []
        self.reads = 0
        self.snapshots = 0
        self.timed = timed
        self._configs: list[tuple[int, Configuration]] = [(0, first_config)]
        self._ceilings: list[tuple[int, int, int]] = []
        """(index, term, ceiling) of each that is committed; they rise."""
        self._last_time = 0
        """Of the newest write with a timestamp."""
        self._snapshot = 0
        """The newest that was served: no entry to come may lie at or below it."""

    @property
    def committed_index(self) -> int:
        """The highest index handed out anywhere."""
        return len(self.committed)

    @property
    def config(self) -> Configuration:
        """The last committed configuration."""
        return self._configs[-1][1]

    def config_at(self, index: int) -> Configuration:
        """The committed configuration in force at `index`."""
        return next(c for at, c in reversed(self._configs) if at <= index)

    def handed_out(self, replica: int, term: int, entries: tuple[Entry, ...]) -> None:
        """State machine safety: no two replicas apply different entries at one index (Raft figure 3)."""
        for entry in entries:
            if entry.index <= len(self.committed):
                known = self.committed[entry.index - 1]
                ensure(
                    known == entry,
                    f"replica {replica} applies {entry.opid}, but {known.opid} was committed there",
                )
                continue
            ensure(
                entry.index == len(self.committed) + 1, f"replica {replica} applies {entry.opid} over a gap"
            )
            self.committed.append(entry)
            self._handed_terms.append(max(term, self._handed_terms[-1] if self._handed_terms else 0))
            if entry.kind is EntryKind.CONFIG:
                self._check_config_step(entry)
            if self.timed:
                self._check_time(entry)

    def _check_config_step(self, entry: Entry) -> None:
        before, after = self.config, decode_configuration(entry.payload)
        old = [p.replica_id for p in before.voters]
        new = [p.replica_id for p in after.voters]
        moved = [v for v in old if v not in new] + [v for v in new if v not in old]
        ensure(len(moved) <= 1, f"configuration {entry.index} moves several voters at once: {moved}")
        ensure(
            after.opid_index == entry.index, f"configuration at {entry.index} calls itself {after.opid_index}"
        )
        self._configs.append((entry.index, after))
        for peer in after.peers:
            self.members[peer.replica_id] = True

    def ceiling_at(self, index: int) -> int:
        """The highest ceiling at or below a committed index, as a store holds it."""
        return max((ceiling for at, _, ceiling in self._ceilings if at <= index), default=0)

    def _check_time(self, entry: Entry) -> None:
        """Timestamps rise along the log, under a ceiling of their own leader's; a snapshot that was served never changes."""
        if entry.kind is EntryKind.CEILING:
            self._ceilings.append((entry.index, entry.term, decode_ceiling(entry.payload)))
        if entry.kind is not EntryKind.WRITE:
            return
        time = entry.timestamp
        ensure(time > self._last_time, f"{entry.opid} has timestamp {time}, after {self._last_time}")
        ensure(time > self._snapshot, f"{entry.opid} lies within the snapshot {self._snapshot} served before")
        highest = max((c for _, term, c in self._ceilings if term == entry.term), default=0)
        ensure(time <= highest, f"{entry.opid} has timestamp {time}, above the ceiling {highest} of its term")
        self._last_time = time

    def snapshot_served(self, snapshot: int, applied: int) -> None:
        """A reader was given all of what is applied up to there as all that there will be at or below `snapshot`."""
        behind = (e for e in self.committed[applied:] if e.kind is EntryKind.WRITE)
        missing = [e.opid for e in behind if e.timestamp <= snapshot]
        ensure(not missing, f"the snapshot {snapshot} lacks {missing}, committed before it was served")
        self._snapshot = max(self._snapshot, snapshot)
        self.snapshots += 1

    def elected(self, core: RaftCore, term: int) -> None:
        """Election safety; and leader completeness, unless the same turn ended the leadership (Raft figure 3)."""
        other = self.leaders.setdefault(term, core.self_replica)
        ensure(
            other == core.self_replica, f"{other} and {core.self_replica} were both elected in term {term}"
        )
        if core.term != term or core.role is not Role.LEADER:
            return
        # Only what was committed in a lower term must be there; a leader may come late to its own election.
        index = bisect_left(self._handed_terms, term)
        if index > core.log.start.index:
            held, due = core.log.term_at(index), self.committed[index - 1].term
            ensure(
                held == due,
                f"replica {core.self_replica} leads term {term} without the committed entry {due}.{index} "
                f"(it holds term {held} there)",
            )

    def acknowledge(self, opid: OpId) -> None:
        """A client was told that its write stands."""
        self.acknowledged.append(opid)
        self.acknowledged_index = max(self.acknowledged_index, opid.index)

    def lost(self, replica: int, opid: OpId) -> None:
        """A replica says that a proposal was dropped; it must not have been acknowledged."""
        if opid.index <= self.committed_index:
            ensure(
                self.committed[opid.index - 1].term != opid.term,
                f"replica {replica} reports {opid} as lost, but it is committed",
            )

    def read(self, asked_at_index: int, index: int, applied: int) -> None:
        """A read ended that began when `asked_at_index` was acknowledged or seen."""
        ensure(
            index >= asked_at_index,
            f"a linearizable read was answered at index {index}, but {asked_at_index} had been seen before it began",
        )
        self.acknowledged_index = max(self.acknowledged_index, applied)
        self.reads += 1

    def finish(self) -> None:
        """No acknowledged write may be missing from what is committed."""
        for opid in self.acknowledged:
            ensure(
                opid.index <= len(self.committed) and self.committed[opid.index - 1].term == opid.term,
                f"the acknowledged write {opid} is lost",
            )


def check_said(disk: SimLog, own: ReplicaId, to: ReplicaId, message: Message) -> None:
    """What leaves promises nothing that its sender's disk does not hold (Raft figure 2: before responding to RPCs). A promise
    of a term that the disk is beyond is void: who hears it later takes it for what it was."""
    if isinstance(message, TimeoutNow) or (isinstance(message, VoteRequest) and message.pre_vote):
        return
    if isinstance(message, UpdateResponse | VoteResponse) and message.failed:
        return  # it promises nothing
    hard = disk.hard
    ensure(hard.term >= message.term, f"{own} speaks in term {message.term} and has {hard} on disk")
    if isinstance(message, VoteResponse):
        gave = to if message.granted and not message.pre_vote else None
    else:
        gave = own if isinstance(message, VoteRequest | UpdateRequest) else None
    if gave is not None and hard.term == message.term:
        ensure(hard == VoteRecord(message.term, gave), f"{own} voted for {gave} and has {hard} on disk")
    if isinstance(message, UpdateResponse) and message.success and hard.term == message.term:
        opid = message.last_received
        entry = disk.entry(opid.index)
        held = disk.start.index >= opid.index or (entry is not None and entry.term == opid.term)
        ensure(held, f"{own} acknowledges {opid} and has not got it on disk")
