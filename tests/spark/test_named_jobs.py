"""Jobs with a name: a batch of a stream that runs again, perhaps in other tasks. Without Spark, on real nodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from stele.client import Client
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema
from stele_spark import turns
from stele_spark.options import Options
from stele_spark.sink import Writer, named_job
from stele_spark.source import SteleDataSource
from stele_spark.turns import Turns
from stele_spark.types import spark_schema
from tests.spark.tasks import PARTITIONING, SCHEMA, Lost, contents, refused_in, shipped

pytestmark = pytest.mark.usefixtures("small_batches")

ROWS = 6_000


def writer(masters: str, table: str, job: str, **options: str) -> Writer:
    """As another run of a batch has it: made anew."""
    given = {"masters": masters, "table": table, "job": job, **options}
    columns = [StructField("id", LongType()), StructField("v", StringType())]
    return shipped(Writer(Options.parse(given), StructType(columns)))


def rows(first: int, end: int, v: str = "ours") -> Iterator[pa.RecordBatch]:
    yield from pa.table({"id": np.arange(first, end), "v": [v] * (end - first)}).to_batches(
        max_chunksize=1_000
    )


@pytest.mark.parametrize("op", ["upsert", "insert", "delete"])
def test_another_run_with_other_tasks_changes_nothing_that_others_wrote_since(masters: str, op: str) -> None:
    with Client(masters) as client:
        table = client.create_table(op, SCHEMA, PARTITIONING)
        if op == "delete":
            table.write_arrow(pa.table({"id": np.arange(ROWS), "v": ["old"] * ROWS}))
        for first in range(0, ROWS, 2_000):  # three tasks
            assert writer(masters, op, "job 1", op=op).write(rows(first, first + 2_000)).rows == 2_000
        table.write_arrow(pa.table({"id": np.arange(0, ROWS, 3), "v": ["theirs"] * (ROWS // 3)}))
        theirs = contents(table)
        assert "theirs" in theirs.values()
        for first in range(0, ROWS, 3_000):  # two tasks
            assert writer(masters, op, "job 1", op=op).write(rows(first, first + 3_000)).rows == 3_000
        assert contents(table) == theirs
        if op == "upsert":  # another job is another one
            writer(masters, op, "job 2", op=op).write(rows(0, ROWS))
            assert contents(table) == dict.fromkeys(range(ROWS), "ours")


@pytest.mark.parametrize("cut", range(1, 6))
def test_of_several_rows_of_a_key_the_last_one_stays(masters: str, cut: int) -> None:
    """An attempt that was cut off has written some of them. The next one goes on behind those, in their order."""
    name = f"several {cut}"
    versions = [
        *rows(0, 100, "a"),
        *rows(50, 150, "b"),
        *rows(0, 100, "c"),
        *rows(90, 91, "d"),
        *rows(90, 91, "e"),
    ]

    def torn() -> Iterator[pa.RecordBatch]:
        yield from versions[:cut]
        raise Lost

    with Client(masters) as client:
        table = client.create_table(name, SCHEMA, PARTITIONING)
        with pytest.raises(Lost):
            writer(masters, name, "job").write(torn())
        assert writer(masters, name, "job").write(iter(versions)).rows == 302
        wanted = {**dict.fromkeys(range(150), "b"), **dict.fromkeys(range(100), "c"), 90: "e"}
        assert contents(table) == wanted
        table.put({"id": 90, "v": "theirs"})
        assert writer(masters, name, "job").write(pa.concat_batches(versions) for _ in range(1)).rows == 302
        assert contents(table) == {**wanted, 90: "theirs"}, "however the batches are cut"


def test_a_repeated_batch_has_its_refused_rows_once(masters: str, tmp_path: Path) -> None:
    with Client(masters) as client:
        client.create_table("refused", SCHEMA, PARTITIONING).put({"id": 3, "v": "there"})
    for _ in range(2):
        run = writer(masters, "refused", "job", op="insert", rejects=str(tmp_path))
        written = run.write(rows(0, 10))
        assert (written.refused, written.rows) == (1, 9)
        run.commit([written])
        assert refused_in(tmp_path) == [(3, "insert", "ALREADY_PRESENT")]


def test_turns_are_those_of_a_count_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema.make([("day", "date"), ("name", "string"), ("v", "int64", True)], ["name", "day"])
    rng = random.Random(7)
    keys = [
        (rng.choice([None, *range(40)]), rng.choice([None, "a", "b", "long " * 30])) for _ in range(5_000)
    ]
    for cut in (50, 1_000, 5_000):
        made, found = Turns(schema), []
        for first in range(0, 5_000, cut):
            part = keys[first : first + cut]
            batch = pa.record_batch(
                {
                    "day": pa.array([day for day, _ in part], pa.date32()),
                    "name": pa.array([n for _, n in part], pa.string()),
                }
            )
            found += made.of(batch).tolist()
        so_far, wanted = Counter[tuple[int | None, str | None]](), []
        for key in keys:
            wanted.append(0 if None in key else so_far[key])
            so_far[key] += 1
        assert found == wanted
        assert all(len(seen._runs) <= 8 for seen in made._seen)
    many = turns._Hashes()
    for n in range(500):
        many.add(np.array([n], np.uint64))
    assert (
        len(many._runs) <= 10
        and many.has(np.arange(600, dtype=np.uint64)).tolist() == [True] * 500 + [False] * 100
    )


def test_what_a_stream_of_writes_refuses(masters: str) -> None:
    with Client(masters) as client:
        client.create_table("sink", SCHEMA, PARTITIONING)
    given = {"masters": masters, "table": "sink"}
    columns = spark_schema(SCHEMA)
    with pytest.raises(Rejected, match=r'use outputMode\("update"\) or "append"'):
        SteleDataSource(given).streamWriter(columns, True)
    with pytest.raises(Rejected, match='leave out "job" for a stream'):
        SteleDataSource({**given, "job": "j"}).streamWriter(columns, False)
    with pytest.raises(Rejected, match='"cursor" is an option of a stream, not of a write'):
        SteleDataSource({**given, "cursor": "c"}).streamWriter(columns, False)
    made = SteleDataSource({**given, "checkpointLocation": "/c"}).streamWriter(
        columns, False
    )  # Spark adds it
    with pytest.raises(Rejected, match=r"does not tell a task its query and batch.*foreachBatch") as caught:
        made.write(rows(0, 1))  # no Spark around it
    assert caught.value.code is Code.UNSUPPORTED_VERSION
    assert named_job("a").id == named_job("a").id != named_job("b").id
