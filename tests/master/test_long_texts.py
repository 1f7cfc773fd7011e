"""Long texts in the catalog and in heartbeats: the view of the cluster stays one message, and no node is lost for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stele.driver.wire import view_from_pb
from stele.master.port import insert, put
from stele.master.records import ClaimRecord, NodeRecord
from stele.model.bounds import NODE_NAME_CHARS_MAX, PLACE_CHARS_MAX, TEXT_CHARS_MAX
from stele.model.ids import NodeId, TabletId, new_id
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import OPTIONS, heartbeat, made, ready, world

LONG = "n" * 6_000_000


async def test_rows_of_a_time_before_the_bounds_are_cut_for_display(tmp_path: Path) -> None:
    """Three names of 6 MB made the view exceed 16 MiB for ever; a claim's time beyond 64 bits made it fail for ever."""
    async with world(tmp_path, OPTIONS) as w:
        await ready(w)
        rows = [
            NodeRecord(NodeId(new_id()), "node", "ACTIVE", name=LONG, machine="m" * 1_000) for _ in range(3)
        ]
        for row in rows:
            await w.lead.commit([insert(row)])
        claim = replace(w.lead.catalog.claim, holder="h" * 10_000, epoch=1, expires_us=1 << 80)
        assert isinstance(claim, ClaimRecord)
        await w.lead.commit([put(claim)])
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        assert view.ByteSize() < MESSAGE_BYTES_MAX // 16
        found = {n.name for n in view.nodes if n.node_id in [id_to_pb(row.node_id) for row in rows]}
        assert found == {"n" * (NODE_NAME_CHARS_MAX - 3) + "..."}


async def test_long_texts_of_a_heartbeat_are_cut_and_its_node_is_heard(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        tablet = TabletId(new_id())
        status = common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(tablet), replica_id=1, state=common_pb2.FAILED, error=LONG
        )
        status.copy.error = LONG
        large = common_pb2.ReplicaStatusPB(tablet_id=id_to_pb(tablet), replica_id=2)
        large.peers.extend([common_pb2.PeerHealthPB(replica_id=1, match_index=1 << 50)] * 10_000)
        request = node.heartbeat(1_000_000)
        request.registration.machine = LONG
        request.registration.version = LONG
        request.tablets.extend([status, large])
        answer = await heartbeat(w.leader, request)
        assert answer.is_leader
        liveness = w.masters[w.group.leader].liveness
        life = liveness.nodes[node.node_id]
        assert life.registration is not None and len(life.registration.machine) == PLACE_CHARS_MAX
        told = (r for t in life.tablets for r in liveness.reports_of(t) if r.node_id == node.node_id)
        reports = {report.replica_id: report.status for report in told}
        assert 2 not in reports
        assert len(reports[1].error) == len(reports[1].copy.error) == TEXT_CHARS_MAX


PEER = common_pb2.PeerPB(node_id=b"n" * 16, replica_id=1, member_type=common_pb2.VOTER)
UNREADABLE = [
    {"member_type": 9},
    {"node_id": b"short"},
    {"replica_id": (1 << 64) - 1},
]


def unreadable(index: int, **fields: object) -> common_pb2.ConfigurationPB:
    peer = common_pb2.PeerPB()
    peer.CopyFrom(PEER)
    for name, value in fields.items():
        setattr(peer, name, value)
    return common_pb2.ConfigurationPB(opid_index=index, peers=[peer])


@pytest.mark.parametrize("fields", UNREADABLE)
async def test_a_configuration_that_nobody_can_read_stops_no_other_tablet(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    """One report of it ended each look of the leader at all its tablets, and every view that a driver reads."""
    async with world(tmp_path, OPTIONS) as w:
        await ready(w)
        table = await made(w, "t")
        row, *_ = w.catalog.current_tablets(table)
        node = w.nodes[row.config.peers[0].node_id]
        node.configs[row.tablet_id] = unreadable(7, **fields)
        await w.beat()
        await made(w, "u")  # comes to run
        await w.beat()
        assert w.catalog.tablets[row.tablet_id].config == row.config
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        assert len(view_from_pb(view).tablets) >= 2


async def test_a_status_of_no_replica_is_left_out(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        request = node.heartbeat(1_000_000)
        good = common_pb2.ReplicaStatusPB(tablet_id=b"t" * 16, replica_id=1)
        request.tablets.extend(
            [
                good,
                common_pb2.ReplicaStatusPB(tablet_id=b"t" * 16, replica_id=2, leader_node=b"short"),
                common_pb2.ReplicaStatusPB(tablet_id=b"t" * 16, replica_id=3, term=1 << 63),
                common_pb2.ReplicaStatusPB(tablet_id=b"t" * 16, replica_id=(1 << 64) - 1),
                common_pb2.ReplicaStatusPB(tablet_id=b"short", replica_id=4),
            ]
        )
        assert (await heartbeat(w.leader, request)).is_leader
        liveness = w.masters[w.group.leader].liveness
        assert [
            r.replica_id for t in liveness.nodes[node.node_id].tablets for r in liveness.reports_of(t)
        ] == [1]
