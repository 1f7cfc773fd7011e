"""Random membership changes: they add, copy, demote, promote and remove, whether that is sensible or not. The
core must refuse what is unsafe.

Invariant: acts only through calls that a real driver could make.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stele.consensus.superblock import DataState
from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import SteleError
from stele.model.ids import OPID_NONE, ReplicaId
from stele.raft.events import ChangeType
from tests.sim.messenger import node_of
from tests.sim.node import SimNode
from tests.sim.rows import Checkpoint

if TYPE_CHECKING:
    from tests.sim.world import World

_EMPTY = Configuration(-1, ())
_PEERS_MAX = 6


def sim_peer(replica_id: int, member_type: MemberType = MemberType.VOTER, promote: bool = False) -> Peer:
    """A peer on a node of its own."""
    return Peer(node_of(replica_id), ReplicaId(replica_id), f"10.0.0.{replica_id}:7050", member_type, promote)


def _promote(node: SimNode) -> None:
    if node.replica is not None and node.core is not None:
        with contextlib.suppress(SteleError):  # it may have failed, or been demoted, meanwhile
            node.replica.members.promote("an administrator wants it to lead")


class Driver:
    """Membership changes ordered from outside the group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fetching: dict[int, bool] = {}
        """Witnesses that wait for their rows."""
        self._named: dict[int, SimNode] = {}
        """The nodes that they are to get them from, by the last order."""

    def leader(self) -> SimNode | None:
        """A node that believes it leads, of those that no recovery gave up."""
        leaders = self.leaders()
        return self._world.rng.choice(leaders) if leaders else None

    def leaders(self) -> list[SimNode]:
        """All of these nodes."""
        current = self._world.recovery
        return [node for node in self._world.all_nodes() if node.leads and not current.outdated(node)]

    def change(self, leader: SimNode | None = None, *, take_away: bool = False) -> None:
        """One change of a random kind, ordered from this leader or from any. `take_away`: remove one more
        voter."""
        leader = leader or self.leader()
        if leader is None or leader.core is None:
            return
        rng = self._world.rng
        config = leader.core.config
        if not config.peers:
            return
        kinds = ["remove", "demote", "promote"]
        if take_away:
            kinds = ["remove", "demote"]
        elif len(config.peers) < _PEERS_MAX:
            kinds += ["learner", "learner", "witness", "witness", "voter"]
        kind = rng.choice(kinds)
        others = [p for p in config.voters if p.replica_id != leader.replica_id]
        victim = rng.choice(others if take_away and others else config.peers)
        match kind:
            case "remove":
                self._propose(leader, ChangeType.REMOVE, victim)
            case "demote":
                changed = replace(victim, member_type=MemberType.NON_VOTER, promote=rng.random() < 0.3)
                self._propose(leader, ChangeType.MODIFY, changed)
            case "promote":
                member_type = rng.choice((MemberType.VOTER, MemberType.NON_VOTER))
                changed = replace(
                    victim, member_type=member_type, promote=member_type is MemberType.NON_VOTER
                )
                self._propose(leader, ChangeType.MODIFY, changed)
            case "learner":
                new = self._copy() if rng.random() < 0.6 else self._blank()
                if new is not None:
                    peer = sim_peer(new.replica_id, MemberType.NON_VOTER, rng.random() < 0.8)
                    self._propose(leader, ChangeType.ADD, peer)
            case "voter":
                new = self._copy()
                if new is not None:
                    self._propose(leader, ChangeType.ADD, sim_peer(new.replica_id))
            case _:
                new = self._witness()
                if new is not None:
                    peer = replace(
                        sim_peer(new.replica_id, MemberType.WITNESS),
                        witness_start=new.superblock.witness_start,
                    )
                    self._propose(leader, ChangeType.ADD, peer)

    def _propose(self, leader: SimNode, change_type: ChangeType, peer: Peer) -> None:
        assert leader.core is not None
        stale = 1 if self._world.rng.random() < 0.05 else 0
        self.order(leader, change_type, peer, leader.core.config.opid_index - stale)

    def order(
        self,
        leader: SimNode,
        change_type: ChangeType,
        peer: Peer,
        cas: int,
        ended: Callable[[SteleError | None], None] | None = None,
    ) -> None:
        """Order a node to make one change of the configuration `cas`. `ended` gets the refusal, or None once
        the change is committed."""
        if leader.replica is None or leader.core is None:
            return
        self._world.faults.changing(leader, self._world.nodes[peer.replica_id])
        what = f"{change_type.name} {peer.replica_id}"
        self._ask(leader, leader.replica.members.change_config(change_type, peer, cas), what, ended)

    def hand_over(self, leader: SimNode, target: ReplicaId | None) -> None:
        """Order a node to hand its leadership to this replica, or to the most advanced one."""
        if leader.replica is not None and leader.core is not None:
            self._ask(leader, leader.replica.members.transfer_leadership(target), "TRANSFER")

    def promote(self, node: SimNode) -> None:
        """Order a node to stand for election although the leader lives, as an administrator does."""
        if node.up and node.replica is not None and node.core is not None:
            self._world.trace("{} is promoted", node.replica_id)
            node.soon(lambda: _promote(node))

    def _ask(
        self,
        leader: SimNode,
        work: Coroutine[Any, Any, Any],
        what: str,
        ended: Callable[[SteleError | None], None] | None = None,
    ) -> None:
        def over(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                return
            error = task.exception()
            self._world.trace("{}: {}: {}", leader.replica_id, what, error or "done")
            if error is None:
                self._world.met[f"done: {what.split()[0]}"] += 1
            elif not isinstance(error, SteleError):
                self._world.failed(f"{what} ended with {error!r}", error)
                return
            if ended is not None:
                ended(error)

        leader.run(work, over)

    def transfer(self) -> None:
        """Order a leader to hand over."""
        leader = self.leader()
        if leader is not None and leader.core is not None:
            rng = self._world.rng
            self.hand_over(leader, rng.choice((None, rng.choice(leader.core.config.peers).replica_id)))

    def tombstone_removed(self) -> None:
        """Stop the replicas that a newer committed configuration omits, as the masters do."""
        config = self._world.history.config
        for node in self._world.all_nodes():
            if node.retired or config.peer(node.replica_id) is not None:
                continue
            if self._world.recovery.outdated(node):
                if self._world.recovery.removes(node):
                    node.exits("a recovery gave it up", again=False)
                    node.retired = True
                continue
            known = node.replica.committed_config.opid_index if node.replica is not None else -1
            if node.replica_id in self._world.history.members and known < config.opid_index:
                node.exits("it is removed", again=False)
                node.retired = True

    # Copies

    def _source(self) -> Checkpoint | None:
        """What the store of some sound replica holds on disk."""
        found = [
            at
            for node in self._world.all_nodes()
            if (at := node.rows.checkpoint()) is not None and not node.failed
        ]
        return self._world.rng.choice(found) if found else None

    def _blank(self) -> SimNode:
        node = self._world.add_node()
        node.form(OPID_NONE, _EMPTY)
        node.boot()
        return node

    def _copy(self) -> SimNode | None:
        """A new node with the content of some store."""
        source = self._source()
        if source is None:
            return None
        node = self._world.add_node()
        node.form(*source)
        node.boot()
        self._world.met["a copy made"] += 1
        return node

    def _witness(self) -> SimNode | None:
        source = self._source()
        if source is None:
            return None
        node = self._world.add_node(DataState.COPYING)
        node.superblock = replace(node.superblock, witness_start=source.opid)
        node.form(source.opid, source.config)
        node.boot()
        self.fetch_rows(node)
        return node

    def fetch_rows(self, node: SimNode, source: SimNode | None = None) -> None:
        """Let the rows of a witness arrive, sooner or later: from this node, or from any."""
        if source is not None:
            self._named[node.replica_id] = source
        if not self._fetching.get(node.replica_id):
            self._fetching[node.replica_id] = True
            self._later(node)

    def _later(self, node: SimNode) -> None:
        self._world.at(self._world.now + self._world.rng.uniform(50.0, 1500.0), self._fetch_rows, node)

    def _fetch_rows(self, node: SimNode) -> None:
        """Rows for a witness: a checkpoint between its log's start and its end."""
        if node.has_data or node.retired:
            return
        named, core = self._named.get(node.replica_id), node.core
        held = named.rows.held_checkpoint() if named is not None and named.up else None
        source = held or self._source()
        if (
            source is None
            or core is None
            or core.log.term_at(source.opid.index) != source.opid.term
            or not core.log.start.index <= source.opid.index <= core.log.durable_index
        ):
            self._flush_some()
            self._later(node)
            return
        node.rows.fetch(source, lambda: self._later(node))

    def _flush_some(self) -> None:
        """Request a checkpoint where no existing one is new enough, as a copy does."""
        up = [node for node in self._world.all_nodes() if node.up]
        if up:
            self._world.rng.choice(up).rows.flush()
