"""Writes the batches of a stream to a table. Called by source.py; sink.py does the work.

A batch is a job with a name: the query's id, which the checkpoint keeps, and the batch's number. Python's
interface does not pass these to a task, but Spark gives them to each task of a batch as local properties.

Invariant: if Spark runs a batch again, in whatever tasks, the second run does not undo what others wrote
since.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource as ds
from pyspark.sql.types import StructType

from stele.client import Job
from stele.model.errors import Code, Rejected
from stele_spark.options import Options, one_sentence
from stele_spark.sink import Writer, Written, named_job

_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Spark's names: StreamExecution.QUERY_ID_KEY and MicroBatchExecution.BATCH_ID_KEY."""


class StreamWriter(ds.DataSourceStreamArrowWriter):
    """Writes record batches. Spark makes one for each batch of the stream."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._writer = Writer(options, schema)

    @one_sentence()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a task's rows and wait until all are durable on a majority. Raises what `Writer.write`
        raises.
        """
        return self._writer.write_job(iterator, _job(), named=True)

    @one_sentence()
    def commit(self, messages: list[ds.WriterCommitMessage | None], batchId: int) -> None:
        """Give the files of refused rows their visible names. The rows are durable already."""
        self._writer.publish([m for m in messages if isinstance(m, Written)])

    def abort(self, messages: list[ds.WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: rows that were written stay. The next run of the batch removes failed attempts' files
        of refused rows.
        """


def _job() -> Job:
    context = TaskContext.get()
    query, batch = (None if context is None else context.getLocalProperty(key) for key in (_QUERY, _BATCH))
    if not query or batch is None:
        raise Rejected(
            f"data source stele: this Spark does not tell a task its query and batch ({_QUERY}, {_BATCH}), so a repeated batch "
            'could not be recognized; write with foreachBatch and the option "job"',
            code=Code.UNSUPPORTED_VERSION,
        )
    return named_job(f"spark {query} {batch}")
