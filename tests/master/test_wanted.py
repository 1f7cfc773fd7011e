"""What is wanted of a node: who may ask for it and change it, when it ends by itself, and what earlier programs make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stele.driver.view import Wanted
from stele.driver.wire import view_from_pb
from stele.master.records import NodeRecord
from stele.master.wanted import RECORD_MS
from stele.model.errors import Code
from stele.model.ids import NodeId
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    Call,
    World,
    claimed,
    hex_of,
    one_tablet,
    ready,
    ready_again,
    refused,
    until,
    world,
)

NODE = f"{1:032x}"
HOUR_MS = 3_600_000
IN_SERVICE, DRAINED = pb.WANTED_IN_SERVICE, pb.WANTED_DRAINED
PARKED, RETIRED = pb.WANTED_PARKED, pb.WANTED_RETIRED


async def want(w: World, wanted: pb.WantedPB.ValueType, epoch: int = 0, **fields: object) -> None:
    """A wish about the first node; epoch 0: an administrator's."""
    if wanted == PARKED:
        fields.setdefault("for_ms", HOUR_MS)
    fields.setdefault("node_id", id_to_pb(NODE))
    await w.leader.WantNode(pb.WantNodeRequest(epoch=epoch, wanted=wanted, **fields), None)


async def seen(w: World, node_id: str = NODE) -> pb.NodeViewPB:
    """A node as a view shows it."""
    view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
    return next(n for n in view.nodes if hex_of(n.node_id) == node_id)


async def test_a_wish_stands_in_the_view_with_its_owner_its_reason_and_its_time(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        node = await seen(w)
        assert (node.wanted, node.wanted_by, node.wanted_left_ms) == (IN_SERVICE, "", 0)
        await want(w, PARKED, reason="new memory")
        node = await seen(w)
        assert (node.wanted, node.wanted_by, node.wanted_reason) == (PARKED, "administrator", "new memory")
        assert HOUR_MS - 10_000 < node.wanted_left_ms <= HOUR_MS
        assert node.state == pb.ACTIVE, "an older driver takes it for a node in service"
        epoch = await claimed(w)
        await want(w, DRAINED, epoch, reason="scale in", node_id=id_to_pb(f"{2:032x}"))
        node = await seen(w, f"{2:032x}")
        assert (node.wanted, node.wanted_by, node.state) == (DRAINED, "driver", pb.DRAINING)
        view = view_from_pb(await w.leader.GetClusterView(pb.GetClusterViewRequest(), None))
        assert [n.asked for n in view.nodes][:3] == [Wanted.PARKED, Wanted.DRAINED, Wanted.IN_SERVICE]


async def test_a_parked_node_gets_no_new_replica(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        free = next(n for n in w.nodes if row.config.peer_on(n) is None)
        await want(w, PARKED, node_id=id_to_pb(free))
        assert free not in [c.node_id for c in w.lead.candidates()]
        intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(free))
        epoch = await claimed(w)
        error = await refused(w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=intent), None))
        assert error.code is Code.INVALID_ARGUMENT and "parked" in str(error)
        await want(w, IN_SERVICE, node_id=id_to_pb(free))
        assert free in [c.node_id for c in w.lead.candidates()]
        await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=intent), None)


async def test_a_master_is_not_fenced(tmp_path: Path) -> None:
    """With two of three fenced, no master could take that back."""
    async with world(tmp_path) as w:
        await ready(w)
        master = f"{0xB1:032x}"
        register = pb.RegisterNodeRequest(node_id=id_to_pb(master), role="master")
        await w.leader.RegisterNode(register, Call())
        error = await refused(want(w, pb.WANTED_FENCED, for_ms=60_000, node_id=id_to_pb(master)))
        assert error.code is Code.INVALID_ARGUMENT and "only nodes can be fenced" in str(error)


