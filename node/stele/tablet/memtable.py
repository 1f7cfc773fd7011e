"""Recent rows in memory, with key indexes for small and for big blocks. Owned by the store; opens no files.

Rows are numbered in the order they were applied (their ordinal). They are in chunks, at first one per block.
Small chunks are joined, so that a million single puts do not make a million Arrow batches. Small plain blocks
wait undecoded until there are some hundreds, or until somebody reads: decoded together they cost a fraction.
Likewise small updates of some columns wait as patches: what they change, and which older rows of this table they
change. Made whole together they read and write each column once for all rows.

There are two indexes. A dict holds the keys of small blocks, with a chain to the older versions of each. A
hash index over ordinals is built only when keys of big blocks are looked up; a load of upserts never does
that.

Threads: one writer. Readers use a `MemView`, which later writes do not change. Writer or reader, whichever
comes first, decodes the waiting blocks, or makes the patched rows whole, under `_waiting_lock`. Never do both kinds wait.

Invariant: ordinals rise with timestamps, so the newest version of a key is the one with the highest ordinal.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stele.model.block import checked_rows, plain_rows
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.hashing import hash_binary, hash_bytes
from stele.model.layout import layout_of
from stele.model.schema import Schema
from stele.tablet.block_checks import with_columns
from stele.tablet.chunk import U64, Chunk, row_bits
from stele.tablet.hash_index import HashIndex
from stele.tablet.machine import WouldBlock
from stele.tablet.order import SharedOrder, SortedRows
from stele.tablet.sorted_runs import Mask, Positions, Run, concat_batches, has_long

SMALL_ROWS = 32
"""Blocks of up to this many rows use the dict."""
_COALESCE = 64
_WIDE_COLUMNS = 100
"""From this many columns on, columns dominate the cost of a row, so fewer rows are handled at a time."""
_COALESCE_WIDE = 8
_WAITING_BYTES_MAX = 1 << 20
"""Waiting blocks are decoded once they count more bytes than this, some 2,000 rows or 350 blocks. So no reader waits
long."""
_WAITING_APART_BYTES_MAX = 1 << 18
"""The same bound if the last blocks had to be decoded one by one, which takes several times as long."""
_JOINED_MIN = 32
"""From this many blocks on, decoding them together is cheaper than one by one."""
_PATCHED_ROWS_MAX = 64
"""The most patched rows that wait. They are made whole in some milliseconds for 300 columns."""
_PATCHED_VALUES_MAX = 1_024
"""The most values that patches which wait give. To make rows whole takes one or two microseconds for each."""
_COALESCED_ROWS_MAX = 8_192
_COALESCED_BYTES_MAX = 16 << 20
"""The most bytes of a joined chunk. Larger chunks gain nothing, and an Arrow array holds at most 2 GiB."""
_BRIEF_ROWS_MAX = 4_096
"""A lookup on the event loop (`brief`) indexes at most this many rows, which takes about 2 ms."""
_INDEX_PIECE_ROWS = 65_536
_CHUNK_OVERHEAD_BYTES = 2_048
_DICT_ENTRY_BYTES = 240

_SERIALS = itertools.count(1)

_Waiting = tuple[memoryview, int, int]
"""A block, its number of rows, its hybrid time."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Rows of one entry that differ from older rows of a memtable in some columns.

    `table`: the memtable's serial number. The memtable itself would be in a cycle of references, and stay in memory after
    its store is closed. `base`: for each row the ordinal of the older row, which is no delete. `columns`: the positions of the columns of
    `batch` among those of the table. `size_bytes`: their size as they came. `keys`: the rows' encoded keys."""

    table: int
    base: Sequence[int]
    columns: Sequence[int]
    batch: pa.RecordBatch
    size_bytes: int
    keys: Sequence[bytes]


