"""Orders that come too late: from a driver or a catalog leader that was replaced, before or after a restart."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from stele.client.streams import Streams
from stele.consensus.replica import ReplicaState
from stele.consensus.superblock import DataState
from stele.model.bounds import FENCE_STEP_MAX, TERM_JUMP_MAX
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import ClusterId, NodeId, OpId, ReplicaId, TabletId, new_id
from stele.rpc.convert import config_to_pb, id_to_pb, opid_to_pb, peer_to_pb
from stele.rpc.proto import common_pb2, consensus_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub
from stele.tserver.node import Node, start_node
from stele.tserver.options import NodeOptions
from tests.consensus.cluster import OPTIONS, wait_until


class Alone:
    """One node that no master speaks to."""

    def __init__(self, directory: Path) -> None:
        self.options = NodeOptions(
            data_dir=directory / "node",
            node_id=NodeId(new_id()),
            cluster_id=ClusterId(new_id()),
            listen="127.0.0.1:0",
            http_port=0,
            flight_port=0,
            stream_port=0,
            replica=OPTIONS,
        )
        self.node: Node

    async def start(self) -> None:
        self.node = await start_node(self.options)
        await wait_until(lambda: self.node.replicas.opened)

    async def restart(self) -> None:
        await self.node.stop()
        await self.start()

    async def ask(self, service: type, method: str, request: Any) -> Any:
        return await self.node.pool.unary(self.node.address, service, method, request, timeout_s=60.0)

    async def send(self, request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        """Over a client's stream."""
        streams = Streams(self.node.pool)
        try:
            return await streams.to(self.node.node_id, self.node.address).ask(request, timeout_s=60.0)
        finally:
            await streams.close()

    async def create(self, tablet_id: TabletId, opid: OpId) -> None:
        peer = Peer(self.options.node_id, ReplicaId(1), self.node.address)
        request = tserver_pb2.CreateTabletRequest(
            tablet_id=id_to_pb(tablet_id),
            table_id=id_to_pb(new_id()),
            config=config_to_pb(Configuration(-1, (peer,))),
            leader_hint=id_to_pb(self.options.node_id),
            catalog_opid=opid_to_pb(opid),
            kind="keyspace",
        )
        await self.ask(TabletServerAdminServiceStub, "CreateTablet", request)

    async def delete(self, tablet_id: TabletId, opid: OpId, target: DataState) -> None:
        request = tserver_pb2.DeleteTabletRequest(
            tablet_id=id_to_pb(tablet_id),
            replica_id=1,
            target=common_pb2.DataStatePB.ValueType(target),
            cas_config_opid_index_less_or_equal=1 << 40,
            catalog_opid=opid_to_pb(opid),
        )
        await self.ask(TabletServerAdminServiceStub, "DeleteTablet", request)

    async def drive(self, epoch: int, tablet_id: str = "", reason: str = "") -> Code:
        """What an order of a driver with this epoch meets: to write a tablet's configuration anew. "": of one that is not here."""
        request = consensus_pb2.BulkChangeConfigRequest(
            tablet_id=id_to_pb(tablet_id or new_id()),
            driver_epoch=epoch,
            reason=reason,
            type=consensus_pb2.MODIFY_PEER,
            peer=peer_to_pb(Peer(self.options.node_id, ReplicaId(1), self.node.address)),
        )
        if tablet_id:
            replica = self.node.replicas.get(tablet_id)
            await wait_until(lambda: replica.state is ReplicaState.RUNNING)
            request.cas_config_opid_index = replica.config.opid_index
        try:
            await self.ask(ConsensusServiceStub, "BulkChangeConfig", request)
        except SteleError as exc:
            return exc.code
        return Code.OK


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Alone]:
    made = Alone(tmp_path)
    await made.start()
    try:
        yield made
    finally:
        await made.node.stop()


async def stale(order: object) -> bool:
    with pytest.raises(Rejected) as refused:
        await order  # type: ignore[misc]
    return refused.value.code is Code.STALE_EPOCH


async def test_orders_of_a_replaced_catalog_leader_are_refused(alone: Alone) -> None:
    one, two = TabletId(new_id()), TabletId(new_id())
    await alone.create(one, OpId(7, 1))
    assert await stale(alone.create(two, OpId(6, 99)))
    await alone.restart()
    assert await stale(alone.create(two, OpId(6, 99)))
    assert await stale(alone.delete(one, OpId(6, 99), DataState.DELETED))
    await alone.create(two, OpId(7, 1))
    assert len(alone.node.replicas) == 2


