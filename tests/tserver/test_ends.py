"""What a node cannot begin or go on with, and with which exit code it then ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stele.consensus.replica import ReplicaState
from stele.model.errors import Corrupt, InvariantViolation, Rejected, SteleError
from stele.model.ids import ClusterId, NodeId, new_id
from stele.model.partition import PartitionSchema
from stele.model.writeop import HEADER
from stele.rpc.proto.common_pb2 import ReplicaStatusPB
from stele.rpc.proto.master_pb2 import TSHeartbeatRequest
from stele.rpc.server import check_free
from stele.tserver.heartbeat_source import HeartbeatSource
from stele.tserver.node import start_node
from stele.tserver.options import (
    EXIT_DISK,
    EXIT_INVARIANT,
    EXIT_TRY_AGAIN,
    EXIT_USAGE,
    EXIT_VOLUME_EMPTY,
    EXIT_VOLUME_FOREIGN,
    NodeOptions,
)
from stele.tserver.process import exit_code
from stele.tserver.volume import Fate, lock_directory
from stele.wal.append_queue import Writer
from tests.consensus.cluster import wait_until
from tests.harness.loopback import Loopback
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, fill, master_of


async def test_fates_of_volumes(cluster: LocalCluster, tmp_path: Path) -> None:
    options, lead = cluster.options("node-0"), master_of(cluster.running["master"]).lead
    assert lead is not None
    # It is ready once it was heard, and on record a little later.
    await wait_until(lambda: lead.catalog.nodes[options.node_id].formed)
    await cluster.stop("node-0")
    with pytest.raises(Fate) as foreign:
        await start_node(NodeOptions(options.data_dir, NodeId(new_id()), cluster.cluster_id, options.listen))
    assert foreign.value.exit_code == EXIT_VOLUME_FOREIGN
    empty = NodeOptions(
        tmp_path / "another", options.node_id, cluster.cluster_id, options.listen, masters=options.masters
    )
    with pytest.raises(Fate) as seen:
        await start_node(empty)
    assert seen.value.exit_code == EXIT_VOLUME_EMPTY and "VolumeEmpty" in seen.value.fate
    with pytest.raises(Fate) as unformed:
        await start_node(
            NodeOptions(tmp_path / "m", NodeId(new_id()), cluster.cluster_id, "127.0.0.1:0", role="master")
        )
    assert unformed.value.exit_code == EXIT_VOLUME_EMPTY


async def test_a_start_that_fails_ends_all_that_it_began(tmp_path: Path) -> None:
    """It went on listening: only the threads, the log and the volume were let go of."""
    host = f"{Loopback().prefix}.1"
    options = NodeOptions(
        tmp_path / "n", NodeId(new_id()), ClusterId(new_id()), f"{host}:7050", http_port=7052
    )
    tasks = asyncio.all_tasks()
    with pytest.raises(Rejected, match="7052"):  # Flight has that port by then
        await start_node(options)
    for port in (options.flight_port, options.stream_port):
        await check_free(f"{host}:{port}", "--port")
    assert asyncio.all_tasks() == tasks
    os.close(lock_directory(options.data_dir))


async def test_a_write_of_a_later_program_ends_the_node(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """An upgraded leader proposed it, and another one of this program has it in its log."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "before"})
        tablet_id = table.tablet(0).place.tablet_id
    nodes = [node for name, node in cluster.running.items() if name != "master"]
    while not (ended := [node for node in nodes if node.failed.done()]):
        for node in nodes:
            with suppress(SteleError):
                await node.replicas.get(tablet_id).writes.submit(b"\x02" + bytes(HEADER.size))
        await asyncio.sleep(0.01)
    assert "upgrade" in ended[0].health.ready()
    assert exit_code(ended[0].failed.result()) == EXIT_USAGE
    assert tablet_id[:8] in (told := capsys.readouterr().err) and "upgrade" in told
    assert ended[0].replicas.get(tablet_id).state is not ReplicaState.FAILED


