"""The servers of a node: gRPC, the streams beside it, Flight and HTTP. services.py makes the services behind
them.

Owns the ports; decides nothing. Invariant: gRPC begins to listen last, when every other port is known,
because its hello carries all ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from stele import metrics
from stele.rpc import server as rpc_server
from stele.rpc.flight import FlightServer
from stele.rpc.http import HttpServer, standard_routes
from stele.rpc.listener import StreamListener
from stele.rpc.resolve import join_address, split_address
from stele.tserver.copy_service import CopyFiles
from stele.tserver.description import NodeDescription
from stele.tserver.health import NodeHealth
from stele.tserver.scan import Scans


class Servers:
    """The servers of one node. `server` has its services already. `set_gauges()` is called before metrics are read."""

    def __init__(
        self,
        description: NodeDescription,
        server: grpc.aio.Server,
        streams: StreamListener,
        scans: Scans,
        files: CopyFiles,
        health: NodeHealth,
        set_gauges: Callable[[], None],
    ) -> None:
        self._description = description
        self._server = server
        self._streams = streams
        self._scans = scans
        self._files = files
        self._http = HttpServer(standard_routes(health, metrics.REGISTRY, set_gauges))
        self._flight: FlightServer | None = None
        self._serving = False

    async def start(self) -> None:
        """Listen on all ports, and record them in the node's description, since the system may have chosen
        some.

        Raises:
            Rejected: a port in use, a bad address.
        """
        description, options = self._description, self._description.options
        host, _ = split_address(options.listen)
        port = await rpc_server.bind(self._server, options.listen)
        address = options.advertised if options.advertise else join_address(host, port)
        advertised, _ = split_address(address)
        await self._streams.listen(host, options.stream_port)
        self._flight = FlightServer(
            host,
            options.flight_port,
            options.cluster_id,
            self._scans,
            self._files,
            fork_id=description.identity.fork_id or "",
        )
        flight_address = join_address(advertised, self._flight.port)
        http_port = await self._http.start(host, options.http_port)
        description.listens(address, flight_address, http_port)
        await self._server.start()
        self._serving = True

    async def stop_serving(self) -> None:
        """Answer no peer and no client any more. Probes still get the reason."""
        if self._serving:
            await rpc_server.stop(self._server, 0.2)
        await self._streams.close()
        if self._flight is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._flight.close)

    async def close(self) -> None:
        """Stop answering probes."""
        await self._http.close()
