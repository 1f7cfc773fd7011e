"""Recent rows in memory, with key indexes for small and for big blocks. Owned by the store; opens no files.

Rows are numbered in the order they were applied (their ordinal). They are in chunks, at first one per block.
Small chunks are joined, so that a million single puts do not make a million Arrow batches. Small plain blocks
wait undecoded until there are some hundreds, or until somebody reads (waiting_blocks.py). Likewise small updates of
some columns wait as patches (patches.py).

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

from stele.model.block import plain_rows
from stele.model.hashing import hash_binary, hash_bytes
from stele.model.layout import layout_of
from stele.model.schema import Schema
from stele.tablet.chunk import U64, Chunk, by_chunk, chunk_at, gathered, joined, row_bits
from stele.tablet.hash_index import HashIndex
from stele.tablet.machine import WouldBlock
from stele.tablet.order import SharedOrder, SortedRows
from stele.tablet.patches import VALUES_MAX, Patch, Patches
from stele.tablet.sorted_runs import Mask, Positions, Run, has_long
from stele.tablet.waiting_blocks import Waiting, chunks_one_by_one, chunks_together, decoded

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
_COALESCED_ROWS_MAX = 8_192
_COALESCED_BYTES_MAX = 16 << 20
"""The most bytes of a joined chunk. Larger chunks gain nothing, and an Arrow array holds at most 2 GiB."""
_BRIEF_ROWS_MAX = 4_096
"""A lookup on the event loop (`brief`) indexes at most this many rows, which takes about 2 ms."""
_INDEX_PIECE_ROWS = 65_536
_CHUNK_OVERHEAD_BYTES = 2_048
_DICT_ENTRY_BYTES = 240

_SERIALS = itertools.count(1)


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
        self._waiting: list[Waiting] = []
        self._waiting_bytes = 0  # part of `bytes`
        wide = len(schema.columns) >= _WIDE_COLUMNS
        self._coalesce_at = _COALESCE_WIDE if wide else _COALESCE
        self._waiting_joined_max = _WAITING_BYTES_MAX // 4 if wide else _WAITING_BYTES_MAX
        self._waiting_max = _WAITING_APART_BYTES_MAX if self.layout is None else self._waiting_joined_max
        self.patches = Patches(schema, self._waiting_joined_max)
        """Updates of some columns that wait; what they take is part of `bytes`."""
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
            self.append(decoded(block, self.schema), time, None, size_bytes, None)
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
        if len(base) * batch.num_columns > VALUES_MAX:
            return False
        if row_bits(self.schema) is not None:
            return True
        if any(map(has_long, batch.columns)):
            return False
        with self._waiting_lock:
            whole = self.rows - len(self.patches.sizes)
            if any(chunk_at(self.chunks, at)[0].has_long for at in set(base) if at < whole):
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
            self.patches.add(patch, time, sizes)
            self.rows += rows
            self.bytes += sum(sizes) + _CHUNK_OVERHEAD_BYTES + _DICT_ENTRY_BYTES * rows

    def _size_of(self, ordinal: int) -> int:
        """About how many bytes this row takes."""
        sizes = self.patches.sizes
        patched = ordinal - (self.rows - len(sizes))
        if patched >= 0:
            return sizes[patched]
        chunk, _ = chunk_at(self.chunks, ordinal)
        return chunk.nbytes // chunk.rows

    def _make_whole(self) -> None:
        """Make one chunk of the patched rows. `_waiting_lock` is held."""
        patches = self.patches
        if not patches.sizes:
            return
        chunk = patches.whole(self.rows - len(patches.sizes), self.chunks)
        # If memory runs out up to here, all patches still wait.
        self.bytes += chunk.nbytes - sum(patches.sizes) - (len(patches.waiting) - 1) * _CHUNK_OVERHEAD_BYTES
        self.chunks += [chunk]
        patches.clear()
        self._small_tail = 0
        self._coalesce(1)

    def _decode_waiting(self) -> None:
        """Make one chunk of the waiting blocks. `_waiting_lock` is held."""
        waiting = self._waiting
        if not waiting:
            return
        start = self.rows - sum(rows for _, rows, _ in waiting)
        chunks = chunks_together(waiting, start, self.schema)
        self._waiting_max = self._waiting_joined_max if chunks else _WAITING_APART_BYTES_MAX
        if not chunks:
            chunks = chunks_one_by_one(waiting, start, self.schema)
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
        if self._waiting or self.patches.sizes:
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
        whole, kept = joined(chunks[at:], self.schema), chunks[:at]
        self.bytes -= (len(chunks) - len(kept) - 1) * _CHUNK_OVERHEAD_BYTES
        self.chunks = [*kept, whole]  # a new list, because views keep the old one

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
                chunk, row = chunk_at(self.chunks, ordinal)
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
        for chunk, members, rows in by_chunk(self.chunks, ordinals):
            if chunk.deleted is not None:
                found[members] = chunk.deleted[rows]
        return found

    def times_at(self, ordinals: Positions) -> U64:
        """Return the hybrid times of the rows with these ordinals."""
        found = np.zeros(len(ordinals), np.uint64)
        for chunk, members, rows in by_chunk(self.chunks, ordinals):
            found[members] = chunk.times if isinstance(chunk.times, int) else chunk.times[rows]
        return found

    def key_at(self, ordinal: int) -> bytes:
        """The key of one row."""
        chunk, row = chunk_at(self.chunks, ordinal)
        key: bytes = chunk.keys[row].as_py()
        return key

    def keys_at(self, ordinals: Positions) -> pa.BinaryArray:
        """The keys of these rows."""
        parts, places = [], []
        for chunk, members, rows in by_chunk(self.chunks, ordinals):
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
            chunk, row = chunk_at(self.chunks, int(ordinals[0]))
            return chunk.batch.slice(row, 1)
        return gathered(self.chunks, ordinals)

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
                chunk, row = chunk_at(self.chunks, ordinal)
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
