"""What a task that writes, and the commit behind it, do without Spark around them: processes of a real cluster."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from stele.backup.folder import Folder
from stele.client import Client, RowErrors
from stele.client.locations import TabletPlace
from stele.model.block import RowError
from stele.model.clock import from_physical_us
from stele.model.errors import Code, Rejected, Retryable
from stele.model.partition import PartitionSchema
from stele_spark.options import Options
from stele_spark.rejects import Rejects
from stele_spark.sink import Writer, Written, joined
from stele_spark.source import Reader
from stele_spark.types import spark_schema
from tests.client.small import EIGHT, small_cluster
from tests.harness.processes import Cluster
from tests.harness.standing import running
from tests.spark.tasks import (
    OPS,
    PARTITIONING,
    ROWS,
    SCHEMA,
    WITH_OP,
    Lost,
    batches,
    contents,
    count,
    made,
    mixed,
    refused_in,
    shipped,
    torn,
    writer_with,
)
from tests.tablet.twin import flush

AHEAD_S = 1.5


def cluster_now() -> str:
    """A snapshot by the cluster's clocks, which sees all that was written."""
    return str(from_physical_us(time.time_ns() // 1_000 + int(AHEAD_S * 1e6)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its clocks are ahead of this machine's by less than anybody calls a fault."""
    cluster = Cluster(tmp_path_factory.mktemp("sink"), masters=1, clocks=True)
    for member in cluster.members:
        cluster.set_clock(member, AHEAD_S)
    with running(cluster):
        yield cluster


def test_an_option_that_there_is_not_is_refused() -> None:
    """A misspelt `where` would read the whole table."""
    with pytest.raises(Rejected, match='unknown option "wehre"'):
        Options.parse({"masters": "m:1", "table": "t", "WEHRE": "id = 1"})


def test_rows_come_in_exactly_the_schema_that_spark_asked_for(cluster: Cluster) -> None:
    """Nullability, too: Spark trusts it, and drops or breaks on what it did not expect."""
    made(cluster, "exact").write(batches(10))
    options = Options.parse(
        {"masters": ",".join(cluster.master_addresses), "table": "exact", "snapshot": cluster_now()}
    )
    asked = StructType([StructField("id", LongType(), False), StructField("v", StringType(), True)])
    reader = Reader(options, asked)
    found = [batch.schema for part in reader.partitions() for batch in reader.read(part)]
    assert found and all(s.field("id").nullable is False and s.field("v").nullable for s in found)


def test_a_task_writes_while_no_master_answers(cluster: Cluster) -> None:
    """Its data path needs none: the driver has asked where the tablets are."""
    writer = made(cluster, "silent")
    cluster.pause(cluster.masters[0])
    try:
        written = writer.write(batches())
    finally:
        cluster.resume(cluster.masters[0])
    assert written.rows == ROWS


def test_a_task_whose_tablets_have_moved_waits_for_the_masters(cluster: Cluster) -> None:
    """For longer than a client that has never met one looks for it."""
    writer = made(cluster, "moved")

    def elsewhere(tablet: TabletPlace) -> TabletPlace:
        return replace(
            tablet, replicas=tuple(replace(place, address="127.0.0.1:9") for place in tablet.replicas)
        )

    writer._plan = replace(writer._plan, tablets=tuple(map(elsewhere, writer._plan.tablets)))
    cluster.pause(cluster.masters[0])
    back = threading.Timer(7, cluster.resume, cluster.masters)
    back.start()
    try:
        assert writer.write(batches()).rows == ROWS
    finally:
        back.join()


def test_a_task_does_not_write_to_a_table_that_was_made_anew(cluster: Cluster) -> None:
    writer = made(cluster, "again")
    with Client(cluster.master_addresses) as client:
        client.delete_table("again")
        client.create_table("again", SCHEMA, PARTITIONING)
    begun = time.monotonic()
    with pytest.raises(Rejected) as caught:
        while time.monotonic() - begun < 120:  # until the nodes have dropped the tablets
            writer.write(batches(10))
            time.sleep(0.1)
    assert caught.value.code is Code.NOT_FOUND
    assert count(cluster, "again", snapshot=cluster_now()) == 0


def test_what_was_saved_is_loaded_by_a_machine_whose_clock_lags(cluster: Cluster) -> None:
    writer = made(cluster, "seen")
    written = [writer.write(batches(rows)) for rows in (5, 10)]
    shipped(writer).commit([*written, None])
    assert count(cluster, "seen") == 10


def test_a_commit_that_the_clock_will_not_see_soon_names_the_snapshot(cluster: Cluster) -> None:
    writer = made(cluster, "late")
    written = writer.write(batches(10))
    far = Written(10, written.timestamp + (60_000_000 << 12))
    with pytest.raises(Rejected, match=f'"snapshot", "{far.timestamp}"') as caught:
        writer.commit([written, far])
    assert caught.value.code is Code.CLOCK_BEHIND
    assert count(cluster, "late", snapshot=str(written.timestamp)) == 10
    writer.commit([Written(0, 0), None])


def test_old_rows_are_read_at_an_iso_time(cluster: Cluster) -> None:
    writer = made(cluster, "old")
    writer.commit([writer.write(batches(5))])
    time.sleep(0.01)
    then = datetime.now(UTC) + timedelta(milliseconds=1)
    time.sleep(0.01)
    writer.commit([writer.write(batches(10))])
    assert count(cluster, "old", snapshot=then.isoformat()) == 5
    zoned = then.astimezone(timezone(timedelta(hours=2)))
    assert count(cluster, "old", snapshot=zoned.isoformat()) == 5
    assert count(cluster, "old") == 10


def test_a_commit_ends_once_a_read_on_this_machine_sees_all_rows(cluster: Cluster) -> None:
    """Those of every task; where there was none there is nothing to wait for."""
    writer = made(cluster, "waited")
    now_us = time.time_ns() // 1_000
    near, far = (from_physical_us(now_us + ahead_us) + 5 for ahead_us in (100_000, 600_000))
    for messages in ([Written(1, far), Written(1, near)], [Written(1, near), None, Written(1, far)]):
        writer.commit(messages)
        assert from_physical_us(time.time_ns() // 1_000) >= far
    writer.commit([])
    writer.commit([None])


async def test_the_batches_of_a_task_share_blocks(tmp_path: Path) -> None:
    """No batch waits for the slowest tablet of the one before it."""
    async with small_cluster(tmp_path) as (small, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        options = Options.parse({"masters": small.master_address, "table": "t"})
        writer = await asyncio.to_thread(Writer, options, spark_schema(SCHEMA))
        written = await asyncio.to_thread(writer.write, batches(60_000))
        assert written.rows == 60_000 == await table.scan().count()
        assert sum(len(tablet.attempts) for tablet in small.tablets.values()) <= 16


@pytest.mark.parametrize("op", ["upsert", "update", "delete"])
def test_columns_that_do_not_fit_are_refused_before_a_task_begins(cluster: Cluster, op: str) -> None:
    masters = ",".join(cluster.master_addresses)
    made(cluster, f"fits {op}")
    options = Options.parse({"masters": masters, "table": f"fits {op}", "op": op})
    with pytest.raises(Rejected, match="column id is missing"):
        Writer(options, StructType([StructField("v", StringType())]))
    with pytest.raises(Rejected, match="'id' is bigint in the table, not string"):
        Writer(options, StructType([StructField("id", StringType()), StructField("v", StringType())]))
    Writer(options, StructType([StructField("id", LongType())]))


@pytest.mark.usefixtures("small_batches")
def test_a_refused_row_ends_the_reading_of_its_task(cluster: Cluster) -> None:
    """What was taken in beside it is written; what comes later would be done again anyway."""
    writer = made(cluster, "some", op="insert")
    read = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal read
        for number, batch in enumerate(batches()):
            read += 1
            yield (
                batch
                if number
                else batch.set_column(0, "id", pa.array([None, *range(1, 10_000)], pa.int64()))
            )

    with pytest.raises(RowErrors, match=r"1 of 10,000 rows was refused.*row 0: .*column id is null"):
        writer.write(source())
    assert read == 1
    assert count(cluster, "some", snapshot=cluster_now()) == 9_999


def test_what_goes_wrong_in_the_source_of_the_rows_is_told_as_it_is(cluster: Cluster) -> None:
    writer = made(cluster, "torn")

    def source() -> Iterator[pa.RecordBatch]:
        yield from batches(20_000)
        raise EOFError("the pipe ended")

    with pytest.raises(EOFError, match="the pipe ended"):
        writer.write(source())
    assert (writer.write(batches())).rows == ROWS


@pytest.mark.parametrize("leads", [True, False], ids=["masters lead", "no master leads"])
async def test_a_task_goes_on_behind_the_last_row_that_it_gave(tmp_path: Path, leads: bool) -> None:
    """Each replica breaks off once, in the middle of its answer; the masters may be away meanwhile."""
    async with small_cluster(tmp_path) as (small, client):
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        (tablet,) = small.tablets_of("t")
        for first in range(0, 500, 100):  # a file each, so a batch each
            await table.write_arrow(pa.table({"id": np.arange(first, first + 100)}))
            flush(tablet.store)
        options = Options.parse({"masters": small.master_address, "table": "t"})
        reader = await asyncio.to_thread(Reader, options, spark_schema(SCHEMA))
        (partition,) = await asyncio.to_thread(reader.partitions)
        for node in small.nodes:
            node.flight_fault.append(
                lambda number: Retryable("gone", code=Code.UNAVAILABLE) if number == 1 else None
            )
        small.not_leading = 0 if leads else 1_000_000
        before = small.located
        found = await asyncio.to_thread(lambda: pa.Table.from_batches(reader.read(partition)))
        assert found["id"].to_pylist() == list(range(500))
        assert sum(node.scans for node in small.nodes) == 4
        assert small.located - before == leads  # asked once none of the three was left


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("op", OPS)
def test_a_task_that_is_tried_again_changes_nothing_that_others_wrote_since(
    cluster: Cluster, op: str
) -> None:
    """It ended with an error after it had written; meanwhile others wrote over its rows, deleted some, and made some
    anew."""
    table = f"tried again {op}"
    writer = made(cluster, table, op=op)
    with Client(cluster.master_addresses) as client:
        target = client.open_table(table)
        if not op.startswith("insert"):
            target.write_arrow(pa.table({"id": np.arange(ROWS), "v": ["old"] * ROWS}))
        mine = None if op.startswith("delete") else "x"

        def reached() -> list[int]:
            now = contents(target, int(cluster_now()))
            return [n for n in range(ROWS) if now.get(n) == mine]

        with pytest.raises(Lost):
            shipped(writer).write(torn(lambda: len(reached()) > 20_000))
        theirs = reached()[:4_000]
        assert len(theirs) == 4_000
        target.write_arrow(pa.table({"id": theirs, "v": ["theirs"] * 4_000}))
        target.write_arrow(pa.table({"id": theirs[:1_000]}), "delete")
        written = shipped(writer).write(batches())
        assert written.rows == ROWS
        wanted = dict.fromkeys(range(ROWS), mine) | dict.fromkeys(theirs, "theirs")
        wanted |= dict.fromkeys(theirs[:1_000], None)
        assert contents(target, int(cluster_now())) == {n: v for n, v in wanted.items() if v is not None}


@pytest.mark.usefixtures("small_batches")
def test_two_attempts_at_once_write_each_row_once(cluster: Cluster) -> None:
    """As speculation runs them: no insert is refused, and the slow one, which nobody waits for, changes nothing."""
    writer = made(cluster, "at once", op="insert")
    begun, over = threading.Event(), threading.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(ROWS, 5_000)):
            if number == ROWS // 10_000:
                begun.set()
                over.wait(60)
            yield batch

    with ThreadPoolExecutor(1) as threads, Client(cluster.master_addresses) as client:
        first = threads.submit(shipped(writer).write, slow())
        assert begun.wait(60)
        assert shipped(writer).write(batches()).rows == ROWS
        table = client.open_table("at once")
        table.write_arrow(pa.table({"id": np.arange(ROWS), "v": ["theirs"] * ROWS}))
        over.set()
        assert first.result(60).rows == ROWS
        assert contents(table, int(cluster_now())) == dict.fromkeys(range(ROWS), "theirs")


def test_before_an_upgrade_is_finalized_a_task_writes_as_it_did(cluster: Cluster) -> None:
    writer = made(cluster, "earlier", op="upsert")
    writer._plan = replace(writer._plan, cluster_version=1)
    for _ in range(2):
        assert shipped(writer).write(batches()).rows == ROWS


def test_each_row_has_an_operation_of_its_own(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All seven; in the order of the rows; those that are refused are put aside, with the others written."""
    writer = writer_with(cluster, "seven", op_column="op", rejects=str(tmp_path))
    with Client(cluster.master_addresses) as client:
        table = client.open_table("seven")
        table.write_arrow(pa.table({"id": np.arange(100), "v": ["old"] * 100}))
        ops = [
            *[(n, op) for n, op in enumerate(OPS)],  # of rows that exist
            *[(200 + n, op) for n, op in enumerate(OPS)],  # of rows that do not
            *((300, op) for op in ("insert", "UPDATE")),
            *((301, op) for op in ("insert", "delete")),
            *((302, "merge"), (303, None), (None, "upsert")),
        ]
        written = writer.write(mixed([n for n, _ in ops], [op for _, op in ops]))
        now = contents(table, int(cluster_now()))
        assert {n: v for n, v in now.items() if v == "new"} == dict.fromkeys(
            (0, 3, 4, 200, 201, 202, 300), "new"
        )
        assert set(range(100)) - set(now) == {5, 6} and 301 not in now
        counted = {
            "upsert": 2,
            "insert": 3,
            "insert_ignore": 2,
            "update": 2,
            "update_ignore": 2,
            "delete": 2,
            "delete_ignore": 2,
        }
        assert written.ops == counted and (written.rows, written.refused) == (15, 6)
        assert refused_in(tmp_path) == []
        shipped(writer).commit([written])
    assert refused_in(tmp_path) == [
        (1, "insert", "ALREADY_PRESENT"),
        (203, "update", "NOT_FOUND"),
        (205, "delete", "NOT_FOUND"),
        (302, "merge", "INVALID_ARGUMENT"),
        (303, None, "INVALID_ARGUMENT"),
        (None, "upsert", "INVALID_ARGUMENT"),
    ]
    told = capsys.readouterr().err
    assert "table seven: written insert 3, insert_ignore 2, upsert 2, update 2" in told
    assert f"refused 6, in {tmp_path}" in told


def test_many_operations_in_blocks_of_thousands(cluster: Cluster) -> None:
    rows = np.arange(ROWS)
    with Client(cluster.master_addresses) as client:
        writer = writer_with(cluster, "thousands", op_column="op")
        writer.write(mixed(rows.tolist(), ["insert"] * ROWS, "one"))
        writer = writer_with(cluster, "thousands", op_column="op")
        ops: list[str | None] = [("update", "delete", "upsert")[n % 3] for n in range(ROWS)]
        written = writer.write(mixed(rows.tolist(), ops, "two"))
        assert written.ops == dict.fromkeys(("update", "delete", "upsert"), ROWS // 3)
        assert contents(client.open_table("thousands"), int(cluster_now())) == {
            n: "two" for n in range(ROWS) if n % 3 != 1
        }


@pytest.mark.usefixtures("small_batches")
def test_refused_rows_of_an_attempt_that_failed_are_not_kept(cluster: Cluster, tmp_path: Path) -> None:
    writer = writer_with(cluster, "kept", StructType(WITH_OP[:2]), op="insert", rejects=str(tmp_path))
    with Client(cluster.master_addresses) as client:
        client.open_table("kept").write_arrow(pa.table({"id": np.arange(50), "v": ["old"] * 50}))
    with pytest.raises(Lost):
        shipped(writer).write(torn(lambda: True))
    left = shipped(writer).write(batches())  # of an attempt that Spark did not hear of
    counts = shipped(writer).write(batches())
    assert (left.refused, counts.refused, counts.rows) == (50, 50, ROWS - 50)
    assert len(list(tmp_path.iterdir())) == 2
    shipped(writer).commit([counts, None])
    assert len(list(tmp_path.iterdir())) == 1
    assert refused_in(tmp_path) == sorted(((n, "insert", "ALREADY_PRESENT") for n in range(50)), key=str)
    writer.abort([counts])
    assert len(refused_in(tmp_path)) == 50


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"op_column": "what"}, "the frame has no column 'what'; it has id, v, op"),
        ({"op_column": "id"}, "'id' is also a column of the table"),
        ({"op_column": "op", "op": "insert"}, '"op" and "op_column" are both given'),
        ({}, "the table has no column 'op'"),
    ],
)
def test_operations_that_cannot_be_are_refused_in_the_driver(
    cluster: Cluster, options: dict[str, str], told: str
) -> None:
    with pytest.raises(Rejected, match=re.escape(told)):
        writer_with(cluster, "told", **options)


def test_a_folder_that_is_a_file_is_refused_in_the_driver(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Rejected, match="is a file; expected a folder"):
        writer_with(cluster, "told", op_column="op", rejects=str(tmp_path / "file"))


def test_without_a_folder_an_unknown_operation_ends_the_task(cluster: Cluster) -> None:
    writer = writer_with(cluster, "told", op_column="op")
    with pytest.raises(Rejected, match="operation 'merge': expected one of insert, insert_ignore, upsert"):
        writer.write(mixed([1], ["merge"]))


def test_small_batches_are_joined() -> None:
    given = [pa.record_batch({"n": np.arange(rows)}) for rows in (10_000, 50_000, 10_000, 70_000, 5, 5)]
    assert [batch.num_rows for batch in joined(iter(given))] == [60_000, 10_000, 70_000, 10]
    wide = [pa.record_batch({"t": ["x" * 1_000_000] * 10})] * 3
    assert [batch.num_rows for batch in joined(iter(wide))] == [10, 10, 10]
    assert list(joined(iter([]))) == []


def test_an_attempt_that_fails_takes_its_file_along(tmp_path: Path) -> None:
    """A null may be why a row was refused; columns are in the table's order."""
    rejects = Rejects(Folder.at(tmp_path), "j" * 32, ("id", "v"))
    files = [rejects.file(0), rejects.file(0), rejects.file(1)]
    rows = pa.record_batch({"v": ["x"], "id": pa.array([None], pa.int64())})
    for file in files[:2]:
        for _ in range(2):
            file.take(rows, ["insert"], [RowError(0, Code.INVALID_ARGUMENT, "id is null")])
            file.settle()
    files[0].discard()
    names = [file.close() for file in files[1:]]
    assert names[1] == "" and [path.name for path in tmp_path.iterdir()] == names[:1]
    rejects.publish(names[:1])
    (path,) = tmp_path.iterdir()
    told = {"id": None, "v": "x", "_op": "insert", "_code": "INVALID_ARGUMENT", "_message": "id is null"}
    assert pq.read_table(path).to_pylist() == [told, told] and path.name == names[0][1:]
