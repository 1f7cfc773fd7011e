"""What `table load` takes rows from, the table that it makes of them, and where refused rows go."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stele.cli.csv_rows import CsvFormat
from stele.cli.source import Input, Source, columns_of
from stele.model.errors import Rejected
from tests.client.commands import runner
from tests.client.small import SCHEMA, SmallCluster, small_cluster

CSV = "id,day,zip,name,x,flag,at,empty\n1,2024-05-01,01234,a,1.5,true,2024-05-01T12:00:00Z,\n2,2024-05-02,99999,,NA,false,,\n"


async def piped(cluster: SmallCluster, data: bytes, *arguments: str) -> tuple[int, str, str]:
    """`stele table load` with this on standard input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stele.cli", "table", "load", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "STELE_MASTERS": cluster.master_address,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    async with asyncio.timeout(100):
        out, err = await process.communicate(data)
    return int(process.returncode or 0), out.decode(), err.decode()


async def test_gzip_on_standard_input_is_told(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, _):
        code, out, err = await piped(cluster, gzip.compress(CSV.encode()), "t", "-")
        assert (code, out) == (2, "") and "standard input is gzip; unpack it first: zcat FILE |" in err


async def test_a_table_is_made_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.csv").write_text(CSV)
    parquet.write_table(
        pa.table({"id": pa.array([1, 2], pa.uint16()), "name": ["a", None]}), tmp_path / "rows.parquet"
    )
    async with small_cluster(tmp_path / "data") as (cluster, client):
        run = runner(cluster, monkeypatch)
        path = str(tmp_path / "rows.csv")
        code, out, err = await run(
            "table", "load", "made", path, "--create", "--key", "day,id", "--hash", "id:2"
        )
        assert (code, out.split()[0]) == (0, "2"), err
        table = await client.open_table("made")
        assert [(c.name, c.type, c.nullable) for c in table.schema.columns] == [
            ("id", "int64", False),
            ("day", "date", False),
            ("zip", "string", True),
            ("name", "string", True),
            ("x", "double", True),
            ("flag", "bool", True),
            ("at", "timestamp", True),
            ("empty", "string", True),
        ]
        assert table.info.tablets == 2 and [c.name for c in table.schema.key_columns] == ["day", "id"]
        assert await table.get((date(2024, 5, 1), 1)) == {
            "id": 1,
            "day": date(2024, 5, 1),
            "zip": "01234",
            "name": "a",
            "x": 1.5,
            "flag": True,
            "at": datetime(2024, 5, 1, 12, tzinfo=UTC),
            "empty": None,
        }
        code, out, err = await run(
            "table", "load", "p", str(tmp_path / "rows.parquet"), "--create", "--key", "id"
        )
        assert code == 0, err
        assert [c.type for c in (await client.open_table("p")).schema.columns] == ["int32", "string"]
        code, out, err = await run("table", "load", "p", path, "--create", "--key", "id")
        assert (code, out) == (2, "") and "ALREADY_PRESENT" in err
        for extra, told in (
            (("--create",), "--create needs --key"),
            (("--key", "id"), "need --create"),
            (("--create", "--key", "idd"), "did you mean 'id'?"),
            (("--create", "--key", "x"), "a double cannot be a key column"),
            (("--create", "--key", "id", "--hash", "id:1"), "1 buckets; expected 2 or more"),
            (("--delimiter", "ab"), "expected one ASCII character"),
        ):
            code, out, err = await run("table", "load", "new", path, *extra)
            assert (code, out) == (2, "") and told in err, err


async def test_gzip_other_delimiters_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f'{i}\t"n\t{i}"\t{i % 7}\n' for i in range(3_000)]
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(
        gzip.compress(("id\tname\tn\n" + "".join(rows[:2_000])).encode())
        + gzip.compress("".join(rows[2_000:]).encode())
    )
    async with small_cluster(tmp_path / "data") as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        run = runner(cluster, monkeypatch)
        code, out, err = await run("table", "load", "t", str(packed), "--delimiter", "tab")
        assert (code, out.split()[0]) == (0, "3,000"), err
        assert await table.get(2_500) == {"id": 2_500, "name": "n\t2500", "n": 1}
        code, out, err = await piped(cluster, b"id;name\n7000;a\n7001;b\n", "t", "-", "--delimiter", ";")
        assert (code, out.split()[0]) == (0, "2"), err
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("id", pa.int64())])) as writer:
            writer.write_batch(pa.record_batch([pa.array(np.arange(8_000, 8_010))], names=["id"]))
        stream = sink.getvalue().to_pybytes()
        assert (await piped(cluster, stream, "t", "-", "--format", "arrow"))[1].split()[0] == "10"
        code, out, err = await piped(cluster, b"id\n1\nmany\n", "made", "-", "--create", "--key", "id")
        assert (code, out.split()[0]) == (0, "2"), err
        assert (await client.open_table("made")).schema.columns[0].type == "string"
        packed.write_bytes(packed.read_bytes()[:2_000])
        code, _, err = await run("table", "load", "t", str(packed), "--delimiter", "tab")
        assert code == 2 and "rows.csv.gz: " in err and "Traceback" not in err
        code, _, err = await run("table", "load", "t", str(tmp_path / "no.csv"))
        assert code == 2 and "no.csv: no such file" in err
        code, _, err = await run("table", "load", "t", "-", "-")
        assert code == 2 and "standard input (-) is named twice" in err


