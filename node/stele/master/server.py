"""The process of a master: a node (stele.tserver) with a master as its extension.

The node's gRPC server also answers MasterService. Invariant: the master follows the present replica of the
catalog tablet on this node, even after a later copy has replaced it.
"""

from __future__ import annotations

from dataclasses import replace

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
from stele.tserver.extension import ExtensionPorts, MakeExtension
from stele.tserver.node import Node, start_node
from stele.tserver.options import NodeOptions
from stele.tserver.process import run_process

LOG_CACHE_BYTES_MAX = 4 << 20
"""The most bytes of newest log entries that a master keeps in memory. Followers that need older ones get them
from its disk.
"""


class MasterExtension:
    """The master in a node: see `stele.tserver.extension.Extension`."""

    def __init__(self, ports: ExtensionPorts, options: MasterOptions) -> None:
        self._ports = ports
        self._catalog_log = ReplicaCatalogLog(lambda: ports.replicas.current(CATALOG_TABLET_ID))
        self.master = Master(
            ports.node_id,
            ports.cluster_id,
            self._catalog_log,
            ports.pool,
            options,
            on_failure=ports.fail,
            adopted=ports.adopted,
        )

    def add_services(self, server: grpc.aio.Server) -> None:
        """MasterService."""
        service = MasterService(self.master, self._confirm, self._ports.book)
        add_MasterServiceServicer_to_server(service, server)

    def start(self) -> None:
        """Follow the catalog's replica from its start on."""
        self.master.start()
        self._ports.replicas.add_listener(self._replica_started)

    def why_unready(self) -> str:
        """Why this master is not ready: it lacks the catalog, or a leader. "" if it is ready."""
        if self._catalog_log.key_space is None:
            return "this master waits for a copy of the catalog"
        if not self._catalog_log.leader_node:
            return "this master knows no leader of the catalog"
        if self._catalog_log.is_leader and self.master.lead is None:
            return "this master was just elected and still loads the catalog"
        return ""

    async def stop(self) -> None:
        """Stop leading."""
        await self.master.stop()

    def _replica_started(self, replica: Replica) -> None:
        if replica.tablet_id == CATALOG_TABLET_ID:
            self._catalog_log.watch()

    async def _confirm(self, request: master_pb2.ConfirmFormationRequest) -> None:
        masters = [(id_from_pb(m.node_id), m.format_id) for m in request.masters]
        await self._ports.formation.confirm(masters)


def with_master(options: NodeOptions, master_options: MasterOptions | None = None) -> MakeExtension:
    """Make the function that makes the master of a node with these options."""
    chosen = master_options or MasterOptions(heartbeat_interval_ms=int(options.heartbeat_s * 1000))
    return lambda ports: MasterExtension(ports, chosen)


def _of_master(options: NodeOptions) -> NodeOptions:
    """The options of a node whose only log is the catalog's."""
    cache_bytes = min(options.memory.cache_bytes, LOG_CACHE_BYTES_MAX)
    return replace(options, memory=replace(options.memory, cache_bytes=cache_bytes))


async def start_master(options: NodeOptions, master_options: MasterOptions | None = None) -> Node:
    """Start a node that contains a master."""
    return await start_node(_of_master(options), with_master(options, master_options))


def run(options: NodeOptions, *, drive_after_ms: int) -> int:
    """Run `stele master run` until told to stop, or until it cannot continue. Returns the exit code.

    `drive_after_ms`: as in MasterOptions.
    """
    chosen = MasterOptions(
        heartbeat_interval_ms=int(options.heartbeat_s * 1000), drive_after_ms=drive_after_ms
    )
    return run_process(_of_master(options), with_master(options, chosen))
