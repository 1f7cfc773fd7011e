"""Answers built from catalog and liveness: the cluster view, table and tablet locations. Pure reads; called
by service.py.

Invariant: a view is built in one step of the event loop, so it shows one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from stele.driver.policy import Policy
from stele.driver.view import DROPPED_MARK, Away, Holder
from stele.driver.wire import copy_record_to_pb, holding_to_pb
from stele.master.catalog import GONE_TABLES, Catalog
from stele.master.heartbeat_bounds import bound_registration
from stele.master.leadership import MasterOptions
from stele.master.liveness import Liveness, Report
from stele.master.records import (
    ClaimRecord,
    IntentRecord,
    NodeRecord,
    PolicyRecord,
    RecoveryRecord,
    TableRecord,
    TabletRecord,
)
from stele.model.bounds import (
    HOLDER_CHARS_MAX,
    NODE_NAME_CHARS_MAX,
    PLACE_CHARS_MAX,
    WALL_US_MAX,
    WORD_CHARS_MAX,
    cut,
)
from stele.model.by_hand import ByHand
from stele.model.config import Configuration, Peer
from stele.model.copies import of_members
from stele.model.errors import Code, Rejected
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.convert import config_to_pb, id_to_pb, opid_to_pb, peer_to_pb
from stele.rpc.convert_schema import partition_to_pb, partitioning_to_pb, schema_to_pb
from stele.rpc.proto import common_pb2, master_pb2

CATALOG_NAME = "(catalog)"
TEXT_OF_HAND_CHARS_MAX = 200
"""The most characters of the reason for a placement by hand. Each view shows the reason until the placement
is released.
"""
T = TypeVar("T")


def written_left(row: NodeRecord) -> int:
    """The time in ms that a node's wanted state still lasts, as its row says. Masters that do not lead use
    it, because they count no time.
    """
    return row.left_ms


def written_keep_left(row: TableRecord) -> int:
    """The time in ms that a dropped table can still be recalled, as its row says. See `written_left`."""
    return row.keep_ms


@dataclass(frozen=True, slots=True)
class Scene:
    """The sources of an answer. `catalog_config` and `leader` are those of the catalog tablet itself, from
    its log."""

    catalog: Catalog
    liveness: Liveness
    options: MasterOptions
    now_ms: int
    wall_us: int
    leader: str
    term: int
    catalog_config: Configuration
    settled: bool
    left_ms: Callable[[NodeRecord], int]
    """How long the wanted state of a node still lasts. Only the leader counts the time."""
    keep_left_ms: Callable[[TableRecord], int] = written_keep_left
    """How long a dropped table can still be recalled. Only the leader counts the time."""

    def config(self, row: TabletRecord) -> Configuration:
        """The newest committed configuration known of a tablet."""
        if row.tablet_id == CATALOG_TABLET_ID and self.catalog_config.peers:
            return self.catalog_config
        return row.config

    def leader_of(self, row: TabletRecord) -> tuple[int, str]:
        """(term, node) of a tablet's leader. Until a replica reports a leader, it is the one that the master
        suggested.
        """
        if row.tablet_id == CATALOG_TABLET_ID:
            return self.term, self.leader
        term, leader = self.liveness.leader_of(row.tablet_id)
        return (term, leader) if leader else (row.term, row.leader)

    def leads(self, row: TabletRecord, leader: str, term: int) -> bool:
        """Whether the assumed leader really leads, by the reports of its own node. A hint may be outdated; a
        view must not be.
        """
        if row.tablet_id == CATALOG_TABLET_ID:
            return bool(leader)
        own = [r.status for r in self.liveness.reports_of(row.tablet_id) if r.node_id == leader]
        return all(s.role == common_pb2.LEADER or s.term < term for s in own)

    def is_alive(self, node_id: str) -> bool:
        """Whether the node sent a heartbeat lately."""
        return self.liveness.age_ms(node_id, self.now_ms) <= self.options.alive_ms


def cluster_view(scene: Scene, cluster_id: str) -> master_pb2.GetClusterViewResponse:
    """Build the whole state of the cluster in one step. It equals all pages put together (view_changes.py).

    Raises:
        Rejected: TOO_LARGE, the state does not fit into a message.
    """
    catalog = scene.catalog
    counts: dict[str, int] = {}
    current = [catalog.tablets[t] for t in catalog.current]
    for row in current:
        for peer in scene.config(row).peers:
            counts[peer.node_id] = counts.get(peer.node_id, 0) + 1
    found = master_pb2.GetClusterViewResponse(
        nodes=view_nodes(scene, counts),
        tablets=[view_tablet(scene, t) for t in sorted(current, key=lambda t: t.tablet_id)],
        intents=[intent_to_pb(i) for i in _sorted(catalog.intents)],
        tables=[table_info(scene, t) for t in catalog.live_tables],
    )
    view_head(found, scene, cluster_id)
    check_message(found.ByteSize())
    return found


def view_head(found: master_pb2.GetClusterViewResponse, scene: Scene, cluster_id: str) -> None:
    """Fill in everything of a view except nodes, tablets, intents and tables."""
    found.cluster_id, found.leader, found.term = id_to_pb(cluster_id), id_to_pb(scene.leader), scene.term
    if scene.catalog.claim.epoch:
        found.claim.CopyFrom(claim_to_pb(scene.catalog.claim))
    found.now_us, found.settled = scene.wall_us, scene.settled
    found.policy.CopyFrom(policy_to_pb(scene.catalog.policy, scene.options))
    found.cluster_version = scene.catalog.cluster_version


def view_nodes(scene: Scene, counts: Mapping[str, int]) -> list[master_pb2.NodeViewPB]:
    """All nodes. `counts`: how many replicas configurations give to each node."""
    return [_node(scene, n, counts.get(n.node_id, 0)) for n in _sorted(scene.catalog.nodes)]


def check_message(size_bytes: int) -> None:
    """Refuse a view that does not fit into one message.

    Raises:
        Rejected: TOO_LARGE.
    """
    if size_bytes > MESSAGE_BYTES_MAX - (64 << 10):
        raise Rejected(
            "the cluster's view is too large for one message; upgrade the program that asks: from this "
            "version on, programs read it in pages",
            code=Code.TOO_LARGE,
        )


def policy_to_pb(policy: PolicyRecord | None, options: MasterOptions) -> master_pb2.DriverPolicyPB:
    """The driver policy in force as a message. If nobody has set a policy, the defaults."""
    if policy is None:
        plain = Policy()
        return master_pb2.DriverPolicyPB(
            dead_after_ms=plain.dead_after_ms,
            max_lost_nodes=plain.max_lost_nodes,
            max_copies=plain.max_copies,
            bytes_per_second=plain.bytes_per_second,
            drive_after_ms=options.drive_after_ms,
            balance_leaders=True,
            rebalance=True,
        )
    return master_pb2.DriverPolicyPB(
        dead_after_ms=policy.dead_after_ms,
        max_lost_nodes=policy.max_lost_nodes,
        max_copies=policy.max_copies,
        bytes_per_second=policy.bytes_per_second,
        drive_after_ms=policy.drive_after_ms,
        owner=cut(policy.owner, HOLDER_CHARS_MAX),
        balance_leaders=policy.balance_leaders,
        rebalance=policy.rebalance,
        held=cut(policy.held),
        holding=holding_to_pb(Holder(name, tuple(Away(*a) for a in away)) for name, away in policy.holding),
        waiting=policy.waiting,
    )


def _sorted(records: dict[str, T]) -> list[T]:
    return [records[key] for key in sorted(records)]


def claim_to_pb(claim: ClaimRecord) -> master_pb2.DriverClaimPB:
    """The driver claim as a message."""
    return master_pb2.DriverClaimPB(
        holder=cut(claim.holder, HOLDER_CHARS_MAX),
        epoch=claim.epoch,
        expires_us=min(claim.expires_us, WALL_US_MAX),
    )


def intent_to_pb(intent: IntentRecord) -> master_pb2.IntentPB:
    """An intent as a message; witness_start is set only for witnesses."""
    return master_pb2.IntentPB(
        tablet_id=id_to_pb(intent.tablet_id),
        replica_id=intent.replica_id,
        source_node=id_to_pb(intent.source_node),
        target_node=id_to_pb(intent.target_node),
        expires_us=min(intent.expires_us, WALL_US_MAX),
        epoch=intent.epoch,
        kind=intent.kind,
        replaces_replica=intent.replaces_replica,
        witness_start=opid_to_pb(intent.witness_start) if intent.witness else None,
        reason=cut(intent.reason),
        cause=cut(intent.cause, WORD_CHARS_MAX),
        config_index=intent.config_index,
    )


def by_hand_to_pb(by_hand: ByHand) -> master_pb2.ByHandPB:
    """An administrator's placement of a tablet's replicas, as a message."""
    return master_pb2.ByHandPB(
        pinned=[id_to_pb(n) for n in by_hand.pinned],
        avoided=[id_to_pb(n) for n in by_hand.avoided],
        extra=by_hand.extra,
        owner=cut(by_hand.owner, HOLDER_CHARS_MAX),
        reason=cut(by_hand.reason, TEXT_OF_HAND_CHARS_MAX),
        since_us=min(by_hand.since_us, WALL_US_MAX),
    )


def recovery_to_pb(done: RecoveryRecord) -> master_pb2.RecoveryPB:
    """A recovery from a lost majority as a message."""
    return master_pb2.RecoveryPB(
        tablet_incarnation=done.incarnation,
        since_us=min(done.since_us, WALL_US_MAX),
        owner=cut(done.owner, HOLDER_CHARS_MAX),
        reason=cut(done.reason, TEXT_OF_HAND_CHARS_MAX),
        told=cut(done.told),
        survivor_node=id_to_pb(done.node_id),
        survivor_replica=done.replica_id,
        last_logged=opid_to_pb(done.last_logged),
        config_before=config_to_pb(done.config_before),
    )


def _node(scene: Scene, row: NodeRecord, replicas: int) -> master_pb2.NodeViewPB:
    node = scene.liveness.located(row)
    life = scene.liveness.nodes.get(node.node_id)
    found = master_pb2.NodeViewPB(
        node_id=id_to_pb(node.node_id),
        incarnation=life.incarnation if life is not None else 0,
        registration=master_pb2.NodeRegistrationPB(
            address=node.address,
            flight_address=node.flight_address,
            http_port=node.http_port,
            machine=node.machine,
            zone=node.zone,
            version=node.version,
            role=node.role,
            cluster_version=node.cluster_version,
        ),
        state=master_pb2.NodeStatePB.Value(node.state),
        heartbeat_age_ms=scene.liveness.age_ms(node.node_id, scene.now_ms),
        ever_heard=scene.liveness.ever_heard(node.node_id),
        replicas=replicas,
        disk_free_bytes=life.disk_free_bytes if life is not None else 0,
        disk_used_bytes=life.disk_used_bytes if life is not None else 0,
        disk_low=life is not None and life.disk_low,
        formed=node.formed,
        name=cut(node.name, NODE_NAME_CHARS_MAX),
        wall_ahead_us=life.wall_ahead_us if life is not None else None,
        given_up=node.returns,
        wanted=master_pb2.WantedPB.Value(f"WANTED_{node.asked}"),
        wanted_by=node.asked_by,
        wanted_reason=cut(node.reason) if node.asked_by else "",
        wanted_left_ms=scene.left_ms(node) if node.asked_by else 0,
        load=life.load if life is not None else None,
    )
    bound_registration(found.registration)
    return found


def view_tablet(scene: Scene, row: TabletRecord) -> master_pb2.TabletViewPB:
    """A tablet with the newest reports of its replicas."""
    config = scene.config(row)
    term, leader = scene.leader_of(row)
    table = scene.catalog.tables.get(row.table_id)
    reports = scene.liveness.reports_of(row.tablet_id)
    return master_pb2.TabletViewPB(
        tablet_id=id_to_pb(row.tablet_id),
        table_id=id_to_pb(row.table_id),
        table_name=_shown_name(table),
        state=row.state,
        committed_config=config_to_pb(config),
        term=max(term, row.term),
        leader_node=id_to_pb(leader if scene.leads(row, leader, term) else ""),
        replication_factor=scene.catalog.replication_factor(row),
        replicas=[
            *(_report(scene, r) for r in reports if _is_shown(scene, row, config, r)),
            *_missing(scene, row, config),
        ],
        next_replica_id=row.next_replica_id,
        leader_kept_until_us=min(row.leader_kept_until_us, WALL_US_MAX),
        by_hand=by_hand_to_pb(row.by_hand) if row.by_hand else None,
        recovery=recovery_to_pb(done) if (done := scene.catalog.recoveries.get(row.tablet_id)) else None,
        copies=map(copy_record_to_pb, of_members(row.copies, config)),
    )


def _shown_name(table: TableRecord | None) -> str:
    """The name of a tablet's table in a view. A dropped table is marked, because another table may have its
    name by now.
    """
    if table is None:
        return CATALOG_NAME
    return f"{table.name}{DROPPED_MARK}" if table.state == "DROPPED" else table.name


def _is_shown(scene: Scene, row: TabletRecord, config: Configuration, report: Report) -> bool:
    """Whether a view includes this report. It omits tombstones, unless the replica is a member or is to
    become a member.

    A tombstone stays for as long as its tablet exists. If views had all tombstones, each move of a replica
    would make later views larger.
    """
    mine = (report.replica_id, report.node_id)
    if config.names(*mine) or report.status.data_state != common_pb2.TOMBSTONED:
        return True
    intent = scene.catalog.intents.get(row.tablet_id)
    return intent is not None and (intent.replica_id, intent.target_node) == mine


def _report(scene: Scene, report: Report) -> master_pb2.ReplicaReportPB:
    return master_pb2.ReplicaReportPB(
        node_id=id_to_pb(report.node_id), status=report.status, age_ms=max(0, scene.now_ms - report.at_ms)
    )


def _missing(scene: Scene, row: TabletRecord, config: Configuration) -> Iterable[master_pb2.ReplicaReportPB]:
    """Reports for members of a configuration that their live nodes do not report. They have no state; `error`
    says why.

    Only full reports that are old enough count. A first replica that was never created counts only after the
    time in which the tablet must get a leader. Its node may have no room, and the driver then finds it
    another node.
    """
    if row.state != "RUNNING":
        return
    young = scene.wall_us - row.since_us <= scene.options.create_timeout_ms * 1000
    for peer in config.peers:
        if young and peer.replica_id in row.uncreated and config.opid_index == -1:
            continue
        life = scene.liveness.nodes.get(peer.node_id)
        if life is None or not life.full or _is_reported(scene, row, peer):
            continue
        if scene.now_ms - life.full_since_ms < scene.options.missing_after_ms:
            continue
        status = common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(row.tablet_id),
            replica_id=peer.replica_id,
            error="its node reports no such replica",
        )
        yield master_pb2.ReplicaReportPB(node_id=id_to_pb(peer.node_id), status=status)


def _is_reported(scene: Scene, row: TabletRecord, peer: Peer) -> bool:
    return scene.liveness.report(row.tablet_id, peer.node_id, peer.replica_id) is not None


def changes_by_itself_ms(scene: Scene, row: TabletRecord) -> int | None:
    """The time at which the tablet's view next changes without an event, by the clock of `Scene.now_ms`;
    None: never.

    A replica that its node does not report counts as missing after a time (`_missing`).
    """
    if row.state != "RUNNING":
        return None
    found: list[int] = []
    for peer in scene.config(row).peers:
        life = scene.liveness.nodes.get(peer.node_id)
        if life is None or not life.full or _is_reported(scene, row, peer):
            continue
        found.append(life.full_since_ms + scene.options.missing_after_ms)
        if row.uncreated:
            young_us = row.since_us + scene.options.create_timeout_ms * 1000 - scene.wall_us
            found.append(scene.now_ms + max(0, young_us) // 1000 + 1)
    return min((at for at in found if at > scene.now_ms), default=None)


def table_info(scene: Scene, table: TableRecord) -> master_pb2.TableInfoPB:
    """A table with the schema that all its tablets have, and the number of its RUNNING tablets."""
    tablets = scene.catalog.current_tablets(table.table_id)
    running = sum(t.state == "RUNNING" for t in tablets)
    made = table.state in GONE_TABLES or running == len(tablets)
    info = master_pb2.TableInfoPB(
        table_id=id_to_pb(table.table_id),
        name=table.name,
        state=table.state if made else "PREPARING",
        partitioning=partitioning_to_pb(PartitionSchema.from_json(table.partitioning)),
        replication_factor=table.replication_factor,
        tablets=len(tablets),
        tablets_running=running,
        kind=table.kind,
        created_us=table.created_us,
        replication_factor_before=table.replication_factor_before,
        dropped_us=min(table.dropped_us, WALL_US_MAX),
        keep_left_ms=scene.keep_left_ms(table) if table.state == "DROPPED" else 0,
        owner=table.owner,
        comment=table.comment,
    )
    if schema := table.fully_applied_schema or table.schema:
        info.schema.CopyFrom(schema_to_pb(Schema.from_json(schema)))
    if table.fully_applied_schema:
        info.newest_schema.CopyFrom(schema_to_pb(Schema.from_json(table.schema)))
    return info


def tablet_locations(scene: Scene, row: TabletRecord) -> master_pb2.TabletLocationsPB:
    """Where a tablet's replicas are, which one leads, and where their rows can be fetched.

    Empty until the catalog says that the tablet is RUNNING. Until then the tablet may be REPLACED, and writes
    to it would be lost.
    """
    _, leader = scene.leader_of(row)
    peers = scene.config(row).peers if row.state != "CREATING" else ()
    return master_pb2.TabletLocationsPB(
        tablet_id=id_to_pb(row.tablet_id),
        table_id=id_to_pb(row.table_id),
        partition=partition_to_pb(row.partition),
        replicas=[_location(scene, p, leader) for p in peers],
        state=row.state,
        tablet_incarnation=row.incarnation,
    )


def _location(scene: Scene, peer: Peer, leader: str) -> master_pb2.ReplicaLocationPB:
    node = scene.catalog.nodes.get(peer.node_id)
    pb = peer_to_pb(peer)
    role = common_pb2.LEADER if peer.node_id == leader else common_pb2.FOLLOWER
    if not peer.votes:
        role = common_pb2.LEARNER
    location = master_pb2.ReplicaLocationPB(peer=pb, role=role, alive=scene.is_alive(peer.node_id))
    location.peer.address = scene.liveness.peer_address(peer)
    if node is not None:
        node = scene.liveness.located(node)
        location.peer.address = node.address or location.peer.address
        location.flight_address = node.flight_address
        location.machine = cut(node.machine, PLACE_CHARS_MAX)
        location.zone = cut(node.zone, PLACE_CHARS_MAX)
    return location


def masters_of(scene: Scene) -> list[master_pb2.MasterInfoPB]:
    """The masters (members of the catalog's committed configuration), with their newest addresses."""
    found = []
    for peer in scene.catalog_config.peers:
        row = scene.catalog.nodes.get(peer.node_id)
        address = scene.liveness.located(row).address if row is not None else ""
        address = address or scene.liveness.peer_address(peer)
        found.append(master_pb2.MasterInfoPB(node_id=id_to_pb(peer.node_id), address=address))
    return found
