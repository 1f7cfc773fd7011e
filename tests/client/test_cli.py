"""The command line against a small cluster: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stele.model.keys import encode_tuple
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from tests.client.commands import runner
from tests.client.small import small_cluster
from tests.tserver.local import LocalCluster


async def test_what_others_print_meanwhile_is_no_part_of_what_a_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes in the test's own process log; their lines stood before a command's JSON."""

    async def prints() -> None:
        while True:
            print("[warning] the event loop stalled")
            await asyncio.sleep(0)

    async with small_cluster(tmp_path) as (cluster, _):
        run = runner(cluster, monkeypatch)
        printing = asyncio.create_task(prints())
        code, out, _ = await run("table", "list", "--json")
        printing.cancel()
        assert (code, json.loads(out)) == (0, [])


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
        assert (code, out.split(" ", 1)[0]) == (0, "5,002")
        assert (await run("table", "scan", "people", "--count"))[1] == "5002\n"
        _, out, told = await run("table", "scan", "people", "--max-staleness", "1", "--count")
        assert out == "5002\n" and re.search(r"these are the rows of 0\.\d s ago", told)
        code, _, told = await run("table", "scan", "people", "--max-staleness", "5", "--snapshot", "0")
        assert code == 2 and "--max-staleness chooses the snapshot" in told
        assert (await run("table", "scan", "people", "--max-staleness", "-1"))[0] == 2
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
            "stele: NOT_FOUND: no table people; `stele table list` shows the existing ones\n",
        )


async def test_a_snapshot_of_0_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node takes 0 in a ticket as its tablet's latest, which is another time for each tablet."""
    async with small_cluster(tmp_path) as (cluster, client):
        run = runner(cluster, monkeypatch)
        await run("table", "create", "t", "--column", "id:int64", "--key", "id", "--hash", "id:4")
        table = await client.open_table("t")
        await table.write_arrow(pa.table({"id": range(100)}))
        for text in ("0", "1970-01-01"):
            before = client.now()
            assert (await run("table", "scan", "t", "--count", "--snapshot", text))[:2] == (0, "100\n")
            asked = [node.snapshots.popleft() for node in cluster.nodes for _ in range(len(node.snapshots))]
            assert len(asked) == 4
            assert len(set(asked)) == 1
            assert asked[0] >= before


async def test_a_snapshot_in_the_future_is_refused_in_plain_words(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said to set the clock right, although the user had asked for that time."""
    async with cluster.client() as client:
        await client.create_table("t", Schema.make([("id", "int64")], ["id"]))
    run = runner(cluster, monkeypatch)
    this_year = datetime.now(UTC).year
    for asked, whose in (
        (f"{this_year + 2}-01-01 00:00:00", "the clock of node [0-9a-f]{8}"),
        ("9999-12-31 00:00:00", "this machine's clock"),  # which no message can hold
    ):
        code, out, err = await run("table", "scan", "t", "--snapshot", asked)
        assert (code, out) == (2, "")
        assert re.search(
            f"^stele: CLOCK_AHEAD: .*the snapshot {asked} UTC lies in the future: {whose} says {this_year}-.* UTC; "
            "give an earlier time, or no snapshot to read the present",
            err,
        ), err


async def test_changes_after_a_time_in_the_future_are_refused_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It spoke of snapshots, or of two numbers."""
    async with small_cluster(tmp_path) as (cluster, _):
        run = runner(cluster, monkeypatch)
        await run("table", "create", "t", "--column", "id:int64", "--key", "id")
        year = datetime.now(UTC).year
        for asked in (f"{year + 2}-01-01 00:00:00", "9999-12-31 00:00:00"):
            code, out, err = await run("table", "scan", "t", "--since", asked)
            assert (code, out) == (2, "")
            assert re.fullmatch(
                f"stele: CLOCK_AHEAD: the time after which to read changes, {asked} UTC lies in the future: "
                f"this machine's clock says {year}-.* UTC; give an earlier time\n",
                err,
            ), err
        code, _, err = await run("table", "scan", "t", "--since", "2024-05-02", "--snapshot", "2024-05-01")
        assert (
            code == 2
            and (
                "the time after which to read changes, 2024-05-02 00:00:00 UTC is later than the time up to which to "
                "read them, 2024-05-01 00:00:00 UTC; expected the earlier time first"
            )
            in err
        )


async def test_key_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with small_cluster(tmp_path) as (cluster, _):
        run = runner(cluster, monkeypatch)
        code, _, err = await run("kv", "put", "s", "colour", "blue")
        assert (code, err) == (2, "stele: NOT_FOUND: no key space s; create it with `stele kv create s`\n")
        assert (await run("kv", "create", "s"))[0] == 0
        assert (await run("kv", "put", "s", "colour", "blue"))[0] == 0
        assert (await run("kv", "get", "s", "colour"))[1] == "blue\n"
        _, out, told = await run("kv", "get", "s", "colour", "--max-staleness", "5")
        assert out == "blue\n" and re.fullmatch(r"this is the value of \d\.\d s ago\n", told)
        assert await run("kv", "get", "s", "shape") == (1, "", "stele: no key shape in s\n")
        assert await run("table", "scan", "s") == (
            2,
            "",
            "stele: INVALID_ARGUMENT: s is a key space, not a table; read it with `stele kv list s`\n",
        )
        code, _, err = await run("kv", "insert", "s", "colour", "red")
        assert code == 2
        assert err == "stele: ALREADY_PRESENT: key 'colour' is present\n"
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
            async with asyncio.timeout(60):
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
            while not cluster.nodes[tablet.leader].writes:  # until it watches
                await asyncio.sleep(0.01)
            tablet.before_read.append(lambda: at_once(tserver_pb2.KV_DELETE, 2))
            at_once(tserver_pb2.KV_REPLACE, 1, b"others")
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
            ("two", (0, 1), pairs, '["1970-01-06", "b"], "0xff"', [["1970-01-06", "b"], {"encoded": "ff"}]),
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
        labels = [f"{n.identity.node_id[:8]} ({n.address})" for n in cluster.nodes]
        assert "2 of 2 tablets have a leader and a majority" in (await run("table", "describe", "t"))[1]
        assert (await run("table", "list"))[1].splitlines()[1].split()[:5] == [
            "t",
            "table",
            "RUNNING",
            "2",
            "2",
        ]
        cluster.pods = {0: "t-node-0"}
        _, out, _ = await run("tablet", "list")
        leaders = {
            0: "t-node-0",
            1: cluster.nodes[1].identity.node_id[:8],
            2: cluster.nodes[2].identity.node_id[:8],
        }
        wanted = {tablet.tablet_id[:8]: leaders[tablet.leader] for tablet in (one, other)}
        assert {line[:8]: line.split()[3] for line in out.splitlines()[1:]} == wanted and "t-node-0" in out
        lines = (await run("table", "describe", "t"))[1].splitlines()[-2:]
        assert {line.split()[0]: line.split()[1] for line in lines} == wanted
        assert all(f" t-node-0@{cluster.nodes[0].address}" in line for line in lines)
        cluster.pods = {}
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
