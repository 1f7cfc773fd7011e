"""Turns records back into the states of streams. Called by recovery, with records in the order of the log.

Invariant: records that the metadata's checkpoint covers do not change hard state; later records do. A record that
contradicts the state makes its stream FAILED.
"""

from __future__ import annotations

from stele.model.entry import Entry, entry_kind_of
from stele.model.ids import OpId, StreamKey
from stele.wal.cache import EntryCache
from stele.wal.format import Kind, Record, stream_key
from stele.wal.metadata import Metadata
from stele.wal.state import State, place

Raw = tuple[bytes, int]


class Replay:
    """Applies records to the states that the metadata holds."""

    def __init__(self, metadata: Metadata | None, cache: EntryCache) -> None:
        self.states: dict[Raw, State] = {}
        self.forgotten: set[Raw] = set()
        self.broken: dict[Raw, str] = {}
        self._cache = cache
        self._unchecked: list[tuple[State, OpId]] = []
        if metadata is not None:
            for saved in metadata.streams:
                state = State.from_saved(saved)
                self.states[state.raw] = state
                if not saved.damaged_at and not saved.tombstoned:
                    self._unchecked.append((state, saved.last))

    def at_position(self) -> None:
        """Check that every stream ends where the metadata says. Call when all that it covers was replayed."""
        for state, last in self._unchecked:
            if state.last != last:
                self.broken[state.raw] = f"its entries end at {state.last}, but the metadata says {last}"
        self._unchecked = []

    def apply(self, r: Record, sequence: int, offset: int, covered: bool) -> None:
        """Apply one record of the group at `offset`. `covered`: the group is before the metadata's
        position."""
        raw = (r.tablet, r.replica)
        state = self.states.get(raw)
        if r.kind == Kind.CREATE:
            if not covered and (state is None or not state.damaged):
                self.states[raw] = State(stream_key(*raw), OpId(r.a, r.b), r.blob, sequence)
            return
        if r.kind == Kind.FORGET:
            # Records from before the damage was found, or from an earlier stream of this key, cannot end the
            # damage.
            found_later = state is not None and place(sequence, offset) < state.damaged_at
            if not covered and not found_later:
                self.states.pop(raw, None)
                self.broken.pop(raw, None)
                self.forgotten.add(raw)
            return
        if state is None and r.kind == Kind.TOMBSTONE and not covered and raw not in self.forgotten:
            state = self.placeholder(raw)
            state.damaged = True
            self.broken.pop(raw, None)
        if state is None:
            if not covered and raw not in self.forgotten:
                self.broken.setdefault(raw, "the record that created it is missing")
            return
        if r.kind == Kind.ENTRY:
            if not state.tombstoned:
                self._entry(state, raw, r, sequence, offset, covered)
        elif r.kind == Kind.TRUNCATE:
            at = max(r.b, state.start.index + 1)
            state.cut(at)
            state.extents.cut(at)
        elif r.kind == Kind.SNAPSHOT_END:
            self._snapshot(state, r, covered)
        elif covered:
            return
        elif r.kind in (Kind.TERM, Kind.VOTE, Kind.PROMOTE):
            state.hard_record(r.kind, r.a, r.b)
        elif r.kind == Kind.TOMBSTONE:
            state.bury()
            state.extents.reset(state.start.index)

    def _entry(self, state: State, raw: Raw, r: Record, sequence: int, offset: int, covered: bool) -> None:
        if r.b <= state.start.index:
            state.cut(state.start.index + 1)
            state.extents.cut(state.start.index + 1)
            return
        if r.b > state.last.index + 1:
            if covered:
                return  # void: it follows entries that were voided later and collected
            self.broken.setdefault(raw, f"entries between {state.last} and {OpId(r.a, r.b)} are missing")
            return
        entry = Entry(r.a, r.b, entry_kind_of(r.detail, r.a, r.b), r.c, r.blob)
        state.put((entry,))
        state.extents.add(r.b, r.b, r.a, sequence, offset)
        self._cache.add(state, (entry,))

    def _snapshot(self, state: State, r: Record, covered: bool) -> None:
        keep = bool(r.detail)
        if not covered:
            state.snapshot(OpId(r.a, r.b), r.blob, keep)
            state.index_snapshot(state.start.index, keep)
        elif not keep:
            state.cut(state.start.index + 1)
            state.extents.reset(state.start.index)

    def placeholder(self, raw: Raw) -> State:
        """Create a stream of which only its key is known."""
        state = self.states.get(raw)
        if state is None:
            state = self.states[raw] = State(stream_key(*raw), OpId(0, 0), b"", 0)
        return state

    def by_key(self) -> dict[StreamKey, State]:
        """The streams by key, in a fixed order."""
        return {s.key: s for s in sorted(self.states.values(), key=lambda s: s.key)}
