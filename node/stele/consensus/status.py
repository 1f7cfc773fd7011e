"""Makes a replica's ReplicaStatusPB, for reports and the command line. Changes nothing.

Invariant: an entry or configuration is reported as committed only if this replica knows that it is.
"""

from __future__ import annotations

from stele.consensus.started import StartedReplica
from stele.consensus.state import Standing
from stele.model.bounds import cut
from stele.model.ids import OPID_NONE
from stele.raft.effects import Role
from stele.raft.status import PeerState
from stele.rpc.convert import config_to_pb, id_to_pb, opid_to_pb
from stele.rpc.proto import common_pb2

_ROLES = {
    Role.LEADER: common_pb2.LEADER,
    Role.FOLLOWER: common_pb2.FOLLOWER,
    Role.CANDIDATE: common_pb2.CANDIDATE,
    Role.LEARNER: common_pb2.LEARNER,
    Role.NON_PARTICIPANT: common_pb2.NON_PARTICIPANT,
}


def replica_status(standing: Standing, started: StartedReplica | None) -> common_pb2.ReplicaStatusPB:
    """The status of a replica and, if it leads, of its peers."""
    superblock = standing.superblock
    pb = common_pb2.ReplicaStatusPB(
        tablet_id=id_to_pb(superblock.tablet_id),
        replica_id=superblock.replica_id,
        state=common_pb2.ReplicaStatePB.ValueType(int(standing.state)),
        data_state=common_pb2.DataStatePB.ValueType(int(superblock.data_state)),
        role=_ROLES[standing.role],
        term=standing.term,
        error=cut(standing.error),
        table_id=id_to_pb(superblock.table_id),
        tablet_incarnation=superblock.tablet_incarnation,
    )
    if started is None:
        return pb
    status = started.core.status()
    leader = standing.leader_peer()
    if leader is not None:
        pb.leader_node = id_to_pb(leader.node_id)
    pb.committed_config.CopyFrom(config_to_pb(status.committed_config))
    if status.pending_change_index is not None:
        pb.pending_config.CopyFrom(config_to_pb(status.config))
    pb.last_logged.CopyFrom(opid_to_pb(status.last_logged))
    pb.last_committed.CopyFrom(opid_to_pb(started.committed_opid))
    machine = started.storage.machine
    pb.last_applied.CopyFrom(opid_to_pb(machine.applied if machine is not None else OPID_NONE))
    pb.has_data = machine is not None
    applied = machine.last_timestamp if machine is not None else 0
    pb.last_timestamp = max(applied, started.core.log.newest_timestamp)
    if machine is not None:
        schema = getattr(machine, "schema", None)
        pb.schema_version = schema.version if schema is not None else 0
        pb.bytes_on_disk = getattr(machine, "bytes_on_disk", 0)
        pb.rows_estimate = getattr(machine, "rows_estimate", 0)
    now_ms = started.runtime.now_ms()
    # Not by the core's role: a failed core may claim for ever that it leads.
    for peer in status.peers if standing.role is Role.LEADER else ():
        pb.peers.append(
            common_pb2.PeerHealthPB(
                replica_id=peer.replica_id,
                match_index=peer.match_index,
                last_heard_ms=max(0, now_ms - peer.last_heard_ms),
                failed=peer.failed,
                needs_copy=peer.state is PeerState.SNAPSHOT,
                unreached=peer.unreached,
            )
        )
    return pb
