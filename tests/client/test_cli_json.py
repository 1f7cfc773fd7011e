"""Every command takes --json, and then prints nothing but JSON on standard output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from stele.cli.app import cli
from stele.cli.driver import show_step
from stele.cli.options import Shared
from stele.driver.progress import Progress
from tests.client.commands import runner
from tests.tserver.local import LocalCluster

PROCESSES = {"node run", "master run"}
"""They end with their process and print nothing. Their logs are JSON with --log-format json."""
ELSEWHERE = {
    "tablet recover": "tests/client/test_recovery.py",
    "tablet promote": "tests/client/test_recovery.py",
    "local take-back": "tests/tserver: a volume that was refused",
    "local cmeta rewrite": "tests/master/test_cmeta.py",
    "master form": "tests/master: it needs masters that are not formed",
    "node forget": "tests/client: it needs a node that is gone",
    "plan": "tests/driver, tests/operator",
    **dict.fromkeys(
        ("kv leases", "kv lease-grant", "kv lease-keep", "kv lease-revoke"), "tests/client/test_leases.py"
    ),
    "kv watch": "tests/client/test_watch.py",
    "driver run": "it needs the main thread, for signals",
}


def commands(
    group: click.Group, context: click.Context, before: str = ""
) -> Iterator[tuple[str, click.Command]]:
    """All commands that do something, as they are typed."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, click.Context(command, parent=context), f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def all_commands() -> dict[str, click.Command]:
    """By what is typed."""
    return dict(commands(cli, click.Context(cli)))


@pytest.mark.parametrize("name", sorted(set(all_commands()) - PROCESSES))
def test_each_command_takes_json_before_it_and_behind_it(name: str) -> None:
    taken = [param for param in all_commands()[name].params if "--json" in param.opts]
    assert [type(param) for param in taken] == [Shared]


def test_steps_of_a_driver_are_objects_in_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    step = Progress("ab" * 16, "t", "Copying", "heal", "its node is silent", "Demoting", 7, 9)
    show_step(step, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["tablet"], told["table"], told["node"]) == ("ab" * 16, "t", None)
    assert (told["step"], told["bytesDone"], told["bytesTotal"]) == ("Copying", 7, 9)


