"""The command line against a small cluster: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stele.cli import app
from stele.cli.errors import EXIT_CODES, PROCESS_EXIT_CODES, exit_code, listed, told
from stele.cli.load import Source
from stele.cli.processes import master_run, node_options, parse_first_masters
from stele.cli.schema_file import table_from_file, table_from_options
from stele.client import AsyncClient
from stele.client.where import parse_where
from stele.model.errors import Advice, Rejected, SteleError
from stele.model.keys import encode_tuple
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.tserver import options
from tests.client.small import SmallCluster, small_cluster

Run = Callable[..., Awaitable[tuple[int, str, str]]]

SCHEMA = Schema.make(
    [
        ("id", "int64"),
        ("name", "string", True),
        ("v", "double", True),
        ("at", "timestamp", True),
        ("price", "decimal(10,2)", True),
        ("ok", "bool", True),
    ],
    ["id"],
)


def runner(cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs commands in a thread, as a process of their own would: what they print, and how they end."""

    def run(arguments: tuple[str, ...]) -> tuple[int, str, str]:
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            app.run(arguments)
        read = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return int(ended.value.code or 0), read[0], read[1]

    async def in_thread(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, arguments)

    monkeypatch.setenv("STELE_MASTERS", cluster.master_address)
    return in_thread


