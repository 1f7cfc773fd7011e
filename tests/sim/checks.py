"""Checks over a whole run that what must never happen did not. The world reports facts to it; it drives
nothing.

Watches: one leader per term, leader completeness, state machine safety, one configuration step at a time, no acknowledged
write lost, each write done once, replicas equal by checksum, timestamps that rise under ceilings, snapshots that never
change. `stele.raft.invariants` judges a core's own state and steps, tests/linear what the clients were told.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from stele.consensus.timestamps import decode_ceiling
from stele.model import writeop
from stele.model.config import Configuration, decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import ensure
from stele.model.ids import OpId, ReplicaId
from stele.raft.core import RaftCore
from stele.raft.effects import HardState, Role
from stele.raft.messages import Message, TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.tablet.machine import Outcome
from tests.sim.content import Rows, rows_of
from tests.sim.twin import Image


class History:
    """All that happened in the group, as an all-knowing observer would record it."""

    def __init__(self, first_config: Configuration) -> None:
        self.committed: list[Entry] = []
        """Entry i is at index i + 1, as soon as any replica has handed it out."""
        self._handed_terms: list[int] = []
        """The highest term seen when entry i + 1 was first handed out; it was committed in that or a lower one."""
        self.leaders: dict[int, int] = {}
        self.members: dict[int, bool] = {p.replica_id: True for p in first_config.peers}
        """All replicas that were ever in a committed configuration."""
        self.acknowledged: list[int] = []
        """Timestamps of the writes whose success clients heard of."""
        self.acknowledged_early: dict[int, tuple[OpId, tuple[ReplicaId, ...]]] = {}
        """By timestamp: writes whose success clients heard of before their commit, and who voted then."""
        self.given_up = False
        """Whether a recovery has ended this history."""
        self._taken: dict[OpId, set[ReplicaId]] = {}
        """By entry: the replicas that had it, and lost power before it was synced there."""
        self.snapshots = 0
        self._checksums: dict[int, tuple[object, int]] = {}
        """By index: the state after that entry, and the replica that had it first."""
        self._done: dict[tuple[bytes, int], int] = {}
        """By client and sequence: the index of the entry that did the write, not a repetition of it."""
        self._configs: list[tuple[int, Configuration]] = [(0, first_config)]
        self._ceilings: list[tuple[int, int, int]] = []
        """(index, term, ceiling) of each committed ceiling; they rise."""
        self._last_time = 0
        """The timestamp of the newest write that has one."""
        self._recovered_at = 0
        """The index of the configuration with which this history goes on after a recovery; 0: there was none."""
        self._snapshot = 0
        """The newest snapshot that was served. No later entry may be at or below it."""

    def forked(self, log: Image) -> History:
        """The history that goes on from this log, whose last entry is the configuration of the survivor alone. What
        was committed and is not in the log is given up."""
        kept = 0
        for entry in self.committed:
            at = entry.index - log.start.index - 1
            if at >= 0 and log.entries[at : at + 1] != [entry]:
                break  # perhaps of the same OpId: the survivor may not know of the term that elected its leader
            kept += 1
        self.given_up = True
        new = History(self._configs[0][1])
        new.committed, new._handed_terms = self.committed[:kept], self._handed_terms[:kept]
        new.members = dict(self.members)
        new._configs = [(at, config) for at, config in self._configs if at <= kept]
        new._checksums = {at: known for at, known in self._checksums.items() if at <= kept}
        new._done = {write: at for write, at in self._done.items() if at <= kept}
        new._ceilings = [each for each in self._ceilings if each[0] <= kept]
        there = [e for e in (*new.committed, *log.entries) if e.kind is EntryKind.WRITE]
        new._last_time = max((e.timestamp for e in new.committed if e.kind is EntryKind.WRITE), default=0)
        times = {entry.timestamp for entry in there}
        new.acknowledged = [timestamp for timestamp in self.acknowledged if timestamp in times]
        new.acknowledged_early = {t: told for t, told in self.acknowledged_early.items() if t in times}
        new._taken = {opid: set(who) for opid, who in self._taken.items()}
        new._recovered_at = log.last.index
        return new

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
            self._check_time(entry)

    def _check_config_step(self, entry: Entry) -> None:
        before, after = self.config, decode_configuration(entry.payload)
        old = [p.replica_id for p in before.voters]
        new = [p.replica_id for p in after.voters]
        moved = [v for v in old if v not in new] + [v for v in new if v not in old]
        ensure(
            len(moved) <= 1 or entry.index == self._recovered_at,
            f"configuration {entry.index} moves several voters at once: {moved}",
        )
        ensure(
            after.opid_index == entry.index,
            f"configuration at {entry.index} has opid_index {after.opid_index}",
        )
        self._configs.append((entry.index, after))
        for peer in after.peers:
            self.members[peer.replica_id] = True

    def applied(self, replica: int, entry: Entry, outcome: Outcome, checksum: object) -> None:
        """A replica's store has applied an entry. All replicas must get the same state, and each write is
        done once."""
        if entry.kind is EntryKind.WRITE and not outcome.duplicate:
            header, _ = writeop.decode(entry.payload)
            write = (header.client_id, header.sequence)
            first = self._done.setdefault(write, entry.index) if any(header.client_id) else entry.index
            ensure(
                first == entry.index,
                f"replica {replica} does the write of entry {first} again at {entry.opid}",
            )
        if checksum is not None:
            known, who = self._checksums.setdefault(entry.index, (checksum, replica))
            ensure(known == checksum, f"replicas {who} and {replica} differ after entry {entry.opid}")

    def _check_time(self, entry: Entry) -> None:
        """Timestamps rise along the log, under a ceiling of their own leader. A snapshot that was served
        never changes."""
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

    def snapshot_served(self, snapshot: int, applied: int, rows: Rows | None = None) -> None:
        """A reader got everything applied up to there as the whole content of `snapshot`, for ever. `rows`: of a table."""
        behind = (e for e in self.committed[applied:] if e.kind is EntryKind.WRITE)
        missing = [e.opid for e in behind if e.timestamp <= snapshot]
        ensure(not missing, f"the snapshot {snapshot} lacks {missing}, committed before it was served")
        if rows is not None:
            due = rows_of(self.committed, snapshot)
            ensure(rows == due, f"the snapshot {snapshot} shows {rows}; what was committed gives {due}")
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
        # Only what was committed in a lower term must be there; a leader may learn late of its own election.
        index = bisect_left(self._handed_terms, term)
        if index > core.log.start.index:
            held, due = core.log.term_at(index), self.committed[index - 1].term
            ensure(
                held == due,
                f"replica {core.self_replica} leads term {term} without the committed entry {due}.{index} "
                f"(it holds term {held} there)",
            )

    def acknowledge(self, timestamp: int) -> None:
        """A client heard that its write succeeded."""
        self.acknowledged.append(timestamp)

    def acknowledge_early(self, timestamp: int, opid: OpId, voters: tuple[ReplicaId, ...]) -> None:
        """A client heard that its write succeeded, and that not all of a majority has synced it."""
        self.acknowledged_early[timestamp] = opid, voters

    def power_took(self, replica_id: ReplicaId, opids: list[OpId]) -> None:
        """A replica had these entries in its log, and a power loss took them."""
        for opid in opids:
            self._taken.setdefault(opid, set()).add(replica_id)

    def vanished(self, in_log: Collection[OpId]) -> set[int]:
        """Timestamps of the writes that were acknowledged early and are not committed. `in_log`: the entries of the leader's log.

        Raises:
            InvariantViolation: one of them is gone, and no majority of the voters has lost power before it had synced it.
        """
        times = {entry.timestamp for entry in self.committed if entry.kind is EntryKind.WRITE}
        gone = set()
        for timestamp, (opid, voters) in self.acknowledged_early.items():
            if timestamp in times:
                continue
            taken = self._taken.get(opid, set()).intersection(voters)
            ensure(
                self.given_up or opid in in_log or len(taken) > len(voters) // 2,
                f"the write of {timestamp} at {opid}, acknowledged in memory, is lost; of {voters} only {sorted(taken)} lost "
                "power before they had synced it",
            )
            gone.add(timestamp)
        return gone

    def lost(self, replica: int, opid: OpId) -> None:
        """A replica reports that a proposal was dropped; it must not have been acknowledged."""
        if opid.index <= self.committed_index:
            ensure(
                self.committed[opid.index - 1].term != opid.term,
                f"replica {replica} reports {opid} as lost, but it is committed",
            )

    def finish(self, in_log: Collection[OpId]) -> None:
        """No acknowledged write may be missing among the committed ones."""
        times = {entry.timestamp for entry in self.committed if entry.kind is EntryKind.WRITE}
        for timestamp in self.acknowledged:
            ensure(timestamp in times, f"the acknowledged write of {timestamp} is lost")
        self.vanished(in_log)


def check_start(core: RaftCore, durable: Image) -> None:
    """A replica starts with the term, the vote and the log that its disk holds (Raft figure 2)."""
    hard = durable.hard
    # A copy brings entries of terms that this replica never took part in.
    raised = durable.last.term > hard.term
    known = HardState(durable.last.term, None) if raised else hard
    ensure(
        (core.term, core.voted_for) == (known.term, known.voted_for),
        f"replica {core.self_replica} starts at term {core.term} with vote {core.voted_for}, but has {hard} "
        f"on disk",
    )
    ensure(
        core.log.last_opid == durable.last,
        f"replica {core.self_replica} starts with a log up to {core.log.last_opid}, but has {durable} on "
        f"disk",
    )


def check_said(disk: Image, own: ReplicaId, to: ReplicaId, message: Message) -> None:
    """A message must not promise more than its sender's disk holds (Raft figure 2: before responding to
    RPCs). A promise of a term below the disk's is void: receivers ignore it."""
    if isinstance(message, TimeoutNow) or (isinstance(message, VoteRequest) and message.pre_vote):
        return
    if isinstance(message, UpdateResponse | VoteResponse) and message.failed:
        return  # it promises nothing
    hard = disk.hard
    ensure(hard.term >= message.term, f"{own} speaks in term {message.term}, but has {hard} on disk")
    if isinstance(message, VoteResponse):
        gave = to if message.granted and not message.pre_vote else None
    else:
        gave = own if isinstance(message, VoteRequest | UpdateRequest) else None
    if gave is not None and hard.term == message.term:
        ensure(hard.voted_for == gave, f"{own} voted for {gave}, but has {hard} on disk")
    if isinstance(message, UpdateResponse) and message.success and hard.term == message.term:
        # `written_index` is judged by the start after the end of the process (tests.sim.twin).
        opid = message.last_received
        held = disk.start.index >= opid.index or disk.opid_at(opid.index) == opid
        ensure(held, f"{own} acknowledges {opid}, but does not have it on disk")