@pytest.mark.parametrize("first", [DRAINED, PARKED, RETIRED])
@pytest.mark.parametrize("then", [IN_SERVICE, DRAINED, PARKED, RETIRED])
async def test_only_the_owner_changes_a_wish_or_an_administrator_who_says_override(
    tmp_path: Path, first: pb.WantedPB.ValueType, then: pb.WantedPB.ValueType
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        epoch = await claimed(w)
        await want(w, first, reason="the disk is bad")
        error = await refused(want(w, then, epoch))
        assert error.code is Code.INVALID_ARGUMENT and "an administrator asked for it" in str(error)
        assert "the disk is bad" in str(error) and (await seen(w)).wanted == first
        assert (await refused(want(w, then, epoch, override=True))).code is Code.INVALID_ARGUMENT
        await want(w, then)
        assert (await seen(w)).wanted == then
        await want(w, IN_SERVICE)

        await want(w, first, epoch)
        error = await refused(want(w, then))
        assert error.code is Code.INVALID_ARGUMENT and "the driver asked for it" in str(error)
        await want(w, then, epoch)
        await want(w, then, override=True)
        assert (await seen(w)).wanted == then


async def test_an_order_that_names_no_wish_no_time_or_a_stale_epoch_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        for call in (
            want(w, pb.WANTED_UNSPECIFIED),
            want(w, PARKED, for_ms=0),
            want(w, RETIRED, for_ms=1),
            want(w, IN_SERVICE, for_ms=1),
        ):
            assert (await refused(call)).code is Code.INVALID_ARGUMENT
        epoch = await claimed(w)
        assert (await refused(want(w, DRAINED, epoch + 1))).code is Code.STALE_EPOCH
        assert (await refused(want(w, DRAINED, node_id=id_to_pb("e" * 32)))).code is Code.NOT_FOUND
        assert (await seen(w)).wanted == IN_SERVICE


@pytest.mark.parametrize("wanted", [PARKED, DRAINED])
async def test_its_time_ends_a_wish(tmp_path: Path, wanted: pb.WantedPB.ValueType) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await want(w, wanted, for_ms=HOUR_MS)
        w.shift_ms += HOUR_MS - 30_000
        await w.beat()
        assert (await seen(w)).wanted == wanted
        w.shift_ms += 31_000
        await until(lambda: w.catalog.nodes[NODE].asked == "IN_SERVICE")
        node = await seen(w)
        assert (node.state, node.wanted_by, node.wanted_left_ms) == (pb.ACTIVE, "", 0)


async def test_a_new_leader_neither_shortens_a_time_nor_begins_it_anew(tmp_path: Path) -> None:
    """What the old leader had counted is in the row, to a minute."""
    async with world(tmp_path) as w:
        await ready(w)
        await want(w, PARKED, for_ms=HOUR_MS)
        left = passed = 0
        for turn in range(1, 4):
            w.shift_ms += HOUR_MS // 5
            passed += HOUR_MS // 5
            most = HOUR_MS - passed + turn * RECORD_MS
            await until(lambda most=most: w.catalog.nodes[NODE].left_ms <= most)
            w.shift_ms += RECORD_MS // 2  # too little to be written down
            passed += RECORD_MS // 2
            await w.elect(MASTERS[turn % 2])
            await ready_again(w)
            left = (await seen(w)).wanted_left_ms
            assert HOUR_MS - passed - 20_000 <= left <= HOUR_MS - passed + turn * RECORD_MS
        assert (await seen(w)).wanted == PARKED


async def test_a_drained_node_is_retired_by_a_driver_only_once_it_is_lost(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        epoch = await claimed(w)
        await want(w, DRAINED)
        error = await refused(w.move(NODE, pb.RETIRED, epoch=epoch))
        assert error.code is Code.INVALID_ARGUMENT and "to be drained, not retired" in str(error)
        w.shift_ms += 60_000
        await w.beat(silent=(NODE,))
        await w.move(NODE, pb.RETIRED, epoch=epoch)
        assert (await seen(w)).wanted == RETIRED
        for wanted in (IN_SERVICE, DRAINED, PARKED, RETIRED):
            assert "final" in str(await refused(want(w, wanted)))
        w.shift_ms += 2 * RECORD_MS
        await w.beat()
        assert w.catalog.nodes[NODE].state == "RETIRED"


async def test_a_node_that_is_to_retire_is_retired_by_a_driver_whoever_asked(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await want(w, RETIRED)
        assert w.catalog.nodes[NODE].state == "DRAINING"
        await w.move(NODE, pb.RETIRED, epoch=await claimed(w))
        assert w.catalog.nodes[NODE].state == "RETIRED"


async def test_a_driver_drains_for_silence_whatever_is_wanted_and_takes_back_only_what_it_asked_for(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        epoch = await claimed(w)
        await want(w, PARKED)
        error = await refused(w.move(NODE, pb.DRAINING, epoch=epoch))
        assert error.code is Code.INVALID_ARGUMENT and "an administrator wants" in str(error)
        lost = pb.SetNodeStateRequest(
            epoch=epoch, node_id=id_to_pb(NODE), state=pb.DRAINING, given_up=True, reason="lost"
        )
        await w.leader.SetNodeState(lost, None)
        node = await seen(w)
        assert node.given_up and (node.wanted, node.wanted_by) == (IN_SERVICE, "")
        await w.move(NODE, pb.ACTIVE, epoch=epoch)
        await w.move(NODE, pb.DRAINING, epoch=epoch)
        assert (await seen(w)).wanted_by == "driver"
        await w.move(NODE, pb.ACTIVE, epoch=epoch)
        assert (await seen(w)).wanted == IN_SERVICE


ACTIVE = NodeRecord(NodeId(NODE), "node", "ACTIVE")


@pytest.mark.parametrize(
    ("row", "asked", "by"),
    [
        (ACTIVE, "IN_SERVICE", ""),
        (replace(ACTIVE, wanted="PARKED", owner="driver", left_ms=1), "PARKED", "driver"),
        (replace(ACTIVE, wanted="PARKED", owner="driver"), "IN_SERVICE", ""),  # its time is over
        (replace(ACTIVE, wanted="DRAINED", owner="driver"), "IN_SERVICE", ""),  # an older program returned it
        (replace(ACTIVE, state="DRAINING"), "RETIRED", "administrator"),  # of a version without owners
        (replace(ACTIVE, state="DRAINING", wanted="PARKED", left_ms=1), "RETIRED", "administrator"),
        (replace(ACTIVE, state="DRAINING", wanted="DRAINED", owner="driver"), "DRAINED", "driver"),
        (replace(ACTIVE, state="DRAINING", given_up=True, wanted="PARKED", left_ms=1), "IN_SERVICE", ""),
        (replace(ACTIVE, state="DRAINING", wanted="of a later program"), "RETIRED", "administrator"),
        (replace(ACTIVE, state="RETIRED", wanted="PARKED", left_ms=1), "RETIRED", "administrator"),
    ],
)
def test_what_is_wanted_by_the_row_also_after_a_program_that_knows_only_states(
    row: NodeRecord, asked: str, by: str
) -> None:
    assert (row.asked, row.asked_by) == (asked, by)
    assert row.takes_replicas == (row.state == "ACTIVE" and asked == "IN_SERVICE")