class MemTable:
    """The rows since the last flush began."""

    def __init__(self, schema: Schema) -> None:
        self.serial = next(_SERIALS)
        self.schema = schema
        self.layout = layout_of(schema)
        self.chunks: list[Chunk] = []
        self.rows = 0
        self.bytes = 0
        # A row's place is twice its ordinal, plus one for a delete. Here: the newest place of each key, and
        # the one before.
        self._small: dict[bytes, int] = {}
        self._older: dict[int, int] = {}
        self._small_tail = 0
        self._waiting: list[_Waiting] = []
        self._waiting_bytes = 0  # part of `bytes`
        wide = len(schema.columns) >= _WIDE_COLUMNS
        self._coalesce_at = _COALESCE_WIDE if wide else _COALESCE
        self._waiting_joined_max = _WAITING_BYTES_MAX // 4 if wide else _WAITING_BYTES_MAX
        self._waiting_max = _WAITING_APART_BYTES_MAX if self.layout is None else self._waiting_joined_max
        self._patches: list[tuple[Patch, int]] = []  # with their hybrid times
        self._patch_sizes: list[int] = []  # about how many bytes each patched row takes; part of `bytes`
        self._patched_values = 0  # how many values they give
        self._waiting_lock = threading.Lock()
        self._big_end = 0
        self._index = HashIndex()
        self._lock = threading.Lock()
        self._order = SharedOrder()

    # --- writing (owner's thread)

    def append(
        self,
        batch: pa.RecordBatch,
        time: int,
        deleted: Mask | None,
        size_bytes: int,
        keys: Sequence[bytes] | None,
    ) -> None:
        """Add the rows of one entry. They count `size_bytes` bytes. If `keys` are given, the block is small, and its
        keys are indexed in the dict."""
        if batch.num_rows == 0:
            return
        with self._waiting_lock:
            self._settle()
            chunk = Chunk(self.rows, batch, time, deleted, self.schema)
            self.bytes += max(size_bytes, chunk.nbytes) + _CHUNK_OVERHEAD_BYTES
            if keys is None:
                self.chunks.append(chunk)
                self.rows += chunk.rows
                self._big_end = self.rows
                self._small_tail = 0
                return
            self._index_small(chunk.start, keys, deleted)
            self.bytes += _DICT_ENTRY_BYTES * len(keys)
            self.chunks.append(chunk)
            self.rows += chunk.rows
            self._small_tail += 1
            if self._small_tail >= self._coalesce_at:
                self._coalesce(self._small_tail)

    def append_plain(self, block: memoryview, time: int, size_bytes: int) -> None:
        """Add the rows of a checked plain block. A small one is decoded later.

        Raises:
            Corrupt: a block that waited is damaged.
            Rejected: UNSUPPORTED_VERSION of this block; nothing was added.
        """
        rows = plain_rows(block)
        if rows > SMALL_ROWS:
            self.append(self._decoded(block), time, None, size_bytes, None)
            return
        with self._waiting_lock:
            self._make_whole()
            self._waiting.append((block, rows, time))
            self.rows += rows
            size_bytes += _CHUNK_OVERHEAD_BYTES + _DICT_ENTRY_BYTES * rows
            self.bytes += size_bytes
            self._waiting_bytes += size_bytes
            if self._waiting_bytes >= self._waiting_max:
                self._decode_waiting()

    def may_wait(self, base: Sequence[int], batch: pa.RecordBatch, size_bytes: int) -> bool:
        """Whether rows that give these other values may wait as a patch. Not if they are many, or may be long: all that
        wait are copied in one step."""
        if len(base) * batch.num_columns > _PATCHED_VALUES_MAX:
            return False
        if row_bits(self.schema) is not None:
            return True
        if any(map(has_long, batch.columns)):
            return False
        with self._waiting_lock:
            whole = self.rows - len(self._patch_sizes)
            if any(self._at(self.chunks, at)[0].has_long for at in set(base) if at < whole):
                return False
            return sum(map(self._size_of, base)) + size_bytes <= self._waiting_joined_max

    def append_patch(self, patch: Patch, time: int) -> None:
        """Add the rows of a patch of this table. They are made whole later."""
        rows = len(patch.keys)
        with self._waiting_lock:
            self._decode_waiting()
            own = patch.size_bytes // rows
            sizes = [self._size_of(at) + own for at in patch.base]
            self._index_small(self.rows, patch.keys, None)
            self._patches.append((patch, time))
            self._patch_sizes += sizes
            self._patched_values += rows * patch.batch.num_columns
            self.rows += rows
            self.bytes += sum(sizes) + _CHUNK_OVERHEAD_BYTES + _DICT_ENTRY_BYTES * rows

    def patches_due(self, rows: int, columns: int) -> bool:
        """Whether so many patched rows wait that they must be made whole before a block of this size is looked up."""
        sizes = self._patch_sizes
        return bool(sizes) and (
            len(sizes) + rows > _PATCHED_ROWS_MAX
            or self._patched_values + rows * columns > _PATCHED_VALUES_MAX
            or sum(sizes) >= self._waiting_joined_max
        )

    def _size_of(self, ordinal: int) -> int:
        """About how many bytes this row takes."""
        patched = ordinal - (self.rows - len(self._patch_sizes))
        if patched >= 0:
            return self._patch_sizes[patched]
        chunk, _ = self._at(self.chunks, ordinal)
        return chunk.nbytes // chunk.rows

    def _make_whole(self) -> None:
        """Make one chunk of the patched rows. `_waiting_lock` is held."""
        patches = self._patches
        if not patches:
            return
        start = self.rows - len(self._patch_sizes)
        times = np.repeat(
            np.fromiter((time for _, time in patches), np.uint64, len(patches)),
            [len(patch.keys) for patch, _ in patches],
        )
        chunk = Chunk(start, self._patched([patch for patch, _ in patches], start), times, None, self.schema)
        chunk.set_keys(pa.array([key for patch, _ in patches for key in patch.keys], pa.binary()))
        # If memory runs out up to here, all patches still wait.
        self.bytes += chunk.nbytes - sum(self._patch_sizes) - (len(patches) - 1) * _CHUNK_OVERHEAD_BYTES
        self.chunks += [chunk]
        self._patches, self._patch_sizes, self._patched_values = [], [], 0
        self._small_tail = 0
        self._coalesce(1)

    def _patched(self, patches: Sequence[Patch], start: int) -> pa.RecordBatch:
        """The whole rows of these patches. `start`: the ordinal of the first one."""
        roots: list[int] = []  # for each row the row below all patches
        changes: list[dict[int, int]] = []  # and for each column that they change, which of its values below
        values: dict[int, list[pa.Array]] = {}
        counts: dict[int, int] = {}
        for patch in patches:
            firsts = [(column, counts.get(column, 0)) for column in patch.columns]
            for row, at in enumerate(patch.base):
                below = at - start
                changed = dict(changes[below]) if below >= 0 else {}
                changed.update((column, first + row) for column, first in firsts)
                roots.append(roots[below] if below >= 0 else at)
                changes.append(changed)
            for place, (column, first) in enumerate(firsts):
                values.setdefault(column, []).append(patch.batch.column(place))
                counts[column] = first + len(patch.keys)
        old = self._gathered(np.array(roots))
        taken: dict[int, list[tuple[int, int]]] = {column: [] for column in values}
        for row, changed in enumerate(changes):
            for column, value in changed.items():
                taken[column].append((row, value))
        made = {}
        for column, pairs in taken.items():
            rows, places = np.array(pairs).T
            index = np.arange(len(roots))
            index[rows] = len(roots) + places
            made[column] = pa.concat_arrays([old.column(column), *values[column]]).take(pa.array(index))
        return with_columns(old, made)

    def _gathered(self, ordinals: Positions) -> pa.RecordBatch:
        """A copy of the rows of chunks, in this order."""
        parts, places = [], []
        for chunk, members, rows in self._by_chunk(ordinals):
            parts.append(chunk.batch.take(pa.array(rows)))
            places.append(members)
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.concatenate(places))
        return concat_batches(parts).take(pa.array(back))

    def _decoded(self, block: memoryview) -> pa.RecordBatch:
        try:
            return checked_rows(block, self.schema)
        except Rejected as exc:
            raise Corrupt(
                f"a write that was already checked cannot be decoded: {exc}", code=Code.CORRUPT
            ) from exc

    def _decode_waiting(self) -> None:
        """Make one chunk of the waiting blocks. `_waiting_lock` is held."""
        waiting = self._waiting
        if not waiting:
            return
        start = self.rows - sum(rows for _, rows, _ in waiting)
        chunks = self._joined_chunk(waiting, start)
        self._waiting_max = self._waiting_joined_max if chunks else _WAITING_APART_BYTES_MAX
        if not chunks:
            chunks = self._read_chunks(waiting, start)
        # If memory runs out up to here, all blocks still wait.
        keys = [chunk.keys.to_pylist() for chunk in chunks]
        for chunk, listed in zip(chunks, keys):
            self._index_small(chunk.start, listed, None)
        unseen = sum(c.nbytes for c in chunks) - sum(len(block) for block, _, _ in waiting)
        self.bytes += max(0, unseen) - (len(waiting) - len(chunks)) * _CHUNK_OVERHEAD_BYTES
        self.chunks += chunks
        self._waiting, self._waiting_bytes = [], 0
        self._small_tail = 0
        self._coalesce(1)

    def _joined_chunk(self, waiting: Sequence[_Waiting], start: int) -> list[Chunk]:
        """One chunk of many blocks with the same layout; none if they are few or differ."""
        if self.layout is None or len(waiting) < _JOINED_MIN:
            return []
        batch = self.layout.rows_of([block for block, _, _ in waiting])
        return [] if batch is None else [Chunk(start, batch, _times(waiting), None, self.schema)]

    def _read_chunks(self, waiting: Sequence[_Waiting], start: int) -> list[Chunk]:
        """Chunks of any blocks, decoded one by one."""
        batches = [self._decoded(block) for block, _, _ in waiting]
        try:
            return [Chunk(start, concat_batches(batches), _times(waiting), None, self.schema)]
        except pa.ArrowInvalid:  # more than an array holds, possible with compressed blocks in an old log
            starts = itertools.accumulate((rows for _, rows, _ in waiting), initial=start)
            return [
                Chunk(first, batch, time, None, self.schema)
                for first, batch, (_, _, time) in zip(starts, batches, waiting)
            ]

    def _index_small(self, first: int, keys: Sequence[bytes], deleted: Mask | None) -> None:
        """Index rows from the ordinal `first` on."""
        small, older = self._small, self._older
        places: Iterable[int] = range(2 * first, 2 * (first + len(keys)), 2)
        if deleted is not None:
            places = [place + gone for place, gone in zip(places, deleted.tolist())]
        for place, key in zip(places, keys):
            before = small.get(key)
            if before is not None and before < place:  # false after a try that ran out of memory halfway
                older[place] = before
            small[key] = place

    def append_keyed(
        self, batch: pa.RecordBatch, time: int, deleted: Mask | None, size_bytes: int, keys: pa.BinaryArray
    ) -> None:
        """As `append` for a big block whose keys are already encoded."""
        self.append(batch, time, deleted, size_bytes, None)
        if batch.num_rows:
            self.chunks[-1].set_keys(keys)

    def _settle(self) -> None:
        """Let no row wait. `_waiting_lock` is held."""
        self._decode_waiting()
        self._make_whole()

    def settle(self) -> None:
        """Decode all blocks and make all rows whole that wait. Any thread."""
        if self._waiting or self._patches:
            with self._waiting_lock:
                self._settle()

    def _coalesce(self, last: int) -> None:
        """Join the last chunks, and then also each earlier chunk that has no more rows than the joined one. So
        each row is copied only a few times."""
        chunks = self.chunks
        at = len(chunks) - last
        rows = sum(c.rows for c in chunks[at:])
        size = sum(c.nbytes for c in chunks[at:])
        self._small_tail = 0
        if size > _COALESCED_BYTES_MAX:
            return
        while (
            at
            and chunks[at - 1].start >= self._big_end
            and chunks[at - 1].rows <= rows <= _COALESCED_ROWS_MAX
        ):
            size += chunks[at - 1].nbytes
            if size > _COALESCED_BYTES_MAX:
                break
            at -= 1
            rows += chunks[at].rows
        if at == len(chunks) - 1:
            return
        joined, kept = _join(chunks[at:], self.schema), chunks[:at]
        self.bytes -= (len(chunks) - len(kept) - 1) * _CHUNK_OVERHEAD_BYTES
        self.chunks = [*kept, joined]  # a new list, because views keep the old one

    # --- finding

    def newest_small(self, key: bytes, *, brief: bool = False) -> tuple[int, bool] | None:
        """Return (ordinal, deleted) of the newest version of one key; None if the memtable lacks the key.

        With `brief`, raises WouldBlock if many rows are not indexed yet."""
        if self._waiting:  # the keys of patched rows are known
            with self._waiting_lock:
                self._decode_waiting()
        found = self._small.get(key)
        best = None if found is None else (found >> 1, bool(found & 1))
        if self._big_end:
            self._lock_index(brief)
            try:
                candidates = self._index.candidates(hash_bytes(key))
            finally:
                self._lock.release()
            for ordinal in candidates:
                if best is not None and ordinal <= best[0]:
                    break
                chunk, row = self._at(self.chunks, ordinal)
                if chunk.keys[row].as_py() == key:
                    return ordinal, chunk.deleted is not None and bool(chunk.deleted[row])
        return best

    def newest(self, keys: pa.BinaryArray, hashes: U64) -> Positions:
        """Return the ordinal of the newest version of each key; -1 if the memtable lacks the key."""
        self.settle()
        with self._lock:
            self._ensure_index(self.rows)
            return self._index.newest(keys, hashes, self)

    def deleted_at(self, ordinals: Positions) -> Mask:
        """Return which of the rows with these ordinals are deletes."""
        found = np.zeros(len(ordinals), bool)
        for chunk, members, rows in self._by_chunk(ordinals):
            if chunk.deleted is not None:
                found[members] = chunk.deleted[rows]
        return found

    def times_at(self, ordinals: Positions) -> U64:
        """Return the hybrid times of the rows with these ordinals."""
        found = np.zeros(len(ordinals), np.uint64)
        for chunk, members, rows in self._by_chunk(ordinals):
            found[members] = chunk.times if isinstance(chunk.times, int) else chunk.times[rows]
        return found

    def key_at(self, ordinal: int) -> bytes:
        """The key of one row."""
        chunk, row = self._at(self.chunks, ordinal)
        key: bytes = chunk.keys[row].as_py()
        return key

    def keys_at(self, ordinals: Positions) -> pa.BinaryArray:
        """The keys of these rows."""
        parts, places = [], []
        for chunk, members, rows in self._by_chunk(ordinals):
            parts.append(chunk.keys.take(pa.array(rows)))
            places.append(members)
        if not parts:
            return pa.array([], pa.binary())
        back = np.argsort(np.concatenate(places))
        return pa.concat_arrays(parts).take(pa.array(back))

    def rows_at(self, ordinals: Positions) -> pa.RecordBatch:
        """Return the rows with these ordinals, in this order; at least one. A single row is not copied."""
        self.settle()
        if len(ordinals) == 1:
            chunk, row = self._at(self.chunks, int(ordinals[0]))
            return chunk.batch.slice(row, 1)
        return self._gathered(ordinals)

    def _by_chunk(self, ordinals: Positions) -> list[tuple[Chunk, Positions, Positions]]:
        chunks = self.chunks
        starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
        owner = np.searchsorted(starts, ordinals, side="right") - 1
        found = []
        for index in np.unique(owner).tolist():
            members = np.flatnonzero(owner == index)
            found.append((chunks[index], members, ordinals[members] - chunks[index].start))
        return found

    @staticmethod
    def _at(chunks: Sequence[Chunk], ordinal: int) -> tuple[Chunk, int]:
        chunk = chunks[bisect.bisect_right(chunks, ordinal, key=lambda c: c.start) - 1]
        return chunk, ordinal - chunk.start

    def _ensure_index(self, end: int) -> None:
        """Index all rows below `end`, in pieces: other threads wait while one handles many rows. The lock is
        held."""
        done = self._index.end
        if done >= end:
            return
        piece: list[pa.BinaryArray] = []
        rows = 0
        for chunk in self.chunks:
            if chunk.start >= end or chunk.start + chunk.rows <= done:
                continue
            piece.append(chunk.keys.slice(max(0, done - chunk.start)))
            rows += len(piece[-1])
            if rows >= _INDEX_PIECE_ROWS:
                self._index_keys(piece)
                piece, rows = [], 0
        if piece:
            self._index_keys(piece)

    def _index_keys(self, keys: Sequence[pa.BinaryArray]) -> None:
        self._index.add(hash_binary(pa.concat_arrays(keys) if len(keys) > 1 else keys[0]))

    # --- reading (any thread)

    def view(self) -> MemView:
        """An immutable view of the present rows."""
        with self._waiting_lock:
            self._settle()
            return MemView(self, self.chunks, len(self.chunks), self.rows)

    def versions(self, key: bytes, end: int, *, brief: bool = False) -> Iterator[tuple[int, int, bool]]:
        """(ordinal, timestamp, deleted) of the versions of one key with ordinals below `end`, newest
        first.

        With `brief`, raises WouldBlock if many rows are not indexed yet."""
        last = end
        ordinals: Iterable[int] = self._hashed(key, end, brief)
        if key in self._small:
            ordinals = heapq.merge(self._chained(key), ordinals, reverse=True)
        for ordinal in ordinals:
            if ordinal < last:
                last = ordinal
                chunk, row = self._at(self.chunks, ordinal)
                yield ordinal, chunk.time_of(row), chunk.deleted is not None and bool(chunk.deleted[row])

    def _chained(self, key: bytes) -> Iterator[int]:
        """Ordinals of a key's versions from small blocks, newest first."""
        place = self._small.get(key)
        while place is not None:
            yield place >> 1
            place = self._older.get(place)

    def _hashed(self, key: bytes, end: int, brief: bool) -> list[int]:
        """The key's ordinals below `end` in the hash index."""
        if not self._big_end:
            return []
        self._lock_index(brief)
        try:
            candidates = self._index.candidates(hash_bytes(key))
        finally:
            self._lock.release()
        return [at for at in candidates if at < end and self.key_at(at) == key]

    def _lock_index(self, brief: bool) -> None:
        """Take the lock, with all rows of big blocks indexed. `brief`: as for `newest_small`."""
        if brief and self._big_end - self._index.end > _BRIEF_ROWS_MAX:
            raise WouldBlock
        if not self._lock.acquire(blocking=not brief):
            raise WouldBlock  # a reader is indexing, perhaps many rows
        try:
            self._ensure_index(self._big_end)
        except BaseException:
            self._lock.release()
            raise

    def sorted_rows(self, chunks: Sequence[Chunk], rows: int) -> list[SortedRows]:
        """Return the rows of these chunks, sorted, newest part first. May include newer rows. `rows`: how many rows
        the chunks have.

        Raises:
            Retryable: NOT_READY: they are more than an Arrow array holds; wait for the flush.
        """
        return self._order.of(chunks, rows)


