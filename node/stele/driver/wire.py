"""Converts answers of masters and nodes to the planner's values. Called by executor and operator.

Opens nothing. Names that thousands of tablets share are kept once (`intern`). Invariant: enum numbers that
this program does not know become UNKNOWN, never a healthy state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from sys import intern

from stele.driver.policy import StandingPolicy
from stele.driver.view import (
    NOBODY,
    Away,
    Claim,
    ClusterView,
    CopyView,
    DataState,
    Holder,
    Intent,
    NodeState,
    NodeView,
    ReplicaState,
    ReplicaView,
    TabletView,
    Wanted,
)
from stele.model.bounds import WALL_US_MAX, WORD_CHARS_MAX, cut
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.config import Configuration
from stele.model.copies import CopyRecord
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TableId, TabletId
from stele.model.incarnation import is_given_up, is_newer
from stele.rpc.convert import config_from_pb, id_from_pb, id_to_pb, opid_from_pb, opid_to_pb
from stele.rpc.proto import common_pb2, master_pb2

_NODE_STATES = {int(s): s for s in NodeState}
_WANTED = {int(w): w for w in Wanted}
_REPLICA_STATES = {int(s): s for s in ReplicaState}
_DATA_STATES = {int(s): s for s in DataState}


def view_from_pb(pb: master_pb2.GetClusterViewResponse) -> ClusterView:
    """The cluster as the leading master sees it.

    Raises:
        Rejected: an identifier or a member type is bad.
    """
    return ClusterView(
        nodes=tuple(node_from_pb(n) for n in pb.nodes),
        tablets=tuple(tablet_from_pb(t) for t in pb.tablets),
        intents=tuple(intent_from_pb(i) for i in pb.intents),
        claim=claim_from_pb(pb.claim) if pb.HasField("claim") else None,
        settled=pb.settled,
        leader_master=id_from_pb(pb.leader),
        term=pb.term,
        now_us=pb.now_us,
        holding=holding_from_pb(pb.policy),
    )


def claim_from_pb(pb: master_pb2.DriverClaimPB) -> Claim:
    """The driver claim."""
    return Claim(pb.holder, pb.epoch, pb.expires_us)


def standing_from_pb(pb: master_pb2.DriverPolicyPB) -> StandingPolicy:
    """The policy that masters drive by, from a message."""
    return StandingPolicy(
        pb.dead_after_ms,
        pb.max_lost_nodes,
        pb.max_copies,
        pb.bytes_per_second,
        pb.drive_after_ms,
        pb.owner,
        pb.balance_leaders,
        pb.rebalance,
        pb.held,
        holding_from_pb(pb),
        tuple(pb.waiting),
    )


def holding_from_pb(pb: master_pb2.DriverPolicyPB) -> tuple[Holder, ...]:
    """Who holds the change budget, as the catalog says."""
    return tuple(
        Holder(h.holder, tuple(Away(id_from_pb(a.node_id), a.incarnation) for a in h.away))
        for h in pb.holding
    )


def holding_to_pb(holding: Iterable[Holder]) -> list[master_pb2.BudgetHolderPB]:
    """Who holds the change budget as messages."""
    return [
        master_pb2.BudgetHolderPB(
            holder=h.name,
            away=[master_pb2.AwayPB(node_id=id_to_pb(a.node_id), incarnation=a.incarnation) for a in h.away],
        )
        for h in holding
    ]


def standing_to_pb(policy: StandingPolicy) -> master_pb2.DriverPolicyPB:
    """A policy for the catalog as a message."""
    return master_pb2.DriverPolicyPB(
        dead_after_ms=policy.dead_after_ms,
        max_lost_nodes=policy.max_lost_nodes,
        max_copies=policy.max_copies,
        bytes_per_second=policy.bytes_per_second,
        drive_after_ms=policy.drive_after_ms,
        owner=policy.owner,
        balance_leaders=policy.balance_leaders,
        rebalance=policy.rebalance,
        held=policy.held,
        holding=holding_to_pb(policy.holding),
        waiting=policy.waiting,
    )


def node_from_pb(pb: master_pb2.NodeViewPB) -> NodeView:
    """A node or a master."""
    registration = pb.registration
    return NodeView(
        node_id=NodeId(id_from_pb(pb.node_id)),
        role=registration.role,
        machine=registration.machine,
        zone=registration.zone,
        address=registration.address,
        state=_NODE_STATES.get(pb.state, NodeState.RETIRED),
        heartbeat_age_ms=pb.heartbeat_age_ms,
        ever_heard=pb.ever_heard,
        incarnation=pb.incarnation,
        replicas=pb.replicas,
        disk_free_bytes=pb.disk_free_bytes,
        disk_used_bytes=pb.disk_used_bytes,
        disk_low=pb.disk_low,
        clock_ahead_us=pb.wall_ahead_us,
        formed=pb.formed,
        given_up=pb.given_up,
        wanted=_WANTED.get(pb.wanted),
        wanted_by=pb.wanted_by,
        wanted_reason=pb.wanted_reason,
        wanted_left_ms=pb.wanted_left_ms,
        load=pb.load if pb.HasField("load") else None,
    )


def tablet_from_pb(pb: master_pb2.TabletViewPB) -> TabletView:
    """A tablet with its replicas."""
    return TabletView(
        tablet_id=TabletId(id_from_pb(pb.tablet_id)),
        table_id=TableId(intern(id_from_pb(pb.table_id))),
        table_name=intern(pb.table_name),
        state=intern(pb.state),
        config=config_from_pb(pb.committed_config),
        term=pb.term,
        leader_node=intern(id_from_pb(pb.leader_node)),
        replication_factor=pb.replication_factor,
        replicas=tuple(replica_from_pb(id_from_pb(r.node_id), r.status, r.age_ms) for r in pb.replicas),
        leader_kept_until_us=pb.leader_kept_until_us,
        by_hand=by_hand_from_pb(pb.by_hand) if pb.HasField("by_hand") else NOT_BY_HAND,
        copies=tuple(map(copy_record_from_pb, pb.copies)),
    )


def copy_record_from_pb(pb: master_pb2.CopyRecordPB) -> CopyRecord:
    """The record of how a replica made by a heal or a move compared with another voter."""
    return CopyRecord(
        replica_id=pb.replica_id,
        cause=intern(pb.cause),
        other_id=pb.other_replica,
        at_us=pb.at_us,
        snapshot=pb.snapshot,
        index=pb.index,
        rows=pb.rows,
        checksum=pb.checksum,
        other_rows=pb.other_rows,
        other_checksum=pb.other_checksum,
    )


def copy_record_to_pb(record: CopyRecord) -> master_pb2.CopyRecordPB:
    """The inverse of `copy_record_from_pb`."""
    return master_pb2.CopyRecordPB(
        replica_id=record.replica_id,
        cause=cut(record.cause, WORD_CHARS_MAX),
        other_replica=record.other_id,
        at_us=min(record.at_us, WALL_US_MAX),
        snapshot=record.snapshot,
        index=record.index,
        rows=record.rows,
        checksum=record.checksum,
        other_rows=record.other_rows,
        other_checksum=record.other_checksum,
    )


def by_hand_from_pb(pb: master_pb2.ByHandPB) -> ByHand:
    """An administrator's placement of a tablet's replicas."""
    return ByHand(
        pinned=tuple(id_from_pb(n) for n in pb.pinned),
        avoided=tuple(id_from_pb(n) for n in pb.avoided),
        extra=pb.extra,
        owner=pb.owner,
        reason=pb.reason,
        since_us=pb.since_us,
    )


def replica_from_pb(node_id: str, pb: common_pb2.ReplicaStatusPB, age_ms: int = 0) -> ReplicaView:
    """A replica as its own node reports it."""
    return ReplicaView(
        node_id=NodeId(intern(node_id)),
        replica_id=ReplicaId(pb.replica_id),
        state=_REPLICA_STATES.get(pb.state, ReplicaState.UNKNOWN),
        data_state=_DATA_STATES.get(pb.data_state, DataState.UNKNOWN),
        has_data=pb.has_data,
        last_committed=_opid(pb.last_committed.term, pb.last_committed.index),
        bytes_on_disk=pb.bytes_on_disk,
        copy=_copy_from_pb(pb.copy) if pb.HasField("copy") else None,
        error=pb.error,
        age_ms=age_ms,
        failed_peers=tuple(ReplicaId(p.replica_id) for p in pb.peers if p.failed),
        lacking_peers=tuple(ReplicaId(p.replica_id) for p in pb.peers if p.needs_copy),
        unreached_ms={ReplicaId(p.replica_id): p.last_heard_ms + age_ms for p in pb.peers if p.unreached}
        or NOBODY,
        load=pb.load,
    )


@lru_cache(maxsize=1024)
def _opid(term: int, index: int) -> OpId:
    """The OpId of these numbers. Equal OpIds are one object, since tablets and their replicas share few
    different ones.
    """
    return OpId(term, index) if term or index else OPID_NONE


def _copy_from_pb(pb: common_pb2.CopyProgressPB) -> CopyView:
    rate = pb.bytes_per_second if pb.HasField("bytes_per_second") else None
    return CopyView(pb.state, pb.bytes_done, pb.bytes_total, id_from_pb(pb.source_node), pb.error, rate)


def intent_from_pb(pb: master_pb2.IntentPB) -> Intent:
    """An intent. If witness_start is set, the new replica starts as a witness."""
    return Intent(
        tablet_id=TabletId(id_from_pb(pb.tablet_id)),
        replica_id=ReplicaId(pb.replica_id),
        target_node=NodeId(id_from_pb(pb.target_node)),
        kind=pb.kind,
        epoch=pb.epoch,
        source_node=id_from_pb(pb.source_node),
        replaces_replica=pb.replaces_replica,
        witness=pb.HasField("witness_start"),
        witness_start=opid_from_pb(pb.witness_start),
        expires_us=pb.expires_us,
        reason=pb.reason,
        cause=pb.cause,
    )


def intent_to_pb(intent: Intent) -> master_pb2.IntentPB:
    """The inverse of `intent_from_pb`."""
    return master_pb2.IntentPB(
        tablet_id=id_to_pb(intent.tablet_id),
        replica_id=intent.replica_id,
        source_node=id_to_pb(intent.source_node),
        target_node=id_to_pb(intent.target_node),
        expires_us=intent.expires_us,
        epoch=intent.epoch,
        kind=intent.kind,
        replaces_replica=intent.replaces_replica,
        witness_start=opid_to_pb(intent.witness_start) if intent.witness else None,
        reason=cut(intent.reason),
        cause=cut(intent.cause, WORD_CHARS_MAX),
    )


def freshen(view: ClusterView, answers: dict[str, list[common_pb2.ReplicaStatusPB]]) -> ClusterView:
    """The view, updated with reports directly from nodes (`answers` by node id).

    A replica that leads in the newest term also provides the committed configuration.
    """
    fresh: dict[str, list[tuple[str, common_pb2.ReplicaStatusPB]]] = {}
    for node_id, statuses in answers.items():
        for status in statuses:
            fresh.setdefault(id_from_pb(status.tablet_id), []).append((node_id, status))
    newer = {}
    for tablet_id, news in fresh.items():
        tablet = view.tablet(tablet_id)
        if tablet is not None:
            newer[tablet_id] = _freshened(tablet, news)
    return view.with_newer(newer)


def _freshened(tablet: TabletView, news: list[tuple[str, common_pb2.ReplicaStatusPB]]) -> TabletView:
    reports = {(r.node_id, r.replica_id): r for r in tablet.replicas}
    config: Configuration = tablet.config
    term, leader = tablet.term, tablet.leader_node
    for node_id, status in news:
        given_up = is_given_up(status.tablet_incarnation, config.incarnation)
        if given_up and status.data_state != common_pb2.COPYING:
            continue  # a recovery gave it up; it may lead others of its kind, at any term
        report = replica_from_pb(node_id, status)
        reports[(report.node_id, report.replica_id)] = report
        if status.role == common_pb2.LEADER and status.term >= term:
            term, leader = status.term, node_id
            told = config_from_pb(status.committed_config)
            if told.peers and not is_newer(config.version, told.version):
                config = told
    return replace(tablet, config=config, term=term, leader_node=leader, replicas=tuple(reports.values()))
