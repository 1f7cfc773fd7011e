"""A node that is gone for good is forgotten when an administrator says so, and only then."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from stele.master.records import NodeRecord
from stele.model.errors import Code
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    World,
    claimed,
    one_tablet,
    ready,
    ready_again,
    refused,
    world,
)

ALIVE_MS = 300
OPTIONS_ = replace(OPTIONS, alive_ms=ALIVE_MS)


def forget(node_id: str) -> pb.SetNodeStateRequest:
    return pb.SetNodeStateRequest(node_id=id_to_pb(node_id), state=pb.RETIRED, reason="gone", forget=True)


async def silent(w: World, node_id: str) -> None:
    """Time passes, in which all but this node are heard."""
    w.shift_ms += 2 * ALIVE_MS
    await w.beat(silent=(node_id,))


async def forgotten_halfway(w: World, node_id: str) -> NodeRecord:
    """A leader dies between its two commits that forget a silent node. The node's row under the next leader."""
    await silent(w, node_id)
    call = asyncio.ensure_future(refused(w.leader.SetNodeState(forget(node_id), None)))
    while w.catalog.nodes[node_id].reason != "gone":
        await asyncio.sleep(0)
    w.group.lose_next = "lost"
    assert (await call).code is Code.UNKNOWN_OUTCOME
    await w.elect(MASTERS[1])
    await ready_again(w)
    row = w.catalog.nodes[node_id]
    assert row.state == "DRAINING"
    return row


async def test_a_silent_node_that_nothing_names_is_forgotten(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        gone = next(n for n in w.nodes if row.config.peer_on(n) is None)
        await silent(w, gone)
        await w.leader.SetNodeState(forget(gone), None)
        assert w.catalog.nodes[gone].state == "RETIRED"
        await w.leader.SetNodeState(forget(gone), None)  # an answer may have been lost


async def test_a_node_that_is_heard_or_named_is_not_forgotten_and_stays_as_it_was(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        free = [n for n in w.nodes if row.config.peer_on(n) is None]
        await silent(w, "")
        error = await refused(w.leader.SetNodeState(forget(free[0]), None))
        assert error.code is Code.UNSAFE_CHANGE and "sends heartbeats" in str(error)
        member = row.config.peers[0].node_id
        await silent(w, member)
        error = await refused(w.leader.SetNodeState(forget(member), None))
        assert error.code is Code.UNSAFE_CHANGE and "the configuration of tablet" in str(error)
        await w.beat()
        intent = pb.IntentPB(
            tablet_id=id_to_pb(row.tablet_id),
            target_node=id_to_pb(free[0]),
            source_node=id_to_pb(member),
            kind="add",
            config_index=row.config.opid_index,
        )
        await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=await claimed(w), intent=intent), None)
        await silent(w, free[0])
        error = await refused(w.leader.SetNodeState(forget(free[0]), None))
        assert error.code is Code.UNSAFE_CHANGE and "the intent on tablet" in str(error)
        assert {n.state for n in w.catalog.nodes.values()} == {"ACTIVE"}
        error = await refused(w.leader.SetNodeState(forget("e" * 32), None))
        assert error.code is Code.NOT_FOUND


async def test_a_leader_that_has_just_begun_to_listen_calls_nobody_silent(tmp_path: Path) -> None:
    async with world(tmp_path, replace(OPTIONS, alive_ms=3_600_000)) as w:
        await ready(w)
        gone = next(iter(w.nodes))
        w.shift_ms += 10
        w.lead.liveness.begin_leading(w.lead.now_ms())
        error = await refused(w.leader.SetNodeState(forget(gone), None))
        assert error.code is Code.NOT_READY


async def test_a_leader_that_dies_halfway_leaves_a_node_that_returns_once_it_is_heard(tmp_path: Path) -> None:
    """Nobody wanted it drained: it must not need an administrator to serve again."""
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        gone = next(n for n in w.nodes if row.config.peer_on(n) is None)
        assert (await forgotten_halfway(w, gone)).returns


async def test_a_node_that_somebody_drained_stays_drained_if_the_leader_dies_halfway(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        gone = next(n for n in w.nodes if row.config.peer_on(n) is None)
        await w.move(gone, pb.DRAINING)
        assert not (await forgotten_halfway(w, gone)).returns
