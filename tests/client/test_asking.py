"""Commands that ask check first: what cannot be done is refused without a question, and a question names the whole id."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from pathlib import Path

import pytest

from stele import backup
from stele.client.checks import finalizable
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.errors import Code, Rejected
from stele.rpc.proto import master_pb2
from tests.backup.tables import made_by_hand
from tests.client.commands import runner
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

DAYS = ("table", "alter", "days")


async def asked(cluster: LocalCluster, *arguments: str, answer: str = "n") -> tuple[int, str]:
    """Runs `stele` at a terminal and answers its question. Its exit code, and what it wrote on standard error."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stele.cli", *arguments),
        stdin=theirs,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "STELE_MASTERS": cluster.master_address},
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    _, err = await process.communicate()
    os.close(ours)
    assert process.returncode is not None
    return process.returncode, err.decode()


async def test_what_cannot_be_done_is_refused_without_a_question(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = runner(cluster, monkeypatch)
    base = made_by_hand(tmp_path, snapshot=1 << 60)
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
    node = cluster.ids["node-0"]
    for arguments, why in (
        (("node", "forget", "nope"), "no node is called 'nope'"),
        (("node", "forget", node), "sends heartbeats"),
        (("node", "retire", "nope"), "no node is called 'nope'"),
        (("node", "retire", node), f"retire {node[:8]}: "),
        (("table", "delete", "nope"), "no table nope"),
        (("table", "drop", "nope", "--now"), "no table nope"),
        (("table", "alter", "nope", "--drop", "x"), "no table nope"),
        (("table", "alter", "t", "--drop", "nam", "--drop", "id"), "no column nam; did you mean 'name'?"),
        (("table", "alter", "t", "--drop", "id"), "column id is in the primary key"),
        (("table", "alter", "t", "--drop-range", "1..2"), "has no range partitions"),
        (
            ("backup", "remove", str(tmp_path / "none"), base.backup_id, "--key", "k"),
            "give either BACKUP or --key",
        ),
    ):
        code, out, err = await run(*arguments)
        assert (code, out) == (2, "") and why in err and "--yes" not in err, (arguments, err)
    code, out, err = await run("backup", "remove", str(tmp_path), "19990101T")
    assert (code, out) == (2, "") and f"no backup begins with 19990101T; there are {base.backup_id}" in err
    code, out, err = await run("backup", "remove", str(tmp_path), "--key", "nothing")
    assert (code, out, err) == (0, "nothing was begun with this key\n", "")


async def test_a_question_names_the_whole_id(cluster: LocalCluster, tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        table_id = table.info.table_id
        await client.create_keyspace("k")
        space_id = (await client.describe("k")).table_id
        code, err = await asked(cluster, "table", "delete", "t")
        assert code == 130 and f"Delete table t ({table_id}) with all its rows for good?" in err
        code, err = await asked(cluster, "table", "alter", "t", "--drop", "name")
        assert code == 130 and f"Drop column name of table t ({table_id}) with all values for good?" in err
        code, err = await asked(cluster, "backup", "remove", str(tmp_path), made.backup_id[:8])
        assert (
            code == 130 and f"Remove backup {made.backup_id} (complete, rows of {made.time}) for good?" in err
        )
        assert [b.backup_id for b in await asyncio.to_thread(backup.list_backups, tmp_path)] == [
            made.backup_id
        ]
        code, err = await asked(cluster, "table", "delete", "k", answer="y")
        assert code == 0 and f"Delete key space k ({space_id})" in err
        assert [info.name for info in await client.list_tables()] == ["t"]


def test_a_version_that_members_do_not_read_is_refused_before_the_question() -> None:
    """By the same view that masters give."""
    view = master_pb2.GetClusterViewResponse(cluster_version=CLUSTER_VERSION - 1)
    for number, (name, reads, silent_ms) in enumerate(
        (("n-0", CLUSTER_VERSION, 0), ("n-1", CLUSTER_VERSION - 1, 0), ("n-2", CLUSTER_VERSION, 60_000))
    ):
        node = view.nodes.add(node_id=bytes([number] * 16), name=name, formed=True, ever_heard=True)
        node.heartbeat_age_ms = silent_ms
        node.registration.role, node.registration.version = "node", "0.1.0"
        node.registration.cluster_version = reads
    with pytest.raises(Rejected) as caught:
        finalizable(view)
    assert caught.value.code is Code.UNSAFE_CHANGE
    # Word for word as docs/upgrading.md and the masters have it.
    lags = f"node n-1 runs release 0.1.0, which reads cluster version {CLUSTER_VERSION - 1}; upgrade it"
    assert lags in str(caught.value) and "node n-2 is silent" in str(caught.value)
    assert "n-0" not in str(caught.value)
    del view.nodes[1:]
    assert finalizable(view).possible == CLUSTER_VERSION
