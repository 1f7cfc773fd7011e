"""The extension that a process may add to a node: a master is one. `start_node` gets the function that makes
it.

Invariant: an extension uses the node only through its ports, and ends before the node closes its connections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from stele.model.ids import ClusterId, NodeId
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import PeerBook
from stele.tserver.formation import Formation
from stele.tserver.replicas import Replicas


@dataclass(frozen=True, slots=True)
class ExtensionPorts:
    """The parts of a node that its extension may use. `adopted`: as `Volume.adopted`. `fail(error)` ends the node."""

    node_id: NodeId
    cluster_id: ClusterId
    adopted: bool
    replicas: Replicas
    formation: Formation
    pool: ChannelPool
    book: PeerBook
    fail: Callable[[Exception], None]


class Extension(Protocol):
    """An extension. All methods are called on the node's event loop."""

    def add_services(self, server: grpc.aio.Server) -> None:
        """Add servicers to the node's gRPC server. Called once, before `start`."""

    def start(self) -> None:
        """Begin. Called once, before anything is served."""

    def why_unready(self) -> str:
        """Why the extension keeps the process from being ready; "" if it is ready."""

    async def stop(self) -> None:
        """End, after leaderships were handed over and nothing is served any more. Also called if `start` was
        not.
        """


MakeExtension = Callable[[ExtensionPorts], Extension]


class NoExtension:
    """The extension of a plain node: it does nothing. The class itself serves as the `MakeExtension`."""

    def __init__(self, ports: ExtensionPorts) -> None:
        pass

    def add_services(self, server: grpc.aio.Server) -> None:
        """Adds no servicers."""

    def start(self) -> None:
        """Begins nothing."""

    def why_unready(self) -> str:
        """Ready whenever the node is."""
        return ""

    async def stop(self) -> None:
        """Ends nothing."""