async def test_a_table_from_creation_to_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = tmp_path / "people.yaml"
    definition.write_text(
        "kind: TabletGroup\nmetadata: {name: people}\nspec:\n  columns:\n    - {name: id, type: int64}\n"
        "    - {name: name, type: string, nullable: true}\n  primaryKey: [id]\n"
        "  partitioning: {hash: [{columns: [id], buckets: 4}]}\n"
    )
    parquet.write_table(
        pa.table({"id": np.arange(5_000), "name": [f"n{i}" for i in range(5_000)]}), tmp_path / "p.parquet"
    )
    (tmp_path / "p.csv").write_text("id,name\n5000,'quoted'\n5001,NA\n")
    async with small_cluster(tmp_path / "data") as (cluster, _):
        run = runner(cluster, monkeypatch)
        assert (await run("table", "create", str(definition)))[:2] == (0, "created table people: 4 tablets\n")
        code, out, _ = await run(
            "table", "load", "people", str(tmp_path / "p.parquet"), str(tmp_path / "p.csv")
        )
        assert (code, out.split(" ", 1)[0]) == (0, "5002")
        assert (await run("table", "scan", "people", "--count"))[1] == "5002\n"
        _, out, _ = await run(
            "table",
            "scan",
            "people",
            "--where",
            "id >= 4999 AND name IS NOT NULL",
            "--ordered",
            "--format",
            "csv",
        )
        assert out == '"id","name"\n4999,"n4999"\n5000,"\'quoted\'"\n'
        _, out, _ = await run("table", "scan", "people", "--where", "id = 5001", "--format", "json")
        assert json.loads(out) == {"id": 5001, "name": None}
        _, out, _ = await run("table", "scan", "people", "--columns", "name", "--limit", "2")
        assert out.splitlines()[0] == "name"
        assert len(out.splitlines()) == 3
        arrow = tmp_path / "out.arrows"
        await run("table", "scan", "people", "--format", "arrow", "-o", str(arrow))
        with pa.memory_map(str(arrow)) as source:
            assert pa.ipc.open_stream(source).read_all().num_rows == 5_002
        _, out, _ = await run("table", "list", "--json")
        assert [table["name"] for table in json.loads(out)] == ["people"]
        assert "hash of id into 4 buckets" in (await run("table", "describe", "people"))[1]
        assert (await run("table", "delete", "people", "--yes"))[0] == 0
        code, _, err = await run("table", "scan", "people")
        assert (code, err) == (
            2,
            "stele: NOT_FOUND: no table people; `stele table list` shows those there are\n",
        )


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
        (tmp_path / "bad.csv").write_text("id,n\n1,many\n9,9\n")
        code, out, err = await run("table", "load", "t", str(tmp_path / "bad.csv"))
        assert (code, out.split(" ", 1)[0]) == (2, "1")
        assert (
            "bad.csv line 2: INVALID_ARGUMENT column n: 'many' is no int32\nstele: INVALID_ARGUMENT: 1 of 2"
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
        assert (code, out.split(" ", 1)[0]) == (2, str(3 * 8_192))
        assert "t.csv line 2: INVALID_ARGUMENT column n: 'many' is no int32" in err
        assert "no more" in err


async def test_a_snapshot_of_0_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node takes 0 in a ticket as its tablet's latest, which is another time for each tablet."""
    async with small_cluster(tmp_path) as (cluster, client):
        run = runner(cluster, monkeypatch)
        await run("table", "create", "t", "--column", "id:int64", "--key", "id", "--hash", "id:4")
        table = await client.open_table("t")
        await table.write_arrow(pa.table({"id": range(100)}))
        for text in ("0", "1970-01-01", ""):
            before = client.now()
            assert (await run("table", "scan", "t", "--count", "--snapshot", text))[:2] == (0, "100\n")
            asked = [node.snapshots.popleft() for node in cluster.nodes for _ in range(len(node.snapshots))]
            assert len(asked) == 4
            assert len(set(asked)) == 1
            assert asked[0] >= before


@pytest.mark.parametrize("suffix", ["arrow", "arrows"])
def test_arrow_is_read_as_a_file_or_as_a_stream_by_what_it_is(tmp_path: Path, suffix: str) -> None:
    """`table scan --format arrow` writes a stream, whatever the file is called."""
    path, rows = tmp_path / f"rows.{suffix}", pa.table({"id": [1, 2]})
    for writer in (pa.ipc.new_file, pa.ipc.new_stream):
        with writer(path, rows.schema) as sink:
            sink.write_table(rows)
        assert pa.Table.from_batches(Source(str(path), SCHEMA, ()).batches()) == rows
    for junk in (b"", b"id\n1\n", b"ARROW1\0\0junk", path.read_bytes()[:20]):
        path.write_bytes(junk)
        with pytest.raises(Rejected, match=f"rows.{suffix}: neither an Arrow file nor an Arrow stream"):
            list(Source(str(path), SCHEMA, ()).batches())


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream], ids=["file", "stream"])
def test_an_arrow_file_with_broken_insides_is_refused(tmp_path: Path, writer: Any) -> None:
    """An offset that points elsewhere ended the program that read it."""
    path = tmp_path / "rows.arrow"
    offsets = np.array([0, 4, 1 << 30, 12], np.int32)
    names = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(b"abcd" * 3))
    with writer(path, pa.schema([("name", pa.string())])) as sink:
        sink.write_batch(pa.RecordBatch.from_arrays([names], names=["name"]))
    with pytest.raises(Rejected, match=r"rows.arrow: .*offset"):
        list(Source(str(path), SCHEMA, ()).batches())


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
        assert code == 2 and "is no string (not UTF-8)" in err and "id=4" in err, err
        assert (await table.scan(["id"], ordered=True).to_table())["id"].to_pylist() == [0, 1, 2, 3, 5]


async def test_key_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with small_cluster(tmp_path) as (cluster, _):
        run = runner(cluster, monkeypatch)
        code, _, err = await run("kv", "put", "s", "colour", "blue")
        assert (code, err) == (2, "stele: NOT_FOUND: no key space s; make it with `stele kv create s`\n")
        assert (await run("kv", "create", "s"))[0] == 0
        assert (await run("kv", "put", "s", "colour", "blue"))[0] == 0
        assert (await run("kv", "get", "s", "colour"))[1] == "blue\n"
        assert await run("kv", "get", "s", "shape") == (1, "", "stele: no key shape in s\n")
        assert await run("table", "scan", "s") == (
            2,
            "",
            "stele: INVALID_ARGUMENT: s is a key space, not a table; read it with `stele kv list s`\n",
        )
        code, _, err = await run("kv", "insert", "s", "colour", "red")
        assert code == 2
        assert err.startswith("stele: ALREADY_PRESENT")
        assert (await run("kv", "elect", "s", "primary", "--id", "me", "--once"))[
            1
        ] == "me holds primary (me)\n"
        assert (await run("kv", "elect", "s", "primary", "--id", "you", "--once"))[1] == "me holds primary\n"
        assert (await run("kv", "list", "s"))[1] == "colour\tblue\nprimary\tme\n"


