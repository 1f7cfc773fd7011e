"""Recovers a tablet whose majority is lost: an administrator gives up what the lost replicas had. Called by
service.py on the leader.

Writes rows only, in one batch. The tablet's row gets a higher incarnation, and a configuration with the
survivor alone. A record of the recovery is written, which stays. The tablet's intent ends. From then on
`orders` repeats the order to the survivor's node until a report says that it was done. Only then are other
replicas of the tablet removed.

Invariant: nothing is recorded while a majority of voters is heard. That holds for the configuration in force
and for a proposed one.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from stele.master.cluster_view import TEXT_OF_HAND_CHARS_MAX
from stele.master.leadership import Leadership
from stele.master.liveness import Report, is_given_up
from stele.master.port import drop, insert, swap
from stele.master.records import RecoveryRecord, TabletRecord
from stele.master.versions import require_readers
from stele.model.bounds import HOLDER_CHARS_MAX, cut
from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import CATALOG_TABLET_ID, NodeId, OpId, ReplicaId, TabletId
from stele.model.incarnation import raised, shown
from stele.rpc.convert import config_from_pb, id_from_pb, opid_from_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb

log = structlog.get_logger("stele.master")

_GONE = (common_pb2.TOMBSTONED, common_pb2.DELETED, common_pb2.COPYING)


async def recover_tablet(lead: Leadership, request: pb.RecoverTabletRequest) -> RecoveryRecord:
    """Make the survivor the only voter of its tablet. A repeated request gives the same record.

    Raises:
        Rejected: NOT_FOUND. UNSAFE_CHANGE, a majority is heard. CAS_FAILED, the tablet was recovered
            meanwhile. INVALID_ARGUMENT, the survivor cannot be used. UNSUPPORTED_VERSION, a live member could
            not read the record.
        Retryable: NOT_READY, this master does not know enough of the nodes yet.
    """
    tablet_id = TabletId(id_from_pb(request.tablet_id))
    survivor = (NodeId(id_from_pb(request.survivor_node)), ReplicaId(request.survivor_replica))
    async with lead.locks.hold(tablets=(tablet_id,)):
        row = lead.catalog.tablet(tablet_id)
        _check_tablet(row)
        lead.check_settled()
        last = lead.catalog.recoveries.get(tablet_id)
        if last is not None and _repeats(request, survivor, last, row):
            return last
        if row.incarnation != request.tablet_incarnation:
            raise Rejected(
                f"tablet {tablet_id[:8]} is of incarnation {shown(row.incarnation)} already, not "
                f"{shown(request.tablet_incarnation)}: it was recovered meanwhile; `stele tablet recover` shows its present state",
                code=Code.CAS_FAILED,
            )
        require_readers(lead, 2, f"recover tablet {tablet_id[:8]}")
        refuse_majority(lead, row)
        peer = _survivor(lead, row, *survivor)
        last_logged = opid_from_pb(request.last_logged)
        done = RecoveryRecord(
            tablet_id,
            raised(row.incarnation),
            lead.wall_us(),
            cut(request.owner, HOLDER_CHARS_MAX),
            cut(request.reason, TEXT_OF_HAND_CHARS_MAX),
            cut(request.told),
            peer.node_id,
            peer.replica_id,
            last_logged,
            _term_above(lead, row, request.term, last_logged),
            row.config,
        )
        changed = replace(
            row,
            incarnation=done.incarnation,
            config=Configuration(last_logged.index, (peer,), done.incarnation),
            term=done.term,
            leader=peer.node_id,
            uncreated=(),
        )
        intent = lead.catalog.intents.get(tablet_id)
        await lead.commit([swap(row, changed), insert(done), *([drop(intent)] if intent is not None else [])])
    log.warning(
        "a lost majority was given up",
        tablet=tablet_id,
        incarnation=shown(done.incarnation),
        survivor=done.node_id,
        owner=done.owner,
        reason=done.reason,
        told=done.told,
    )
    lead.look_at(tablet_id)
    return done


def _repeats(
    request: pb.RecoverTabletRequest,
    survivor: tuple[NodeId, ReplicaId],
    last: RecoveryRecord,
    row: TabletRecord,
) -> bool:
    """Whether the last recovery of the tablet is what this request asks for."""
    return (
        last.incarnation == row.incarnation
        and last.config_before.incarnation == request.tablet_incarnation
        and (last.node_id, last.replica_id) == survivor
    )


def _check_tablet(row: TabletRecord) -> None:
    if row.tablet_id == CATALOG_TABLET_ID:
        raise Rejected(
            "this call cannot recover the catalog; stop the masters, and run `stele local cmeta rewrite` on the volume of "
            "the most advanced one"
        )
    if row.state != "RUNNING":
        raise Rejected(f"tablet {row.tablet_id[:8]} is {row.state}; only a RUNNING one can be recovered")


def refuse_majority(lead: Leadership, row: TabletRecord) -> None:
    """Raise UNSAFE_CHANGE if the voters that could answer are a majority of any configuration that could be
    in force.
    """
    reports = lead.liveness.reports_of(row.tablet_id)
    pending = [
        config_from_pb(r.status.pending_config) for r in reports if r.status.HasField("pending_config")
    ]
    for config in (row.config, *pending):
        heard = [p for p in config.voters if _could_answer(lead, row, p)]
        if config.peers and len(heard) >= config.majority:
            replicas = ", ".join(str(p.replica_id) for p in heard)
            raise Rejected(
                f"tablet {row.tablet_id[:8]}: {len(heard)} of {len(config.voters)} voters are heard (replicas {replicas}), which is "
                "a majority: the tablet works without a forced recovery, so none is made",
                code=Code.UNSAFE_CHANGE,
            )


def _could_answer(lead: Leadership, row: TabletRecord, peer: Peer) -> bool:
    node = lead.catalog.nodes.get(peer.node_id)
    if node is None or not lead.is_alive(node):
        return False
    life = lead.liveness.nodes.get(peer.node_id)
    report = lead.liveness.report(row.tablet_id, peer.node_id, peer.replica_id)
    if report is None:
        return life is None or not life.full  # it may have one, and not have told it yet
    status = report.status
    if is_given_up(status, row.incarnation):
        return False
    return status.state != common_pb2.FAILED and status.data_state not in _GONE


def _survivor(lead: Leadership, row: TabletRecord, node_id: NodeId, replica_id: ReplicaId) -> Peer:
    """The survivor, as the only voter.

    Raises:
        Rejected: it is no replica of the tablet that can be used.
        Retryable: its node is not heard now.
    """
    what = f"replica {replica_id} of tablet {row.tablet_id[:8]} on node {node_id[:8]}"
    report: Report | None = lead.liveness.report(row.tablet_id, node_id, replica_id)
    node = lead.catalog.nodes.get(node_id)
    if node is None or not lead.is_alive(node):
        raise Retryable(
            f"{what}: its node sends no heartbeats now; start it, or let `stele tablet recover` find another survivor",
            code=Code.NOT_READY,
        )
    if report is None or report.status.data_state in _GONE or not report.status.has_data:
        raise Rejected(
            f"{what}: its node reports no such replica with rows; let `stele tablet recover` find another survivor",
            code=Code.NOT_FOUND,
        )
    if report.status.state == common_pb2.FAILED:
        raise Rejected(
            f"{what} has FAILED ({report.status.error}): its rows cannot be trusted; "
            "let `stele tablet recover` find another survivor"
        )
    known = row.config.peer(replica_id) or Peer(node_id, replica_id, "")
    if known.node_id != node_id or replica_id >= row.next_replica_id:
        raise Rejected(
            f"{what}: the catalog never gave the tablet such a replica; let `stele tablet recover` find another survivor"
        )
    address = lead.liveness.located(node).address or known.address
    return Peer(node_id, known.replica_id, address, MemberType.VOTER)


def _term_above(lead: Leadership, row: TabletRecord, told: int, last_logged: OpId) -> int:
    reported = (r.status.term for r in lead.liveness.all_reports_of(row.tablet_id))
    return max(row.term, told, last_logged.term, *reported, 0) + 1
