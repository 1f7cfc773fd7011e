"""Nodes that exist only as heartbeats and answers, many in one process. Used by scale.py.

Each has a gRPC server and a pool of its own, reports only what changed, and carries orders out at once.
Configuration, term and leader of a group are kept once for all its replicas. No log is written, and no row is
copied.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import Code, Rejected, SteleError
from stele.model.ids import ClusterId, NodeId, ReplicaId, new_id
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_from_pb, config_to_pb, id_from_pb, id_to_pb, peer_from_pb
from stele.rpc.errors import abort_with
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import (
    ConsensusServiceServicer,
    add_ConsensusServiceServicer_to_server,
)
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.rpc.proto.tserver_pb2_grpc import (
    TabletServerAdminServiceServicer,
    add_TabletServerAdminServiceServicer_to_server,
)

_BYTES = 64 << 20


@dataclass
class Group:
    """The group of a tablet. `rows`: the replicas that have their rows."""

    config: Configuration
    leader: str
    term: int = 1
    rows: set[int] = field(default_factory=set)


class Nodes:
    """All nodes and groups. `orders`: how many orders of each kind were carried out."""

    def __init__(self, cluster_id: str, masters: list[str], count: int) -> None:
        self.cluster_id, self.masters = cluster_id, masters
        self.groups: dict[str, Group] = {}
        self.orders: Counter[str] = Counter()
        self._ordered = asyncio.Event()
        self.nodes = [Node(self, number) for number in range(count)]
        self.live = {node.node_id: node for node in self.nodes}

    async def start(self) -> None:
        for node in self.nodes:
            await node.start()

    async def stop(self) -> None:
        for node in self.nodes:
            await node.stop()

    async def lose(self, node: Node) -> None:
        """Remove a node. Its groups elect other leaders."""
        del self.live[node.node_id]
        await node.stop()
        for tablet_id in list(node.replicas):
            group = self.groups[tablet_id]
            if group.leader == node.node_id:
                heirs = [p.node_id for p in group.config.peers if p.votes and p.node_id in self.live]
                group.leader, group.term = min(heirs), group.term + 1
                self.changed(tablet_id)

    def ordered(self, what: str) -> None:
        """Count an order."""
        self.orders[what] += 1
        self._ordered.set()

    async def made(self, replicas: int) -> None:
        """Wait until this many replicas were ordered."""
        while self.orders["CreateTablet"] < replicas:
            self._ordered.clear()
            await self._ordered.wait()

    def changed(self, tablet_id: str) -> None:
        """Let all members report the tablet soon."""
        for node in self.live.values():
            if tablet_id in node.replicas:
                node.dirty.add(tablet_id)

    def fragile(self) -> int:
        """Tablets that would lose their majority with one more voter."""
        found = 0
        for group in self.groups.values():
            voters = [p for p in group.config.peers if p.votes]
            live = sum(p.node_id in self.live for p in voters)
            found += live - (len(voters) // 2 + 1) < 1
        return found

    def without_rows(self) -> int:
        """The number of tablets that have fewer than three live voters with their rows."""
        found = 0
        for group in self.groups.values():
            voters = [p for p in group.config.peers if p.member_type is MemberType.VOTER]
            found += sum(p.node_id in self.live and p.replica_id in group.rows for p in voters) < 3
        return found

    def change(self, tablet_id: str, request: consensus_pb2.BulkChangeConfigRequest) -> Configuration:
        """Change a configuration. Then promote the members that wait to become voters, as the leader does."""
        group, peer = self.groups[tablet_id], peer_from_pb(request.peer)
        if request.cas_config_opid_index != group.config.opid_index:
            raise Rejected(
                f"tablet {tablet_id[:8]}: configuration {request.cas_config_opid_index} is outdated, "
                f"{group.config.opid_index} is in force",
                code=Code.CAS_FAILED,
            )
        rest = tuple(p for p in group.config.peers if p.replica_id != peer.replica_id)
        peers = rest if request.type == consensus_pb2.REMOVE_PEER else (*rest, peer)
        group.config = Configuration(group.config.opid_index + 1, peers)
        self.orders[consensus_pb2.ChangeTypePB.Name(request.type)] += 1
        answer = group.config
        self.promote(tablet_id)
        self.changed(tablet_id)
        return answer

    def promote(self, tablet_id: str) -> None:
        """Promote members that have their rows, as a leader does."""
        group = self.groups[tablet_id]
        for peer in group.config.peers:
            if (peer.promote or peer.member_type is MemberType.WITNESS) and peer.replica_id in group.rows:
                voter = Peer(peer.node_id, peer.replica_id, peer.address, MemberType.VOTER)
                peers = tuple(voter if p is peer else p for p in group.config.peers)
                group.config = replace(group.config, opid_index=group.config.opid_index + 1, peers=peers)
                self.changed(tablet_id)


def _tombstone(tablet_id: str, replica_id: int) -> common_pb2.ReplicaStatusPB:
    """Return what a node reports of a replica that was removed."""
    return common_pb2.ReplicaStatusPB(
        tablet_id=id_to_pb(tablet_id),
        replica_id=replica_id,
        state=common_pb2.STOPPED,
        data_state=common_pb2.TOMBSTONED,
        role=common_pb2.NON_PARTICIPANT,
    )


def _answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except SteleError as exc:
            await abort_with(context, exc)

    return call


class Node(TabletServerAdminServiceServicer, ConsensusServiceServicer):
    """One node. `replicas`: replica id by tablet; `copies`: progress of copies that came to it."""

    def __init__(self, all_nodes: Nodes, number: int) -> None:
        self.all = all_nodes
        self.number = number
        self.node_id = NodeId(new_id())
        self.replicas: dict[str, int] = {}
        self.copies: dict[str, common_pb2.CopyProgressPB] = {}
        self.dirty: set[str] = set()
        self._tombstones: list[tuple[str, int]] = []
        """Removed replicas of which the leading master does not know yet."""
        self.address = ""
        self._start = random.getrandbits(60)
        self._pool = ChannelPool(Identity(ClusterId(all_nodes.cluster_id), self.node_id, 1))
        self._server = grpc.aio.server()
        self._beats: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        add_TabletServerAdminServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        add_ConsensusServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._beats = [asyncio.create_task(self._beat(master)) for master in self.all.masters]

    async def stop(self) -> None:
        for beat in self._beats:
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        await self._server.stop(None)
        await self._pool.close()

    async def _beat(self, master: str) -> None:
        """Report changes to one master each second. At first, and when the master asks, report everything."""
        full, register = True, True
        told: set[str] = set()
        for sequence in itertools.count(1):
            keys = set(self.replicas) if full else self.dirty & set(self.replicas)
            request = master_pb2.TSHeartbeatRequest(
                node_id=id_to_pb(self.node_id),
                incarnation=1,
                start=self._start,
                sequence=sequence,
                incremental=not full,
                has_report=True,
                disk_free_bytes=1 << 40,
                disk_used_bytes=1 << 30,
                load=0,
                tablets=[self.status(t) for t in keys],
            )
            if register:
                request.registration.CopyFrom(
                    master_pb2.NodeRegistrationPB(
                        address=self.address,
                        machine=f"m{self.number}",
                        zone=f"z{self.number % 3}",
                        role="node",
                        cluster_version=CLUSTER_VERSION,
                    )
                )
            told, graves = set(keys), len(self._tombstones)
            request.tablets.extend(_tombstone(t, r) for t, r in self._tombstones)
            try:
                answer = await self._pool.unary(
                    master, MasterServiceStub, "TSHeartbeat", request, timeout_s=10
                )
            except SteleError as exc:
                full = register = True
                if exc.code is Code.NOT_FOUND:
                    with suppress(SteleError):
                        asked = master_pb2.RegisterNodeRequest(node_id=id_to_pb(self.node_id), role="node")
                        await self._pool.unary(master, MasterServiceStub, "RegisterNode", asked, timeout_s=10)
            else:
                full, register = answer.needs_full_report, answer.needs_reregister
                if answer.is_leader:
                    self.dirty -= told
                    del self._tombstones[:graves]
            await asyncio.sleep(1.0)

    def status(self, tablet_id: str) -> common_pb2.ReplicaStatusPB:
        group, replica_id = self.all.groups[tablet_id], self.replicas[tablet_id]
        index = group.config.opid_index + 10
        status = common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(tablet_id),
            replica_id=replica_id,
            state=common_pb2.RUNNING,
            data_state=common_pb2.READY,
            role=common_pb2.LEADER if group.leader == self.node_id else common_pb2.FOLLOWER,
            term=group.term,
            leader_node=id_to_pb(group.leader),
            has_data=replica_id in group.rows,
            schema_version=1,
            bytes_on_disk=_BYTES,
            committed_config=config_to_pb(group.config),
            last_committed=common_pb2.OpIdPB(term=1, index=index),
            last_logged=common_pb2.OpIdPB(term=1, index=index),
        )
        if (copy := self.copies.get(tablet_id)) is not None and replica_id not in group.rows:
            status.copy.CopyFrom(copy)
        return status

    # --- orders

    async def CreateTablet(self, request: tserver_pb2.CreateTabletRequest, context: Any) -> Any:
        tablet_id, config = id_from_pb(request.tablet_id), config_from_pb(request.config)
        group = self.all.groups.setdefault(tablet_id, Group(config, id_from_pb(request.leader_hint)))
        peer = config.peer_on(self.node_id)
        if peer is not None:
            self.replicas[tablet_id] = int(peer.replica_id)
            group.rows.add(int(peer.replica_id))
            self.dirty.add(tablet_id)
        self.all.ordered("CreateTablet")
        return tserver_pb2.CreateTabletResponse()

    async def DeleteTablet(self, request: tserver_pb2.DeleteTabletRequest, context: Any) -> Any:
        tablet_id = id_from_pb(request.tablet_id)
        if self.replicas.get(tablet_id) == request.replica_id:
            del self.replicas[tablet_id]
            self._tombstones.append((tablet_id, request.replica_id))
        self.all.orders["DeleteTablet"] += 1
        return tserver_pb2.DeleteTabletResponse()

    async def GetConsensusState(
        self, request: consensus_pb2.GetConsensusStateRequest, context: Any
    ) -> consensus_pb2.GetConsensusStateResponse:
        asked = (id_from_pb(raw) for raw in request.tablet_ids)
        return consensus_pb2.GetConsensusStateResponse(
            node_id=id_to_pb(self.node_id),
            incarnation=1,
            replicas=[self.status(t) for t in asked if t in self.replicas],
        )

    @_answering
    async def BulkChangeConfig(self, request: consensus_pb2.BulkChangeConfigRequest, context: Any) -> Any:
        committed = self.all.change(id_from_pb(request.tablet_id), request)
        return consensus_pb2.BulkChangeConfigResponse(committed=config_to_pb(committed))

    @_answering
    async def LeaderStepDown(self, request: consensus_pb2.LeaderStepDownRequest, context: Any) -> Any:
        group = self.all.groups[id_from_pb(request.tablet_id)]
        target = id_from_pb(request.target_node) or self._heir(group)
        if target not in self.all.live:
            raise Rejected(f"node {target} does not answer, so it cannot lead", code=Code.UNSAFE_CHANGE)
        group.leader, group.term = target, group.term + 1
        self.all.orders["LeaderStepDown"] += 1
        self.all.changed(id_from_pb(request.tablet_id))
        return consensus_pb2.LeaderStepDownResponse()

    def _heir(self, group: Group) -> str:
        """A voter to lead in place of this one; "" if there is none."""
        voters = (p for p in group.config.peers if p.member_type is MemberType.VOTER)
        able = (p.node_id for p in voters if p.node_id in self.all.live and p.replica_id in group.rows)
        return random.choice([node_id for node_id in able if node_id != self.node_id] or [""])

    async def StartTabletCopy(self, request: consensus_pb2.StartTabletCopyRequest, context: Any) -> Any:
        """The rows arrive at once, unless the order is for a witness that waits for its turn."""
        tablet_id = id_from_pb(request.tablet_id)
        self.replicas[tablet_id] = ReplicaId(request.replica_id)
        progress = common_pb2.CopyProgressPB(
            replica_id=request.replica_id,
            source_node=request.source_node,
            state="Waiting" if request.log_only else "Done",
            bytes_total=_BYTES,
            bytes_done=0 if request.log_only else _BYTES,
        )
        self.copies[tablet_id] = progress
        if not request.log_only:
            self.all.groups[tablet_id].rows.add(int(request.replica_id))
            self.all.promote(tablet_id)
        self.all.orders["StartTabletCopy"] += 1
        self.dirty.add(tablet_id)
        return consensus_pb2.StartTabletCopyResponse(progress=progress, witness_start=request.witness_start)
