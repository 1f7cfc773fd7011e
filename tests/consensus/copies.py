"""Copies from node to node without a network between them: sources that break off, and what is asked of a target."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

from stele.consensus.copy_order import CopyOrder
from stele.consensus.copy_source import SessionInfo
from stele.consensus.copy_target import TabletCopy
from stele.consensus.replica import Replica
from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import Retryable
from stele.model.ids import OpId, ReplicaId, TabletId
from stele.raft.events import ChangeType
from tests.consensus.cluster import WAIT_S, Group, TestNode, wait_until


class DirectFrames:
    """CopyFrames straight from another node's sessions."""

    def __init__(self, source: DirectSource, stop: Event, *wanted: Any) -> None:
        self.source = source
        self.stop = stop
        self.wanted = wanted

    def cancel(self) -> None:
        """Nothing waits here for long."""

    def __iter__(self) -> Iterator[tuple[int, bytes, int]]:
        source, sent = self.source, 0
        while source.hold is not None and not source.hold.wait(0.01):
            if self.stop.is_set():
                raise Retryable("stopped")
        for at, data, crc in source.node.sessions.fetch(*self.wanted):
            if source.breaks and sent + len(data) > source.break_after:
                source.breaks -= 1
                if source.damage:
                    yield at, bytes(len(data)), crc
                raise Retryable("the connection broke")
            sent += len(data)
            source.sent += len(data)
            yield at, data, crc


class DirectSource:
    """CopySource straight to another node's sessions. `break_after` bytes the connection fails, `breaks` times."""

    def __init__(
        self, node: TestNode, breaks: int = 0, break_after: int = 1, *, damage: bool = False
    ) -> None:
        self.node = node
        self.breaks = breaks
        self.break_after = break_after
        self.damage = damage
        self.begun = 0
        self.sent = 0
        self.hold: Event | None = None

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        self.begun += 1
        return await self.node.sessions.begin(self.node.replicas.get(tablet_id), at_least)

    def fetch(self, session_id: str, name: str, offset: int, length: int, stop: Event) -> DirectFrames:
        return DirectFrames(self, stop, session_id, name, offset, length)

    async def keep_alive(self, session_id: str) -> int:
        return self.node.sessions.keep_alive(session_id)

    async def end(self, session_id: str, success: bool, damage: str) -> None:
        await self.node.sessions.end(session_id, damage)


def order(group: Group, source: TestNode, replica_id: int, **more: object) -> CopyOrder:
    """An order to copy the replica that the source holds, under a new number."""
    return CopyOrder(group.tablet_id, ReplicaId(replica_id), source.node_id, "source:1", **more)  # type: ignore[arg-type]


async def start(
    group: Group, source: TestNode, target: TestNode, replica_id: int, **more: object
) -> TabletCopy:
    """A copy that has begun."""
    copy = await target.manager.start_copy(order(group, source, replica_id, **more), DirectSource(source))
    assert copy is not None
    return copy


async def installed(copy: TabletCopy) -> None:
    """Wait until the copy is done."""
    await wait_until(lambda: copy.progress.state in ("Done", "Failed"))
    assert copy.progress.state == "Done", copy.progress.error


async def add(group: Group, target: TestNode, replica_id: int, **more: object) -> Configuration:
    """Add the replica that the target holds; the configuration with it."""
    leader = await group.leader()
    peer = Peer(target.node_id, ReplicaId(replica_id), "n:1", **more)  # type: ignore[arg-type]
    return await leader.members.change_config(ChangeType.ADD, peer, leader.committed_config.opid_index)


def member_type(replica: Replica, replica_id: int) -> MemberType | None:
    """What a replica knows another of its group to be; None: no member."""
    peer = replica.committed_config.peer(replica_id)
    return peer.member_type if peer is not None else None


async def young_member(
    group: Group, leader: Replica, target: TestNode
) -> tuple[DirectSource, TabletCopy, OpId]:
    """Replica 4 as a witness in the place of a voter that was demoted; its rows wait for `hold` of the source. And its start."""
    for replica in group.replicas():
        await group.caught_up(replica)
    begun = leader.committed_opid
    source = DirectSource(group.node_of(leader))
    source.hold = Event()
    copy = await target.manager.start_copy(
        order(group, source.node, 4, witness=True, witness_start=begun), source
    )
    assert copy is not None and await copy.wait_prepared(WAIT_S)
    await wait_until(lambda: copy.progress.state == "Fetching")
    victim = next(r for r in group.replicas() if r is not leader)
    demoted = Peer(victim.host.node_id, victim.replica_id, "x:1", MemberType.NON_VOTER)
    config = await leader.members.change_config(
        ChangeType.MODIFY, demoted, leader.committed_config.opid_index
    )
    peer = Peer(target.node_id, ReplicaId(4), "n:1", MemberType.WITNESS, witness_start=begun)
    await leader.members.change_config(ChangeType.ADD, peer, config.opid_index)
    return source, copy, begun
