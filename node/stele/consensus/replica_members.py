"""A replica and the members of its group: changes and handing over, which configuration was in force where, peers that need
a copy. A layer of Replica.

Decides no membership. Invariant: whoever asked for a change or a transfer gets one answer, the core's or that the replica
ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.replica_log import LogPart
from stele.consensus.superblock import Superblock
from stele.model.config import Configuration, Peer
from stele.model.errors import SteleError
from stele.model.ids import NodeId, ReplicaId
from stele.raft.events import ChangeType, ProposeChange, TransferLeadership
from stele.raft.status import PeerState

_SENDERS_MAX = 1_024
"""Replicas of a group that are remembered, those of its latest configurations apart."""


class MemberPart(LogPart):
    """Membership and leadership, as they are asked for and as they stand."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        super().__init__(superblock, directory, host, options)
        self._configs: list[Configuration] = []
        self._node_of: dict[ReplicaId, NodeId] = {}  # a replica never changes its node
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.needs_copy: dict[ReplicaId, str] = {}

    async def change_config(self, change_type: ChangeType, peer: Peer, cas_opid_index: int) -> Configuration:
        """Change one member; returns the committed configuration.

        Raises:
            Retryable: NOT_LEADER, NOT_READY, CHANGE_IN_PROGRESS, STEPPING_DOWN.
            Rejected: CAS_FAILED, UNSAFE_CHANGE.
        """
        self.check_leader()
        context = next(self._contexts)
        config: Configuration = await self._ask(
            context, ProposeChange(context, change_type, peer, cas_opid_index)
        )
        return config

    async def transfer_leadership(
        self, target: ReplicaId | None = None, leads: Mapping[NodeId, int] | None = None
    ) -> None:
        """Hand leadership to `target`, or to the voter whose node leads least by `leads`, of those that keep up.

        Raises:
            Retryable: NOT_LEADER, TIMED_OUT (it leads on), NOT_READY.
            Rejected: the target cannot lead.
        """
        self.check_leader()
        context = next(self._contexts)
        now_ms = self._runtime.now_ms() if self._runtime is not None else 0
        known = leads or {}
        led = tuple((p.replica_id, known.get(p.node_id, 0)) for p in self.config.peers)
        await self._ask(context, TransferLeadership(context, target, now_ms, led))

    async def _ask(self, context: int, event: ProposeChange | TransferLeadership) -> Any:
        if self._runtime is None:
            raise self._not_leader()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[context] = future
        self._runtime.post(event)
        return await asyncio.shield(future)

    def _answer(self, context: int, value: Any, error: SteleError | None) -> None:
        future = self._answers.pop(context, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
            future.exception()  # whoever asked may have gone

    def config_at(self, index: int) -> Configuration:
        """The configuration that was in force at a log index at or above the last flush."""
        for config in reversed(self._configs):
            if config.opid_index <= index:
                return config
        return self._configs[0]

    def _remember(self, config: Configuration) -> None:
        self._configs = [c for c in self._configs if c.opid_index < config.opid_index][-15:]
        self._configs.append(config)
        self._node_of.update((peer.replica_id, peer.node_id) for peer in config.peers)

    def _meets(self, sender: ReplicaId, from_node: NodeId) -> bool:
        """Whether messages of `sender` may come from this node: it is in no configuration known here, and is remembered."""
        known = self._node_of.get(sender)
        if known is not None:
            self.host.dropped(
                from_node, "sender", f"replica {sender} of tablet {self.tablet_id} is on node {known}"
            )
            return False
        if len(self._node_of) >= _SENDERS_MAX:
            self._node_of = {peer.replica_id: peer.node_id for c in self._configs for peer in c.peers}
        self._node_of[sender] = from_node
        return True

    def _config_changed(self, config: Configuration, committed: bool, cause: str) -> None:
        if committed:
            self.committed_config = config
        else:
            self.config = config
        if committed and self.config.opid_index <= config.opid_index:
            self.config = config
        self._remember(config)
        self._log.info("configuration", index=config.opid_index, committed=committed, cause=cause)
        self.host.changed(self)

    def _needs_copy(self, replica_id: ReplicaId, cause: str) -> None:
        """Once for each peer: what the core says of it may be said again."""
        if replica_id not in self.needs_copy:
            self._log.warning("peer needs a copy", peer=replica_id, cause=cause)
            self.needs_copy[replica_id] = cause
            self.host.changed(self)  # the masters hear of it from this leader alone

    def _forget_copied(self) -> None:
        """Peers that are gone, or whose acknowledgement came after all: believed to lack entries they would be replaced."""
        peers = self.core.status().peers if self.core is not None else ()
        lacking = {p.replica_id for p in peers if p.state is PeerState.SNAPSHOT}
        if not self.needs_copy.keys() <= lacking:
            self.needs_copy = {peer: cause for peer, cause in self.needs_copy.items() if peer in lacking}
            self.host.changed(self)
