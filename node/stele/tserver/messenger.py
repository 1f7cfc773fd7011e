"""Raft messages between this node's replicas and their peers on other nodes, and groups at rest, which send
none (quiet.py). Owns the transport in both directions, and the last encoded message. Decides nothing about
tablets.

Invariant: a message reaches only the replica that it names, and only if sender and receiver have the same
incarnation of the tablet. `send` never waits. A message that cannot be sent is lost, which Raft tolerates.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable

import structlog

from stele import metrics
from stele.consensus.incarnations import same_incarnation
from stele.consensus.ports import HostedReplica
from stele.model.errors import SteleError
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.raft.messages import Message, UpdateRequest
from stele.raft.options import RaftOptions
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import PeerBook
from stele.rpc.inbound import PeerInbound
from stele.rpc.listener import StreamListener
from stele.rpc.logging import OncePer
from stele.rpc.peers import BULK, CONTROL, PeerTransport
from stele.rpc.proto import common_pb2, consensus_pb2
from stele.tserver.beating import Beating
from stele.tserver.confirming import Confirming
from stele.tserver.following import LeaderQuestions
from stele.tserver.messages import QUIET, encode_body, encode_head, message_from_pb
from stele.tserver.quiet import QuietGroups
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")


class Messenger:
    """The messenger of one node. `own_address()`: where this node listens.

    `dial_configured`: whether a peer may be dialled at an address from a configuration. It is False on an
    adopted volume, whose configurations may name nodes of the volume that it was copied from.
    """

    def __init__(
        self,
        replicas: Replicas,
        pool: ChannelPool,
        book: PeerBook,
        budget: ByteBudget,
        streams: StreamListener,
        options: RaftOptions,
        *,
        now_ms: int,
        own_address: Callable[[], str],
        dial_configured: bool,
    ) -> None:
        self._replicas = replicas
        self._dial_configured = dial_configured
        self.quiet = QuietGroups(replicas, options, self._ping, now_ms)
        self.beating = Beating(
            replicas,
            self._beat,
            first=secrets.randbits(48) << 14,
            patience_ms=options.election_max_ms,
            now_ms=now_ms,
        )
        self.confirming = Confirming(
            replicas,
            self._confirm,
            first=secrets.randbits(48) << 14,
            patience_ms=options.heartbeat_ms,
            now_ms=now_ms,
        )
        self.following = LeaderQuestions(
            replicas, self._follow, first=secrets.randbits(48) << 14, now_ms=now_ms
        )
        self._transport = PeerTransport(
            pool,
            self._address_of,
            self._on_message,
            self._on_disconnect,
            on_reconnect=replicas.peer_node_back,
            on_heard=self.quiet.heard,
            book=book,
            own_address=own_address,
            rng=random.Random(),
        )
        self._inbound = PeerInbound(self._transport, budget, streams)
        # What was sent last, until the next tick at most. A leader sends the same to each peer in turn.
        self._encoded: tuple[Message | None, bytes] = None, b""
        self._once = OncePer()

    def send(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, message: Message, *, quiet: bool = False
    ) -> None:
        """As `Host.send`. A fenced node sends and accepts nothing."""
        if self._replicas.fenced:
            return
        bulk = isinstance(message, UpdateRequest) and bool(message.entries)
        if not self._transport.takes(node_id, bulk=bulk):
            metrics.peer_dropped.labels(BULK if bulk else CONTROL).inc()
            return  # before it costs an encoding: a leader of many tablets tries a lost peer for each of them
        superblock = replica.superblock
        head = encode_head(replica.raw_tablet_id, superblock.replica_id, to, superblock.tablet_incarnation)
        if message is not self._encoded[0]:
            self._encoded = message, encode_body(message)
        raw = head + self._encoded[1]
        if isinstance(message, UpdateRequest):
            may_wait = not bulk and not message.read_context
            self._transport.send(node_id, raw + QUIET if quiet else raw, bulk=bulk, may_wait=may_wait)
        else:
            self._transport.send(node_id, raw)

    def dropped(self, node_id: NodeId, cause: str, why: str) -> None:
        """As `Host.dropped`."""
        metrics.peer_refused.labels(cause).inc()
        self._once.tell(
            log.warning, "message dropped", node_id, cause, from_node=node_id, cause=cause, error=why
        )

    def introduce(self, request: common_pb2.OpenStreamRequest) -> common_pb2.OpenStreamResponse:
        """As `PeerInbound.introduce`, for a peer that wants to open a stream."""
        return self._inbound.introduce(request)

    def tick(self, now_ms: int) -> None:
        """Pass the time on to the parts of the messenger."""
        self._encoded = None, b""
        self.quiet.tick(now_ms)
        self.beating.tick(now_ms)
        self.confirming.tick(now_ms)
        self.following.tick(now_ms)

    def woken(self, key: StreamKey) -> None:
        """Note that a replica is no longer at rest: its time goes on."""
        self._replicas.woken(key)
        self.quiet.woken(key)

    async def close(self) -> None:
        """Close all links; queued messages are lost."""
        await self.following.close()
        await self._transport.close()

    def _ping(self, node_id: NodeId, resting: consensus_pb2.RestingPB) -> None:
        if self._replicas.fenced:
            return
        self._transport.send(node_id, consensus_pb2.ConsensusMessage(resting=resting).SerializeToString())

    def _beat(self, node_id: NodeId, beat: consensus_pb2.BeatPB) -> None:
        if self._replicas.fenced:
            return
        self._transport.send(node_id, consensus_pb2.ConsensusMessage(beat=beat).SerializeToString())

    def _confirm(self, node_id: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        if self._replicas.fenced:
            return
        self._transport.send(node_id, consensus_pb2.ConsensusMessage(confirm=confirm).SerializeToString())

    def _follow(self, node_id: NodeId, follow: consensus_pb2.FollowPB) -> None:
        if self._replicas.fenced:
            return
        self._transport.send(node_id, consensus_pb2.ConsensusMessage(follow=follow).SerializeToString())

    def _address_of(self, node_id: NodeId) -> str:
        """The last known HOST:PORT of a node by the configurations of the replicas here; "" if none names it."""
        if not self._dial_configured:
            return ""
        for replica in self._replicas:
            peer = replica.config.peer_on(node_id)
            if peer is not None and peer.address:
                return peer.address
        return ""

    def _on_message(self, from_node: NodeId, envelope: consensus_pb2.ConsensusMessage) -> None:
        if self._replicas.fenced:
            return
        replica = self._replicas.route((envelope.tablet_id, envelope.to_replica))
        if replica is None:
            if envelope.HasField("beat"):
                self.beating.told(from_node, envelope.beat)
            elif envelope.HasField("confirm"):
                self.confirming.told(from_node, envelope.confirm)
            elif envelope.HasField("follow"):
                self.following.told(from_node, envelope.follow)
            elif envelope.HasField("resting"):
                self.quiet.told(from_node, envelope.resting)
            return
        sender = ReplicaId(envelope.from_replica)
        if not same_incarnation(replica, from_node, sender, envelope.tablet_incarnation):
            return
        try:
            message = message_from_pb(envelope)
        except SteleError as exc:
            self.dropped(from_node, "kind", str(exc))
            return
        if not (envelope.quiet and self.quiet.take(replica, sender, message)):
            replica.on_message(from_node, sender, message)

    def _on_disconnect(self, node_id: NodeId) -> None:
        self.quiet.lost(node_id)
        self.beating.lost(node_id)
        self.confirming.lost(node_id)
        self.following.lost(node_id)
        self._replicas.peer_node_failed(node_id)
