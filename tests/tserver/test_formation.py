"""A master that is formed, and one that waits for the other first masters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.consensus.replica import ReplicaState
from stele.model.errors import Code, Retryable
from stele.model.ids import CATALOG_TABLET_ID, new_id
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.tserver.formation_check import ensure_not_formed
from stele.tserver.node import Node
from stele.tserver.options import FirstMaster, NodeOptions
from tests.consensus.cluster import wait_until
from tests.harness.loopback import Loopback
from tests.tserver.local import LocalCluster


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
            "formed": lambda: node.description.formed,
            "starting": lambda: node.replicas.current(CATALOG_TABLET_ID) is not None,
        }[when]
        asking = asyncio.create_task(node.formation.confirm(masters))
        await asyncio.sleep(0)
        while not reached():
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await node.formation.confirm(masters)
        await wait_until(lambda: runs(node))
        assert node.description.formed and not node.replicas.held
    finally:
        await made.close()


def runs(node: Node) -> bool:
    catalog = node.replicas.current(CATALOG_TABLET_ID)
    return catalog is not None and catalog.state is ReplicaState.RUNNING


async def test_a_first_master_that_waits_for_the_others_is_not_ready(tmp_path: Path) -> None:
    """Nodes that start together with it send heartbeats. They come again, and nobody is told of a bug."""
    network = Loopback()
    here, silent = (FirstMaster(new_id(), f"{network.prefix}.{n}:7051") for n in (1, 2))
    options = NodeOptions(
        tmp_path, here.node_id, new_id(), here.address, role="master", first_masters=(here, silent)
    )
    waiting = asyncio.create_task(ensure_not_formed(options))
    pool = ChannelPool(Identity(cluster_id=options.cluster_id))
    heartbeat = master_pb2.TSHeartbeatRequest(node_id=id_to_pb(new_id()), incarnation=1)

    async def refusal() -> Retryable:
        with pytest.raises(Retryable) as failure:
            await pool.unary(here.address, MasterServiceStub, "TSHeartbeat", heartbeat)
        return failure.value

    try:
        while (error := await refusal()).code is Code.UNAVAILABLE:  # it does not listen yet
            await asyncio.sleep(0.05)
        assert error.code is Code.NOT_READY and "has not formatted its volume yet" in str(error), error
        assert not waiting.done()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pool.close()
