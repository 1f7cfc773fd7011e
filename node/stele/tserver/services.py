"""The gRPC services of every node and master, made from the node's parts. Called by node.py, once."""

from __future__ import annotations

from functools import partial

import grpc

from stele.consensus.copy_source import CopySessions
from stele.rpc import server as rpc_server
from stele.rpc.budget import ByteBudget
from stele.rpc.client_stream import ClientStreams
from stele.rpc.flight_service import add_flight_service
from stele.rpc.identity import PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import (
    add_ConsensusServiceServicer_to_server,
    add_TabletCopyServiceServicer_to_server,
)
from stele.rpc.proto.tserver_pb2_grpc import (
    add_TabletServerAdminServiceServicer_to_server,
    add_TabletServerServiceServicer_to_server,
)
from stele.tserver.admin_service import AdminService
from stele.tserver.consensus_service import ConsensusService
from stele.tserver.copy_client import CopySources
from stele.tserver.copy_service import TabletCopyService
from stele.tserver.description import NodeDescription
from stele.tserver.fences import Fences
from stele.tserver.heartbeater import Heartbeater
from stele.tserver.host import NodeHost
from stele.tserver.leader_load import LeaderLoad
from stele.tserver.leases import LeaseKeeper
from stele.tserver.manager import TabletManager
from stele.tserver.messenger import Messenger
from stele.tserver.monitor import NodeMonitor
from stele.tserver.plans import Plans
from stele.tserver.replicas import Replicas
from stele.tserver.tablet_service import TabletService
from stele.tserver.threads import NodeThreads
from stele.tserver.wall_clock import WallClock
from stele.tserver.watching import Watches


def make_server(
    description: NodeDescription,
    book: PeerBook,
    budget: ByteBudget,
    streams: StreamListener,
    threads: NodeThreads,
    wall_clock: WallClock,
    replicas: Replicas,
    manager: TabletManager,
    sessions: CopySessions,
    copy_sources: CopySources,
    fences: Fences,
    messenger: Messenger,
    heartbeater: Heartbeater,
    monitor: NodeMonitor,
    host: NodeHost,
    plans: Plans,
    watches: Watches,
    leases: LeaseKeeper,
    load: LeaderLoad,
) -> grpc.aio.Server:
    """A gRPC server with the node's services, which does not listen yet."""
    identity = description.identity

    def status() -> tserver_pb2.GetNodeStatusResponse:
        return description.status(
            disk_free_bytes=monitor.disk_bytes[0], replicas=len(replicas), masters=heartbeater.addresses
        )

    server = rpc_server.make_server(identity, book, budget)
    add_TabletServerServiceServicer_to_server(
        TabletService(
            identity.node_id,
            replicas,
            wall_clock,
            load,
            in_read_thread=threads.in_read_thread,
            status=status,
            cluster_version=lambda: heartbeater.cluster_version,
            watches=watches,
            leases=leases,
            make_streams=partial(ClientStreams, identity, book, budget, streams),
        ),
        server,
    )
    add_TabletServerAdminServiceServicer_to_server(
        AdminService(identity.node_id, replicas, manager, fences), server
    )
    add_ConsensusServiceServicer_to_server(
        ConsensusService(
            identity,
            messenger,
            replicas,
            manager,
            fences,
            copy_source=copy_sources.at,
            changed=host.changed_key,
        ),
        server,
    )
    add_TabletCopyServiceServicer_to_server(TabletCopyService(description, replicas, sessions), server)
    add_flight_service(server, plans)
    return server