async def test_what_commands_do_is_told_as_json(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cluster for all: starting it takes longer than any part."""
    run, ran = runner(cluster, monkeypatch), set()

    async def told(*words: str) -> Any:
        ran.update(name for name in all_commands() if list(words[: len(name.split())]) == name.split())
        code, out, err = await run(*words, "--json")
        assert code == 0, f"{words}: {out}{err}"
        return json.loads(out)

    # tables and rows
    made = await told("table", "create", "t", "--column", "id:int64", "--column", "n:int32?", "--key", "id")
    assert made.pop("why").startswith("one tablet: no partitions were named, and the cluster has 3 nodes")
    assert made == {"name": "t", "tablets": 1, "replicationFactor": 3}
    (tmp_path / "t.csv").write_text("id,n\n1,1\n2,\n")
    loaded = await told("table", "load", "t", str(tmp_path / "t.csv"))
    assert loaded == {
        "written": 2,
        "refused": 0,
        "complete": True,
        "moreMayBeWritten": False,
        "durability": "synced",
    }
    assert await told("table", "scan", "t", "--count") == {"rows": 2}
    code, out, _ = await run("--json", "table", "scan", "t", "--ordered")
    assert [json.loads(line) for line in out.splitlines()] == [{"id": 1, "n": 1}, {"id": 2, "n": None}]
    written = await told("table", "scan", "t", "-o", str(tmp_path / "t.parquet"))
    assert (written["rows"], written["bytes"]) == (2, (tmp_path / "t.parquet").stat().st_size)
    code, out, err = await run("table", "scan", "t", "-o", str(tmp_path / "t.json"))
    assert (code, out) == (0, "") and err.startswith("2 rows, 39 bytes, in ") and err.endswith("t.json\n")
    code, _, err = await run("table", "scan", "t", "--json", "--format", "csv")
    assert code == 2 and "--json and --format csv exclude each other" in err
    altered = await told("table", "alter", "t", "--add", "s:string?")
    assert altered == {"name": "t", "schemaVersion": 2, "columns": 3, "ranges": 1}
    assert await told("table", "rename", "t", "u") == {"name": "u", "before": "t"}
    held = await told("table", "hold", "u", "nightly")
    assert held["name"] == "nightly" and int(held["since"]) > 0
    assert [hold["name"] for hold in await told("table", "holds", "u")] == ["nightly"]
    assert await told("table", "release", "u", "nightly") == {"table": "u", "released": "nightly"}
    assert (await told("table", "verify", "u"))["equal"] is True
    factor = await told("table", "set-rf", "u", "3")
    assert (factor["before"], factor["replicationFactor"], factor["done"]) == (3, 3, True)
    assert (await told("table", "describe", "u"))["name"] == "u"
    assert [table["name"] for table in await told("table", "list")] == ["u"]

    # backups
    folder = str(tmp_path / "backups")
    backup = await told("backup", "create", folder, "u")
    verified = await told("backup", "verify", folder)
    assert verified["rowsRestored"] == {"u": 2} and [b["id"] for b in verified["chain"]] == [backup["id"]]
    restored = await told("backup", "restore", folder, "--table", "u=v")
    assert restored["tables"] == [{"name": "v", "of": "u", "rows": 2}]
    assert (await told("backup", "drill", folder))["rows"] == 2
    assert await told("backup", "prune", folder, "--keep", "1") == {"removed": [], "kept": [backup["id"]]}
    assert len(await told("backup", "list", folder)) == 1
    code, out, err = await run("backup", "remove", folder, backup["id"], "--yes", "--json", "--json-progress")
    assert code == 2 and "--json and --json-progress exclude each other" in err
    assert await told("backup", "remove", folder, "--key", "nothing", "--yes") == {"removed": []}
    code, out, err = await run("backup", "restore", folder, "--json")
    assert (code, out) == (2, "") and "choose another name with `--table u=NEW`" in err
    code, out, err = await run(
        "table", "load", "u", str(tmp_path / "t.csv"), "--create", "--key", "id", "--json"
    )
    assert (code, out) == (2, "") and "exists already; leave out --create and --key to write into it" in err
    code, out, err = await run("table", "load", "w", str(tmp_path / "t.csv"), "--create", "--key", "id")
    assert code == 0 and err.startswith("note: one tablet: no partitions were named"), err

    # tables that go
    dropped = await told("table", "drop", "v")
    recalled = await told("table", "recall", dropped["id"])
    assert recalled == {"name": "v", "id": dropped["id"], "kind": "table"}
    assert await told("table", "delete", "v", "--yes") == {"deleted": "v"}
    assert await told("cluster", "keep-dropped", "2h") == {"keepSeconds": 7200.0, "before": 86400.0}
    assert await told("cluster", "keep-dropped") == {"keepSeconds": 7200.0}

    # key spaces
    assert await told("kv", "create", "s") == {"name": "s", "replicationFactor": 3}
    revisions = list[int]()

    async def changed(*words: str) -> dict[str, Any]:
        answer = await told("kv", *words)
        revisions.append(answer.pop("revision"))
        return answer

    for verb in ("put", "insert"):
        assert await changed(verb, "s", verb, "blue") == {"keyspace": "s", "key": verb}
    async with cluster.client() as client:
        await (await client.keyspace("s")).replace("raw", b"\xff")
    assert await told("kv", "get", "s", "put") == {"key": "put", "value": "blue"}
    assert await told("kv", "get", "s", "raw") == {"key": "raw", "valueHex": "ff"}
    assert [pair["key"] for pair in await told("kv", "list", "s")] == ["insert", "put", "raw"]
    assert await changed("write", "s", "--put", "a", "1", "--delete", "a2") == {
        "keyspace": "s",
        "keys": ["a", "a2"],
    }
    assert await changed("delete", "s", "a") == {"keyspace": "s", "key": "a"}
    assert await changed("delete", "s", "raw") == {"keyspace": "s", "key": "raw"}
    assert len(set(revisions)) == 5 and revisions == sorted(revisions)
    state = await told("kv", "list", "s", "--revision")
    assert state["revision"] >= revisions[-1]
    assert [(each["key"], each["revision"]) for each in state["keys"]] == [
        ("insert", revisions[1]),
        ("put", revisions[0]),
    ]
    assert await told("kv", "elect", "s", "first", "--id", "me", "--once") == {
        "name": "first",
        "holder": "me",
        "me": True,
    }

    # tablets, nodes, masters
    tablet = next(each["tablet"] for each in await told("tablet", "list") if each["table"] == "u")
    described = await told("tablet", "describe", tablet)
    assert tablet in json.dumps(described)
    stepped = await told("tablet", "step-down", tablet)
    assert stepped["tablet"] == tablet and stepped["before"] != stepped["leader"]
    released = await told("tablet", "release", tablet)
    assert (released["tablet"], released["replicas"]) == (tablet, 3)
    nodes = [node for node in await told("node", "list") if node["role"] == "node"]
    node = nodes[0]["node_id"]
    for verb, more, wanted in (
        ("park", ("--for", "1h"), "PARKED"),
        ("unpark", (), "IN_SERVICE"),
        ("fence", ("--for", "1h"), "FENCED"),
        ("unfence", (), "IN_SERVICE"),
    ):
        answer = await told("node", verb, node, *more)
        assert (answer["changed"], answer["node"]["wanted"]) == (True, wanted)
    masters = await told("master", "list")
    assert len(masters) == 1 and masters[0]["leads"]
    (seen,) = [node for node in await told("node", "list") if node["role"] == "master"]
    for key in ("name", "machine", "zone", "address", "seen"):
        assert masters[0][key] == seen[key], key
    assert (await told("master", "set-count", "1"))["done"] is True
    assert (await told("cluster", "finalize"))["finalized"] == (await told("cluster", "version"))["finalized"]
    await told("ksck")
    assert (await told("rebalance"))["done"] is True
    left = set(all_commands()) - PROCESSES - set(ELSEWHERE) - ran
    assert left == {f"node {verb}" for verb in ("drain", "undrain", "retire")} | {
        f"tablet {verb}" for verb in ("move", "add-replica", "remove-replica")
    }, "the rest go through the same functions as those that ran"
