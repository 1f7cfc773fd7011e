"""Nodes under a master: tables, writes, scans, restarts, copies, all through sockets."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.client.health import examine
from stele.consensus.copy_source import SessionInfo
from stele.consensus.copy_target import CopyOrder
from stele.consensus.fetch import CopyFrames
from stele.consensus.replica import ReplicaState
from stele.model.block import RowOp, encode_block
from stele.model.errors import Code, Corrupt, InvariantViolation, Rejected, Retryable
from stele.model.ids import CATALOG_TABLET_ID, NodeId, OpId, ReplicaId, StreamKey, TabletId, new_id
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.flight_client import FlightStream
from stele.rpc.identity import PROTOCOL_VERSION
from stele.rpc.proto import consensus_pb2 as pb
from stele.rpc.proto.common_pb2 import ReplicaStatusPB
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.proto.master_pb2 import TSHeartbeatRequest
from stele.rpc.ticket import CopyTicket
from stele.tserver.node import Node
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
from stele.tserver.volume import Fate
from stele.wal.handover import Writer
from tests.consensus.cluster import wait_until
from tests.tserver.local import LocalCluster

SCHEMA = Schema.make([("id", "int64"), ("name", "string")], ["id"])
HASHED = PartitionSchema((HashPartition((0,), 4, 0),), None)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    made = LocalCluster(tmp_path)
    try:
        yield await made.start()
    finally:
        await made.close()


async def fill(client: AsyncClient, count: int, name: str = "t") -> None:
    table = await client.open_table(name)
    async with table.new_session() as session:
        for i in range(count):
            await session.upsert({"id": i, "name": f"n{i}"})


async def count(client: AsyncClient, name: str = "t") -> int:
    return await (await client.open_table(name)).scan().count()


async def test_write_scan_restart(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 500)
        assert await count(client) == 500
        assert (await (await client.open_table("t")).get({"id": 7})) == {"id": 7, "name": "n7"}
    before = {name: cluster.running[name].incarnation for name in ("node-0", "node-1", "node-2")}
    for name in before:
        await cluster.stop(name)
    for name, incarnation in before.items():
        node = await cluster.launch(name)
        assert node.incarnation == incarnation + 1
    async with cluster.client() as client:
        assert await count(client) == 500
        await fill(client, 600)
        assert await count(client) == 600


async def test_a_node_that_refuses_writes_for_want_of_space_says_so_to_the_masters(
    cluster: LocalCluster,
) -> None:
    """What is low is said by who refuses: its own mark, on its own disk."""
    node = cluster.running["node-1"]
    options = node.log.options
    async with cluster.client() as client:
        for low in (True, False):
            node.log.options = replace(options, low_space_bytes=1 << 60) if low else options
            wanted = [node.node_id] if low else []
            while True:
                told = examine(await cluster_view(client.masters))
                if [n.node_id for n in told.low_on_disk] == wanted:
                    break
                await asyncio.sleep(0.05)
            assert all(n.disk_free_bytes for n in told.nodes)
            assert told.healthy


async def test_a_block_with_broken_insides_is_refused_before_it_is_proposed(cluster: LocalCluster) -> None:
    """String offsets that point far outside of the message: applied unseen they would end every replica."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        batch = pa.RecordBatch.from_arrays(
            [pa.array([1]), pa.array(["a name of 21 letters!"])], schema=SCHEMA.to_arrow()
        )
        good = encode_block(RowOp.UPSERT, SCHEMA.column_ids, batch, SCHEMA.version)
        end = struct.pack("<ii", 0, 21)
        at = good.rindex(end)
        for block in (
            good[:at] + struct.pack("<ii", 0, 1 << 30) + good[at + 8 :],
            good[:-8],
            b"",
            b"x" * 100,
        ):
            with pytest.raises(Rejected):
                await table._tablet(0).write(block, timeout_s=5)
        await table.put({"id": 2, "name": "after"})
        assert await count(client) == 1


@pytest.mark.parametrize("ahead_us", [3_600_000_000, (1 << 63) - (1 << 62)])
async def test_a_client_id_from_the_future_is_refused_before_it_is_proposed(
    cluster: LocalCluster, ahead_us: int
) -> None:
    """Once forgotten it would make all ids older than itself TOO_OLD, those of all new clients, until that time comes."""
    made_us = time.time_ns() // 1_000 + ahead_us
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        kv = await client.create_keyspace("k")
        for tablet in (table._tablet(0), kv._tablet):
            tablet._sequencer.begin()
            tablet._sequencer.made_us = made_us
        with pytest.raises(Rejected) as caught:
            await table.put({"id": 1, "name": "early"})
        assert caught.value.code is Code.CLOCK_AHEAD
        with pytest.raises(Rejected) as caught:
            await kv.replace("a", "early")
        assert caught.value.code is Code.CLOCK_AHEAD
        assert await count(client) == 0


