"""A real Spark follows a table on real nodes: into Parquet, over restarts, and while a node is killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stele.client import Client, Table
from tests.harness.processes import Cluster
from tests.spark.archive import FILE
from tests.spark.tasks import PARTITIONING, SCHEMA, contents

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

Change = tuple[int, int, str, str | None]


def test_sessions_of_tests_are_small(spark: Any) -> None:
    """tests/spark/archive.py makes their Javas start soon; those classes are shared that it has archived."""
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    java = spark._jvm.java.lang.management.ManagementFactory
    given = list(java.getRuntimeMXBean().getInputArguments())
    assert "-XX:TieredStopAtLevel=1" in given and "-XX:+UseSerialGC" in given
    made = FILE.exists() and FILE.stat().st_size > 0
    assert (f"-XX:SharedArchiveFile={FILE}" in given) is made


def follow(spark: Any, masters: str, table: str, **options: str) -> Any:
    given = {"masters": masters, "table": table, "startingSnapshot": "table", **options}
    return spark.readStream.format("stele").options(**given).load()


def into_parquet(frame: Any, folder: Path) -> Any:
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    return writer.option("path", str(folder / "rows"))


def changes(folder: Path) -> list[Change]:
    """What Spark's log of the sink says is in the files, by key and time. Equal rows stay."""
    found = pa.concat_tables([pq.read_table(path) for path in sorted((folder / "rows").glob("*.parquet"))])
    rows = found.select(["id", "_ts", "_op", "v"]).to_pylist()
    return sorted((row["id"], row["_ts"], row["_op"], row["v"]) for row in rows)


def brought_together(rows: list[Change]) -> dict[int, str | None]:
    """The table that these changes make."""
    copy: dict[int, str | None] = {}
    for key, _, op, value in rows:
        if op == "delete":
            del copy[key]
        else:
            copy[key] = value
    return copy


def written(table: Table, first: int, count: int, text: str) -> None:
    ids = range(first, first + count)
    table.write_arrow(pa.table({"id": ids, "v": [f"{text} {n}" for n in ids]}))


def test_runs_that_end_follow_each_other(spark: Any, masters: str, tmp_path: Path) -> None:
    """Each begins where the one before ended; the last batch of that was never committed. No row comes twice."""
    with Client(masters) as client:
        table = client.create_table("runs", SCHEMA, PARTITIONING)
        written(table, 0, 1_000, "first")
        for turn in range(3):
            frame = follow(spark, masters, "runs", cursor="runs", maxRowsPerTrigger="100")
            into_parquet(frame, tmp_path).trigger(availableNow=True).start().awaitTermination()
            rows = changes(tmp_path)
            assert len(set(rows)) == len(rows)
            assert brought_together(rows) == contents(table), turn
            assert table.holds()[0].name == "runs"
            if turn == 1:  # every change of a key, not only what became of it
                assert [row[3] for row in rows if row[0] == 5] == [
                    "first 5",
                    *[f"turn {n}" for n in range(150)],
                ]
            if turn:
                continue  # nothing new for the last turn
            for n in range(150):
                table.put({"id": 5, "v": f"turn {n}"})
            written(table, 2_000, 50, "more")
            for key in range(100, 120):
                table.delete({"id": key})
        batches = [p for p in (tmp_path / "checkpoint" / "commits").iterdir() if p.name.isdigit()]
        assert 4 <= len(batches) <= 12


