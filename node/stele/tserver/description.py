"""What a node reports of itself to masters, peers, tools and probes.

Decides nothing. Invariant: its report of the volume equals what was last written there.
"""

from __future__ import annotations

import resource
import secrets
from collections.abc import Mapping
from typing import Any

from stele import __version__
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.ids import start_digest
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import master_pb2, tserver_pb2
from stele.tserver.node_record import NodeRecord
from stele.tserver.options import NodeOptions
from stele.tserver.volume import Volume


class NodeDescription:
    """The description of one start. Ports that the options leave open are known only once `listens` was
    called."""

    def __init__(self, options: NodeOptions, volume: Volume) -> None:
        self.options = options
        self._volume = volume
        self.identity = Identity(
            options.cluster_id,
            options.node_id,
            volume.record.incarnation,
            volume.record.fork_id,
        )
        self.start = secrets.randbits(64)
        """Identifies this start. It is sent to masters only, because anyone who knows it can speak for the
        node.
        """
        self._address = options.advertised
        self._flight_address = ""
        self._http_port = options.http_port

    def listens(self, address: str, flight_address: str, http_port: int) -> None:
        """Set the node's HOST:PORT and its HTTP port. Called once, before anything is served."""
        self._address = address
        self._flight_address = flight_address
        self._http_port = http_port

    @property
    def address(self) -> str:
        """HOST:PORT by which others reach the node."""
        return self._address

    @property
    def flight_address(self) -> str:
        """HOST:PORT of Arrow Flight; "" before it is known."""
        return self._flight_address

    @property
    def http_port(self) -> int:
        """The HTTP port of probes and metrics."""
        return self._http_port

    @property
    def record(self) -> NodeRecord:
        """The node's record on the volume."""
        return self._volume.record

    @property
    def formed(self) -> bool:
        """Whether the cluster of this first master has formed, or a copy of the catalog came to it. True for
        all other nodes.
        """
        return self.record.formed

    def registration(self) -> master_pb2.NodeRegistrationPB:
        """The node's registration with the masters."""
        return master_pb2.NodeRegistrationPB(
            address=self.address,
            flight_address=self.flight_address,
            http_port=self.http_port,
            machine=self.options.machine,
            zone=self.options.zone,
            version=__version__,
            role=self.options.role,
            cluster_version=CLUSTER_VERSION,
        )

    def status(
        self, *, disk_free_bytes: int, replicas: int, masters: tuple[str, ...]
    ) -> tserver_pb2.GetNodeStatusResponse:
        """The node as tools see it. `masters`: the masters that the node knows."""
        return tserver_pb2.GetNodeStatusResponse(
            node_id=id_to_pb(self.identity.node_id),
            cluster_id=id_to_pb(self.identity.cluster_id),
            incarnation=self.identity.incarnation,
            address=self.address,
            version=__version__,
            machine=self.options.machine,
            zone=self.options.zone,
            role=self.options.role,
            resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            disk_free_bytes=disk_free_bytes,
            replicas=replicas,
            flight_address=self.flight_address,
            http_port=self.http_port,
            format_id=self.record.format_id,
            formed=self.formed,
            masters=masters,
            fork_id=self.record.fork_id,
            start_digest=start_digest(self.start),
        )

    def shown(self) -> Mapping[str, Any]:
        """What /identity shows."""
        return {
            "cluster_id": self.identity.cluster_id,
            "fork_id": self.identity.fork_id,
            "node_id": self.identity.node_id,
            "incarnation": self.identity.incarnation,
            "role": self.options.role,
            "format_id": self.record.format_id,
            "formed": self.formed,
            "address": self.address,
            "flight_address": self.flight_address,
        }
