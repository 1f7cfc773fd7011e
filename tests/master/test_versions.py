"""The cluster version: what waits for it, who keeps it from being finalized, and who is refused afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.port import swap
from stele.master.records import ClusterRecord
from stele.master.row_encoding import decode, encode
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.partition import PartitionSchema
from stele.model.ranges import of_ranges
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import partitioning_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    CLUSTER,
    MASTERS,
    Call,
    Node,
    World,
    create_request,
    heartbeat,
    made,
    ready,
    refused,
    world,
)

ASK = pb.FinalizeClusterVersionRequest()


async def upgraded(w: World) -> None:
    """As after an upgrade that is not finalized: nodes and masters that answer, and a catalog of release 0.1.0."""
    w.nodes |= {m: Node(m, f"machine-{m[:2]}", "z1") for m in MASTERS}
    for master in MASTERS:
        w.nodes[master].role = "master"
    await ready(w)
    lead = w.lead
    cluster = lead.catalog.cluster
    assert cluster is not None and cluster.cluster_version == CLUSTER_VERSION
    await lead.do(lead.commit([swap(cluster, replace(cluster, cluster_version=1))]))


def some_node(w: World) -> Node:
    """The first that is no master."""
    return next(n for n in w.nodes.values() if n.role == "node")


def new_requests(w: World) -> dict[str, object]:
    """One request for each thing that release 0.1.0 would misread. A recovery is apart: test_recovering.py."""
    node_id = id_to_pb(some_node(w).node_id)
    tablet_id = id_to_pb(next(t for t in w.catalog.current if t != CATALOG_TABLET_ID))
    add = pb.AlterStepPB()
    add.add_column.name, add.add_column.type, add.add_column.nullable = "more", "int64", True
    wants = {
        f"WantNode {pb.WantedPB.Name(wanted)}": pb.WantNodeRequest(
            node_id=node_id, wanted=wanted, for_ms=60_000, reason="test"
        )
        for wanted in (pb.WANTED_DRAINED, pb.WANTED_PARKED, pb.WANTED_FENCED)
    }
    gaps = create_request("gaps")
    ranged = of_ranges((0,), [(b"a", b"f"), (b"m", b"t")])
    gaps.partitioning.CopyFrom(partitioning_to_pb(PartitionSchema((), ranged)))
    noted, kept = create_request("noted"), create_request("kept")
    noted.owner, kept.schema.history_ms = "ops", 3_600_000
    return wants | {
        "CreateTable with gaps": gaps,
        "CreateTable with an owner": noted,
        "CreateTable with a history retention": kept,
        "AlterTable of an owner": pb.AlterTableRequest(name="t", owner="ops"),
        "AlterTable of the history": pb.AlterTableRequest(
            name="t", steps=[pb.AlterStepPB(set_history_ms=60_000)]
        ),
        "AlterTable": pb.AlterTableRequest(name="t", steps=[add]),
        "SetReplicationFactor": pb.SetReplicationFactorRequest(name="t", replication_factor=1),
        "SetMasterCount": pb.SetMasterCountRequest(masters=1),
        "PlaceTablet": pb.PlaceTabletRequest(tablet_id=tablet_id, what=pb.ADD_REPLICA, replicas=4),
    }


async def test_what_is_new_waits_until_it_is_finalized(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await upgraded(w)
        await made(w)
        before = {n.node_id: n for n in w.catalog.nodes.values()}
        for name, request in new_requests(w).items():
            error = await refused(getattr(w.leader, name.split()[0])(request, Call()))
            assert error.code is Code.UNSUPPORTED_VERSION, name
            assert "stele cluster finalize" in str(error) and "has 1" in str(error), name
        assert {n.node_id: n for n in w.catalog.nodes.values()} == before
        assert not w.catalog.altering
        assert [t.name for t in w.catalog.tables.values()] == ["t"]
        answer = await w.leader.FinalizeClusterVersion(ASK, Call())
        assert answer.cluster_version == CLUSTER_VERSION
        await w.leader.AlterTable(new_requests(w)["AlterTable"], Call())
        assert w.catalog.altering


async def test_what_release_0_1_0_reads_needs_no_new_version(tmp_path: Path) -> None:
    """Tables are made and renamed, nodes retired, the policy set."""
    async with world(tmp_path) as w:
        await upgraded(w)
        await made(w)
        await w.leader.AlterTable(pb.AlterTableRequest(name="t", new_name="u"), Call())
        node_id = id_to_pb(some_node(w).node_id)
        for wanted in (pb.WANTED_RETIRED, pb.WANTED_IN_SERVICE):
            await w.leader.WantNode(pb.WantNodeRequest(node_id=node_id, wanted=wanted), Call())
        assert w.catalog.cluster_version == 1


@pytest.mark.parametrize("who", ["node", "master"])
async def test_a_member_that_lags_is_named(tmp_path: Path, who: str) -> None:
    """Also a silent one, since nobody knows what it runs."""
    async with world(tmp_path) as w:
        await upgraded(w)
        lagging = next(n for n in w.nodes.values() if n.role == who)
        lagging.cluster_version, lagging.version = 0, "0.1.0"
        await w.beat()
        error = await refused(w.leader.FinalizeClusterVersion(ASK, Call()))
        assert error.code is Code.UNSAFE_CHANGE and w.catalog.cluster_version == 1
        assert f"{who} {lagging.node_id[:8]} runs release 0.1.0, which reads cluster version 1" in str(error)
        lagging.cluster_version = CLUSTER_VERSION
        await w.beat()
        w.shift_ms += 5_000
        await w.beat(silent=(lagging.node_id,))
        error = await refused(w.leader.FinalizeClusterVersion(ASK, Call()))
        assert f"{who} {lagging.node_id[:8]} is silent" in str(error) and w.catalog.cluster_version == 1
        await w.beat()
        for _ in range(2):  # a repeated request changes nothing
            answer = await w.leader.FinalizeClusterVersion(ASK, Call())
            assert answer.cluster_version == w.catalog.cluster_version == CLUSTER_VERSION


async def test_a_new_leader_asks_what_everybody_runs(tmp_path: Path) -> None:
    """The rows may be of before a rollback."""
    async with world(tmp_path) as w:
        await upgraded(w)
        await w.elect(MASTERS[1])
        w.shift_ms += 1_000  # it is settled
        error = await refused(w.leader.FinalizeClusterVersion(ASK, Call()))
        assert isinstance(error, Retryable | Rejected) and w.catalog.cluster_version == 1
        await w.beat()
        await w.leader.FinalizeClusterVersion(ASK, Call())
        assert w.catalog.cluster_version == CLUSTER_VERSION


async def test_retired_nodes_keep_nobody_waiting(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await upgraded(w)
        gone = some_node(w)
        for state in (pb.DRAINING, pb.RETIRED):
            await w.move(gone.node_id, state)
        del w.nodes[gone.node_id]
        w.shift_ms += 5_000
        await w.beat()
        await w.leader.FinalizeClusterVersion(ASK, Call())
        assert w.catalog.cluster_version == CLUSTER_VERSION


async def test_a_member_of_an_earlier_version_is_refused_once_it_is_finalized(tmp_path: Path) -> None:
    """By every master, with what to do. Upgraded on the same volume it is heard again."""
    async with world(tmp_path) as w:
        await upgraded(w)
        old = some_node(w)
        old.cluster_version, old.version = 0, "0.1.0"
        await w.beat()  # before, it is as welcome as any
        old.cluster_version = CLUSTER_VERSION
        await w.beat()
        await w.leader.FinalizeClusterVersion(ASK, Call())
        old.cluster_version, old.incarnation = 0, 2
        for service in w.services.values():
            error = await refused(heartbeat(service, old.heartbeat(10_000)))
            assert error.code is Code.UNSUPPORTED_VERSION
            for part in ("release 0.1.0", "cluster version 1", "2 is finalized", "on the same volume"):
                assert part in str(error)
        old.cluster_version, old.incarnation = CLUSTER_VERSION, 3
        await w.beat()
        assert w.lead.is_alive(w.catalog.nodes[old.node_id])


async def test_no_master_finalizes_what_it_cannot_read(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await upgraded(w)
        later = pb.FinalizeClusterVersionRequest(cluster_version=CLUSTER_VERSION + 1)
        error = await refused(w.leader.FinalizeClusterVersion(later, Call()))
        assert error.code is Code.UNSUPPORTED_VERSION and w.catalog.cluster_version == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda row: bytes([CLUSTER_VERSION + 1]) + row[1:], Rejected),
        (lambda row: bytes([0]) + row[1:], Corrupt),
    ],
)
def test_the_row_of_the_cluster_stops_masters_of_an_earlier_version(
    change: Callable[[bytes], bytes], error: type[Exception]
) -> None:
    """Its version byte is the cluster version: release 0.1.0 reads 1 alone, and ends at any other."""
    before, after = (encode(ClusterRecord(CLUSTER, version, 3)) for version in (1, CLUSTER_VERSION))
    assert (before[0], after[0]) == (1, CLUSTER_VERSION)
    assert decode(ClusterRecord, after).cluster_version == CLUSTER_VERSION
    with pytest.raises(error):
        decode(ClusterRecord, change(after))
