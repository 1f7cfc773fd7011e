"""Timestamps in the simulator: the code that replicas run (`stele.consensus.timestamps`), over clocks that are apart and step
back and forth. A write gets its timestamp as in `stele.consensus.writes`, a snapshot its promise as in `stele.consensus.reads`.

Invariant: drives nothing but its replica's proposals; what comes of them is judged by History.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from stele.consensus.timestamps import decode_ceiling, encode_ceiling
from stele.model.clock import from_physical_us
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Rejected
from stele.model.ids import HybridTime, OpId
from stele.raft.effects import Role
from stele.raft.events import Propose

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica

_RETRY_MS = 2.0
_AHEAD_US, _AHEAD_MAX_US, _ERROR_US = 250_000, 5_000_000, 500_000


class Stamping:
    """Timestamps, ceilings and snapshots of one life of a replica."""

    def __init__(self, replica: SimReplica, entries: tuple[Entry, ...], ceiling: int) -> None:
        self._replica = replica
        self._world = replica.world
        self._life = replica.life
        self.times = replica.world.timestamps_class(
            replica.wall_us, _AHEAD_US, _AHEAD_MAX_US, _ERROR_US, fault=lambda wall_us: replica.clock_fault
        )
        self.times.in_log(ceiling)
        self.appending(entries)
        self._leads = False
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._unapplied: dict[
            int, int
        ] = {}  # context, then log index of a write of this leader: its timestamp
        self._contexts: dict[int, int] = {}  # of writes that the core has not answered yet
        self._ceiling_contexts: dict[int, int] = {}
        self._ceilings: dict[int, int] = {}
        self._snapshots: list[int] = []
        self._retry_set = False

    def appending(self, entries: tuple[Entry, ...]) -> None:
        """Entries stand in the log, or are about to."""
        for entry in entries:
            if entry.kind is EntryKind.CEILING:
                self.times.in_log(decode_ceiling(entry.payload))

    def role_changed(self, role: Role) -> None:
        """It begins to lead, or ends."""
        led, self._leads = self._leads, role is Role.LEADER
        if self._leads and not led:
            self.times.lead()
            self._ceilings.clear()
            self._ceiling_contexts.clear()
        elif led and not self._leads:
            while self._waiting:
                self._world.clients.over(self._replica.replica_id, self._waiting.popleft()[0])
            self._snapshots.clear()

    # Writes

    def write(self, context: int, payload: bytes) -> None:
        """A client's; refused where it does not lead."""
        if self._leads:
            self._waiting.append((context, payload))
            self._pump()
        else:
            self._world.clients.over(self._replica.replica_id, context)

    def _pump(self) -> None:
        if self._life != self._replica.life or not self._leads:
            return
        while self._waiting:
            timestamp = self.times.assign()
            if timestamp is None:
                break
            context, payload = self._waiting.popleft()
            self._contexts[context] = timestamp
            self._replica.feed(Propose(context, EntryKind.WRITE, payload, timestamp))
        if self._waiting or self._snapshots:
            self._want_ceiling(max(self._snapshots, default=0))
        self._serve()

    def _want_ceiling(self, at_least: int) -> None:
        ceiling = self.times.next_ceiling(at_least)
        if ceiling is not None:
            context = self._world.clients.context()
            self._ceiling_contexts[context] = ceiling
            stamp = self.times.stamp(ceiling)
            self._replica.feed(Propose(context, EntryKind.CEILING, encode_ceiling(ceiling), stamp))
        elif not self._retry_set:
            self._retry_set = True
            self._world.at(self._world.now + _RETRY_MS, self._look_again)

    def _look_again(self) -> None:
        self._retry_set = False
        self._pump()

    # Snapshots

    def snapshot(self, wall_us: int) -> None:
        """A reader asks for all up to a time that it chose by a clock of its own."""
        snapshot = from_physical_us(wall_us)
        if not self._leads:
            return
        try:
            self.times.reserve(snapshot)
        except Rejected:
            return  # its clock is too far ahead of this one
        self._snapshots.append(snapshot)
        self._pump()

    def _serve(self) -> None:
        """Snapshots below the ceiling, once what this leader and earlier ones proposed below them is applied."""
        core = self._replica.core
        if core is None or self._replica.applied < core.log.handed_index:
            return
        given = (*self._contexts.values(), *self._unapplied.values())
        for snapshot in list(self._snapshots):
            if self.times.covers(snapshot) and not any(time <= snapshot for time in given):
                self._snapshots.remove(snapshot)
                self._world.history.snapshot_served(HybridTime(snapshot), self._replica.applied)

    # What the core says

    def proposed(self, context: int, opid: OpId) -> None:
        """It is in the log."""
        if context in self._contexts:
            self._unapplied[opid.index] = self._contexts.pop(context)
        elif context in self._ceiling_contexts:
            del self._ceiling_contexts[context]
            self._ceilings[opid.index] = opid.term

    def refused(self, context: int) -> None:
        """It will never be."""
        self._contexts.pop(context, None)
        if self._ceiling_contexts.pop(context, None) is not None:
            self.times.lost()
            self._pump()

    def lost(self, opid: OpId) -> None:
        """It was dropped from the log."""
        self._unapplied.pop(opid.index, None)
        if self._ceilings.pop(opid.index, None) is not None:
            self.times.lost()

    def committed(self, entries: tuple[Entry, ...], term: int) -> None:
        """Entries are committed, and applied at once."""
        for entry in entries:
            self._unapplied.pop(entry.index, None)
            if entry.kind is EntryKind.CEILING and self._ceilings.pop(entry.index, None) == term:
                self.times.committed(decode_ceiling(entry.payload))
        self._pump()
