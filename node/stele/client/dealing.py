"""Deals rows out to tablets and encodes their blocks. Used by batcher.py; waits for nothing.

The one place that chooses how: a few plain rows (`stele.model.plain`) stay Python values, since making Arrow arrays of
them costs several times as much. All other rows become Arrow batches.

Invariant: both ways send the same rows to the same tablets as the same bytes, and refuse the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from stele.client.waiting_rows import Item, Part, joined_ops
from stele.model.block import INSERTS, RowError, RowOp, encode_block
from stele.model.partition import PartitionSchema, assign, assign_few, rows_by_tablet
from stele.model.plain import plain_rows
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema

PLAIN_ROWS_MAX = 512
"""For more rows at once, Arrow is faster."""


class Dealer:
    """Deals out and encodes rows of one table. `plain` false: never as plain values."""

    def __init__(self, schema: Schema, partitioning: PartitionSchema, *, plain: bool = True) -> None:
        self.schema = schema
        self._partitioning = partitioning
        self._plain = plain_rows(schema) if plain else None

    def deal(self, group: Sequence[Item]) -> tuple[list[tuple[int, Part]], list[RowError]]:
        """Deal rows out. Returns parts, each with the ordinal of its tablet, and the errors of refused rows
        by their place in `group`.

        `group`: one or more rows of one shape, see `groups_of`. If a row's values raise an exception, nothing
        is dealt out.
        """
        plain = self._deal_plain(group)
        return (plain, []) if plain is not None else self._deal_arrow(group)

    def _deal_plain(self, group: Sequence[Item]) -> list[tuple[int, Part]] | None:
        """As `deal`; None if any of the rows is not plain."""
        op = group[0][0]
        if self._plain is None or len(group) > PLAIN_ROWS_MAX or op not in INSERTS:
            return None
        each, rows, futures, _ = zip(*group)
        if any(other is not op for other in each):
            return None
        found = self._plain.values(rows)
        if found is None:
            return None
        values, columns = found
        ordinals = assign_few(columns, self.schema, self._partitioning)
        parts: dict[int, Part] = {}
        for ordinal, row, future in zip(ordinals, values, futures):
            part = parts.get(ordinal)
            if part is None:
                part = parts[ordinal] = Part(self, op, self.schema.column_ids, [], [])
            part.rows.append(row)
            part.futures.append(future)
        return list(parts.items())

    def _deal_arrow(self, group: Sequence[Item]) -> tuple[list[tuple[int, Part]], list[RowError]]:
        each, rows, futures, _ = map(list, zip(*group))
        ops: RowOp | np.ndarray = each[0]
        batch, column_ids, kept, errors = batch_from_rows(rows, self.schema, each[0])
        if errors:
            each, futures = ([column[i] for i in kept.tolist()] for column in (each, futures))
        if any(op is not ops for op in each):
            ops = np.array(each, np.uint8)
        return self._split(Part(self, ops, column_ids, batch, futures)), errors

    def again(self, part: Part) -> list[tuple[int, Part]]:
        """Deal a part of any dealer out again, by this one's partitioning. The dealer that made the part
        still encodes it."""
        rows = part.dealer.batch(part)
        return self._split(Part(part.dealer, part.ops, part.column_ids, rows, part.futures))

    def _split(self, whole: Part) -> list[tuple[int, Part]]:
        """The rows of each tablet; those that no range covers have the ordinal OUTSIDE."""
        batch, ops, futures = whole.rows, whole.ops, whole.futures
        assert not isinstance(batch, list)
        order, pieces = rows_by_tablet(assign(batch, whole.dealer.schema, self._partitioning))
        if len(pieces) > 1:  # one gather for all; a tablet's rows are a slice of it
            batch = batch.take(pa.array(order))
            if not isinstance(ops, RowOp):
                ops = ops[order]
            futures = [futures[i] for i in order.tolist()]
        parts = []
        for ordinal, start, end in pieces:
            part_ops = ops if isinstance(ops, RowOp) else ops[start:end]
            rows = batch.slice(start, end - start)
            parts.append((ordinal, Part(whole.dealer, part_ops, whole.column_ids, rows, futures[start:end])))
        return parts

    def join(self, whole: Part, parts: Sequence[Part]) -> None:
        """Put the operations and rows of all `parts` into `whole`, which has the same columns.

        Raises:
            pyarrow.ArrowInvalid: their rows cannot be one batch.
        """
        whole.ops = joined_ops(parts)
        plain = [part.rows for part in parts if isinstance(part.rows, list)]
        if len(plain) == len(parts) and isinstance(whole.ops, RowOp):
            whole.rows = list(chain.from_iterable(plain))
        else:
            whole.rows = pa.concat_batches([self.batch(part) for part in parts])

    def batch(self, part: Part) -> pa.RecordBatch:
        """Return the rows of a part in Arrow."""
        if not isinstance(part.rows, list):
            return part.rows
        assert self._plain is not None
        return self._plain.batch(part.rows)

    def block(self, part: Part) -> bytes:
        """Encode a part as a block."""
        ops, rows = part.ops, part.rows
        if (
            self._plain is not None
            and isinstance(ops, RowOp)
            and isinstance(rows, list)
            and len(rows) <= self._plain.rows_max
        ):
            return self._plain.encode(ops, rows)
        return encode_block(ops, part.column_ids, self.batch(part), self.schema.version)