async def test_who_stands_for_a_name_is_told_each_holder_once(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        space = await client.create_keyspace("s")
        (tablet,) = cluster.tablets.values()
        assert await space.elect("primary", "them") == "them"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stele.cli", "kv", "elect", "s", "primary", "--id", "me"),
            *("--masters", cluster.master_address),
            stdout=asyncio.subprocess.PIPE,
        )

        async def told() -> str:
            assert process.stdout is not None
            async with asyncio.timeout(30):
                return (await process.stdout.readline()).decode()

        def at_once(op: tserver_pb2.KvOpPB.ValueType, sequence: int, value: bytes = b"") -> None:
            request = tserver_pb2.KvRequest(
                tablet_id=id_to_pb(tablet.tablet_id),
                op=op,
                key=b"primary",
                value=value,
                client_id=b"another client, ",
                sequence=sequence,
                first_attempt_us=1,
            )
            cluster.nodes[tablet.leader]._kv(request)

        try:
            assert await told() == "them holds primary\n"
            # The next holder has resigned when it is read again: it is told by its name, and then who came after.
            at_once(tserver_pb2.KV_REPLACE, 1, b"others")
            tablet.before_read.extend([lambda: None, lambda: at_once(tserver_pb2.KV_DELETE, 2)])
            assert await told() == "others holds primary\n"
            assert await told() == "me holds primary (me)\n"
            await space.replace("primary", b"\xff")
            assert await told() == "\ufffd holds primary\n"
            await asyncio.sleep(1.5)
            await space.replace("primary", "them")
            assert await told() == "them holds primary\n"
        finally:
            process.terminate()  # not SIGINT, which whoever runs in the background is told to ignore
            assert await process.wait() == -signal.SIGTERM


async def test_ranges_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema.make([("day", "date"), ("s", "string")], ["day", "s"])
    types = (pa.date32(), pa.string())
    days = tuple(encode_tuple((date(2024, month, 1),), types[:1]) for month in (1, 7))
    pairs = (encode_tuple((5, "b"), types), b"\xff")
    async with small_cluster(tmp_path) as (cluster, client):
        run = runner(cluster, monkeypatch)
        for name, ids, splits, told, listed in (
            ("one", (0,), days, '"2024-01-01", "2024-07-01"', [["2024-01-01"], ["2024-07-01"]]),
            ("two", (0, 1), pairs, '["1970-01-06", "b"], "0xff"', [["1970-01-06", "b"], ["0xff"]]),
        ):
            await client.create_table(name, schema, PartitionSchema((), RangePartition(ids, splits)))
            columns = [schema.columns[i].name for i in ids]
            _, out, _ = await run("table", "describe", name)
            assert f"range of {', '.join(columns)}, split at {told}\n" in out
            shown = json.loads((await run("table", "describe", name, "--json"))[1])["partitioning"]
            assert shown == {"hash": [], "range": {"columns": columns, "splitAt": listed}}


