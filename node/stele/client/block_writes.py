"""Writers of blocks for one open table: Arrow data, sessions, parts of jobs. Used by table.py.

Opens no files and asks no master. Invariant: a part of a job is written only if every member of the cluster knows jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from stele.client import arguments
from stele.client.arrow_input import ArrowData, arrow_of, batches_of
from stele.client.bulk import BulkWriter, Refusal
from stele.client.durability import Durability, durability_of
from stele.client.jobs import JobPart
from stele.client.ranges import Ranges
from stele.client.results import WriteResult
from stele.client.tablet import TabletClient
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected
from stele.model.job import Attempt
from stele.model.schema import Schema
from stele.rpc.threads import in_thread

BULK_BYTES = 64 << 20
_JOBS_VERSION = 2


class OpenTable(Protocol):
    """What writers need of their table."""

    @property
    def schema(self) -> Schema:
        """The columns that the table knows now."""

    def tablet(self, ordinal: int) -> TabletClient:
        """The client of one tablet. Raises SteleError."""


class BlockWrites:
    """Makes the writers of one table. `timeout_s`: of each block, unless the caller says otherwise."""

    def __init__(self, table: OpenTable, ranges: Ranges, timeout_s: float) -> None:
        self._table = table
        self._ranges = ranges
        self._timeout_s = timeout_s

    @property
    def takes_jobs(self) -> bool:
        """Whether every member of the cluster knows parts of jobs."""
        return self._ranges.locations.cluster_version >= _JOBS_VERSION

    def writer(
        self,
        op: RowOp | str | None,
        *,
        timeout_s: float | None = None,
        buffer_bytes: int = BULK_BYTES,
        on_rows: Callable[[int], None] | None = None,
        part: JobPart | None = None,
        on_refused: Refusal | None = None,
        durability: str = Durability.SYNCED,
    ) -> BulkWriter:
        """A writer of the table's present columns. `AsyncTable.arrow_writer` has the details."""
        return self.of(
            self._table.schema,
            None if op is None else arguments.row_op(op),
            arguments.seconds_or(timeout_s, self._timeout_s, "timeout_s"),
            arguments.whole_number(buffer_bytes, "buffer_bytes", least=1),
            on_rows,
            None if part is None else self._attempt(part),
            on_refused,
            durability_of(durability),
        )

    def of(
        self,
        schema: Schema,
        op: RowOp | None,
        timeout_s: float,
        bytes_max: int = BULK_BYTES,
        on_rows: Callable[[int], None] | None = None,
        attempt: Attempt | None = None,
        on_refused: Refusal | None = None,
        durability: Durability = Durability.SYNCED,
    ) -> BulkWriter:
        """A writer of these columns. See BulkWriter."""
        return BulkWriter(
            self._ranges.locations.info.name,
            schema,
            self._ranges.now,
            self._table.tablet,
            op,
            timeout_s=timeout_s,
            bytes_max=bytes_max,
            on_rows=on_rows,
            ranges=self._ranges,
            attempt=attempt,
            on_refused=on_refused,
            durability=durability,
        )

    def _attempt(self, part: JobPart) -> Attempt:
        expected = "a part of a job, as Job.new().part(0) gives"
        attempt: Attempt = arguments.of_kind(part, JobPart, "part", expected).attempt()
        locations = self._ranges.locations
        if not self.takes_jobs:
            raise Rejected(
                f"table {locations.info.name}: a part of a job: this needs cluster version {_JOBS_VERSION}, but the "
                f"cluster has {locations.cluster_version}; `stele cluster finalize` allows it",
                code=Code.UNSUPPORTED_VERSION,
            )
        return attempt


async def write_all(writer: BulkWriter, data: ArrowData) -> WriteResult:
    """Write all of `data`. After an error nothing more is sent.

    Raises:
        SteleError: as `AsyncTable.write_arrow`, but no RowErrors.
    """
    try:
        writer.check(data)
        found = data if isinstance(data, (pa.Table, pa.RecordBatch)) else await in_thread(arrow_of, data)
        source = batches_of(found)
        # Other libraries may take long for a batch. The caller's own iterator may need this thread.
        while True:
            batch = next(source, None) if found is data else await in_thread(next, source, None)
            if batch is None:
                break
            await writer.feed(batch)
        return await writer.finish()
    except BaseException:
        await writer.abandon()
        raise
