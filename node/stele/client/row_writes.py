"""Writes single rows of an open table, and keeps the columns that the table knows. Used by table.py.

Owns the batcher and the columns in force. Invariant: the batcher has the columns that `schema` gives.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from stele.client.batcher import Batcher
from stele.client.durability import Durability
from stele.client.lookup import Row
from stele.client.ranges import Ranges
from stele.client.streams import Streams
from stele.client.tablet import TabletClient
from stele.model.block import RowOp
from stele.model.errors import Rejected, Retryable
from stele.model.rows import check_row
from stele.model.schema import Schema

_SEEK_S = 1.0


class RowWrites:
    """Writes single rows of one table. `timeout_s`: how long one row may take."""

    def __init__(
        self,
        schema: Schema,
        ranges: Ranges,
        streams: Streams,
        tablet: Callable[[int], TabletClient],
        timeout_s: float,
    ) -> None:
        self._schema = schema
        self._locations = ranges.locations
        self._streams = streams
        self._sought_at = -math.inf
        self._not_told: Retryable | None = None
        """Why the masters did not answer when they were last asked for new columns."""
        name = ranges.locations.info.name
        self._batcher = Batcher(name, schema, ranges.now, tablet, timeout_s=timeout_s, ranges=ranges)

    @property
    def schema(self) -> Schema:
        """The columns and key that the table knows."""
        if self._locations.outdated:
            self.take_news()
        return self._schema

    def take_news(self) -> None:
        """Adopt a newer schema, if the masters have sent one.

        Not every answer of the masters leads to this. A program that uses a column's old name can go on until
        it must learn the new name.
        """
        locations, told = self._locations, self._locations.info.schema
        if told is not None and told.version > self._schema.version:
            self._schema = told
            self._batcher.adopt(told)
        if (
            told is locations.newest_schema
        ):  # otherwise the table is ALTERING, and its next columns come later
            locations.outdated = False

    def put(self, op: RowOp, row: Row, durability: Durability | None = None) -> asyncio.Future[Any]:
        """Write one row. The future gets the hybrid time of the write, or what `AsyncTable.put` raises. With `durability` it gets
        a Written."""
        self._streams.ensure_open()
        check_row(row)
        if self._locations.outdated:
            self.take_news()
        if self._batcher.in_force.outdated:
            self._batcher.adopt_ranges()
        if isinstance(row, dict) and not row.keys() <= self._schema.by_name.keys():
            return asyncio.get_running_loop().create_task(self._put_unknown(op, row, durability))
        return self._batcher.put(op, row, durability)

    async def _put_unknown(self, op: RowOp, row: Row, durability: Durability | None) -> Any:
        """Write a row with a column that this table does not know: somebody may have added it since.

        The masters are asked only now and then, because most such rows are wrong. While no master answers, the column
        may exist: the refusal is then Retryable."""
        if time.monotonic() - self._sought_at > _SEEK_S:
            self._sought_at = time.monotonic()
            self._not_told = None
            try:
                await self._locations.refresh(timeout_s=_SEEK_S)
            except Retryable as exc:
                self._not_told = exc
            self.take_news()
        try:
            return await self._batcher.put(op, row, durability)
        except Rejected as refusal:
            if self._not_told is None:
                raise
            raise Retryable(
                f"{refusal.args[0]}. Somebody may have added such a column since, but no master answers: "
                f"{self._not_told.args[0]}",
                code=self._not_told.code,
            ) from refusal

    async def close(self) -> None:
        """Wait for rows in flight that somebody still waits for."""
        await self._batcher.close()