async def test_an_older_order_about_the_same_tablet_is_refused(alone: Alone) -> None:
    """Orders about other tablets may overtake each other: they leave the master side by side."""
    one, two = TabletId(new_id()), TabletId(new_id())
    await alone.create(one, OpId(7, 5))
    await alone.delete(one, OpId(7, 9), DataState.DELETED)
    assert await stale(alone.create(one, OpId(7, 6)))
    await alone.delete(one, OpId(7, 9), DataState.DELETED)  # again: its answer was lost
    await alone.create(two, OpId(7, 8))
    assert not alone.node.replicas.holds(one) and alone.node.replicas.holds(two)


async def test_a_deletion_that_overtook_the_order_to_make_a_tablet_refuses_it(alone: Alone) -> None:
    """There was nothing to delete yet, and the late order made a replica of a tablet that nobody wants."""
    one, two = TabletId(new_id()), TabletId(new_id())
    await alone.delete(one, OpId(7, 9), DataState.DELETED)
    assert await stale(alone.create(one, OpId(7, 6)))
    await alone.create(two, OpId(6, 8))  # and fences nobody else
    assert not alone.node.replicas.holds(one) and alone.node.replicas.holds(two)


async def test_a_tablet_that_was_deleted_is_not_made_again_after_a_restart(alone: Alone) -> None:
    tablet = TabletId(new_id())
    await alone.create(tablet, OpId(7, 5))
    await alone.delete(tablet, OpId(7, 9), DataState.DELETED)
    await alone.restart()
    assert await stale(alone.create(tablet, OpId(7, 6)))
    assert not alone.node.replicas.holds(tablet)


async def test_orders_of_a_replaced_driver_are_refused(alone: Alone) -> None:
    tablet = TabletId(new_id())
    await alone.create(tablet, OpId(7, 5))
    assert await alone.drive(5, tablet) is Code.OK
    assert await alone.drive(0, tablet) is Code.OK
    assert await alone.drive(4, tablet) is Code.STALE_EPOCH
    await alone.restart()
    assert await alone.drive(4, tablet) is Code.STALE_EPOCH
    assert await alone.drive(5, tablet) is Code.OK


async def test_an_order_without_an_epoch_is_an_administrators_and_says_so(alone: Alone) -> None:
    """In the log, where somebody looks who asks why a configuration changed."""
    tablet = TabletId(new_id())
    await alone.create(tablet, OpId(7, 5))
    for epoch, told in ((3, "new disk"), (0, "an administrator's order: new disk")):
        with capture_logs() as logs:
            assert await alone.drive(epoch, tablet, "new disk") is Code.OK
        causes = {line["cause"] for line in logs if line["event"] == "configuration"}
        assert causes and all(cause.startswith(f"{told}: ") for cause in causes), causes


HUGE = 1 << 62


async def test_an_order_that_was_not_carried_out_fences_nobody(alone: Alone) -> None:
    """One with huge numbers, about a tablet that is not here, made every later order STALE_EPOCH for ever."""
    here, other = TabletId(new_id()), TabletId(new_id())
    await alone.create(here, OpId(7, 5))
    for epoch in (6, 6 + FENCE_STEP_MAX, HUGE):
        assert await alone.drive(epoch) is not Code.OK
    for term in (8, HUGE):
        for target in (DataState.DELETED, DataState.TOMBSTONED):
            with contextlib.suppress(Retryable):
                await alone.delete(other, OpId(term, HUGE), target)
    with contextlib.suppress(Retryable):
        await alone.create(here, OpId(7, HUGE))  # it is there already
    for _ in range(2):
        assert await alone.drive(1, here) is Code.OK
        await alone.create(TabletId(new_id()), OpId(7, 6))
        await alone.restart()


async def test_an_order_far_ahead_of_what_was_heard_waits_for_a_heartbeat(alone: Alone) -> None:
    tablet, far = TabletId(new_id()), 1_000_000
    with pytest.raises(Retryable, match="it learns the newest from its next heartbeat"):
        await alone.create(tablet, OpId(far, 5))
    alone.node.fences.learned(far, far)
    await alone.create(tablet, OpId(far, 5))
    assert await alone.drive(far + FENCE_STEP_MAX + 1, tablet) is Code.NOT_READY
    assert await alone.drive(far, tablet) is Code.OK


async def test_heartbeats_lead_the_fences_up_in_steps_whatever_they_tell(alone: Alone) -> None:
    fences, tablet = alone.node.fences, TabletId(new_id())
    fences.learned(HUGE, HUGE)
    await alone.create(tablet, OpId(TERM_JUMP_MAX, 1))
    fences.learned(TERM_JUMP_MAX * 2, TERM_JUMP_MAX * 2)
    assert await stale(alone.create(tablet, OpId(TERM_JUMP_MAX, 2)))


