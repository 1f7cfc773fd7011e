"""What must never happen, watched over a whole run. Told of facts by the world; drives nothing.

Watches: one leader per term, leader completeness, state machine safety, one configuration step at a time, no
acknowledged write lost, linearizable reads. The core's own state and steps are judged by `stele.raft.invariants`.
"""

from __future__ import annotations

from bisect import bisect_left

from stele.model.config import Configuration, decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import ensure
from stele.model.ids import OpId
from stele.raft.core import RaftCore
from stele.raft.effects import Role


class History:
    """The group's story as an all-knowing observer would tell it."""

    def __init__(self, first_config: Configuration) -> None:
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
        self._configs: list[tuple[int, Configuration]] = [(0, first_config)]

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
