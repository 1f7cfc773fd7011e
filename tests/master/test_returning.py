"""Which nodes return to service once they are heard, and which stay drained: who asked for it decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.port import swap
from stele.master.records import NodeRecord
from stele.master.row_encoding import VERSION, decode
from stele.model.errors import Code
from stele.model.ids import NodeId
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import World, claimed, hex_of, ready, refused, world

NODE = f"{1:032x}"


async def order(w: World, state: pb.NodeStatePB.ValueType, epoch: int, **fields: bool) -> None:
    """An order about the first node; epoch 0: an administrator's."""
    request = pb.SetNodeStateRequest(epoch=epoch, node_id=id_to_pb(NODE), state=state, **fields)
    await w.leader.SetNodeState(request, None)


async def returns(w: World) -> bool:
    """Whether the view says that the first node was given up for its silence."""
    view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
    return bool(next(n.given_up for n in view.nodes if hex_of(n.node_id) == NODE))


async def test_a_driver_takes_back_what_it_gave_up_and_nothing_else(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        epoch = await claimed(w)
        await order(w, pb.DRAINING, epoch, given_up=True)
        assert await returns(w)
        await order(w, pb.ACTIVE, epoch)
        assert w.catalog.nodes[NODE].state == "ACTIVE" and not await returns(w)

        await order(w, pb.DRAINING, 0)
        await order(w, pb.DRAINING, epoch, given_up=True)  # late: it is drained already, and is to stay so
        assert not await returns(w)
        error = await refused(order(w, pb.ACTIVE, epoch))
        assert error.code is Code.INVALID_ARGUMENT and "somebody asked to drain" in str(error)
        await order(w, pb.ACTIVE, 0)

        await order(w, pb.DRAINING, epoch, given_up=True)
        await order(w, pb.DRAINING, 0)  # an administrator wants it drained, whether or not it returns
        assert w.catalog.nodes[NODE].state == "DRAINING" and not await returns(w)
        assert (await refused(order(w, pb.ACTIVE, epoch))).code is Code.INVALID_ARGUMENT


async def test_a_node_that_is_heard_again_is_not_retired_by_a_driver_that_saw_it_silent(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        epoch = await claimed(w)
        await order(w, pb.DRAINING, epoch, given_up=True)
        await w.beat()
        assert (await refused(order(w, pb.RETIRED, epoch))).code is Code.NOT_READY
        w.shift_ms += 60_000
        await w.beat(silent=(NODE,))
        await order(w, pb.RETIRED, epoch)
        assert w.catalog.nodes[NODE].state == "RETIRED"
        await w.beat()
        assert "cannot become" in str(await refused(order(w, pb.ACTIVE, 0))), "RETIRED is final"


@pytest.mark.parametrize(
    ("reason", "returns_to_service"), [("declared lost, and silent", True), ("the disk is bad", False)]
)
async def test_rows_of_the_version_before_say_who_gave_a_node_up_by_their_reason(
    tmp_path: Path, reason: str, returns_to_service: bool
) -> None:
    now = NodeRecord(NodeId(NODE), "node", "DRAINING", reason=reason, formed=True)
    fields = [
        "node_id",
        "role",
        "state",
        "formed",
        "name",
        "address",
        "flight_address",
        "http_port",
        "machine",
    ]
    fields += ["zone", "version", "reason", "incarnation", "start", "log_synced"]
    row = bytes([VERSION]) + json.dumps([getattr(now, name) for name in fields]).encode()
    read = decode(NodeRecord, row)
    assert (read, read.given_up, read.returns) == (now, False, returns_to_service)
    assert not replace(read, state="RETIRED").returns
    async with world(tmp_path) as w:
        await ready(w)
        present = w.catalog.nodes[NODE]
        await w.lead.commit([swap(present, replace(present, state="DRAINING", reason=reason))])
        assert await returns(w) is returns_to_service
