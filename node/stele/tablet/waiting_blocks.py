"""Small plain blocks that wait in a memtable, and how they become chunks: decoded together they cost a fraction.

The memtable keeps them, bounds them, and says when. Invariant: the rows keep their order, whichever way they are decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stele.model.block import checked_rows
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.layout import layout_of
from stele.model.schema import Schema
from stele.tablet.chunk import U64, Chunk
from stele.tablet.sorted_runs import concat_batches

_JOINED_MIN = 32
"""From this many blocks on, decoding them together is cheaper than one by one."""

Waiting = tuple[memoryview, int, int]
"""A block, its number of rows, its hybrid time."""


def chunks_together(waiting: Sequence[Waiting], start: int, schema: Schema) -> list[Chunk]:
    """One chunk of many blocks with the same layout; none if they are few or differ."""
    layout = layout_of(schema)
    if layout is None or len(waiting) < _JOINED_MIN:
        return []
    batch = layout.rows_of([block for block, _, _ in waiting])
    return [] if batch is None else [Chunk(start, batch, _times(waiting), None, schema)]


def chunks_one_by_one(waiting: Sequence[Waiting], start: int, schema: Schema) -> list[Chunk]:
    """Chunks of any blocks, decoded one by one."""
    batches = [decoded(block, schema) for block, _, _ in waiting]
    try:
        return [Chunk(start, concat_batches(batches), _times(waiting), None, schema)]
    except pa.ArrowInvalid:  # more than an array holds, possible with compressed blocks in an old log
        starts = itertools.accumulate((rows for _, rows, _ in waiting), initial=start)
        return [
            Chunk(first, batch, time, None, schema)
            for first, batch, (_, _, time) in zip(starts, batches, waiting)
        ]


def decoded(block: memoryview, schema: Schema) -> pa.RecordBatch:
    """The rows of a block that was checked when it came. Raises Corrupt: it is damaged."""
    try:
        return checked_rows(block, schema)
    except Rejected as exc:
        raise Corrupt(
            f"a write that was already checked cannot be decoded: {exc}", code=Code.CORRUPT
        ) from exc


def _times(waiting: Sequence[Waiting]) -> int | U64:
    if len(waiting) == 1:
        return waiting[0][2]
    times = np.fromiter((time for _, _, time in waiting), np.uint64, len(waiting))
    return np.repeat(times, [rows for _, rows, _ in waiting])