def test_a_node_that_is_killed_costs_no_change(
    spark: Any, masters: str, processes: Cluster, tmp_path: Path
) -> None:
    with Client(masters, timeout_s=60) as client:
        table = client.create_table("killed", SCHEMA, PARTITIONING)
        written(table, 0, 20_000, "first")
        frame = follow(spark, masters, "killed", cursor="killed", maxRowsPerTrigger="2000")
        query = into_parquet(frame, tmp_path).trigger(processingTime="200 milliseconds").start()
        turns, enough = [0], threading.Event()

        def write() -> None:
            while not enough.wait(0.2) and turns[0] < 300:
                turn = turns[0]
                written(table, 100 * turn, 500, f"turn {turn}")
                for key in range(0, 20_000, 997):
                    table.put({"id": key, "v": f"put {turn}"})
                table.delete({"id": 19_000 + turn})
                turns[0] += 1

        def until(batch: int) -> None:
            while (query.lastProgress or {"batchId": -1})["batchId"] < batch:
                assert query.isActive, query.exception()
                time.sleep(0.1)

        writing, victim = threading.Thread(target=write), processes.nodes[0]
        try:
            until(0)
            writing.start()
            until(2)
            processes.kill(victim)
            killed = turns[0]
            while turns[0] < killed + 5:
                assert writing.is_alive()
                time.sleep(0.1)
            enough.set()
            writing.join(120)
            query.processAllAvailable()
            rows = changes(tmp_path)
        finally:
            enough.set()
            query.stop()
            processes.restart(victim)
        assert len(set(rows)) == len(rows)
        assert brought_together(rows) == contents(table)
        assert sum(row[3] is not None and row[3].startswith("put ") for row in rows) == turns[0] * 21
        assert sum(row[2] == "delete" for row in rows) == turns[0]


def test_other_columns_end_a_query_with_what_to_do(spark: Any, masters: str, tmp_path: Path) -> None:
    with Client(masters) as client:
        table = client.create_table("altered", SCHEMA, PARTITIONING)
        written(table, 0, 10, "first")
        query = into_parquet(follow(spark, masters, "altered"), tmp_path).start()
        query.processAllAvailable()
        table.alter(add=[("size", "int64", True)])
        table.refresh()
        table.put({"id": 100, "v": "new", "size": 7})
        with pytest.raises(
            Exception, match=r"SCHEMA_MISMATCH: table altered was altered: column size was added"
        ):
            query.awaitTermination(120)
        again = into_parquet(follow(spark, masters, "altered"), tmp_path).trigger(availableNow=True).start()
        again.awaitTermination()
        found = spark.read.option("mergeSchema", "true").parquet(str(tmp_path / "rows")).collect()
        assert sorted((row.id, row.size, row._schema) for row in found) == [
            *((n, None, 1) for n in range(10)),
            (100, 7, 2),
        ]


def test_a_table_is_copied_and_a_repeated_batch_changes_nothing(
    spark: Any, masters: str, tmp_path: Path
) -> None:
    """Spark ends after a batch is written, before it notes that. It runs the batch again, in other tasks; meanwhile
    others have written to its rows."""
    with Client(masters) as client:
        table, copy = (client.create_table(name, SCHEMA, PARTITIONING) for name in ("from", "to"))
        written(table, 0, 3_000, "first")

        def run(partitions: int) -> None:
            frame = follow(spark, masters, "from", cursor="to").coalesce(partitions)
            rows = frame.selectExpr("id", "v", "if(_op = 'delete', 'delete_ignore', _op) AS op")
            sink = rows.writeStream.format("stele").options(masters=masters, table="to", op_column="op")
            sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint"))
            sink.trigger(availableNow=True).start().awaitTermination()

        run(3)
        assert contents(copy) == contents(table)
        for turn in range(5):
            written(table, 100, 50, f"turn {turn}")
        for key in range(120, 130):
            table.delete({"id": key})
        run(3)
        assert contents(copy) == contents(table)
        (last,) = (p for p in (tmp_path / "checkpoint" / "commits").iterdir() if p.name == "1")
        last.unlink()
        (last.parent / f".{last.name}.crc").unlink()
        theirs = {100: "theirs", 125: "theirs", 130: "theirs"}
        copy.write_arrow(pa.table({"id": list(theirs), "v": list(theirs.values())}))
        copy.delete({"id": 140})
        run(1)
        assert last.exists(), "the batch was run again"
        wanted = {**contents(table), **theirs}
        del wanted[140]
        assert contents(copy) == wanted