async def test_a_client_whose_clock_is_behind_is_told_so(cluster: LocalCluster) -> None:
    """It was told NO_QUORUM for ever: each id that it made was older than those that the tablet had forgotten."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        kv = await client.create_keyspace("k")
        mark_us = time.time_ns() // 1_000 + 1_200_000_000  # as if this clock were 20 minutes behind
        for node in cluster.running.values():
            for replica in node.replicas:
                machine: Any = replica.machine
                machine._once._mark_us = mark_us
        for _ in range(2):
            for write in (lambda: table.put({"id": 1, "name": "late"}), lambda: kv.replace("a", b"late")):
                with pytest.raises(
                    Rejected, match=r"this machine's clock is behind: .*set it right"
                ) as caught:
                    await write()
                assert caught.value.code is Code.CLOCK_BEHIND
        assert await count(client) == 0


async def test_a_client_id_that_was_forgotten_is_replaced(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "first"})
        for node in cluster.running.values():
            for replica in node.replicas:
                machine: Any = replica.machine
                if replica.superblock.kind == "table":
                    await wait_until(lambda machine=machine: machine._once.clients == 1)
                    machine._once._forget_oldest()
        with pytest.raises(Retryable, match="has forgotten this client id"):
            await table.put({"id": 2, "name": "again"})
        await table.put({"id": 2, "name": "again"})
        assert await count(client) == 2


async def test_a_client_id_that_was_forgotten_is_replaced_though_many_write_under_it(
    cluster: LocalCluster,
) -> None:
    """A new one was made only while no write was under way: of callers who tried again at once none ever came through."""
    async with cluster.client() as client:
        kv = await client.create_keyspace("k")
        await kv.replace("a", "first")
        for node in cluster.running.values():
            for replica in node.replicas:
                machine: Any = replica.machine
                if replica.superblock.kind == "keyspace" and replica.tablet_id != CATALOG_TABLET_ID:
                    await wait_until(lambda machine=machine: machine._once.clients == 1)
                    machine._once._forget_oldest()

        async def write(number: int) -> int:
            for refused in range(20):
                try:
                    await kv.replace(f"key {number}", "again")
                    return refused
                except Retryable as exc:
                    assert "has forgotten this client id" in str(exc)
            return 20

        assert max(await asyncio.gather(*(write(number) for number in range(8)))) == 1
        assert len(await kv.list("key")) == 8


async def test_a_client_whose_masters_were_all_replaced_asks_the_nodes(cluster: LocalCluster) -> None:
    """It had asked no master meanwhile, and its addresses were nobody's: it found none for ever, beside nodes that knew."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "one"})
        client.masters._given = ["127.0.0.1:1"]
        client.masters._known = ["127.0.0.1:1"]
        await table.locations.refresh()
        assert [info.name for info in await client.list_tables()] == ["t"]


async def test_readiness_and_hand_over_at_stop(cluster: LocalCluster) -> None:
    for name, node in cluster.running.items():
        await wait_until(lambda node=node: not node.health.ready())
        assert node.health.identity()["formed"], name
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 50)
        await cluster.stop("node-0", hand_over=True)
        leaders = [r for n in cluster.running.values() for r in n.replicas if r.is_leader]
        assert len(leaders) == 5  # four tablets and the catalog
        await fill(client, 60)
        assert await count(client) == 60