async def test_refused_rows_go_to_a_file_with_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'id,n,name\n1,5,"two\nlines"\n2,many,"x,\ny"\n3,7\n4,7,d\n'
    (tmp_path / "rows.csv").write_text(text)
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(text.encode()))
    parquet.write_table(pa.table({"id": [4, 5], "name": ["again", "e"]}), tmp_path / "more.parquet")
    async with small_cluster(tmp_path / "data") as (cluster, client):
        run = runner(cluster, monkeypatch)
        for n, name in enumerate(("rows.csv", "rows.csv.gz", "-")):
            table = await client.create_table(f"t{n}", SCHEMA)
            kept = tmp_path / f"rejects{n}"
            path = "-" if name == "-" else str(tmp_path / name)
            arguments = (
                f"t{n}",
                path,
                str(tmp_path / "more.parquet"),
                "--op",
                "insert",
                "--rejects",
                str(kept),
            )
            if name == "-":
                code, out, err = await piped(cluster, text.encode(), *arguments)
            else:
                code, out, err = await run("table", "load", *arguments)
            assert (code, out.split()[0]) == (2, "3"), err
            assert f"3 of 6 rows were refused, and are in {kept}; the others were written" in err
            assert "line 4: INVALID_ARGUMENT column n: 'many' is not an int32" in err
            found = [json.loads(line) for line in kept.read_text().splitlines()]
            assert [(r.get("line", r.get("row")), r["code"], r["row"]) for r in found[:2]] == [
                (4, "INVALID_ARGUMENT", '2,many,"x,\ny"'),
                (6, "INVALID_ARGUMENT", "3,7"),
            ]
            assert found[0]["file"] == ("standard input" if name == "-" else path)
            assert found[0]["why"] == "column n: 'many' is not an int32"
            assert found[2]["code"] == "ALREADY_PRESENT" and found[2]["values"] == {"id": 4, "name": "again"}
            assert await table.scan().count() == 3
            code, _, err = await run("table", "load", *arguments)
            assert code == 2 and f"{kept} exists already; name another file" in err


async def test_rows_that_were_refused_before_a_load_ended_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file went with the error of a later one, and only the first refused rows were ever told."""
    first, bad, kept = tmp_path / "first.csv", tmp_path / "bad.parquet", tmp_path / "rejects"
    first.write_text("id,n\n1,5\n" + "".join(f"{n},many\n" for n in range(2, 40)))
    bad.write_bytes(b"no parquet")
    async with small_cluster(tmp_path / "data") as (cluster, client):
        await client.create_table("t", SCHEMA)
        run = runner(cluster, monkeypatch)
        code, _, err = await run("table", "load", "t", str(first), str(bad), "--rejects", str(kept))
        assert code == 2 and "bad.parquet" in err
        assert f"the 38 rows that were refused so far are in {kept}" in err
        found = [json.loads(line) for line in kept.read_text().splitlines()]
        assert [each["row"] for each in found] == [f"{n},many" for n in range(2, 40)]
        kept.unlink()
        code, _, err = await run("table", "load", "t", str(bad), "--rejects", str(kept))
        assert code == 2 and "refused so far" not in err and not kept.exists()


def test_what_looks_like_a_number_and_is_none_is_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c,d\n007,0,12:30:00,-05\n1,10,13:00:00,6\n")
    found = columns_of(Input.of(str(path)), CsvFormat())
    assert [str(t) for t in found.types] == ["string", "int64", "string", "string"]
    path.write_text("a\n")
    assert columns_of(Input.of(str(path)), CsvFormat()).types == [pa.string()]
    path.write_text("")
    with pytest.raises(Rejected, match=r"t\.csv: "):
        columns_of(Input.of(str(path)), CsvFormat())
    with pytest.raises(Rejected, match="or give --format"):
        Input.of(str(tmp_path / "t.txt"))
    assert Source(Input.of(str(path)), SCHEMA, CsvFormat()).unit == "line"
