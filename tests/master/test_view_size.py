"""How many tablets there may be: for programs of the release before, as many as one message carries; then more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.catalog import Catalog
from stele.master.cluster_view import Scene, cluster_view, written_left
from stele.master.leadership import MasterOptions
from stele.master.liveness import Liveness
from stele.master.port import put
from stele.master.records import IntentRecord, NodeRecord, TableRecord, TabletRecord, key_of
from stele.master.row_encoding import encode
from stele.master.view_size import (
    ONE_MESSAGE_BYTES_MAX,
    VIEW_BYTES_MAX,
    all_view_bytes,
    view_bytes,
    wanted_replicas,
)
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, ReplicaId, TableId, TabletId
from stele.model.partition import Partition, PartitionSchema
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import OPTIONS, SCHEMA, create_request, ready, refused, world

LARGE = (1 << 63) - 1
NODES = [NodeId(f"{n:032x}") for n in range(1, 101)]
TABLE = TableRecord(
    TableId("e" * 32), "t" * 32, "RUNNING", SCHEMA.to_json(), PartitionSchema().to_json(), 3, "table", LARGE
)


def address(node_id: NodeId) -> str:
    """As long as an address of IPv6 is."""
    return f"[2001:0db8:0000:0000:0000:0000:0000:{node_id[-4:]}]:7050"


def status(row: TabletRecord, number: int) -> common_pb2.ReplicaStatusPB:
    """All that a replica that is well has to tell, in large numbers."""
    opid = common_pb2.OpIdPB(term=1 << 30, index=1 << 50)
    others = [p.replica_id for p in row.config.peers[1:]] if number == 0 else []
    return common_pb2.ReplicaStatusPB(
        tablet_id=id_to_pb(row.tablet_id),
        table_id=id_to_pb(row.table_id),
        replica_id=row.config.peers[number].replica_id,
        state=common_pb2.RUNNING,
        data_state=common_pb2.READY,
        role=common_pb2.LEADER if number == 0 else common_pb2.FOLLOWER,
        term=1 << 30,
        leader_node=id_to_pb(row.config.peers[0].node_id),
        committed_config=config_to_pb(row.config),
        last_logged=opid,
        last_committed=opid,
        last_applied=opid,
        schema_version=1,
        bytes_on_disk=1 << 40,
        rows_estimate=1 << 40,
        has_data=True,
        peers=[
            common_pb2.PeerHealthPB(replica_id=r, match_index=1 << 50, last_heard_ms=1 << 20, unreached=True)
            for r in others
        ],
        tablet_incarnation=1,
    )


def tombstone(row: TabletRecord, replica_id: int) -> common_pb2.ReplicaStatusPB:
    """What is left of a replica that was removed, as its node tells it."""
    return common_pb2.ReplicaStatusPB(
        tablet_id=id_to_pb(row.tablet_id),
        replica_id=replica_id,
        state=common_pb2.STOPPED,
        data_state=common_pb2.TOMBSTONED,
        role=common_pb2.NON_PARTICIPANT,
        term=1 << 30,
        last_logged=common_pb2.OpIdPB(term=1 << 30, index=1 << 50),
        table_id=id_to_pb(row.table_id),
    )


def scene_of(
    table: TableRecord, tablets: int, removed: Iterable[int] = (), intents: tuple[IntentRecord, ...] = ()
) -> Scene:
    """A cluster of one table, with replicas 1000 and on; `removed`: of each tablet these were, each from some node."""
    rows = []
    for n in range(tablets):
        peers = tuple(
            Peer(node, ReplicaId(1_000 + i), address(node))
            for i, node in enumerate(NODES[(n + i) % len(NODES)] for i in range(table.replication_factor))
        )
        config = Configuration(1 << 50, peers)
        rows.append(
            TabletRecord(
                tablet(n), table.table_id, n, "RUNNING", Partition(), LARGE, config, 1 << 30, NODES[0], 2_000
            )
        )
    nodes = [NodeRecord(n, "node", "ACTIVE", True, f"node-{n[-4:]}", address(n)) for n in NODES]
    catalog = Catalog((key_of(r), encode(r)) for r in (*nodes, table, *rows, *intents))
    liveness = Liveness(0)
    told: dict[NodeId, list[common_pb2.ReplicaStatusPB]] = {n: [] for n in NODES}
    for row in rows:
        for number, peer in enumerate(row.config.peers):
            if peer.replica_id not in removed:
                told[peer.node_id].append(status(row, number))
        for replica_id in removed:
            member = row.config.peer(ReplicaId(replica_id))
            holder = member.node_id if member is not None else NODES[replica_id % len(NODES)]
            told[holder].append(tombstone(row, replica_id))
    for sequence, (node, reports) in enumerate(told.items(), 1):
        beat = pb.TSHeartbeatRequest(
            node_id=id_to_pb(node), incarnation=1, sequence=sequence, has_report=True, tablets=reports
        )
        liveness.heard(beat, 1)
        asyncio.run(liveness.merge(beat, 1))
    config = Configuration(-1, ())
    return Scene(catalog, liveness, MasterOptions(), 1 << 20, LARGE, NODES[0], 1, config, True, written_left)


def tablet(n: int) -> TabletId:
    return TabletId(f"{n + 1:032x}")


@pytest.mark.parametrize("rf", [1, 3, 5, 7])
def test_a_view_of_as_many_tablets_as_the_release_before_sees_fits_into_a_message(rf: int) -> None:
    table = replace(TABLE, replication_factor=rf)
    tablets = ONE_MESSAGE_BYTES_MAX // view_bytes(table, 1)
    while view_bytes(table, tablets + 1) <= ONE_MESSAGE_BYTES_MAX:
        tablets += 1
    view = cluster_view(scene_of(table, tablets), "c" * 32)
    assert len(view.tablets) == tablets and sum(len(t.replicas) for t in view.tablets) == tablets * rf
    assert view.ByteSize() <= view_bytes(table, tablets) + 500 * len(NODES)
    assert view.ByteSize() <= MESSAGE_BYTES_MAX * 4 // 5


def test_replicas_that_were_removed_do_not_make_a_view_grow() -> None:
    """Each took 80 bytes of it for as long as its tablet lived: 300,000 of them, and nobody had a view any more."""
    scene = scene_of(TABLE, 100, removed=range(1, 51))
    view = cluster_view(scene, "c" * 32)
    assert [len(t.replicas) for t in view.tablets] == [3] * 100
    assert view.ByteSize() <= view_bytes(TABLE, 100) + 500 * len(NODES)
    assert len(scene.liveness.reports_of(tablet(0))) == 53  # by which rows of deleted tablets are judged


def test_a_removed_replica_is_told_that_a_configuration_or_an_intent_names() -> None:
    """Drivers look for another in its place; of all others nobody has a question."""
    intent = IntentRecord(tablet(0), ReplicaId(7), NODES[7], "add", 1, 1, LARGE)
    view = cluster_view(scene_of(TABLE, 2, removed=(6, 7, 1_002), intents=(intent,)), "c" * 32)
    removed = [
        [r.status.replica_id for r in t.replicas if r.status.data_state == common_pb2.TOMBSTONED]
        for t in view.tablets
    ]
    assert removed == [[1_002, 7], [1_002]]


async def test_a_table_that_no_view_would_have_room_for_is_refused_until_others_are_deleted(
    tmp_path: Path,
) -> None:
    options = replace(
        OPTIONS, tablets_per_node_max=100_000, alive_ms=3_600_000
    )  # nobody beats between the calls
    async with world(tmp_path, options) as w:
        await ready(w)
        fitting = VIEW_BYTES_MAX * 2 // 3 // (view_bytes(TABLE, 2) - view_bytes(TABLE, 1))
        first = create_request("first", buckets=fitting, table_id="d" * 32)
        await w.leader.CreateTable(first, None)
        error = await refused(w.leader.CreateTable(create_request("second", buckets=fitting), None))
        assert error.code is Code.TOO_LARGE and "but masters and drivers hold at most" in str(error)
        await w.leader.CreateTable(first, None)  # done already
        await w.leader.CreateTable(create_request("small", buckets=2), None)
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="first"), None)
        await w.leader.CreateTable(create_request("second", buckets=fitting), None)


async def test_requests_that_come_at_once_keep_to_the_bound_together(tmp_path: Path) -> None:
    """Each was checked before the others were on record."""
    options = replace(OPTIONS, tablets_per_node_max=100_000, alive_ms=3_600_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        fitting = VIEW_BYTES_MAX * 11 // 20 // (view_bytes(TABLE, 2) - view_bytes(TABLE, 1))
        await w.leader.CreateTable(create_request("grows", buckets=fitting, rf=1), None)
        told = await asyncio.gather(
            *(w.leader.CreateTable(create_request(f"t{n}", buckets=fitting), None) for n in range(2)),
            w.leader.SetReplicationFactor(
                pb.SetReplicationFactorRequest(name="grows", replication_factor=3), None
            ),
            return_exceptions=True,
        )
        errors = [error for error in told if isinstance(error, Rejected)]
        assert all(error.code is Code.TOO_LARGE for error in errors), errors
        assert all_view_bytes(w.catalog) <= VIEW_BYTES_MAX and len(errors) == 2


async def test_replicas_that_are_asked_for_at_once_keep_to_what_nodes_may_have(tmp_path: Path) -> None:
    """Those without a place did not count."""
    options = replace(OPTIONS, tablets_per_node_max=6, alive_ms=3_600_000)  # 30 on five nodes
    async with world(tmp_path, options) as w:
        await ready(w)
        await w.leader.CreateTable(create_request("a", buckets=4, rf=1), None)
        await w.leader.CreateTable(create_request("b", buckets=4, rf=1), None)
        told = await asyncio.gather(
            *(w.leader.CreateTable(create_request(f"t{n}", buckets=4), None) for n in range(2)),
            *(
                w.leader.SetReplicationFactor(
                    pb.SetReplicationFactorRequest(name=n, replication_factor=3), None
                )
                for n in ("a", "b")
            ),
            return_exceptions=True,
        )
        errors = [str(error) for error in told if isinstance(error, Rejected)]
        assert wanted_replicas(w.catalog) == 28 and len(errors) == 2
        assert "12 more replicas would make 32 on 5 nodes, of at most 6 each; use fewer" in errors[0]
        assert "'b': 8 more replicas would make 36 on 5 nodes" in errors[1]


def test_ten_thousand_tablets_of_a_thousand_tables_may_be_made() -> None:
    assert 1_000 * view_bytes(replace(TABLE, name="t" * 60), 10) <= VIEW_BYTES_MAX


async def test_what_the_release_before_could_not_see_waits_until_it_cannot_come_back(tmp_path: Path) -> None:
    """Its operator and its drivers read the whole view in one message, and would know nothing any more."""
    options = replace(OPTIONS, tablets_per_node_max=100_000, alive_ms=3_600_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        cluster = w.catalog.cluster
        await w.lead.commit([put(replace(cluster, cluster_version=1))])
        many = ONE_MESSAGE_BYTES_MAX * 5 // 4 // (view_bytes(TABLE, 2) - view_bytes(TABLE, 1))
        error = await refused(w.leader.CreateTable(create_request("large", buckets=many), None))
        assert error.code is Code.UNSUPPORTED_VERSION and "stele cluster finalize" in str(error)
        await w.leader.CreateTable(create_request("small", buckets=2), None)
        await w.lead.commit([put(replace(cluster, cluster_version=2))])
        await w.leader.CreateTable(create_request("large", buckets=many), None)
