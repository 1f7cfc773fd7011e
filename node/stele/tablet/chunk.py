"""Rows of a memtable as they were applied, and where a row is in a list of chunks. Made by the memtable; read by whoever sorts
them.

Invariant: the rows of a chunk never change. In a list each chunk begins where the one before ends.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.schema import Schema
from stele.tablet.sorted_runs import Mask, Positions, Run, concat_batches, has_long

U64 = npt.NDArray[np.uint64]


def row_bits(schema: Schema) -> int | None:
    """Bits of a row, with one for null in each column; None if a column's values differ in length."""
    if "row_bits" not in schema.derived:
        types = schema.to_arrow().types
        fixed = not any(pa.types.is_string(each) or pa.types.is_binary(each) for each in types)
        schema.derived["row_bits"] = sum(each.bit_width + 1 for each in types) if fixed else None
    found: int | None = schema.derived["row_bits"]
    return found


class Chunk:
    """Consecutive rows. `times` is one hybrid time for all rows, or one per row."""

    __slots__ = ("_keys", "_long", "_nbytes", "_schema", "batch", "deleted", "rows", "start", "times")

    def __init__(
        self, start: int, batch: pa.RecordBatch, times: int | U64, deleted: Mask | None, schema: Schema
    ) -> None:
        self.start = start
        self.rows: int = batch.num_rows
        self.batch = batch
        self.times = times
        self.deleted = deleted
        self._schema = schema
        self._keys: pa.BinaryArray | None = None
        self._nbytes = -1
        self._long: bool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take. Computed once. Arrow is asked only if values differ in length, because it takes
        half a millisecond for 300 columns."""
        if self._nbytes < 0:
            bits = row_bits(self._schema)
            self._nbytes = self.batch.nbytes if bits is None else -(-self.rows * bits // 8)
        return self._nbytes

    @property
    def has_long(self) -> bool:
        """Whether a row has a value too long to be copied on the event loop. Computed once."""
        if self._long is None:
            self._long = any(map(has_long, self.batch.columns))
        return self._long

    @property
    def keys(self) -> pa.BinaryArray:
        """Encoded keys, computed on first use."""
        if self._keys is None:
            self._keys = key_bytes.encode_keys(self.batch, self._schema)
        return self._keys

    def set_keys(self, keys: pa.BinaryArray) -> None:
        """Set the keys, if the caller has encoded them already."""
        self._keys = keys

    def time_of(self, row: int) -> int:
        """Hybrid time of one row."""
        return self.times if isinstance(self.times, int) else int(self.times[row])

    def time_array(self) -> U64:
        """Hybrid times of all rows."""
        return np.full(self.rows, self.times, np.uint64) if isinstance(self.times, int) else self.times

    def run(self) -> Run:
        """The rows as a run, in the order they were applied."""
        return Run(self.batch, self.keys, self.time_array(), self.deleted)


def chunk_at(chunks: Sequence[Chunk], ordinal: int) -> tuple[Chunk, int]:
    """The chunk that has a row, and the row's place in it."""
    chunk = chunks[bisect.bisect_right(chunks, ordinal, key=lambda c: c.start) - 1]
    return chunk, ordinal - chunk.start


def by_chunk(chunks: Sequence[Chunk], ordinals: Positions) -> list[tuple[Chunk, Positions, Positions]]:
    """The chunks that have these rows; for each the places of its rows among `ordinals`, and in the chunk."""
    starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
    owner = np.searchsorted(starts, ordinals, side="right") - 1
    found = []
    for index in np.unique(owner).tolist():
        members = np.flatnonzero(owner == index)
        found.append((chunks[index], members, ordinals[members] - chunks[index].start))
    return found


def gathered(chunks: Sequence[Chunk], ordinals: Positions) -> pa.RecordBatch:
    """A copy of these rows, in this order."""
    parts, places = [], []
    for chunk, members, rows in by_chunk(chunks, ordinals):
        parts.append(chunk.batch.take(pa.array(rows)))
        places.append(members)
    if len(parts) == 1:
        return parts[0]
    back = np.argsort(np.concatenate(places))
    return concat_batches(parts).take(pa.array(back))


def joined(chunks: Sequence[Chunk], schema: Schema) -> Chunk:
    """One chunk with the rows of all."""
    deleted = None
    if any(c.deleted is not None for c in chunks):
        deleted = np.concatenate([np.zeros(c.rows, bool) if c.deleted is None else c.deleted for c in chunks])
    times = np.concatenate([c.time_array() for c in chunks])
    return Chunk(chunks[0].start, concat_batches([c.batch for c in chunks]), times, deleted, schema)
