"""What a node listens with: gRPC, the streams beside it, Flight and HTTP, and the services behind them. Made by node.py.

Owns the ports; decides nothing, and keeps no state of tablets. Invariant: gRPC is served last, when every other port is
known: a hello tells of them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from stele import metrics
from stele.rpc import server as rpc_server
from stele.rpc.client_stream import ClientStreams
from stele.rpc.flight import FlightServer
from stele.rpc.http import HttpServer, standard_routes
from stele.rpc.proto.consensus_pb2_grpc import (
    add_ConsensusServiceServicer_to_server,
    add_TabletCopyServiceServicer_to_server,
)
from stele.rpc.proto.tserver_pb2_grpc import (
    add_TabletServerAdminServiceServicer_to_server,
    add_TabletServerServiceServicer_to_server,
)
from stele.rpc.resolve import join_address, split_address
from stele.tserver.admin_service import AdminService
from stele.tserver.consensus_service import ConsensusService
from stele.tserver.copy_service import CopyFiles, TabletCopyService
from stele.tserver.scan import Scans
from stele.tserver.tablet_service import TabletService

if TYPE_CHECKING:
    from stele.tserver.node import Node

AddService = Callable[["Node", grpc.aio.Server], None]


class Servers:
    """Of one node. `extra` adds services to its gRPC server."""

    def __init__(self, node: Node, extra: Sequence[AddService]) -> None:
        self._node = node
        self._extra = extra
        self._grpc: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self._flight: FlightServer | None = None

    async def start(self) -> None:
        """Listen on all ports, and note in the node's facts those that the system chose.

        Raises:
            Rejected: a port in use, a bad address.
        """
        node, options = self._node, self._node.options
        host, _ = split_address(options.listen)
        facts, identity = node.facts, node.facts.identity
        server = self._services()
        port = await rpc_server.bind(server, options.listen)
        if not options.advertise:
            identity.address = join_address(host, port)
        await node.streams.listen(host, options.stream_port)
        scans = Scans(facts, node.replicas, node.scan_memory)
        files = CopyFiles(identity, node.book, node.sessions)
        self._flight = FlightServer(
            host, options.flight_port, node.cluster_id, scans, files, fork_id=identity.fork_id or ""
        )
        advertised, _ = split_address(identity.address)
        facts.flight_address = join_address(advertised, self._flight.port)
        self._http = HttpServer(standard_routes(node.health, metrics.REGISTRY))
        facts.http_port = await self._http.start(host, options.http_port)
        await server.start()
        self._grpc = server

    def _services(self) -> grpc.aio.Server:
        node, identity = self._node, self._node.facts.identity
        tablets = TabletService(
            node.node_id,
            node.replicas,
            node.wall_clock,
            in_read_thread=node.threads.in_read_thread,
            status=node.status,
            open_stream=lambda request: clients.introduce(request),
        )
        clients = ClientStreams(identity, node.book, node.budget, node.streams, tablets)
        consensus = ConsensusService(
            identity,
            node.messenger,
            node.replicas,
            node.manager,
            node.fences,
            copy_source=node.copy_source,
            changed=node.host.changed_key,
        )
        server = rpc_server.make_server(identity, node.book, node.budget)
        add_TabletServerServiceServicer_to_server(tablets, server)
        add_TabletServerAdminServiceServicer_to_server(
            AdminService(node.node_id, node.replicas, node.manager, node.fences), server
        )
        add_ConsensusServiceServicer_to_server(consensus, server)
        add_TabletCopyServiceServicer_to_server(
            TabletCopyService(node.facts, node.replicas, node.sessions), server
        )
        for add in self._extra:
            add(node, server)
        return server

    async def stop_serving(self) -> None:
        """Answer no peer and no client any more; probes are still told why."""
        if self._grpc is not None:
            await rpc_server.stop(self._grpc, 0.2)
        await self._node.streams.close()
        if self._flight is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._flight.close)

    async def close(self) -> None:
        """Tell probes nothing more."""
        if self._http is not None:
            await self._http.close()
