"""What the command line writes: to pipes that end, to full disks, to files, and back from them. Processes of their own."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stele.cli.output import show_table
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.rows import python_rows
from stele.model.schema import Schema
from tests.client.commands import runner
from tests.client.small import SmallCluster, small_cluster

SPREAD = PartitionSchema((HashPartition((0,), 4),))
WIDE = Schema.make([("id", "int64"), ("text", "string")], ["id"])


@asynccontextmanager
async def wide_table(directory: Path) -> AsyncIterator[SmallCluster]:
    """A table `wide` of some megabytes in several batches of several tablets."""
    async with small_cluster(directory) as (cluster, client):
        table = await client.create_table("wide", WIDE, SPREAD)
        await table.write_arrow(pa.table({"id": np.arange(300_000), "text": ["x" * 20] * 300_000}))
        yield cluster


async def shell(cluster: SmallCluster, line: str) -> tuple[int, str, str]:
    """A line of bash in which `stele` is ours: exit code, standard output and standard error."""
    variables = {
        **os.environ,
        "STELE_MASTERS": cluster.master_address,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    script = f'set -o pipefail; stele() {{ "{sys.executable}" -m stele.cli "$@"; }}; {line}'
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(100):
        out, err = await process.communicate()
    return int(process.returncode or 0), out.decode(), err.decode()


async def test_a_reader_that_leaves_ends_the_command_without_a_word(tmp_path: Path) -> None:
    async with wide_table(tmp_path) as cluster:
        for form in ("csv", "json", "arrow"):
            line = f"stele table scan wide --format {form} | head -c 100 | wc -c"
            assert await shell(cluster, line) == (0, "100\n", ""), form
        for short in (
            "table list",
            "table scan wide --count",
            "table scan wide",
            "table scan wide --format csv",
        ):
            code, _, err = await shell(cluster, f"stele {short} | true")
            assert code == 0 and err.strip().count("\n") == 0 and "Error" not in err, (short, err)


async def test_a_scan_of_a_program_that_fails_within_ends_with_the_program(tmp_path: Path) -> None:
    """Its threads wait for room that nobody will make."""
    program = """
import asyncio, os
from stele.client import AsyncClient
async def main():
    async with AsyncClient(os.environ["STELE_MASTERS"]) as client:
        async for batch in (await client.open_table("wide")).scan().batches():
            raise RuntimeError("enough")
for _ in range(10):
    try:
        asyncio.run(main())
    except RuntimeError as error:
        told = error