@dataclass(frozen=True, slots=True)
class MemView:
    """The content of a memtable at one moment."""

    table: MemTable
    chunks: list[Chunk]
    count: int
    rows: int

    @property
    def max_time(self) -> int:
        """Hybrid time of the last row. There is at least one row."""
        last = self.chunks[self.count - 1]
        return last.time_of(last.rows - 1)

    def sorted_rows(self) -> list[SortedRows]:
        """All rows, sorted, newest part first; at least one. May include newer rows, with times above
        `max_time`."""
        return self.table.sorted_rows(self.chunks[: self.count], self.rows)

    def runs(self) -> list[Run]:
        """All rows as they were applied, oldest first, without a copy."""
        return [chunk.run() for chunk in self.chunks[: self.count]]

    def find(
        self, key: bytes, snapshot: int, *, brief: bool = False
    ) -> tuple[bool, pa.RecordBatch | None] | None:
        """Find the newest version of a key at or below `snapshot`.

        Returns (True, its row), or (False, None) if it is a delete, or None if there is no such version.

        With `brief`, raises WouldBlock if many rows are not indexed yet, if the newest version is newer, or if it may have
        long values."""
        for ordinal, time, deleted in self.table.versions(key, self.rows, brief=brief):
            if time > snapshot:
                if brief:
                    raise WouldBlock
            else:
                if deleted:
                    return False, None
                at = bisect.bisect_right(self.chunks, ordinal, hi=self.count, key=lambda c: c.start) - 1
                chunk = self.chunks[at]
                if brief and chunk.has_long:
                    raise WouldBlock
                return True, chunk.batch.slice(ordinal - chunk.start, 1)
        return None


def _times(waiting: Sequence[_Waiting]) -> int | U64:
    if len(waiting) == 1:
        return waiting[0][2]
    times = np.fromiter((time for _, _, time in waiting), np.uint64, len(waiting))
    return np.repeat(times, [rows for _, rows, _ in waiting])


def _join(chunks: Sequence[Chunk], schema: Schema) -> Chunk:
    deleted = None
    if any(c.deleted is not None for c in chunks):
        deleted = np.concatenate([np.zeros(c.rows, bool) if c.deleted is None else c.deleted for c in chunks])
    times = np.concatenate([c.time_array() for c in chunks])
    return Chunk(chunks[0].start, concat_batches([c.batch for c in chunks]), times, deleted, schema)
