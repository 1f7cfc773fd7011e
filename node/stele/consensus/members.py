"""The group of a replica: changes of members, transfers of leadership, nodes of replicas, peers that need a
copy.

One part of a StartedReplica. It decides no membership.

Invariant: each request for a change or a transfer gets one answer: the core's, or the error that ends the
replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TypeVar

from stele.consensus.ports import Host
from stele.consensus.runtime import CoreRuntime
from stele.consensus.state import Standing
from stele.model.config import Configuration, Peer, decode_configuration
from stele.model.entry import EntryKind
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import NodeId, ReplicaId
from stele.raft import effects as fx
from stele.raft.events import ChangeType, InitialState, Promote, ProposeChange, TransferLeadership
from stele.raft.status import PeerState

T = TypeVar("T")
_SENDERS_MAX = 1_024
"""How many replicas of a group are remembered, besides those of its latest configurations."""
_CONFIGS_KEPT = 16


class Members:
    """Requests for changes of members and leader, and what is known of the group.

    `node_of`: the node of each replica of the group, which never changes. `needs_copy`: as leader, the peers
    that the log cannot bring up to date, and why.
    """

    def __init__(
        self,
        standing: Standing,
        host: Host,
        runtime: CoreRuntime,
        contexts: Iterator[int],
        initial: InitialState,
    ) -> None:
        self.node_of: dict[ReplicaId, NodeId] = {}
        self.needs_copy: dict[ReplicaId, str] = {}
        self._standing = standing
        self._host = host
        self._runtime = runtime
        self._contexts = contexts
        self._configs: list[Configuration] = []
        self._changes: dict[int, asyncio.Future[Configuration]] = {}
        self._transfers: dict[int, asyncio.Future[None]] = {}
        self._remember(initial.config)
        for _, config in initial.skipped.configs:
            self._remember(config)
        for entry in initial.entries:
            if entry.kind is EntryKind.CONFIG:
                self._remember(decode_configuration(entry.payload))

    @property
    def busy(self) -> bool:
        """Whether a caller waits for an answer."""
        return bool(self._changes or self._transfers)

    # --- orders

    async def change_config(
        self, change_type: ChangeType, peer: Peer, cas_opid_index: int, cause: str = ""
    ) -> Configuration:
        """Change one member; returns the committed configuration. `cause`: why, for the log.

        Raises:
            Retryable: NOT_LEADER, NO_QUORUM, NOT_READY, CHANGE_IN_PROGRESS, STEPPING_DOWN.
            Rejected: CAS_FAILED, UNSAFE_CHANGE. ALREADY_PRESENT, NOT_FOUND or INVALID_ARGUMENT: the change
                does not fit the configuration.
        """
        self._standing.check_leader()
        context = next(self._contexts)
        return await self._ask(
            self._changes, context, ProposeChange(context, change_type, peer, cas_opid_index, cause)
        )

    async def transfer_leadership(
        self,
        target: ReplicaId | None = None,
        leads: Mapping[NodeId, int] | None = None,
        cause: str = "",
        *,
        at_once: bool = False,
    ) -> None:
        """Hand leadership to `target`. None: to the voter that keeps up and whose node leads the fewest
        groups.

        `leads`: how many groups each node leads. `cause`: why, for the log. `at_once`: refuse a target that
        lacks much of the log, because writes wait until it has all of it.

        Raises:
            Retryable: NOT_LEADER, NO_QUORUM, CHANGE_IN_PROGRESS (another transfer), TIMED_OUT (this replica
                still leads), UNAVAILABLE (another replica leads), NOT_READY (also for a target that is not
                caught up).
            Rejected: UNSAFE_CHANGE, the target cannot lead.
        """
        self._standing.check_leader()
        context = next(self._contexts)
        known = leads or {}
        led = tuple((p.replica_id, known.get(p.node_id, 0)) for p in self._standing.config.peers)
        if cause:
            self._standing.log.info("handing over leadership", to=target, cause=cause)
        event = TransferLeadership(context, target, self._runtime.now_ms(), led, cause, at_once)
        await self._ask(self._transfers, context, event)

    def promote(self, cause: str) -> None:
        """Let this replica stand for election at once. Its role shows whether it wins.

        Raises:
            Rejected: it cannot lead, because it is not a voter with rows, or has FAILED.
            Retryable: NOT_READY, it has promised a leader's lease that is not over.
        """
        core = self._runtime.core
        if not self._standing.running or not core.may_campaign or core.is_witness:
            raise Rejected(
                f"replica {self._standing.replica_id} of tablet {self._standing.tablet_id[:8]} cannot lead: only "
                f"a running voter with rows can, and it is {self._standing.state.name}; choose another "
                f"replica"
            )
        if core.bound_at(self._runtime.now_ms()):
            raise Retryable(
                f"replica {self._standing.replica_id} of tablet {self._standing.tablet_id[:8]} has promised its leader a "
                f"lease that has not expired; transfer leadership from that leader, or try again after the lease ends",
                code=Code.NOT_READY,
            )
        self._standing.log.warning("promoted by force", cause=cause)
        self._runtime.post(Promote(self._runtime.now_ms(), cause))

    async def _ask(
        self,
        answers: dict[int, asyncio.Future[T]],
        context: int,
        event: ProposeChange | TransferLeadership,
    ) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answers[context] = future
        self._runtime.post(event)
        return await asyncio.shield(future)

    # --- what the core reports

    def changed(self, context: int, config: Configuration) -> None:
        """Answer a requested change of members: it is committed."""
        future = self._changes.pop(context, None)
        if future is not None:
            future.set_result(config)

    def transferred(self, context: int) -> None:
        """Answer a requested transfer: the other replica leads now."""
        future = self._transfers.pop(context, None)
        if future is not None:
            future.set_result(None)

    def refused(self, context: int, error: SteleError) -> None:
        """Answer a request for a change or a transfer: it failed with `error`."""
        future = self._changes.pop(context, None) or self._transfers.pop(context, None)
        if future is not None:
            future.set_exception(error)
            future.exception()  # retrieved here: the caller may have gone

    def refuse_all(self, error: SteleError) -> None:
        """Refuse all changes and transfers under way, because the replica ends."""
        for context in (*self._changes, *self._transfers):
            self.refused(context, error)

    def configured(self, change: fx.ConfigChanged) -> None:
        """Take over the core's report of a new active configuration, or of one that is committed."""
        self._remember(change.config)
        self._standing.configured(change.config, change.committed, change.cause)

    def peer_needs_copy(self, replica_id: ReplicaId, cause: str) -> None:
        """Note, log and report a peer that needs a copy. Does it once, however often the core says so."""
        if replica_id not in self.needs_copy:
            self._standing.log.warning("peer needs a copy", peer=replica_id, cause=cause)
            self.needs_copy[replica_id] = cause
            self._standing.report()  # only this leader can report it to the masters

    def end_leading(self) -> None:
        """Forget what only a leader knows of its peers: this replica no longer leads."""
        self.needs_copy.clear()

    def forget_copied(self) -> None:
        """Drop from `needs_copy` the peers that are gone or acknowledge entries. Otherwise a driver would
        replace them.
        """
        peers = self._runtime.core.status().peers
        lacking = {p.replica_id for p in peers if p.state is PeerState.SNAPSHOT}
        if not self.needs_copy.keys() <= lacking:
            self.needs_copy = {peer: cause for peer, cause in self.needs_copy.items() if peer in lacking}
            self._standing.report()

    # --- who is who

    def config_at(self, index: int) -> Configuration:
        """The configuration that was in force at a log index at or above the last flush."""
        for config in reversed(self._configs):
            if config.opid_index <= index:
                return config
        return self._configs[0]

    def learn_sender(self, sender: ReplicaId, from_node: NodeId) -> bool:
        """Whether to take a message whose `sender` is unknown or, according to `node_of`, on another node.

        If the sender is unknown, remember that it is on `from_node`, and take the message. Otherwise tell the
        host that the message is dropped.
        """
        known = self.node_of.get(sender)
        if known is not None:
            self._host.dropped(
                from_node,
                "sender",
                f"replica {sender} of tablet {self._standing.tablet_id[:8]} is on node {known}, not on the "
                "node that sent the message",
            )
            return False
        if len(self.node_of) >= _SENDERS_MAX:
            self.node_of = {peer.replica_id: peer.node_id for c in self._configs for peer in c.peers}
        self.node_of[sender] = from_node
        return True

    def _remember(self, config: Configuration) -> None:
        older = [c for c in self._configs if c.opid_index < config.opid_index]
        self._configs = [*older[-(_CONFIGS_KEPT - 1) :], config]
        self.node_of.update((peer.replica_id, peer.node_id) for peer in config.peers)
