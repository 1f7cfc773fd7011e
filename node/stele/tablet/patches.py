"""Updates of some columns that wait in a memtable as patches: what they change, and which older rows of it they change.

Made whole together they read and write each column once for all rows. Owned by the memtable, which calls this under its lock.

Invariant: what waits is bounded, as a reader makes it whole in a turn of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stele.model.schema import Schema
from stele.tablet.block_checks import with_columns
from stele.tablet.chunk import Chunk, gathered

_ROWS_MAX = 64
"""The most patched rows that wait. They are made whole in some milliseconds for 300 columns."""
VALUES_MAX = 1_024
"""The most values that patches which wait give. To make rows whole takes one or two microseconds for each."""


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


class Patches:
    """The patches of one memtable that wait. `bytes_max`: from this many bytes of patched rows on, they are made whole."""

    def __init__(self, schema: Schema, bytes_max: int) -> None:
        self.waiting: list[tuple[Patch, int]] = []
        """With their hybrid times."""
        self.sizes: list[int] = []
        """About how many bytes each patched row takes."""
        self._schema = schema
        self._bytes_max = bytes_max
        self._values = 0  # how many values they give

    def due(self, rows: int, columns: int) -> bool:
        """Whether so many patched rows wait that they must be made whole before a block of this size is looked up."""
        sizes = self.sizes
        return bool(sizes) and (
            len(sizes) + rows > _ROWS_MAX
            or self._values + rows * columns > VALUES_MAX
            or sum(sizes) >= self._bytes_max
        )

    def add(self, patch: Patch, time: int, sizes: list[int]) -> None:
        """Let a patch wait. `sizes`: about how many bytes each of its rows takes."""
        self.waiting.append((patch, time))
        self.sizes += sizes
        self._values += len(sizes) * patch.batch.num_columns

    def whole(self, start: int, chunks: Sequence[Chunk]) -> Chunk:
        """The whole rows of all patches; they still wait. `start`: the ordinal of the first one. `chunks`: all rows before
        it."""
        waiting = self.waiting
        times = np.repeat(
            np.fromiter((time for _, time in waiting), np.uint64, len(waiting)),
            [len(patch.keys) for patch, _ in waiting],
        )
        rows = self._patched([patch for patch, _ in waiting], start, chunks)
        chunk = Chunk(start, rows, times, None, self._schema)
        chunk.set_keys(pa.array([key for patch, _ in waiting for key in patch.keys], pa.binary()))
        return chunk

    def clear(self) -> None:
        """None waits any more: their rows are in a chunk."""
        self.waiting, self.sizes, self._values = [], [], 0

    def _patched(self, patches: Sequence[Patch], start: int, chunks: Sequence[Chunk]) -> pa.RecordBatch:
        """The whole rows of these patches. `start`: the ordinal of the first one. `chunks`: all rows before it."""
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
        old = gathered(chunks, np.array(roots))
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
