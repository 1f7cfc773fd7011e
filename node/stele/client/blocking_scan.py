"""A scan of the blocking client. Each method runs the asynchronous method of the same name and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stele.client import html, reprs
from stele.client.scan import AsyncScanner, as_pandas
from stele.model.rows import python_rows

if TYPE_CHECKING:
    from stele.client.blocking import Client


class Scanner:
    """A scan, ready to be read any number of times.

    Example:
        >>> scan = table.scan(["name", "value"], ordered=True)
        >>> scan.count()
        2
    """

    def __init__(self, client: Client, scanner: AsyncScanner) -> None:
        self._client = client
        self.asynchronous = scanner

    def __repr__(self) -> str:
        return reprs.blocking(self.asynchronous)

    @property
    def snapshot(self) -> int:
        """The hybrid time at which the scan reads. A scan of changes reads up to it: give it to the next call of
        `changes` as `after`.

        Example:
            >>> table.scan(snapshot=table.scan().snapshot).count()
            2
        """
        return self.asynchronous.snapshot

    @property
    def age_s(self) -> float:
        """How old the snapshot was when this scan was made, in seconds by this machine's clock; 0 if it was not in the past.

        Example:
            >>> table.scan(max_staleness=10.0).age_s <= 10
            True
        """
        return self.asynchronous.age_s

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Record batches as they arrive, with a bounded number in memory; in key order if the scan is
        ordered.

        Raises SteleError if no replica of a tablet can serve it.

        Example:
            >>> sum(batch.num_rows for batch in table.scan().batches())
            2
        """
        source = self.asynchronous.batches()
        turn = asyncio.Lock()  # an interrupted read may end a moment later
        try:
            while True:
                try:
                    yield self._client.run(_next(source, turn))
                except StopAsyncIteration:
                    return
        finally:
            self._client.end(_close(source, turn))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Row after row, as dicts with the values that `get` returns. Raises what `batches` raises."""
        for batch in self.batches():
            yield from python_rows(batch)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The record batches as an Arrow stream, for other libraries such as DuckDB, Polars and pandas.

        Each call reads again, at the same snapshot."""
        schema = self.asynchronous.plan.arrow_schema
        return pa.RecordBatchReader.from_batches(schema, self.batches()).__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        return html.of_scan(self.asynchronous.plan)

    def to_table(self) -> pa.Table:
        """All rows as one Arrow table. Raises what `batches` raises.

        Example:
            >>> table.scan(["name"], ordered=True).to_table()["name"].to_pylist()
            ['cellar', 'roof']
        """
        return self._client.run(self.asynchronous.to_table())

    def to_pandas(self) -> Any:
        """All rows as a pandas frame. Raises what `batches` raises, and ImportError without pandas.

        Example:
            >>> float(table.scan().to_pandas()["value"].max())
            21.5
        """
        return as_pandas(self.to_table())

    def count(self) -> int:
        """The number of rows. Reads one narrow column. Raises what `batches` raises.

        Example:
            >>> table.scan(predicates=("name", "=", "roof")).count()
            1
        """
        return self._client.run(self.asynchronous.count())


async def _next(source: Any, turn: asyncio.Lock) -> pa.RecordBatch:
    async with turn:
        return await anext(source)


async def _close(source: Any, turn: asyncio.Lock) -> None:
    async with turn:
        await source.aclose()