async def test_a_failed_log_ends_the_node(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    node.log.shared.fail(OSError("the disk is gone"))
    await wait_until(node.failed.done)
    assert "disk is gone" in node.health.ready()
    assert exit_code(node.failed.result()) == EXIT_DISK
    await cluster.stop("node-0")


async def test_a_failed_log_ends_the_node_though_its_disk_does_not_say_how_full_it_is(
    cluster: LocalCluster,
) -> None:
    node, directory = cluster.running["node-0"], cluster.options("node-0").data_dir
    away = directory.rename(directory.with_name("away"))
    try:
        with pytest.raises(OSError):
            await node.monitor.measure()
        node.log.shared.fail(OSError("the disk is gone"))
        await wait_until(node.failed.done)
    finally:
        away.rename(directory)
    await cluster.stop("node-0")


async def test_replicas_that_a_failed_log_stopped_are_not_told_as_failed(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver would replace them, where a node that starts again has them all."""
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await wait_until(lambda: len(node.replicas) == 4 and all(r.running for r in node.replicas))
        told: list[list[ReplicaStatusPB]] = []
        source, request = node.heartbeat_source, HeartbeatSource.request

        def noted(self: HeartbeatSource, tablets: list[ReplicaStatusPB], *more: Any) -> TSHeartbeatRequest:
            if self is source:
                told.append(tablets)
            return request(self, tablets, *more)

        monkeypatch.setattr(HeartbeatSource, "request", noted)
        node.log.shared.fail(OSError("the disk is gone"))
        await fill(client, 20)
        await wait_until(lambda: any(r.state is ReplicaState.FAILED for r in node.replicas))
        beats = len(told)
        await wait_until(lambda: len(told) >= beats + 3)
        assert not [s for tablets in told for s in tablets if s.state == ReplicaState.FAILED]
    await cluster.stop("node-0")


async def test_a_log_whose_disk_hangs_ends_the_node(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 20)
        await wait_until(lambda: node.log.under_way is None)
        node.monitor._log_stall_ms = 3_000
        await asyncio.sleep(4.0)
        assert not node.failed.done(), "a log at rest does not hang"
        await wait_until(lambda: node.log.under_way is None)
        with node.log.shared.lock:  # as if a sync of the thread's never returned
            node.log.shared.append_queue.pass_writer(Writer.NOBODY, Writer.THREAD)
        await wait_until(node.failed.done)
        assert "hangs" in str(node.failed.result())
        assert exit_code(node.failed.result()) == EXIT_TRY_AGAIN
        with (
            node.log.shared.lock
        ):  # it goes on, with what was queued meanwhile: who waits for that would hold up the end
            node.log.shared.append_queue.wake.notify()
    await cluster.stop("node-0")


_HANGS = """
import asyncio, sys, time
from pathlib import Path
from stele.model.errors import Retryable
from stele.tserver import process
from stele.tserver.extension import NoExtension
from stele.tserver.options import NodeOptions

process.END_S = 0.5

class Hangs(NoExtension):
    def __init__(self, ports):
        self.fail = ports.fail

    def start(self):
        self.fail(Retryable("the disk hangs"))

    async def stop(self):
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)

ports = {"http_port": 0, "flight_port": 0, "stream_port": 0}
options = NodeOptions(Path(sys.argv[1]), "a" * 32, "b" * 32, "127.0.0.1:0", **ports)
sys.exit(process.run_process(options, Hangs))
"""


def test_a_node_that_cannot_close_its_log_ends_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HANGS, str(tmp_path / "n")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr.count("stele: the disk hangs")) == (EXIT_TRY_AGAIN, 1)


def test_exit_codes_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "why"
    monkeypatch.setenv("STELE_TERMINATION_LOG", str(told))
    assert exit_code(Rejected("cannot listen at 10.0.0.1:7050")) == EXIT_USAGE
    assert told.read_text() == "cannot listen at 10.0.0.1:7050\n"
    assert exit_code(Corrupt("segment 3")) == EXIT_DISK
    assert exit_code(InvariantViolation("two leaders")) == EXIT_INVARIANT
    assert exit_code(Fate("VolumeEmpty", EXIT_VOLUME_EMPTY, "it is empty")) == EXIT_VOLUME_EMPTY
