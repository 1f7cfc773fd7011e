"""A master as a process: a node whose gRPC server also answers MasterService, and whose catalog replica has a Master.

Made by the command line (`stele master run`) through `run_process(options, MasterNode)`. Invariant: the master follows
whichever replica stands for the catalog tablet on this node, also one that a copy brings later.
"""

from __future__ import annotations

import grpc

from stele.consensus.replica import Replica
from stele.master.leadership import MasterOptions
from stele.master.master import Master
from stele.master.replica_log import ReplicaCatalogLog
from stele.master.service import MasterService
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import add_MasterServiceServicer_to_server
from stele.tserver.node import Node
from stele.tserver.options import NodeOptions
from stele.tserver.process import run_process


class MasterNode(Node):
    """A node with a master in it."""

    def __init__(self, options: NodeOptions, master_options: MasterOptions | None = None) -> None:
        super().__init__(options, (self._add_service,), extra_ready=self._why_unready)
        self._master_options = master_options or MasterOptions(
            heartbeat_interval_ms=int(options.heartbeat_s * 1000)
        )
        self._catalog_log = ReplicaCatalogLog(lambda: self.replicas.current(CATALOG_TABLET_ID))
        self.master: Master | None = None
        # Noted first, so it comes last: the master leads no more once leadership is handed over.
        self._life.push_async_callback(self._end_master)

    async def start(self) -> None:
        """As Node; the master follows the catalog's replica from its start on."""
        await super().start()
        self.replicas.add_listener(self._replica_started)

    async def _end_master(self) -> None:
        if self.master is not None:
            await self.master.stop()

    def _add_service(self, node: Node, server: grpc.aio.Server) -> None:
        self.master = Master(
            node.node_id,
            node.cluster_id,
            self._catalog_log,
            node.pool,
            self._master_options,
            on_failure=node.shutdown.fail,
            adopted=node.volume.adopted,
        )
        self.master.start()
        add_MasterServiceServicer_to_server(MasterService(self.master, self._confirm, node.book), server)

    def _replica_started(self, replica: Replica) -> None:
        if replica.tablet_id == CATALOG_TABLET_ID:
            self._catalog_log.watch()

    async def _confirm(self, request: master_pb2.ConfirmFormationRequest) -> None:
        await self.formation.confirm([(id_from_pb(m.node_id), m.format_id) for m in request.masters])

    def _why_unready(self) -> str:
        if self._catalog_log.key_space is None:
            return "no copy of the catalog has arrived yet"
        if not self._catalog_log.leader_node:
            return "the catalog has no leader that this master knows"
        if self._catalog_log.is_leader and (self.master is None or self.master.lead is None):
            return "this master begins to lead and loads the catalog"
        return ""


def run(options: NodeOptions, master_options: MasterOptions | None = None) -> int:
    """`stele master run`: until told to stop, or until it cannot go on; the exit code."""
    return run_process(options, lambda o: MasterNode(o, master_options))
