"""Those who change the membership: they add, copy, demote, promote and remove, wisely or not. The core must refuse what
is unsafe.

Invariant: acts only through events that a real driver could cause.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.raft.effects import Role
from stele.raft.events import ChangeType, ProposeChange, TransferLeadership
from tests.sim.replica import SimReplica

if TYPE_CHECKING:
    from tests.sim.world import World

_EMPTY = Configuration(-1, ())


def sim_peer(replica_id: int, member_type: MemberType = MemberType.VOTER, promote: bool = False) -> Peer:
    """A peer on a node of its own."""
    return Peer(
        NodeId(f"{replica_id:032x}"), ReplicaId(replica_id), f"10.0.0.{replica_id}:7050", member_type, promote
    )


class Driver:
    """Membership as the world's outside drives it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._copying: dict[int, bool] = {}

    def leader(self) -> SimReplica | None:
        """Somebody who thinks it leads."""
        leaders = [r for r in self._world.all_replicas() if r.core is not None and r.core.role is Role.LEADER]
        return self._world.rng.choice(leaders) if leaders else None

    def change(self, leader: SimReplica | None = None, *, take_away: bool = False) -> None:
        """One change of a drawn kind, asked of this or of any leader. `take_away`: another voter less."""
        leader = leader or self.leader()
        if leader is None or leader.core is None:
            return
        rng = self._world.rng
        config = leader.core.config
        kinds = ["remove", "demote", "promote"]
        if take_away:
            kinds = ["remove", "demote"]
        elif len(config.peers) < 6:
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
                copied = rng.random() < 0.6
                new = self._prepare(witness=False) if copied else self._blank()
                if new is not None:
                    peer = sim_peer(new.replica_id, MemberType.NON_VOTER, rng.random() < 0.8)
                    self._propose(leader, ChangeType.ADD, peer)
            case "voter":
                new = self._prepare(witness=False)
                if new is not None:
                    self._propose(leader, ChangeType.ADD, sim_peer(new.replica_id))
            case _:
                new = self._prepare(witness=True)
                if new is not None and new.core is not None:
                    peer = replace(
                        sim_peer(new.replica_id, MemberType.WITNESS), witness_start=new.core.log.start
                    )
                    self._propose(leader, ChangeType.ADD, peer)

    def _propose(self, leader: SimReplica, change_type: ChangeType, peer: Peer) -> None:
        world = self._world
        assert leader.core is not None
        cas = leader.core.config.opid_index - (1 if world.rng.random() < 0.05 else 0)
        leader.feed(ProposeChange(world.clients.context(), change_type, peer, cas))

    def transfer(self) -> None:
        """Ask a leader to hand over."""
        leader = self.leader()
        if leader is not None and leader.core is not None:
            target = self._world.rng.choice(
                (None, self._world.rng.choice(leader.core.config.peers).replica_id)
            )
            leader.feed(TransferLeadership(self._world.clients.context(), target, leader.now_ms()))

    def tombstone_removed(self) -> None:
        """Stop what a newer committed configuration omits, as the masters do."""
        config = self._world.history.config
        for replica in self._world.all_replicas():
            core = replica.core
            if core is None or config.peer(replica.replica_id) is not None:
                continue
            if (
                replica.replica_id in self._world.history.members
                and core.committed_config.opid_index < config.opid_index
            ):
                replica.crash()
                self._world.retired[replica.replica_id] = True

    # Copies

    def _checkpoint(self) -> tuple[OpId, Configuration] | None:
        """What some sound replica's store holds."""
        sources = [
            r
            for r in self._world.all_replicas()
            if r.core is not None and r.has_data and not r.core.failed and r.applied > 0
        ]
        if not sources:
            return None
        source = self._world.rng.choice(sources)
        assert source.core is not None
        return source.core.log.opid_at(source.applied), source.core.log.config_at(source.applied)

    def _blank(self) -> SimReplica:
        return self._world.add_replica(OPID_NONE, _EMPTY, witness=False)

    def _prepare(self, *, witness: bool) -> SimReplica | None:
        checkpoint = self._checkpoint()
        if checkpoint is None:
            return None
        new = self._world.add_replica(*checkpoint, witness=witness)
        if witness:
            self._later(self._fetch_rows, new.replica_id)
        return new

    def _later(self, act: object, replica_id: ReplicaId) -> None:
        self._world.at(self._world.now + self._world.rng.uniform(50.0, 1500.0), act, replica_id)

    def _fetch_rows(self, replica_id: ReplicaId) -> None:
        """Rows for a witness: a checkpoint between its log's start and its end."""
        target = self._world.replicas[replica_id]
        if target.has_data or replica_id in self._world.retired:
            return
        checkpoint = self._checkpoint()
        core = target.core
        if checkpoint is None or core is None or core.log.term_at(checkpoint[0].index) != checkpoint[0].term:
            self._later(self._fetch_rows, replica_id)
            return
        target.data_arrived()

    def copy_to(self, replica_id: ReplicaId, asker: ReplicaId) -> None:
        """A peer's log ends before the leader's begins."""
        if not self._copying.get(replica_id):
            self._copying[replica_id] = True
            self._world.at(
                self._world.now + self._world.rng.uniform(50.0, 1000.0), self._install, replica_id, asker
            )

    def _install(self, replica_id: ReplicaId, asker: ReplicaId) -> None:
        self._copying[replica_id] = False
        world = self._world
        target, source = world.replicas[replica_id], world.replicas[asker]
        if replica_id in world.retired or target.failed or target.abstains:
            return
        if source.core is None or source.core.role is not Role.LEADER or not source.has_data:
            return  # whoever leads next asks again
        if source.applied < source.core.log.start.index or not target.up:
            self.copy_to(replica_id, asker)
            return
        target.install(source.core.log.opid_at(source.applied), source.core.log.config_at(source.applied))
