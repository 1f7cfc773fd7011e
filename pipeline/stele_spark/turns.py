"""Numbers the rows of each key within one task: its first row has turn 0, its second turn 1, and so on. Used by
sink.py for jobs with a name.

One part of a job writes a key at most once. So the rows of each turn are written as a part of their own. If an
attempt was cut off after a key's first row, the next attempt still writes the second one.

Invariant: a row's turn depends only on the rows of its key before it, not on how batches are cut.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.hashing import hash_binary
from stele.model.keys import encode_arrays
from stele.model.schema import Schema

U64 = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


class Turns:
    """Counts the rows of each key. A key is known by 64 bits of its hash, so it takes 8 bytes."""

    def __init__(self, schema: Schema) -> None:
        self._columns = schema.key_columns
        self._seen: list[_Hashes] = []  # by turn: the keys that have had it

    def of(self, batch: pa.RecordBatch) -> Places:
        """The turn of each row, counted from 0. A row whose key has a null gets turn 0, and is refused later."""
        arrays = [batch.column(column.name).cast(column.arrow) for column in self._columns]
        turns = np.zeros(batch.num_rows, np.int64)
        whole = np.flatnonzero(np.all([np.asarray(array.is_valid()) for array in arrays], axis=0))
        if not len(whole):
            return turns
        hashes = hash_binary(encode_arrays([array.take(pa.array(whole)) for array in arrays]))
        order = np.argsort(hashes, kind="stable")
        keys, first, counts = np.unique(hashes[order], return_index=True, return_counts=True)
        before = np.zeros(len(keys), np.int64)
        for seen in self._seen:
            before += seen.has(keys)
        within = np.arange(len(order)) - np.repeat(first, counts)
        turns[whole[order]] = np.repeat(before, counts) + within
        after = before + counts
        for turn in range(int(after.max())):
            if turn == len(self._seen):
                self._seen.append(_Hashes())
            self._seen[turn].add(keys[(before <= turn) & (turn < after)])
        return turns


class _Hashes:
    """A set of hashes, kept in sorted runs. Each run is more than twice as long as the next one, so there are
    few.
    """

    def __init__(self) -> None:
        self._runs: list[U64] = []

    def add(self, ascending: U64) -> None:
        """Add hashes that the set does not have. They must be in ascending order."""
        self._runs.append(ascending)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = np.sort(np.concatenate([self._runs[-1], last]), kind="stable")

    def has(self, ascending: U64) -> npt.NDArray[np.bool_]:
        """For each of these hashes, whether the set has it."""
        found = np.zeros(len(ascending), np.bool_)
        for run in self._runs:
            if len(run):
                at = np.minimum(np.searchsorted(run, ascending), len(run) - 1)
                found |= run[at] == ascending
        return found