async def test_an_order_under_way_keeps_older_ones_out(alone: Alone) -> None:
    fences, tablet = alone.node.fences, TabletId(new_id())
    with fences.of_driver(5), fences.of_catalog(tablet, OpId(7, 9)):
        with pytest.raises(Rejected, match="has heard of epoch 5"):
            fences.of_driver(4)
        for older in (OpId(7, 8), OpId(6, 99)):
            with pytest.raises(Rejected, match=r"has heard of 7.9"):
                fences.of_catalog(tablet, older)
        fences.of_catalog(TabletId(new_id()), OpId(7, 1))
    fences.of_driver(4)
    fences.of_catalog(tablet, OpId(6, 99))


async def test_whatever_a_replaced_driver_orders_is_refused(alone: Alone) -> None:
    alone.node.fences.learned(0, 5)
    tablet_id, late = id_to_pb(new_id()), 4
    node_id = id_to_pb(new_id())
    change = consensus_pb2.BulkChangeConfigRequest(
        tablet_id=tablet_id, driver_epoch=late, type=consensus_pb2.ADD_PEER
    )
    change.peer.node_id = node_id
    copy = consensus_pb2.StartTabletCopyRequest(
        tablet_id=tablet_id,
        replica_id=2,
        source_node=node_id,
        source_address="127.0.0.1:1",
        driver_epoch=late,
    )
    down = consensus_pb2.LeaderStepDownRequest(tablet_id=tablet_id, driver_epoch=late)
    assert await stale(alone.ask(ConsensusServiceStub, "BulkChangeConfig", change))
    assert await stale(alone.ask(ConsensusServiceStub, "StartTabletCopy", copy))
    assert await stale(alone.ask(ConsensusServiceStub, "LeaderStepDown", down))
    assert not alone.node.replicas.copies


async def test_heartbeats_tell_of_new_leaders_and_drivers_and_cost_no_sync(alone: Alone) -> None:
    before = alone.node.volume.record
    alone.node.fences.learned(9, 3)
    assert alone.node.volume.record is before
    assert await alone.drive(2) is Code.STALE_EPOCH
    assert await stale(alone.create(TabletId(new_id()), OpId(8, 99)))
    await alone.create(TabletId(new_id()), OpId(9, 1))
    await alone.restart()
    assert await alone.drive(2) is Code.STALE_EPOCH


async def test_what_names_a_lower_incarnation_of_a_tablet_is_not_heard(alone: Alone) -> None:
    """After a recovery from a lost majority, who was left out of it still speaks as what the tablet was before."""
    tablet_id, node = TabletId(new_id()), alone.node
    here = Peer(alone.options.node_id, ReplicaId(1), node.address)
    other = Peer(NodeId(new_id()), ReplicaId(2), "127.0.0.1:1")
    request = tserver_pb2.CreateTabletRequest(
        tablet_id=id_to_pb(tablet_id),
        table_id=id_to_pb(new_id()),
        config=config_to_pb(Configuration(-1, (here, other))),
        kind="keyspace",
        tablet_incarnation=3,
    )
    await alone.ask(TabletServerAdminServiceStub, "CreateTablet", request)
    core = node.replicas.get(tablet_id).core
    assert core is not None
    for incarnation, term in ((2, 99), (3, 9)):
        message = consensus_pb2.ConsensusMessage(
            tablet_id=id_to_pb(tablet_id),
            from_replica=2,
            to_replica=1,
            tablet_incarnation=incarnation,
            vote=consensus_pb2.VoteRequest(
                term=term, last_logged=opid_to_pb(OpId(8, 9)), ignore_live_leader=True
            ),
        )
        node.messenger._on_message(other.node_id, message)
    await wait_until(lambda: core.status().term >= 9)
    assert core.status().term == 9
    named = {"tablet_id": id_to_pb(tablet_id), "tablet_incarnation": 2}
    for request in (
        tserver_pb2.ClientRequest(write=tserver_pb2.WriteRequest(**named)),
        tserver_pb2.ClientRequest(read=tserver_pb2.ReadRequest(**named)),
        tserver_pb2.ClientRequest(kv=tserver_pb2.KvRequest(op=tserver_pb2.KV_READ, **named)),
    ):
        with pytest.raises(Rejected) as refused:
            await alone.send(request)
        assert refused.value.code is Code.STALE_INCARNATION
    change = consensus_pb2.BulkChangeConfigRequest(
        type=consensus_pb2.ADD_PEER, peer=peer_to_pb(other), cas_config_opid_index=-1, **named
    )
    with pytest.raises(Rejected) as refused:
        await alone.ask(ConsensusServiceStub, "BulkChangeConfig", change)
    assert refused.value.code is Code.STALE_INCARNATION
