"""The content of this node's heartbeats: its identity, its health, and what changed on it. The heartbeater's
loops use it and decide where to send it.

Invariant: heartbeats are numbered in the order in which they are made, and all of one process carry the same
random start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from stele.model.ids import StreamKey
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from stele.tserver.admission import Admission
from stele.tserver.description import NodeDescription
from stele.tserver.leader_load import LeaderLoad
from stele.tserver.monitor import NodeMonitor
from stele.tserver.replicas import Replicas
from stele.tserver.reports import all_keys, all_reports, report_one
from stele.tserver.wall_clock import WallClock
from stele.tserver.withdrawal import Withdrawal
from stele.wal.log import Log


class HeartbeatSource:
    """Makes the heartbeats of one node.

    `log_found`: the end of the log as this start found it; 0 if the masters have admitted this start already.
    """

    def __init__(
        self,
        description: NodeDescription,
        replicas: Replicas,
        node_log: Log,
        monitor: NodeMonitor,
        wall_clock: WallClock,
        admission: Admission,
        withdrawal: Withdrawal,
        load: LeaderLoad,
        *,
        log_found: int,
    ) -> None:
        self._description = description
        self._replicas = replicas
        self._log = node_log
        self._monitor = monitor
        self._wall_clock = wall_clock
        self._admission = admission
        self._withdrawal = withdrawal
        self._load = load
        self._log_found = log_found
        self._sequence = itertools.count(1)

    @property
    def may_report(self) -> bool:
        """Whether replicas may be reported: all are known, and none has FAILED only because the node's log
        has failed.

        A driver would replace such replicas, though they are intact and serve after a restart.
        """
        return self._replicas.opened and self._log.failed is None

    @property
    def opened(self) -> bool:
        """Whether all replicas on the volume are known."""
        return self._replicas.opened

    @property
    def replica_count(self) -> int:
        """How many replicas a full report contains."""
        return len(all_keys(self._replicas))

    def full_report(self) -> list[common_pb2.ReplicaStatusPB]:
        """A report of all replicas."""
        return all_reports(self._replicas)

    def report(self, keys: Iterable[StreamKey]) -> tuple[list[common_pb2.ReplicaStatusPB], list[StreamKey]]:
        """A report of some replicas, and the keys of those that are no longer here."""
        reports: list[common_pb2.ReplicaStatusPB] = []
        removed: list[StreamKey] = []
        for key in keys:
            report = report_one(self._replicas, key)
            if report is not None:
                reports.append(report)
            else:
                removed.append(key)
        return reports, removed

    def request(
        self,
        tablets: list[common_pb2.ReplicaStatusPB],
        removed: list[StreamKey],
        master: str,
        addresses_digest: int,
    ) -> pb.TSHeartbeatRequest:
        """A heartbeat for `master`, the node id that answered last at the address; "" before the first
        answer.
        """
        identity = self._description.identity
        free, used = self._monitor.disk_bytes
        request = pb.TSHeartbeatRequest(
            node_id=id_to_pb(identity.node_id),
            incarnation=identity.incarnation,
            sequence=next(self._sequence),
            tablets=tablets,
            removed_tablets=[id_to_pb(key.tablet_id) for key in removed],
            disk_free_bytes=free,
            disk_used_bytes=used,
            disk_low=self._log.low_space,
            addresses_digest=addresses_digest,
            start=self._description.start,
            log_found=self._log_found,
            log_synced=self._log.synced_place,
            vetted=self._admission.admitted,
            taken_back=self._description.record.accepting,
            dropped_digest=self._withdrawal.digest,
            load=self._load.total,
        )
        self._wall_clock.tell(request, master)
        return request

    def registration(self) -> pb.NodeRegistrationPB:
        """The node's registration with the masters."""
        return self._description.registration()

    def register_request(self) -> pb.RegisterNodeRequest:
        """A request that registers this node with masters that do not know it."""
        description = self._description
        return pb.RegisterNodeRequest(
            node_id=id_to_pb(description.identity.node_id), role=description.options.role
        )