async def test_a_key_space_over_the_wire(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        kv = await client.create_keyspace("k")
        await kv.replace(b"a", b"1")
        assert await kv.read(b"a") == b"1"
        await kv.delete(b"a")
        assert await kv.read(b"a") is None


async def test_copy_over_the_wire(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA)
        await fill(client, 2000)
        # A fourth node joins and gets a replica of its own.
        cluster.ids["node-3"] = NodeId(new_id())
        fresh = await cluster.launch("node-3")
        await wait_until(lambda: fresh.replicas.opened)
        source = next(
            n
            for n in cluster.running.values()
            for r in n.replicas
            if r.is_leader and n.options.role == "node"
        )
        leader = next(r for r in source.replicas if r.is_leader)
        order = pb.StartTabletCopyRequest(
            tablet_id=id_to_pb(leader.tablet_id),
            replica_id=9,
            source_node=id_to_pb(source.node_id),
            source_address=source.address,
        )
        call = (fresh.address, ConsensusServiceStub, "StartTabletCopy", order)
        for _ in range(200):
            answer = await client.pool.unary(*call)
            if answer.progress.state in ("Done", "Failed"):
                break
            await asyncio.sleep(0.02)
        assert answer.progress.state == "Done", answer.progress.error
        change = pb.BulkChangeConfigRequest(
            tablet_id=id_to_pb(leader.tablet_id),
            type=pb.ADD_PEER,
            cas_config_opid_index=leader.committed_config.opid_index,
        )
        change.peer.node_id = id_to_pb(fresh.node_id)
        change.peer.replica_id = 9
        change.peer.address = fresh.address
        change.peer.member_type = 2
        change.peer.promote = True
        changed = await client.pool.unary(source.address, ConsensusServiceStub, "BulkChangeConfig", change)
        assert id_from_pb(changed.committed.peers[-1].node_id) == fresh.node_id
        replica = fresh.replicas.get(leader.tablet_id)
        await wait_until(lambda: leader.committed_config.peer(9).member_type == 1)  # type: ignore[union-attr]
        await fill(client, 2100)
        await wait_until(lambda: replica.applied_index >= leader.applied_index)
        assert replica.machine.view().checksum() == leader.machine.view().checksum()  # type: ignore[union-attr]


async def test_a_copy_that_fails_before_there_is_a_replica_is_told_of(cluster: LocalCluster) -> None:
    """Found by tests/linear, seed 101: its source was lost, and a driver waited for its bytes for ever."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        (tablet,) = table.locations.tablets
        cluster.ids["node-3"] = NodeId(new_id())
        fresh = await cluster.launch("node-3")
        await wait_until(lambda: fresh.replicas.opened)
        lost = LostSource()
        order = CopyOrder(TabletId(tablet.tablet_id), ReplicaId(9), NodeId(new_id()), "127.0.0.1:1")
        copy = await fresh.manager.start_copy(order, lost)
        assert copy is not None
        fresh.changed_key(copy.key)  # as the service does that takes the order

        async def masters_say() -> list[str]:
            view = await cluster_view(client.masters)
            return [s.status.copy.state for t in view.tablets for s in t.replicas if s.status.replica_id == 9]

        async def node_says() -> list[str]:
            asked = pb.GetConsensusStateRequest(tablet_ids=[id_to_pb(tablet.tablet_id)])
            state = await client.pool.unary(fresh.address, ConsensusServiceStub, "GetConsensusState", asked)
            return [s.copy.state for s in state.replicas]

        async def come_to_say(state: str) -> None:
            for _ in range(200):
                if await masters_say() == await node_says() == [state]:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError(f"masters {await masters_say()}, node {await node_says()}: never {state}")

        await come_to_say("Starting")
        lost.found_out.set()
        await come_to_say("Failed")


async def test_a_copy_is_begun_anew_where_another_source_is_named(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        await fill(client, 50)
        (tablet,) = table.locations.tablets
        cluster.ids["node-3"] = NodeId(new_id())
        fresh = await cluster.launch("node-3")
        await wait_until(lambda: fresh.replicas.opened)
        order = CopyOrder(TabletId(tablet.tablet_id), ReplicaId(9), NodeId(new_id()), "127.0.0.1:1")
        stuck = await fresh.manager.start_copy(order, LostSource())
        assert stuck is not None and await fresh.manager.start_copy(order, LostSource()) is stuck
        source = next(n for n in cluster.running.values() if n.replicas.holds(tablet.tablet_id))
        order = replace(order, source_node=source.node_id, source_address=source.address)
        copy = await fresh.manager.start_copy(order, fresh.copy_source(source.node_id, source.address))
        assert stuck.failed and copy is not None
        await wait_until(lambda: copy.progress.state in ("Done", "Failed"))
        assert copy.progress.state == "Done", copy.progress.error
        other = replace(order, source_node=NodeId(new_id()))
        assert await fresh.manager.start_copy(other, LostSource()) in (copy, None), "it is here"


class LostSource:
    """A CopySource that does not answer, and then is known to be gone."""

    def __init__(self) -> None:
        self.found_out = asyncio.Event()

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        await self.found_out.wait()
        raise Rejected("the source is gone", code=Code.NOT_FOUND)

    def fetch(self, session_id: str, name: str, offset: int, length: int, stop: Event) -> CopyFrames:
        raise AssertionError("no session")

    async def keep_alive(self, session_id: str) -> int:
        raise AssertionError("no session")

    async def end(self, session_id: str, success: bool, damage: str) -> None:
        raise AssertionError("no session")


async def test_a_copy_survives_a_restart_of_its_source_and_names_who_asks(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA)
        await fill(client, 5000)
        cluster.ids["node-3"] = NodeId(new_id())
        fresh = await cluster.launch("node-3")
        await wait_until(lambda: fresh.replicas.opened)
        name, source = next(
            (name, n) for name, n in cluster.running.items() if name != "master" and len(n.replicas) == 1
        )
        replica = next(iter(source.replicas))
        replicas = [n.replicas.current(replica.tablet_id) for n in cluster.running.values()]
        newest = max(r.machine.applied for r in replicas if r is not None and r.machine is not None)
        await wait_until(lambda: replica.machine is not None and replica.machine.applied >= newest)
        order = pb.StartTabletCopyRequest(
            tablet_id=id_to_pb(replica.tablet_id),
            replica_id=9,
            source_node=id_to_pb(source.node_id),
            source_address=source.address,
            bytes_per_second=20_000,
        )
        call = (fresh.address, ConsensusServiceStub, "StartTabletCopy", order)
        await client.pool.unary(*call)
        copy = fresh.replicas.copies[StreamKey(replica.tablet_id, ReplicaId(9))]
        await wait_until(lambda: 0 < copy.progress.bytes_done < copy.progress.bytes_total)
        (session,) = source.sessions._sessions
        for change, code in (
            ({"to_node": fresh.node_id}, Code.WRONG_NODE),
            ({"protocol_version": 99}, Code.UNSUPPORTED_VERSION),
            ({"from_incarnation": 0}, Code.STALE_INCARNATION),
            ({"session_id": "another"}, Code.NOT_FOUND),
            ({"name": "../../node.json"}, Code.NOT_FOUND),
        ):
            good = CopyTicket(
                cluster.cluster_id,
                session,
                "MANIFEST",
                0,
                1,
                fresh.node_id,
                fresh.incarnation,
                source.node_id,
                PROTOCOL_VERSION,
            )
            stream = FlightStream(
                fresh.flight_connections,
                source.flight_address,
                replace(good, **change).encode(),  # type: ignore[arg-type]
                Event(),
            )
            with pytest.raises(Rejected) as refused:
                await asyncio.to_thread(list, stream)
            assert refused.value.code is code
        await cluster.stop(name)
        assert copy.progress.state == "Fetching"
        source = await cluster.launch(name)
        await wait_until(lambda: copy.progress.state in ("Done", "Failed"), timeout_s=60)
        assert copy.progress.state == "Done", copy.progress.error
        assert copy.progress.bytes_done == copy.progress.bytes_total
        machine, copied = (n.replicas.get(replica.tablet_id).machine for n in (source, fresh))
        assert machine is not None and copied is not None
        assert machine.view().checksum() == copied.view().checksum()  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", ["asked", "formed", "starting"])
async def test_a_formation_whose_caller_goes_away_is_carried_out(tmp_path: Path, when: str) -> None:
    """The master was formed on paper, and its catalog was never started: asked again it said that all was done."""
    made = LocalCluster(tmp_path, nodes=0)
    node = await made.launch("master", first=True)
    try:
        await wait_until(lambda: node.replicas.holds(CATALOG_TABLET_ID))
        record = node.volume.record
        masters = [(record.node_id, record.format_id)]
        reached = {
            "asked": lambda: True,
            "formed": lambda: node.formed,
            "starting": lambda: node.replicas.current(CATALOG_TABLET_ID) is not None,
        }[when]
        asking = asyncio.create_task(node.confirm_formation(masters))
        await asyncio.sleep(0)
        while not reached():
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await node.confirm_formation(masters)
        await wait_until(lambda: runs(node))
        assert node.formed and not node.replicas.held
    finally:
        await made.close()


def runs(node: Node) -> bool:
    catalog = node.replicas.current(CATALOG_TABLET_ID)
    return catalog is not None and catalog.state is ReplicaState.RUNNING


async def test_fates_of_volumes(cluster: LocalCluster, tmp_path: Path) -> None:
    options = cluster.options("node-0")
    await cluster.stop("node-0")
    with pytest.raises(Fate) as foreign:
        await Node(
            NodeOptions(options.data_dir, NodeId(new_id()), cluster.cluster_id, options.listen)
        ).start()
    assert foreign.value.exit_code == EXIT_VOLUME_FOREIGN
    empty = NodeOptions(
        tmp_path / "another", options.node_id, cluster.cluster_id, options.listen, masters=options.masters
    )
    with pytest.raises(Fate) as seen:
        await Node(empty).start()
    assert seen.value.exit_code == EXIT_VOLUME_EMPTY and "VolumeEmpty" in seen.value.fate
    with pytest.raises(Fate) as unformed:
        await Node(
            NodeOptions(tmp_path / "m", NodeId(new_id()), cluster.cluster_id, "127.0.0.1:0", role="master")
        ).start()
    assert unformed.value.exit_code == EXIT_VOLUME_EMPTY


async def test_a_failed_log_ends_the_node(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    node.log.fail(OSError("the disk is gone"))
    await wait_until(node.failed.done)
    assert "disk is gone" in node.health.ready()
    assert exit_code(node.failed.result()) == EXIT_DISK
    await cluster.stop("node-0")


async def test_replicas_that_a_failed_log_stopped_are_not_told_as_failed(cluster: LocalCluster) -> None:
    """A driver would replace them, where a node that starts again has them all."""
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await wait_until(lambda: len(node.replicas) == 4 and all(r.running for r in node.replicas))
        told: list[list[ReplicaStatusPB]] = []
        request = node.heartbeater.request

        def noted(
            tablets: list[ReplicaStatusPB], removed: list[StreamKey], master: str
        ) -> TSHeartbeatRequest:
            told.append(tablets)
            return request(tablets, removed, master)

        node.heartbeater.request = noted  # type: ignore[method-assign]
        node.log.fail(OSError("the disk is gone"))
        await fill(client, 20)
        await wait_until(lambda: any(r.state is ReplicaState.FAILED for r in node.replicas))
        beats = len(told)
        await wait_until(lambda: len(told) >= beats + 3)
        assert not [s for tablets in told for s in tablets if s.state == ReplicaState.FAILED]
    await cluster.stop("node-0")


async def test_a_log_whose_disk_hangs_ends_the_node(cluster: LocalCluster) -> None:
    await cluster.stop("node-0")
    node = Node(replace(cluster.options("node-0"), log_stall_ms=400))
    await node.start()
    cluster.running["node-0"] = node
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 20)
        await asyncio.sleep(1.0)
        assert not node.failed.done(), "a log at rest does not hang"
        await wait_until(lambda: node.log.under_way is None)
        with node.log.lock:  # as if a sync of the thread's never returned
            node.log.handover.pass_writer(Writer.NOBODY, Writer.THREAD)
        await wait_until(node.failed.done)
        assert "hangs" in str(node.failed.result())
        assert exit_code(node.failed.result()) == EXIT_TRY_AGAIN
        with node.log.lock:
            node.log.handover.pass_writer(Writer.THREAD, Writer.NOBODY)
    await cluster.stop("node-0")


_HANGS = """
import asyncio, sys, time
from stele.model.errors import Retryable
from stele.tserver import process

process.END_S = 0.5

class Hangs:
    address, node_id, incarnation = "", "", 1

    def __init__(self, options):
        self.failed = asyncio.get_running_loop().create_future()

    async def start(self):
        self.failed.set_result(Retryable("the disk hangs"))

    async def stop(self):
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)