async def test_what_is_told_of_tablets_is_so_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as it was when they were made, nor as a node that is silent told it last."""
    async with small_cluster(tmp_path) as (cluster, client):
        parts = PartitionSchema((HashPartition((0,), 2),))
        await client.create_table("t", Schema.make([("id", "int64")], ["id"]), parts)
        run = runner(cluster, monkeypatch)
        one, other = cluster.tablets.values()
        labels = [f"{n.identity.node_id[:8]} ({n.identity.address})" for n in cluster.nodes]
        assert "2 of 2 tablets have a leader and a majority" in (await run("table", "describe", "t"))[1]
        assert (await run("table", "list"))[1].splitlines()[1].split()[:5] == [
            "t",
            "table",
            "RUNNING",
            "2",
            "2",
        ]
        cluster.silent = {0}
        other.leader = 1
        _, out, _ = await run("table", "describe", "t")
        assert "1 of 2 tablets have a leader and a majority" in out
        assert f"is unavailable: replica 1 on {labels[0]} is on a silent node; its leader {labels[0]}" in out
        (line,) = [line for line in out.splitlines() if line.startswith(f"{one.tablet_id[:8]} ")]
        assert line.split()[1] == "-"
        assert (await run("table", "list"))[1].splitlines()[1].split()[:5] == [
            "t",
            "table",
            "RUNNING",
            "2",
            "1",
        ]
        (told,) = json.loads((await run("table", "list", "--json"))[1])
        assert (told["tabletsRunning"], told["tabletsReady"]) == (2, 1)
        _, out, _ = await run("tablet", "describe", one.tablet_id[:8].upper())
        assert out.startswith(
            f"tablet {one.tablet_id} of t: unavailable, term 1, leader -, configuration 0\n"
        )
        (line,) = [line for line in out.splitlines() if line.startswith("1 ")]
        assert line.split("  ")[1:] and "LEADER" not in line and "RUNNING" not in line
        assert line.endswith("is on a silent node")
        (line,) = [line for line in out.splitlines() if line.startswith("2 ")]
        assert " RUNNING  FOLLOWER " in line
        told = json.loads((await run("tablet", "describe", one.tablet_id, "--json"))[1])
        assert told["tabletId"] == one.tablet_id
        assert told["committedConfig"]["peers"][2]["nodeId"] == cluster.nodes[2].identity.node_id


async def test_shared_options_stand_before_the_command_or_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", Schema.make([("id", "int64")], ["id"]))
        run = runner(cluster, monkeypatch)
        here = ("--masters", cluster.master_address)
        wrong = ("--masters", "127.0.0.1:1", "--timeout", "0.2")
        monkeypatch.setenv("STELE_MASTERS", "127.0.0.1:1")  # what is given counts more
        for arguments in (
            (*here, "table", "scan", "t", "--count"),
            ("table", *here, "scan", "t", "--count"),
            ("table", "scan", "t", "--count", *here),
            (*wrong, "table", *here, "scan", "t", "--count"),
            (*wrong, "table", "scan", "t", "--count", *here),
        ):
            assert await run(*arguments) == (0, "0\n", ""), arguments
        assert json.loads((await run(*here, "--json", "table", "list"))[1])[0]["name"] == "t"
        code, _, err = await run("--timeout", "0.2", "table", "scan", "t")
        assert (code, err.partition(" (")[0]) == (75, "stele: UNAVAILABLE: no master answers at 127.0.0.1:1")
        for arguments, line in (
            (("--json", "table", "scan", "t"), "stele table scan takes no --json before the command"),
            ((*here, "node", "run"), "stele node run takes no --masters before the command"),
            (("--timeout", "0", "ksck"), "Invalid value for '--timeout': 0.0 is not in the range x>0"),
        ):
            code, _, err = await run(*arguments)
            assert code == 2 and err.startswith(f"stele: {line}"), err


async def test_next_steps_are_in_the_words_of_who_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", Schema.make([("id", "int64")], ["id"]))
        run = runner(cluster, monkeypatch)
        for call, arguments, python, shell in (
            (
                client.open_table("x"),
                ("table", "scan", "x"),
                "list_tables() shows",
                "`stele table list` shows",
            ),
            (
                client.describe("x"),
                ("table", "describe", "x"),
                "list_tables() shows",
                "`stele table list` shows",
            ),
            (client.describe("x"), ("tablet", "list", "--table", "x"), "list_tables()", "`stele table list`"),
            (client.keyspace("x"), ("kv", "list", "x"), "create_keyspace('x')", "`stele kv create x`"),
            (client.keyspace("t"), ("kv", "list", "t"), "open_table('t')", "`stele table scan t`"),
            (
                AsyncClient("127.0.0.1:1", first_contact_s=0.2).list_tables(),
                ("table", "scan", "t", "--timeout", "0.2", "--masters", "127.0.0.1:1"),
                "; check the masters given",
                "; check --masters",
            ),
        ):
            with pytest.raises(SteleError) as caught:
                await call
            assert python in str(caught.value) and "stele " not in str(caught.value)
            code, _, err = await run(*arguments)
            assert code == exit_code(caught.value) and shell in err and "()" not in err, err
    for advice in Advice:
        assert told(Rejected("no", advice=advice, name="n")).startswith("INVALID_ARGUMENT: no; ")
    with pytest.raises(Rejected, match="no masters given; give the HOST:PORT of some of them"):
        AsyncClient("")


def test_exit_codes_are_those_of_the_processes() -> None:
    wanted = {value for name, value in vars(options).items() if name.startswith("EXIT_")}
    assert set(PROCESS_EXIT_CODES) == wanted
    assert all(f"{code} {EXIT_CODES[code]}" in listed(EXIT_CODES) for code in (0, 1, 2, 5, 70, 75, 130))


async def test_no_master_is_one_line_and_try_again_later() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stele.cli", "ksck", "--masters", "127.0.0.1:1", "--timeout", "0.2"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 75
    assert err.decode().startswith(
        "stele: UNAVAILABLE: no master answers at 127.0.0.1:1 (connection refused)"
    )
    assert err.count(b"\n") == 1


async def test_a_process_with_a_bad_setting_says_what_to_do(tmp_path: Path) -> None:
    for arguments, wanted in (
        (("--data-dir", str(tmp_path), "--node-id", "x", "--cluster-id", "y"), "--node-id"),
        (("--data-dir", str(tmp_path)), "--node-id"),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stele.cli", "node", "run", *arguments), stderr=asyncio.subprocess.PIPE
        )
        _, err = await process.communicate()
        assert process.returncode == 2
        assert wanted in err.decode()


def test_conditions() -> None:
    text = (
        "id >= -3 AND name = 'it''s' and v < 1.5e3 AND at > '2013-01-01T05:00:00' AND price != 3.10 AND ok = TRUE "
        "AND name IS NULL AND name IS NOT NULL AND id IN (1, 2,3)"
    )
    found = parse_where(text, SCHEMA)
    assert [(c, o) for c, o, _ in found] == [
        ("id", ">="),
        ("name", "="),
        ("v", "<"),
        ("at", ">"),
        ("price", "!="),
        ("ok", "="),
        ("name", "is_null"),
        ("name", "is_not_null"),
        ("id", "in"),
    ]
    assert [found[i][2] for i in (0, 1, 2, 5, 8)] == [-3, "it's", 1500.0, True, [1, 2, 3]]
    assert str(found[3][2]) == "2013-01-01 05:00:00+00:00"
    assert parse_where("v >= .5 AND v <> -.5e1", SCHEMA) == [("v", ">=", 0.5), ("v", "!=", -5.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ends too early; expected COLUMN OPERATOR VALUE"),
        ("id", "ends too early"),
        ("id =", "ends too early"),
        ("id = 1 and", "ends too early"),
        ("id = 1 OR id = 2", "conditions are joined by AND; there is no OR (for several values"),
        ("id = 1 || id = 2", "there is no OR"),
        ("id = 1 & id = 2", "conditions are joined by AND, not &"),
        ("id = 1 && id = 2", "conditions are joined by AND, not &&"),
        ("id = 1, v = 2", "conditions are joined by AND, not by commas"),
        ("id = 1 v = 2", "expected AND before v"),
        ("id >= 1 <= 5", "expected AND before <="),
        ("id = 1;", "leave out the ;"),
        ("(id = 1)", "conditions stand without parentheses, joined by AND"),
        ("NOT id = 1", "there is no NOT; turn the operator round, != for ="),
        ("colour = 1", "no column colour; expected one of id, name"),
        ("1 = id", "1 where a column is expected; write COLUMN OPERATOR VALUE"),
        ('"id" = 1', "the name of a column stands without quotes"),
        ("`id` = 1", "the name of a column stands without quotes"),
        ("id == 1", "use = instead of =="),
        ("id => 1", "use >= instead of =>"),
        ("id =< 1", "use <= instead of =<"),
        ("id ~ 1", "~ after id; expected =, !=, <, <=, >, >=, IN, IS NULL or IS NOT NULL"),
        ("name like 'U%'", "there is no LIKE; text that begins with U is name >= 'U' AND name < 'V'"),
        ("id between 1 and 5", "there is no BETWEEN; use id >= LOW AND id <= HIGH"),
        ("id not in (1, 2)", "there is no NOT IN; use id != A AND id != B"),
        ("id IN (1", "ends too early"),
        ("id IN 1", "expected ( after IN, like id IN (7)"),
        ("id IN ()", ") where a value of id is expected, like 7"),
        ("id IN (1 2)", "expected , or ) in the list after IN"),
        ("id IS 1", "expected IS NULL or IS NOT NULL after id"),
        ("name = null", "null compares with nothing; use name IS NULL or IS NOT NULL"),
        ("name = UA", "UA is no string; column name is compared with one like 'UA'; text stands in ''"),
        ('name = "UA"', "\"UA\": text stands in '', like 'UA'"),
        ("name = 'UA", "a ' has no end; text stands in '', and a ' within it is written ''"),
        ("name = 'it's'", "a ' has no end"),
        ("id = 'one'", "'one' is no int64; column id is compared with one like 7"),
        ("id > 1.5", "1.5 is no int64"),
        ("id > v", "v is a column; id is compared with a value, not with a column"),
        (
            "at > 2013-01-01",
            "2013 is no timestamp; column at is compared with one like '2026-01-31T12:00:00Z'",
        ),
        ("at = 'soon'", "'soon' is no timestamp"),
        ("ok = 1", "1 is no bool; column ok is compared with one like true"),
        ("price = 'x'", "'x' is no decimal(10,2); column price is compared with one like 1.5"),
    ],
)
def test_conditions_that_are_not_understood(text: str, words: str) -> None:
    with pytest.raises(Rejected, match="where ") as caught:
        parse_where(text, SCHEMA)
    assert words in str(caught.value)


def test_definitions_with_all_their_faults(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("columns: [{name: id, type: int65}, {name: id, type: string}]\nprimaryKey: [id]\n")
    with pytest.raises(Rejected, match=r"(?s)int65.*twice"):
        table_from_file(str(bad))
    for text in (
        "[1]",
        "columns: 3",
        "columns: [{name: id}]\nprimaryKey: [id]",
        "{",
        "columns: []\nprimaryKey: []",
    ):
        bad.write_text(text)
        with pytest.raises(Rejected, match=r"bad\.yaml"):
            table_from_file(str(bad))
    bad.write_text(
        "columns: [{name: id, type: int64}, {name: n, type: int64, default: 1.5}]\nprimaryKey: [id]\n"
    )
    with pytest.raises(Rejected, match=r"bad\.yaml: schema: column n: default 1.5 is no int64"):
        table_from_file(str(bad))
    with pytest.raises(Rejected, match="--column id"):
        table_from_options("t", ["id"], "id", [])
    with pytest.raises(Rejected, match="missing, or names no column"):
        table_from_options("t", ["id:int64"], "id", ["no:8"])
    with pytest.raises(Rejected, match="HEX32=HOST:PORT"):
        parse_first_masters("a=b")
    assert parse_first_masters("a" * 32 + "=h:1")[0].address == "h:1"


def test_a_first_master_tells_all_first_masters_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --masters it would tell nobody, and be silent to whoever leads."""
    a, b = "a" * 32, "b" * 32
    given = f"--data-dir d --node-id {a} --cluster-id {a} --first-masters {a}=h1:1,{b}=h2:2".split()
    monkeypatch.delenv("STELE_MASTERS", raising=False)

    def masters(*more: str) -> tuple[str, ...]:
        values = dict(master_run.make_context("run", [*given, *more]).params)
        first = parse_first_masters(values.pop("first_masters"))
        del values["log_format"], values["log_level"]
        return node_options(values, "master", first_masters=first).masters

    assert masters() == ("h1:1", "h2:2")
    assert masters("--masters", "h3:3") == ("h3:3",)