raise told
"""
    (tmp_path / "program.py").write_text(program)
    async with wide_table(tmp_path / "data") as cluster:
        code, _, err = await shell(cluster, f'"{sys.executable}" {tmp_path / "program.py"}')
        assert (code, err.splitlines()[-1]) == (1, "RuntimeError: enough")


KINDS = {
    "flag": "bool",
    "small": "int8",
    "ratio": "float",
    "amount": "double",
    "price": "decimal(38,6)",
    "text": "string",
    "raw": "binary",
    "day": "date",
    "moment": "timestamp",
}
KEY = Schema.make([("id", "int64"), *((name, kind, True) for name, kind in KINDS.items())], ["id"])
NAN = float("nan")
ROWS = [
    {"id": 1, "text": "", "raw": b"", "flag": False, "small": -128, "ratio": NAN, "amount": -0.0},
    {"id": 2, "text": "NA", "raw": b"NA", "amount": float("-inf"), "day": dt.date(1, 1, 1)},
    {
        "id": 3,
        "text": 'a,"b"\r\n\x1b[31mc',
        "raw": b'\0\xff"\n',
        "amount": 1e300,
        "price": decimal.Decimal("-1.5"),
    },
    {"id": 4, "text": " \u00e9 ", "raw": b"\xc3", "moment": dt.datetime(1900, 1, 1, 0, 0, 0, 1, dt.UTC)},
    {"id": 5, "day": dt.date(9999, 12, 31), "moment": dt.datetime(2024, 3, 31, 1, 30, tzinfo=dt.UTC)},
    {"id": 6, "day": -(2**31), "moment": 2**63 - 1},
    {"id": 7, "day": 2_932_897, "moment": -62_135_596_800_000_001, "text": '"' * 3_000_000},
    {"id": 8, "day": 2**31 - 1, "moment": dt.datetime.max.replace(tzinfo=dt.UTC)},
]


def _told(table: pa.Table) -> str:
    """As text, in which NaN equals itself."""
    return str([row for batch in table.to_batches() for row in python_rows(batch)])


async def test_what_a_scan_wrote_is_loaded_as_it_was(tmp_path: Path) -> None:
    """Empty text is not null, the word NA neither, and bytes need be no text."""
    async with small_cluster(tmp_path / "data") as (cluster, client):
        for name in ("kinds", "copy"):
            table = await client.create_table(name, KEY, SPREAD)
            if name == "kinds":
                await table.write_arrow(pa.Table.from_pylist(ROWS, schema=table.arrow_schema))
        expected = await (await client.open_table("kinds")).scan(ordered=True).to_table()
        for form, suffix in (("csv", "csv"), ("arrow", "arrow")):
            path = tmp_path / f"kinds.{suffix}"
            line = f"stele table scan kinds --format {form} -o {path} && stele table load copy {path}"
            code, out, err = await shell(cluster, line)
            assert (code, out.partition(" ")[0]) == (0, "8"), err
            copied = await table.scan(ordered=True).to_table()
            assert _told(copied) == _told(expected)
            await table.write_arrow(pa.table({"id": [row["id"] for row in ROWS]}), op="delete")


async def test_a_snapshot_without_a_zone_is_utc(tmp_path: Path) -> None:
    """As a time in --where is; it was the zone of whoever asked."""
    async with wide_table(tmp_path) as cluster:
        now = dt.datetime.now(dt.UTC).replace(tzinfo=None).isoformat()
        for zone in ("UTC-9", "UTC+9"):
            line = f"TZ={zone} stele table scan wide --count --snapshot {now}"
            assert await shell(cluster, line) == (0, "300000\n", "")


async def test_rows_are_told_in_words_of_json_and_without_orders_to_the_terminal(tmp_path: Path) -> None:
    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    async with small_cluster(tmp_path / "data") as (cluster, client):
        table = await client.create_table("kinds", KEY, SPREAD)
        await table.write_arrow(pa.Table.from_pylist(ROWS, schema=table.arrow_schema))
        _, out, _ = await shell(cluster, "stele table scan kinds --ordered --format json")
        found = [json.loads(line, parse_constant=refused) for line in out.splitlines()]
        assert [row["ratio"] for row in found][:2] == ["NaN", None]
        assert [row["amount"] for row in found][:4] == [-0.0, "-Infinity", 1e300, None]
        _, out, _ = await shell(cluster, "stele table scan kinds --ordered --columns id,text")
        assert out.splitlines()[3] == r'3   a,"b"\r\n\x1b[31mc'


async def test_what_cannot_be_written_or_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.parquet"
    parquet.write_table(
        pa.table({"id": np.arange(100_000), "text": [f"x{i}" for i in range(100_000)]}), whole
    )
    damaged = bytearray(whole.read_bytes())
    damaged[1_000:1_400] = bytes(byte ^ 0xFF for byte in damaged[1_000:1_400])
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:5_000])
    (tmp_path / "few.csv").write_text("id,text\n1,x\nmany,y\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\0")
    (tmp_path / "null.yaml").write_text("spec:\nmetadata: {name: x}\n")
    async with small_cluster(tmp_path / "data") as (cluster, client):
        await client.create_table("wide", WIDE, SPREAD)
        await client.create_keyspace("keys")
        few, cut, damaged_file = (tmp_path / name for name in ("few.csv", "cut.parquet", "damaged.parquet"))
        binary, null = tmp_path / "binary.yaml", tmp_path / "null.yaml"
        for line, code, told in (
            (
                "table scan wide --format csv -o /nowhere/x.csv",
                2,
                "/nowhere/x.csv: No such file or directory",
            ),
            ("table scan wide --format csv > /dev/full", 75, "No space left on device"),
            ("table list > /dev/full", 75, "No space left on device"),
            ("table scan wide -o x", 2, "--output expects .csv, .json, .arrow or .parquet"),
            (
                "table scan wide --count -o x --format csv",
                2,
                "--count prints a number and cannot be used with --output",
            ),
            (f"table load wide {damaged_file}", 2, "damaged.parquet: "),
            (f"table load wide {cut}", 2, "cut.parquet: "),
            (
                f"table load wide {few} {cut}",
                2,
                "few.csv line 3: INVALID_ARGUMENT column id: 'many' is not an int64",
            ),
            (f"table create {binary}", 2, "not valid YAML or JSON"),
            (f"table create {null}", 2, "null.yaml: spec is missing"),
            (f"table create {null} --hash id:3", 2, "--key and --hash need --column"),
            ("table list >&-", 0, ""),
            ("table scan wide --count --timeout inf", 2, "expected a finite number of seconds above 0"),
            ("driver run --lost abc", 2, "--lost abc: expected all 32 digits of a node's id"),
            ("driver run --copies 0", 2, "--copies"),
            ("driver run --dead-after 2", 2, "2.0 is not in the range 3<=x<=86400"),
            ("kv get keys $'\\xff' >&-", 2, "expected text that is UTF-8, or bytes"),
            ("table scan wide --snapshot 0001-01-01", 2, "--snapshot 0001-01-01: expected a hybrid time"),
            ("table scan wide --snapshot ²", 2, "--snapshot ²: expected a hybrid time"),
            (
                "table create x --column id:int64 --key id --hash id:²",
                2,
                "--hash id:²: expected NAME,...:BUCKETS",
            ),
        ):
            if ">" in line or "/nowhere" in line:  # its standard output is given up: a process of its own
                ended, _, err = await shell(cluster, f"stele {line}")
            else:
                ended, _, err = await runner(cluster, monkeypatch)(*shlex.split(line))
            assert (ended, "Traceback" in err) == (code, False), (line, err)
            assert told in err, err


def test_a_row_of_a_table_is_a_line_whatever_names_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Older masters took any name."""
    show_table(("name", "kind"), [("a\nb", "table"), ("\x1b[31mflüge", "table")])
    assert capsys.readouterr().out.splitlines() == [
        "name           kind",
        r"a\nb           table",
        r"\x1b[31mflüge  table",
    ]