sys.exit(process.run_process(None, Hangs))
"""


def test_a_node_that_cannot_close_its_log_ends_all_the_same() -> None:
    ended = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=40)
    assert (ended.returncode, ended.stderr.count("stele: the disk hangs")) == (EXIT_TRY_AGAIN, 1)


def test_exit_codes_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "why"
    monkeypatch.setenv("STELE_TERMINATION_LOG", str(told))
    assert exit_code(Rejected("cannot listen at 10.0.0.1:7050")) == EXIT_USAGE
    assert told.read_text() == "cannot listen at 10.0.0.1:7050\n"
    assert exit_code(Corrupt("segment 3")) == EXIT_DISK
    assert exit_code(InvariantViolation("two leaders")) == EXIT_INVARIANT
    assert exit_code(Fate("VolumeEmpty", EXIT_VOLUME_EMPTY, "it is empty")) == EXIT_VOLUME_EMPTY


async def test_a_port_in_use_is_one_line_that_says_what_to_do(cluster: LocalCluster, tmp_path: Path) -> None:
    options = cluster.options("node-0")
    with pytest.raises(Rejected) as refused:
        await Node(NodeOptions(tmp_path / "x", NodeId(new_id()), cluster.cluster_id, options.listen)).start()
    assert "in use" in str(refused.value)
