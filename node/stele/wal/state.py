"""What is known of one stream, and what each record does to it. Only this file gives records their meaning.

Used when records are appended (at the call), when they are indexed (once written) and when they are replayed.
The log's lock guards it; it does no I/O.

Invariant: replaying a stream's records in order gives the same state as appending them. A record at index i
voids all earlier ones at or above i, whatever the terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stele.model.config import Configuration, decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.ids import OpId, ReplicaId, StreamKey
from stele.wal.extents import Extents
from stele.wal.format import Kind


@dataclass(frozen=True, slots=True)
class HardState:
    """Term and vote of a replica. `promoted`: the vote comes from a forced promotion."""

    term: int = 0
    voted_for: ReplicaId | None = None
    promoted: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A stream in the consensus metadata: all but its entries. `created`: the sequence of the segment that
    was active when the stream was created.

    `damaged_at`: 0, or a place in the log (see `place`). Records before that place cannot end the damage.
    """

    key: StreamKey
    hard: HardState
    start: OpId
    config: bytes
    last: OpId
    tombstoned: bool
    damaged_at: int
    created: int


@dataclass(frozen=True, slots=True)
class Anchor:
    """Keeps entries from `index` on. `gives_way`: only while the disk has space for them."""

    index: int
    gives_way: bool


def place(sequence: int, offset: int) -> int:
    """A place in the log as one number. The numbers sort as the places do."""
    return sequence << 40 | offset


def segment_of(at: int) -> int:
    """The sequence of the segment that holds a place."""
    return at >> 40


class State:
    """One stream. `last`, `cache`, `hard` and `start` follow the calls; `extents` follow what is written.

    `cuts`: how often entries became void."""

    __slots__ = (
        "abandoned",
        "anchors",
        "cache",
        "config_blob",
        "configs",
        "created",
        "cuts",
        "damaged",
        "damaged_at",
        "extents",
        "failed",
        "flushed",
        "hard",
        "key",
        "last",
        "raw",
        "start",
        "tombstoned",
    )

    def __init__(self, key: StreamKey, start: OpId, config: bytes, created: int) -> None:
        self.key = key
        self.raw = (bytes.fromhex(key.tablet_id), int(key.replica_id))
        self.hard = HardState()
        self.start = start
        self.config_blob = config
        self.last = start
        self.cache: dict[int, Entry] = {}
        self.configs: list[tuple[int, bytes]] = []
        self.extents = Extents(start.index)
        self.flushed = start.index
        self.anchors: dict[str, Anchor] = {}
        self.abandoned = False
        self.created = created
        self.cuts = 0
        self.tombstoned = False
        self.damaged = False
        self.damaged_at = 0
        self.failed: str | None = None

    @classmethod
    def from_saved(cls, saved: Saved) -> State:
        """The state that the metadata holds, without entries."""
        state = cls(saved.key, saved.start, saved.config, saved.created)
        state.hard = saved.hard
        state.tombstoned = saved.tombstoned
        state.damaged = saved.damaged_at > 0
        state.damaged_at = saved.damaged_at
        return state

    def saved(self) -> Saved:
        """The state to write into the metadata."""
        return Saved(
            self.key,
            self.hard,
            self.start,
            self.config_blob,
            self.last,
            self.tombstoned,
            self.damaged_at or int(self.damaged),
            self.created,
        )

    @property
    def untouched(self) -> bool:
        """Whether the stream has held nothing since its creation."""
        return self.failed is None and self.last == self.start and self.hard == HardState()

    @property
    def config(self) -> Configuration:
        """The configuration in force at `start`."""
        return decode_configuration(self.config_blob)

    def term_at(self, index: int) -> int | None:
        """The term of the entry at `index`; None if it is not there."""
        if index == self.start.index:
            return self.start.term
        if not self.start.index < index <= self.last.index:
            return None
        entry = self.cache.get(index)
        if entry is not None:
            return entry.term
        at = self.extents.find(index)
        return None if at is None else self.extents[at].term

    # These run under the log's lock, so they visit the indexes or the cached entries, whichever are fewer.

    def next_cached(self, first: int, last: int) -> int:
        """The lowest index from `first` to `last` whose entry is in memory; `last` + 1 if there is none."""
        if last - first < len(self.cache):
            return next((index for index in range(first, last + 1) if index in self.cache), last + 1)
        return min((index for index in self.cache if first <= index <= last), default=last + 1)

    def _uncache(self, first: int, last: int) -> None:
        indexes: Sequence[int] = range(first, last + 1)
        if len(indexes) > len(self.cache):
            indexes = [index for index in self.cache if first <= index <= last]
        for index in indexes:
            self.cache.pop(index, None)

    # --- hard state

    def hard_record(self, kind: int, term: int, who: int) -> None:
        """Apply a TERM, VOTE or PROMOTE record."""
        if kind == Kind.TERM:
            if term > self.hard.term:
                self.hard = HardState(term)
        elif term >= self.hard.term:
            self.hard = HardState(term, ReplicaId(who), kind == Kind.PROMOTE)

    # --- entries, at call time

    def put(self, entries: tuple[Entry, ...]) -> None:
        """Append entries. The first is above `start` and at most one above `last`."""
        if entries[0].index <= self.last.index:
            self.cut(entries[0].index)
        cache = self.cache
        for entry in entries:
            cache[entry.index] = entry
            if entry.kind is EntryKind.CONFIG:
                self.configs.append((entry.index, entry.payload))
        self.last = OpId(entry.term, entry.index)

    def cut(self, from_index: int) -> None:
        """Void the entries at or above `from_index`."""
        if from_index > self.last.index:
            return
        self.cuts += 1
        from_index = max(from_index, self.start.index + 1)
        term = self.term_at(from_index - 1)
        self._uncache(from_index, self.last.index)
        while self.configs and self.configs[-1][0] >= from_index:
            self.configs.pop()
        self.last = OpId(self.start.term if term is None else term, from_index - 1)

    def snapshot(self, opid: OpId, config: bytes, keep: bool) -> None:
        """Let the log start after `opid`. `keep`: entries above it survive."""
        if not keep:
            self.cut(self.start.index + 1)
        if opid.index < self.start.index:
            return
        self._uncache(self.start.index + 1, min(opid.index, self.last.index))
        if opid.index >= self.last.index:
            self.last = opid
        self.start = opid
        self.config_blob = config
        self.configs = [c for c in self.configs if c[0] > opid.index]
        self.flushed = max(self.flushed, opid.index)

    def raise_start(self, index: int) -> None:
        """Drop the entries up to `index`. The store must hold them all."""
        if index <= self.start.index:
            return
        term = self.term_at(index)
        if term is None:
            return
        config = self.config_blob
        for at, blob in self.configs:
            if at <= index:
                config = blob
        self.snapshot(OpId(term, index), config, True)
        self.extents.drop_to(index)

    def bury(self) -> None:
        """Make the stream a tombstone: hard state and last OpId stay, entries go."""
        self.tombstoned = True
        self.start = self.last
        self.cache.clear()
        self.configs.clear()
        self.anchors.clear()

    @property
    def needs_nothing(self) -> bool:
        """Whether nobody will read its entries again, so that their segments can go. Segments that show damage
        are set aside first (`stele.wal.quarantine`)."""
        return self.tombstoned or self.abandoned or self.failed is not None

    # --- entries, once written

    def index_snapshot(self, start_index: int, keep: bool) -> None:
        """Do for `extents` what `snapshot` does."""
        if keep:
            self.extents.drop_to(start_index)
        else:
            self.extents.reset(start_index)
