"""One replica's own log within the node's log: the log port of `stele.raft`, and reads. Made by log.py.

Calls return at once, and take effect in their order. Opens no files itself. Invariant: a refused call changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from stele.model.config import Configuration, decode_configuration, encode_configuration
from stele.model.entry import Entry
from stele.model.errors import Code, Corrupt, Rejected, ensure
from stele.model.ids import OpId, ReplicaId, StreamKey
from stele.model.logrecord import (
    EntryRecord,
    LogRecord,
    PromoteRecord,
    SkippedRecord,
    SnapshotRecord,
    TermRecord,
    VoteRecord,
)
from stele.wal.append_queue import RECORD_COST_BYTES, REWRITTEN, Done, Written
from stele.wal.base import SharedLog
from stele.wal.extents import Extent
from stele.wal.format import Kind, Record
from stele.wal.reader import GroupReader, entries_of
from stele.wal.segment import Segment
from stele.wal.state import Anchor, HardState, State

_LOAD_BYTES = 8 << 20
_U63 = 1 << 63
_U64 = 1 << 64


class StreamLog:
    """Implements `stele.raft.ports.LogPort` (structurally). Every method may be called from any thread.

    Appends raise:
        Retryable: THROTTLED, the queue is full, and DISK_FULL, there is no space (both for entries only).
            NOT_READY, the log is closed.
        Rejected: TOO_LARGE, and TABLET_DELETED for a removed replica (both for entries only).
        Corrupt: IO_ERROR after a failed write or sync of the log; CORRUPT for a damaged stream.
        InvariantViolation: entries that do not follow those in the log.
    """

    __slots__ = ("_log", "_state")

    def __init__(self, log: SharedLog, state: State) -> None:
        self._log = log
        self._state = state

    # --- what is known

    @property
    def key(self) -> StreamKey:
        """The stream's key."""
        return self._state.key

    @property
    def hard_state(self) -> HardState:
        """Term and vote."""
        return self._state.hard

    @property
    def start(self) -> OpId:
        """The log holds entries after this one."""
        return self._state.start

    @property
    def config(self) -> Configuration:
        """The configuration in force at `start`."""
        return self._state.config

    @property
    def last_opid(self) -> OpId:
        """The OpId of the last entry; `start` if there is none."""
        return self._state.last

    @property
    def under_way(self) -> tuple[int, int] | None:
        """See Log.under_way. It concerns the whole log, which all streams share."""
        return self._log.under_way

    @property
    def tombstoned(self) -> bool:
        """Whether the replica was removed."""
        return self._state.tombstoned

    @property
    def damaged(self) -> bool:
        """Whether damage may have destroyed a term or a vote. A tombstone with such damage must not vote."""
        return self._state.damaged

    # --- the log port

    def append_term(self, term: int, done: Done | None = None) -> None:
        """See LogPort."""
        self._hard(Kind.TERM, term, 0, done)

    def append_vote(self, term: int, voted_for: ReplicaId, done: Done | None = None) -> None:
        """See LogPort."""
        self._hard(Kind.VOTE, term, voted_for, done)

    def append_promote(self, term: int, leader: ReplicaId, done: Done | None = None) -> None:
        """See LogPort."""
        self._hard(Kind.PROMOTE, term, leader, done)

    def append_entries(self, entries: tuple[Entry, ...], done: Done | None = None) -> None:
        """See LogPort. Payloads are `bytes`; they are not copied before the write."""
        state, log = self._state, self._log
        if not entries:
            ensure(False, f"log {state.key}: an append needs at least one entry")
        size = 0
        first = expected = entries[0].index
        for entry in entries:
            if entry.index != expected or not 0 <= entry.term < _U63 or not 0 <= entry.timestamp < _U64:
                ensure(False, f"log {state.key}: found entry {entry.opid}, expected index {expected}")
            expected += 1
            size += len(entry.payload) + RECORD_COST_BYTES
        if size > log.options.append_bytes_max:
            self._check_size(size, log.options.append_bytes_max)
        with log.lock:
            if state.failed is not None:
                self._check_live()
            log.admit(size)
            if state.tombstoned:
                raise Rejected(f"log {state.key}: the replica was removed", code=Code.TABLET_DELETED)
            if not state.start.index < first <= state.last.index + 1:
                ensure(
                    False,
                    f"log {state.key}: entries from {entries[0].opid} on do not follow {state.last}; "
                    f"it begins after {state.start}",
                )
            state.put(entries)
            log.append_queue.push((state, entries, None, done), size)

    def when_written(self, done: Done) -> None:
        """See LogPort."""
        with self._log.lock:
            self._check_live()
            self._log.admit_control()
            self._log.append_queue.push((None, None, Written(done), None), 0)

    def pop_entries(self, from_index: int, done: Done | None = None) -> None:
        """See LogPort."""
        with self._log.lock:
            self._check_live()
            self._log.admit_control()
            ensure(
                from_index > self._state.start.index,
                f"log {self._state.key}: cannot drop from {from_index}, it begins after {self._state.start}",
            )
            self._state.cut(from_index)
            self._push(Kind.TRUNCATE, 0, 0, from_index, b"", done)

    def begin_snapshot(self, opid: OpId, done: Done | None = None) -> None:
        """See LogPort."""
        with self._log.lock:
            self._check_live()
            self._log.admit_control()
            self._push(Kind.SNAPSHOT_BEGIN, 0, opid.term, opid.index, b"", done)

    def end_snapshot(self, opid: OpId, config: Configuration, done: Done | None = None) -> None:
        """See LogPort. A snapshot older than `start` changes nothing."""
        blob = encode_configuration(config)
        state = self._state
        with self._log.lock:
            self._check_live()
            self._log.admit_control()
            if opid.index < state.start.index:
                self._log.append_queue.push((None, None, None, done), 0)
                return
            keep = state.term_at(opid.index) == opid.term
            state.snapshot(opid, blob, keep)
            self._push(Kind.SNAPSHOT_END, int(keep), opid.term, opid.index, blob, done)

    def load(self, above: int = 0) -> Iterator[LogRecord]:
        """See LogPort. Reads the disk: call it in a thread."""
        state = self._state
        with self._log.lock:
            self._check_live()
            hard, start, last, config = state.hard, state.start, state.last, state.config
            held = state.extents.copy_to(min(above, last.index))
            configs = [at_blob for at_blob in state.configs if at_blob[0] <= held.last]
        yield SnapshotRecord(start, config)
        if hard.voted_for is None:
            if hard.term:
                yield TermRecord(hard.term)
        elif hard.promoted:
            yield PromoteRecord(hard.term, hard.voted_for)
        else:
            yield VoteRecord(hard.term, hard.voted_for)
        terms = tuple(end for end in held.ends() if end.index > start.index)
        if terms:
            yield SkippedRecord(terms, tuple((at, decode_configuration(blob)) for at, blob in configs))
        index = terms[-1].index + 1 if terms else start.index + 1
        while index <= last.index:
            for entry in self.read_entries(index, _LOAD_BYTES):
                if entry.index > last.index:
                    return
                yield EntryRecord(entry)
                index = entry.index + 1

    # --- reading, and letting entries go

    def read_entries(self, first_index: int, bytes_max: int) -> list[Entry]:
        """Entries from `first_index` on: at least one, about `bytes_max` bytes. Empty past the end.

        Raises:
            Rejected: NOT_FOUND: the entries were collected; the peer must be copied.
            Corrupt: the disk changed the bytes.
        """
        state, log = self._state, self._log
        found: list[Entry] = []
        size = 0
        reader = GroupReader(log.files)
        try:
            while size < bytes_max or not found:
                with log.lock:
                    self._check_live()
                    if first_index <= state.start.index:
                        if found:
                            return found
                        raise Rejected(
                            f"log {state.key}: entry {first_index} was collected; "
                            f"the log begins after {state.start}; copy the replica instead",
                            code=Code.NOT_FOUND,
                        )
                    while first_index <= state.last.index and (size < bytes_max or not found):
                        entry = state.cache.get(first_index)
                        if entry is None:
                            break
                        found.append(entry)
                        size += entry.size_bytes
                        first_index += 1
                    else:
                        return found
                    at = state.extents.find(first_index)
                    ensure(
                        at is not None,
                        f"log {state.key}: entry {first_index} is neither in memory nor on disk",
                    )
                    extent = state.extents[at]  # type: ignore[index]
                    # Cached entries may be newer than those on disk, and not yet written.
                    upto = state.next_cached(first_index, min(extent.last, state.last.index)) - 1
                    segment = log.pin_segment(extent.sequence)
                try:
                    entries = self._read_extent(reader, segment, extent, first_index, upto)
                finally:
                    log.unpin_segment(segment)
                for entry in entries:
                    if found and size >= bytes_max:
                        break
                    found.append(entry)
                    size += entry.size_bytes
                    first_index += 1
        finally:
            reader.close()
        return found

    def write_again(self, bytes_max: int, done: Done | None = None) -> int:
        """Write all unflushed entries again at the log's end, in one group, so that their segments can be
        collected.

        They can be collected once `done` was called. `load` gives the same as before. Reads the disk: call it
        in a thread. Returns the bytes written; 0 if there are no such entries, or if they changed meanwhile.

        Raises:
            Rejected: TOO_LARGE: they are more than `bytes_max`.
            Retryable: DISK_FULL; NOT_READY: the log is closed.
            Corrupt: see StreamLog; also if the disk changed the bytes.
        """
        state, log = self._state, self._log
        with log.lock:
            self._check_live()
            first, last, cuts = state.flushed + 1, state.last.index, state.cuts
        entries: list[Entry] = []
        size = 0
        while first + len(entries) <= last:
            found = self.read_entries(first + len(entries), _LOAD_BYTES)
            if not found:
                return 0
            size += sum(len(e.payload) + RECORD_COST_BYTES for e in found)
            self._check_size(size, bytes_max)
            entries += found
        with log.lock:
            self._check_live()
            # Any entry may be void by now. That the last one is still there proves nothing about the earlier
            # ones.
            if not entries or state.tombstoned or (state.flushed + 1, state.cuts) != (first, cuts):
                return 0
            # A record voids all entries at or above its index, so include what was appended meanwhile.
            for index in range(entries[-1].index + 1, state.last.index + 1):
                entry = state.cache.get(index)
                if entry is None:
                    return 0
                entries.append(entry)
                size += len(entry.payload) + RECORD_COST_BYTES
            self._check_size(size, bytes_max)
            log.admit_again()
            log.append_queue.push((state, entries, REWRITTEN, done), size)
        return size

    def set_flushed(self, index: int) -> None:
        """Note that the store holds all entries up to `index` durably. No replay needs them any more."""
        with self._log.lock:
            self._state.flushed = max(self._state.flushed, index)

    def abandon_entries(self) -> None:
        """Stop keeping the entries: the replica is FAILED, and a majority of its group has them all without
        it.

        Once segments are collected, the log begins after the store's end, so this replica cannot start
        again."""
        with self._log.lock:
            self._state.abandoned = True

    def anchor(self, name: str, index: int, *, gives_way: bool = False) -> None:
        """Keep entries from `index` on. Replaces an anchor of the same name. An anchor that holds more than
        `anchor_bytes_max` is dropped and reported.

        With `gives_way` it is also dropped when the disk lacks space: the peer that needs it can be
        copied."""
        with self._log.lock:
            self._state.anchors[name] = Anchor(index, gives_way)

    def release(self, name: str) -> None:
        """Remove an anchor. Does nothing if there is none of that name."""
        with self._log.lock:
            self._state.anchors.pop(name, None)

    # --- inner

    def _read_extent(
        self, reader: GroupReader, segment: Segment, extent: Extent, first: int, last: int
    ) -> list[Entry]:
        body, count = reader.group(segment.path, segment.segment_id, extent.offset)
        entries = entries_of(body, count, self._state.raw, first, last)
        if len(entries) != last - first + 1 or any(e.term != extent.term for e in entries):
            raise Corrupt(
                f"{segment.path}: the group at {extent.offset} "
                f"does not hold entries {first} to {last} of {self.key}"
            )
        return entries

    def _hard(self, kind: Kind, term: int, who: int, done: Done | None) -> None:
        state = self._state
        ensure(0 <= term < _U63 and 0 <= who < _U63, f"log {state.key}: term {term}, replica {who}")
        with self._log.lock:
            self._check_live()
            self._log.admit_control()
            state.hard_record(kind, term, who)
            self._push(kind, 0, term, who, b"", done)

    def _push(self, kind: Kind, detail: int, a: int, b: int, blob: bytes, done: Done | None) -> None:
        state = self._state
        record = Record(kind, detail, *state.raw, a, b, 0, blob)
        self._log.append_queue.push((state, None, record, done), RECORD_COST_BYTES + len(blob))

    def _check_size(self, size: int, bytes_max: int) -> None:
        allowed = min(bytes_max, self._log.options.append_bytes_max)
        if size > allowed:
            raise Rejected(
                f"log {self._state.key}: {size} bytes in one append; at most {allowed} are allowed; split it",
                code=Code.TOO_LARGE,
            )

    def _check_live(self) -> None:
        if self._state.failed is not None:
            raise Corrupt(f"log {self._state.key}: {self._state.failed}")
