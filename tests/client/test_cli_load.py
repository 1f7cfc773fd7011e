"""`stele table load`: what is read, what is refused, what is counted."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stele.cli.csv_rows import CsvFormat
from stele.cli.source import Input, Source
from stele.model.errors import Rejected
from stele.model.schema import Schema
from tests.client.commands import runner
from tests.client.small import small_cluster

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True)], ["id"])


async def test_rows_that_are_refused_are_told_and_the_others_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        run = runner(cluster, monkeypatch)
        await run("table", "create", "t", "--column", "id:int64", "--column", "n:int32?", "--key", "id")
        table = await client.open_table("t")
        await table.put({"id": 2})
        (tmp_path / "t.csv").write_text("id,n\n1,1\n2,2\n3,3\n")
        code, out, err = await run("table", "load", "t", str(tmp_path / "t.csv"), "--op", "insert")
        assert (code, out.split(" ", 1)[0]) == (2, "2")
        assert "t.csv line 3: ALREADY_PRESENT" in err
        (tmp_path / "mixed.csv").write_text("id,n\n1,1\n4,many\n5,5,5\n\n2,2\n6,6\n")
        code, out, err = await run("table", "load", "t", str(tmp_path / "mixed.csv"), "--op", "insert")
        assert (code, out.split(" ", 1)[0]) == (2, "1")
        assert re.findall(r"line (\d+): (\w+)", err) == [
            ("2", "ALREADY_PRESENT"),
            ("3", "INVALID_ARGUMENT"),
            ("4", "INVALID_ARGUMENT"),
            ("6", "ALREADY_PRESENT"),
        ]
        (tmp_path / "bad.csv").write_text("id,n\n1,many\n9,9\n")
        code, out, err = await run("table", "load", "t", str(tmp_path / "bad.csv"))
        assert (code, out.split(" ", 1)[0]) == (2, "1")
        assert (
            "bad.csv line 2: INVALID_ARGUMENT column n: 'many' is not an int32\nstele: INVALID_ARGUMENT: 1 of 2"
            in err
        )


async def test_rows_that_were_written_before_a_load_ended_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were told as "0 rows written", and the bad lines not at all."""

    async with small_cluster(tmp_path) as (cluster, client):
        run = runner(cluster, monkeypatch)
        await run("table", "create", "t", "--column", "id:int64", "--column", "n:int32?", "--key", "id")
        await client.open_table("t")
        (tablet,) = cluster.tablets.values()
        tablet.before.extend([lambda: None] * 3)
        tablet.before.append(lambda: Rejected("no more"))
        lines = "".join(f"{number},\n" for number in range(50_000))
        (tmp_path / "t.csv").write_text(f"id,n\n1,many\n{lines}")
        code, out, err = await run("table", "load", "t", str(tmp_path / "t.csv"))
        assert (code, out.split(" ", 1)[0]) == (2, f"{3 * 8_192:,}")
        assert out.endswith("the load is not complete, and more rows may be written than were acknowledged\n")
        assert "t.csv line 2: INVALID_ARGUMENT column n: 'many' is not an int32" in err
        assert "no more" in err


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("header.csv", b"id,colour\n1,2\n", "the table has no column 'colour'"),
        ("quote.csv", b'id,n\n1,1\n2,"2\n', "line 3: a quote opens here and is not closed"),
        ("plain.csv.gz", b"id,n\n1,1\n", "Not a gzipped file"),
        ("rows.parquet", b"id,n\n1,1\n", "Parquet magic bytes not found"),
        ("rows.arrow", b"id,n\n1,1\n", "neither an Arrow file nor an Arrow stream"),
    ],
)
async def test_of_a_file_that_is_refused_no_row_is_written_and_that_is_told(
    name: str, content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that more rows may be written than were acknowledged, after an empty line on standard error."""
    good, bad = tmp_path / "good.csv", tmp_path / name
    good.write_text("id,n\n7,7\n8,8\n")
    bad.write_bytes(content)
    async with small_cluster(tmp_path) as (cluster, client):
        run = runner(cluster, monkeypatch)
        await run("table", "create", "t", "--column", "id:int64", "--column", "n:int32?", "--key", "id")
        code, out, err = await run("table", "load", "t", str(bad))
        assert (code, out) == (2, "no row was written\n"), err
        assert err.startswith(f"stele: INVALID_ARGUMENT: {bad}: ") and why in err and err.count("\n") == 1
        assert await (await client.open_table("t")).scan().count() == 0
        # Of the file before it all rows are known to be written.
        code, out, err = await run("table", "load", "t", str(good), str(bad))
        assert code == 2 and err.startswith("stele: ")
        assert re.fullmatch(
            r"2 rows written in \d+\.\d s \([\d,]+ rows/s\); the load is not complete\n", out
        ), out


async def test_of_columns_that_do_not_fit_no_row_is_written_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks.csv").write_text("n\n1\n2\n")
    parquet.write_table(pa.table({"id": ["a", "b"]}), tmp_path / "text.parquet")
    async with small_cluster(tmp_path / "data") as (cluster, _):
        run = runner(cluster, monkeypatch)
        await run("table", "create", "t", "--column", "id:int64", "--column", "n:int32?", "--key", "id")
        for name, why in (
            ("lacks.csv", "column id is missing"),
            ("text.parquet", "column id: string does not fit int64"),
        ):
            code, out, err = await run("table", "load", "t", str(tmp_path / name))
            assert (code, out) == (2, "no row was written\n") and why in err, (out, err)


async def test_of_a_table_that_is_not_there_no_rows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.csv").write_text("id\n1\n")
    async with small_cluster(tmp_path) as (cluster, _):
        code, out, err = await runner(cluster, monkeypatch)("table", "load", "no", str(tmp_path / "rows.csv"))
        assert (code, out) == (2, "") and "no table no" in err


def test_a_time_without_a_zone_is_utc(tmp_path: Path) -> None:
    """As in --where and --snapshot; it was refused. Times with a zone may stand beside it."""
    schema = Schema.make([("id", "int64"), ("at", "timestamp", True)], ["id"])
    given = {
        "2024-06-01 00:00:00": datetime(2024, 6, 1),
        "2024-06-01T12:30:00.000001": datetime(2024, 6, 1, 12, 30, 0, 1),
        " 2024-06-01 00:00 ": datetime(2024, 6, 1),
        "2024-06-01": datetime(2024, 6, 1),
        "2024-06-01T02:00:00+02:00": datetime(2024, 6, 1),
        "2024-06-01T00:00:00Z": datetime(2024, 6, 1),
        "": None,
        "+1": datetime(1970, 1, 1, 0, 0, 0, 1),
        "2024-06-01T12:30:00.0000001": None,
        "noon": None,
    }
    path = tmp_path / "t.csv"
    path.write_text("id,at\n" + "".join(f"{n},{text}\n" for n, text in enumerate(given)))
    source = Source(Input.of(str(path)), schema, CsvFormat(("",)))
    rows = pa.Table.from_batches(source.batches())
    assert rows["at"].to_pylist() == [at and at.replace(tzinfo=UTC) for at in list(given.values())[:8]]
    assert [(line, why.partition(";")[0]) for line, why in source.lines.errors] == [
        (10, "column at: '2024-06-01T12:30:00.0000001' is not a timestamp"),
        (11, "column at: 'noon' is not a timestamp"),
    ]
    assert "2026-01-31T12:00:00Z; without a zone it is UTC" in source.lines.errors[1][1]
    path.write_text("id,at\n" + "".join(f"{n},2024-06-01 00:00:00\n" for n in range(1_000)))
    rows = pa.Table.from_batches(Source(Input.of(str(path)), schema, CsvFormat(("",))).batches())
    assert rows["at"].unique().to_pylist() == [datetime(2024, 6, 1, tzinfo=UTC)] and len(rows) == 1_000


@pytest.mark.parametrize("suffix", ["arrow", "arrows"])
def test_arrow_is_read_as_a_file_or_as_a_stream_by_what_it_is(tmp_path: Path, suffix: str) -> None:
    """`table scan --format arrow` writes a stream, whatever the file is called."""
    path, rows = tmp_path / f"rows.{suffix}", pa.table({"id": [1, 2]})
    for writer in (pa.ipc.new_file, pa.ipc.new_stream):
        with writer(path, rows.schema) as sink:
            sink.write_table(rows)
        assert pa.Table.from_batches(Source(Input.of(str(path)), SCHEMA, CsvFormat(())).batches()) == rows
    for junk in (b"", b"id\n1\n", b"ARROW1\0\0junk", path.read_bytes()[:20]):
        path.write_bytes(junk)
        with pytest.raises(Rejected, match=f"rows.{suffix}: neither an Arrow file nor an Arrow stream"):
            list(Source(Input.of(str(path)), SCHEMA, CsvFormat(())).batches())


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream], ids=["file", "stream"])
def test_an_arrow_file_with_broken_insides_is_refused(tmp_path: Path, writer: Any) -> None:
    """An offset that points elsewhere ended the program that read it."""
    path = tmp_path / "rows.arrow"
    offsets = np.array([0, 4, 1 << 30, 12], np.int32)
    names = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(b"abcd" * 3))
    with writer(path, pa.schema([("name", pa.string())])) as sink:
        sink.write_batch(pa.RecordBatch.from_arrays([names], names=["name"]))
    with pytest.raises(Rejected, match=r"rows.arrow: .*offset"):
        list(Source(Input.of(str(path)), SCHEMA, CsvFormat(())).batches())


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream], ids=["file", "stream"])
async def test_a_string_of_an_arrow_file_that_is_not_utf8_is_refused_by_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any
) -> None:
    path = tmp_path / "rows.arrow"
    names = pa.array([b"good", b"b\xffd", b"fine"]).view(pa.string())
    with writer(path, pa.schema([("id", pa.int64()), ("name", pa.string())])) as sink:
        for first in (0, 3):
            batch = [pa.array(range(first, first + 3)), names if first else pa.array(["a", "b", "c"])]
            sink.write_batch(pa.RecordBatch.from_arrays(batch, names=["id", "name"]))
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        code, _, err = await runner(cluster, monkeypatch)("table", "load", "t", str(path))
        assert code == 2 and "is not UTF-8" in err and "id=4" in err, err
        assert (await table.scan(["id"], ordered=True).to_table())["id"].to_pylist() == [0, 1, 2, 3, 5]
