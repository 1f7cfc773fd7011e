"""The network between the nodes of tests/consensus/cluster.py, in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stele.model.ids import NodeId, ReplicaId
from stele.raft.messages import Message
from stele.rpc.proto import consensus_pb2

if TYPE_CHECKING:
    from tests.consensus.cluster import TestNode


class Network:
    """Carries messages between TestNodes. `cut` holds the nodes that hear and say nothing."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, TestNode] = {}
        self.cut: set[NodeId] = set()
        self.loss = 0.0
        self.random = random.Random(7)

    def carries(
        self, sender: TestNode, to: NodeId, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        """Whether a message of a replica goes on its way. Tests that watch or choose messages replace this."""
        return self._is_lucky(sender, to)

    def send(
        self,
        sender: TestNode,
        to: NodeId,
        tablet: bytes,
        from_: int,
        to_: int,
        message: Message,
        quiet: bool,
        incarnation: int,
    ) -> None:
        """Carry a message of a replica."""
        if self.carries(sender, to, tablet, from_, to_, message):
            self._bring(
                to,
                lambda n: n.receive,
                sender.node_id,
                tablet,
                ReplicaId(from_),
                to_,
                message,
                quiet,
                incarnation,
            )

    def ping(self, sender: TestNode, to: NodeId, *told: Any) -> None:
        """Carry a node's ping."""
        if self._is_lucky(sender, to):
            self._bring(to, lambda n: n.pinged, sender.node_id, *told)

    def beat(self, sender: TestNode, to: NodeId, beat: consensus_pb2.BeatPB) -> None:
        """Carry beats, or the answer to them."""
        if self._is_lucky(sender, to):
            self._bring(to, lambda n: n.beating.told, sender.node_id, beat)

    def confirm(self, sender: TestNode, to: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        """Carry a question about leaders, or its answer."""
        if self._is_lucky(sender, to):
            self._bring(to, lambda n: n.confirming.told, sender.node_id, confirm)

    def follow(self, sender: TestNode, to: NodeId, follow: consensus_pb2.FollowPB) -> None:
        """Carry a follower's question, or its answer."""
        if self._is_lucky(sender, to):
            self._bring(to, lambda n: n.following.told, sender.node_id, follow)

    def _is_lucky(self, sender: TestNode, to: NodeId) -> bool:
        return sender.node_id not in self.cut and to not in self.cut and self.random.random() >= self.loss

    def _bring(self, to: NodeId, door: Callable[[TestNode], Callable[..., None]], *told: Any) -> None:
        target = self.nodes.get(to)
        if target is not None and not target.stopped:
            asyncio.get_running_loop().call_soon(door(target), *told)
