"""Makes a node's reports to the masters: a ReplicaStatusPB for each started replica, tombstone and copy.

Invariant: a replica that was reported once is reported until the masters know that it is gone.
"""

from __future__ import annotations

from stele.consensus.copy_target import TabletCopy
from stele.consensus.superblock import Superblock
from stele.model.bounds import cut
from stele.model.ids import StreamKey
from stele.rpc.convert import id_to_pb, opid_to_pb
from stele.rpc.proto import common_pb2
from stele.tserver.replicas import Replicas


def tombstone_status(superblock: Superblock) -> common_pb2.ReplicaStatusPB:
    """A tombstone as a report shows it."""
    return common_pb2.ReplicaStatusPB(
        tablet_id=id_to_pb(superblock.tablet_id),
        replica_id=superblock.replica_id,
        state=common_pb2.STOPPED,
        data_state=common_pb2.TOMBSTONED,
        role=common_pb2.NON_PARTICIPANT,
        term=superblock.last_term,
        last_logged=opid_to_pb(superblock.last_opid),
        table_id=id_to_pb(superblock.table_id),
    )


def copy_progress(copy: TabletCopy) -> common_pb2.CopyProgressPB:
    """A copy's progress as a message."""
    progress = copy.progress
    return common_pb2.CopyProgressPB(
        replica_id=progress.replica_id,
        source_node=id_to_pb(progress.source_node),
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        state=progress.state,
        error=cut(progress.error),
        bytes_per_second=copy.bytes_per_second,
    )


def report_one(replicas: Replicas, key: StreamKey) -> common_pb2.ReplicaStatusPB | None:
    """The report of one replica. None: it is not here, or not any more."""
    replica = replicas.by_key(key)
    copy = replicas.copies.get(key)
    if replica is not None:
        status = replica.status()
    elif key in replicas.tombstones:
        return tombstone_status(replicas.tombstones[key])
    elif copy is not None:
        status = common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(key.tablet_id),
            replica_id=key.replica_id,
            state=common_pb2.BOOTSTRAPPING,
            data_state=common_pb2.COPYING,
            role=common_pb2.NON_PARTICIPANT,
        )
    else:
        return None
    if copy is not None:
        status.copy.CopyFrom(copy_progress(copy))
    return status


def all_keys(replicas: Replicas) -> list[StreamKey]:
    """Every replica that a full report contains."""
    keys = [replica.superblock.key for replica in replicas]
    return list(dict.fromkeys([*keys, *replicas.tombstones, *replicas.copies]))


def all_reports(replicas: Replicas) -> list[common_pb2.ReplicaStatusPB]:
    """A full report."""
    reports = (report_one(replicas, key) for key in all_keys(replicas))
    return [report for report in reports if report is not None]
