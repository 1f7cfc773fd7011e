"""A dumb twin of the log: streams as plain lists, in memory, forgetting nothing."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from stele.model.config import Configuration
from stele.model.entry import Entry
from stele.model.ids import OPID_NONE, OpId, ReplicaId, StreamKey
from stele.raft.ports import LoadedLog
from tests.wal.support import CONFIG


@dataclass
class TwinStream:
    term: int = 0
    vote: ReplicaId | None = None
    start: OpId = OPID_NONE
    config: Configuration = CONFIG
    entries: list[Entry] = field(default_factory=list)
    flushed: int = 0
    tombstoned: bool = False

    @property
    def last(self) -> OpId:
        return self.entries[-1].opid if self.entries else self.start

    def put(self, new: tuple[Entry, ...]) -> None:
        self.cut(new[0].index)
        self.entries += new

    def cut(self, from_index: int) -> None:
        self.entries = [e for e in self.entries if e.index < from_index]

    def snapshot(self, opid: OpId, config: Configuration) -> None:
        if opid.index < self.start.index:
            return
        meets = opid == self.start or any(e.opid == opid for e in self.entries)
        self.entries = [e for e in self.entries if e.index > opid.index] if meets else []
        self.start, self.config = opid, config
        self.flushed = max(self.flushed, opid.index)

    def agrees(self, found: LoadedLog) -> bool:
        """Whether a log shows this state; its start may have been raised as far as the store was flushed."""
        if (found.hard_state.term, found.hard_state.voted_for) != (self.term, self.vote):
            return False
        if self.tombstoned:
            return not found.entries
        if not self.start.index <= found.start.index <= max(self.flushed, self.start.index):
            return False
        if found.start.index == self.start.index:
            if found.start != self.start or found.config != self.config:
                return False
        elif not any(e.opid == found.start for e in self.entries):
            return False
        return list(found.entries) == [e for e in self.entries if e.index > found.start.index]


class Twin:
    def __init__(self) -> None:
        self.streams: dict[StreamKey, TwinStream] = {}

    def copy(self) -> Twin:
        other = Twin()
        for key, s in self.streams.items():
            other.streams[key] = copy.copy(s)
            other.streams[key].entries = list(s.entries)
        return other
