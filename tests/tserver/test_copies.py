"""Tablet copies between nodes, through sockets: begun, failed, begun anew from elsewhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from threading import Event

import pytest

from stele.client.admin import cluster_view
from stele.consensus.copy_order import CopyOrder
from stele.consensus.copy_source import SessionInfo
from stele.consensus.fetch import CopyFrames
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, OpId, ReplicaId, StreamKey, TabletId, new_id
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.flight_client import FlightStream
from stele.rpc.identity import PROTOCOL_VERSION
from stele.rpc.proto import consensus_pb2 as pb
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.ticket import CopyTicket
from stele.tablet.store import TabletStore
from tests.consensus.cluster import WAIT_S, wait_until
from tests.tserver.local import SCHEMA, LocalCluster, fill


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
        async with asyncio.timeout(WAIT_S):
            while (answer := await client.pool.unary(*call)).progress.state not in ("Done", "Failed"):
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
        fresh.host.changed_key(copy.key)  # as the service does that takes the order

        async def masters_say() -> list[str]:
            view = await cluster_view(client.masters)
            return [s.status.copy.state for t in view.tablets for s in t.replicas if s.status.replica_id == 9]

        async def node_says() -> list[str]:
            asked = pb.GetConsensusStateRequest(tablet_ids=[id_to_pb(tablet.tablet_id)])
            state = await client.pool.unary(fresh.address, ConsensusServiceStub, "GetConsensusState", asked)
            return [s.copy.state for s in state.replicas]

        async def come_to_say(state: str) -> None:
            give_up = time.monotonic() + WAIT_S
            while not await masters_say() == await node_says() == [state]:
                said = f"masters {await masters_say()}, node {await node_says()}: never {state}"
                assert time.monotonic() < give_up, said
                await asyncio.sleep(0.02)

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
        copy = await fresh.manager.start_copy(order, fresh.copy_sources.at(source.node_id, source.address))
        assert stuck.failed and copy is not None
        await wait_until(lambda: copy.progress.state in ("Done", "Failed"))
        assert copy.progress.state == "Done", copy.progress.error
        other = replace(order, source_node=NodeId(new_id()))
        assert await fresh.manager.start_copy(other, LostSource()) in (copy, None), "it is here"


async def test_a_copy_that_runs_goes_on_at_the_rate_of_a_later_order(cluster: LocalCluster) -> None:
    """The budget was raised while it ran: with the one that it began with it would take many minutes."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        await fill(client, 5000)
        (tablet,) = table.locations.tablets
        cluster.ids["node-3"] = NodeId(new_id())
        fresh = await cluster.launch("node-3")
        await wait_until(lambda: fresh.replicas.opened)
        source = next(
            node
            for node in cluster.running.values()  # another may not have all rows yet
            if any(r.is_leader and r.tablet_id == tablet.tablet_id for r in node.replicas)
        )
        order = pb.StartTabletCopyRequest(
            tablet_id=id_to_pb(tablet.tablet_id),
            replica_id=9,
            source_node=id_to_pb(source.node_id),
            source_address=source.address,
            bytes_per_second=100,
        )
        call = (fresh.address, ConsensusServiceStub, "StartTabletCopy", order)
        answer = await client.pool.unary(*call)
        assert answer.progress.bytes_per_second == 100
        copy = fresh.replicas.copies[StreamKey(TabletId(tablet.tablet_id), ReplicaId(9))]
        await wait_until(lambda: copy.progress.bytes_total > 0 or copy.failed)
        assert copy.progress.bytes_total > 40_000
        order.bytes_per_second = 1 << 30
        answer = await client.pool.unary(*call)
        assert answer.progress.bytes_per_second == 1 << 30
        assert fresh.replicas.copies[copy.key] is copy, "it goes on where it was"
        await wait_until(lambda: copy.progress.state in ("Done", "Failed"), timeout_s=60)
        assert copy.progress.state == "Done", copy.progress.error


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
            bytes_per_second=1_000,
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
                source.description.flight_address,
                replace(good, **change).encode(),  # type: ignore[arg-type]
                Event(),
            )
            with pytest.raises(Rejected) as refused:
                await asyncio.to_thread(list, stream)
            assert refused.value.code is code
        await cluster.stop(name)
        assert copy.progress.state == "Fetching"
        source = await cluster.launch(name)
        order.bytes_per_second = 1 << 30
        await client.pool.unary(*call)
        await wait_until(lambda: copy.progress.state in ("Done", "Failed"), timeout_s=60)
        assert copy.progress.state == "Done", copy.progress.error
        assert copy.progress.bytes_done == copy.progress.bytes_total
        machine, copied = (n.replicas.get(replica.tablet_id).machine for n in (source, fresh))
        assert isinstance(machine, TabletStore) and isinstance(copied, TabletStore)
        # The source learns after its start, and so maybe after this copy, what of its log is committed.
        await wait_until(lambda: machine.applied >= newest)
        then = copied.last_timestamp
        assert machine.view(then).checksum() == copied.view(then).checksum()
