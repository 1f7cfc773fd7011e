"""Loads in heartbeats: bounded, shown, kept in memory only; nodes of an earlier release tell none."""

from __future__ import annotations

from pathlib import Path

from stele.driver.wire import view_from_pb
from stele.model.bounds import LOAD_MAX
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import OPTIONS, heartbeat, made, ready, world

MOST = (1 << 32) - 1


async def test_loads_are_bounded_shown_and_not_written(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS) as w:
        await ready(w, 3)
        table_id = await made(w, rf=3, buckets=4)
        node = next(n for n in w.nodes.values() if any(n.replicas.values()))
        (tablet_id, replica_id) = next(key for key, leads in node.replicas.items() if leads)
        before = w.catalog.opid
        request = node.heartbeat(1 << 40)
        request.load = MOST
        for status in request.tablets:
            if status.role == common_pb2.LEADER:
                status.load = MOST
        assert (await heartbeat(w.leader, request)).is_leader
        view = view_from_pb(await w.leader.GetClusterView(pb.GetClusterViewRequest(), None))
        tablet, seen = view.tablet(tablet_id), view.node(node.node_id)
        assert tablet is not None and seen is not None and tablet.table_id == table_id
        told = {r.replica_id: r.load for r in tablet.replicas}
        assert told[replica_id] == LOAD_MAX and sum(told.values()) == LOAD_MAX
        assert seen.load == LOAD_MAX
        others = [n for n in view.nodes if n.role == "node" and n.node_id != node.node_id]
        assert others and all(n.load is None for n in others), "they tell none"
        assert w.catalog.opid == before
        request = node.heartbeat((1 << 40) + 1)
        request.load = 0
        await heartbeat(w.leader, request)
        view = view_from_pb(await w.leader.GetClusterView(pb.GetClusterViewRequest(), None))
        again = view.node(node.node_id)
        assert again is not None and again.load == 0
