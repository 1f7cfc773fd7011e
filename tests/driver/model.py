"""A simple model of a cluster: configurations, replicas, catalog. It has no messages, and no time except
heartbeat ages.

It refuses what a real leader refuses (stale CAS, a majority that cannot be reached) and checks, at every change of a
configuration, what must never happen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations

from stele.driver.policy import Policy
from stele.driver.steps import (
    AddPreFollower,
    AddWitness,
    BeginIntent,
    CancelCopy,
    DemotePeer,
    DrainNode,
    EndIntent,
    EndWish,
    MoveLeader,
    ParkNode,
    PromoteBack,
    RemovePeer,
    RetireNode,
    ReturnNode,
    StartCopy,
    Step,
    TakeOverIntent,
)
from stele.driver.view import (
    MOVE,
    MOVE_BY_HAND,
    Claim,
    ClusterView,
    CopyView,
    DataState,
    Intent,
    NodeState,
    NodeView,
    ReplicaState,
    ReplicaView,
    TabletView,
    Wanted,
)
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import NodeId, OpId, ReplicaId, TableId, TabletId

COPY_ROUNDS = 2
POLICY = Policy(dead_after_ms=10_000, max_lost_nodes=9, max_copies=3, balance_leaders=False)
"""Leaders stay where they are, so that the stories show only heals."""


class Refused(Exception):
    """The answer of a leader or the catalog to an order that is late, stale or unsafe."""


@dataclass
class ModelNode:
    """A node and whether it answers. `gone`: it never comes back. `hangs`: copies to it make no progress.
    `cut`: masters hear it, and it takes copies and orders, but no replica hears its replicas. `opening`:
    masters hear it after a restart, but it has reported none of its replicas, and no replica hears those
    yet."""

    node_id: NodeId
    machine: str
    zone: str
    role: str = "node"
    alive: bool = True
    gone: bool = False
    hangs: bool = False
    cut: bool = False
    opening: bool = False
    state: NodeState = NodeState.ACTIVE
    given_up: bool = False
    wanted: Wanted | None = None
    wanted_by: str = ""

    @property
    def parked(self) -> bool:
        """Whether it may be away."""
        return self.state is NodeState.ACTIVE and self.wanted is Wanted.PARKED


@dataclass
class ModelReplica:
    """A node's part of a tablet. `waiting`: a witness that fetches nothing yet. `said_failed`: what its
    leader last heard of it."""

    node_id: NodeId
    has_data: bool
    copied: int = COPY_ROUNDS
    waiting: bool = False
    failed: bool = False
    said_failed: bool = False
    tombstoned: bool = False
    caught_up_once: bool = False


@dataclass
class ModelTablet:
    """A group. `log_index` counts all entries, so that configuration indexes rise."""

    tablet_id: TabletId
    config: Configuration
    rf: int
    leader: str = ""
    log_index: int = 10
    next_replica_id: int = 1
    replicas: dict[int, ModelReplica] = field(default_factory=dict)
    by_hand: ByHand = NOT_BY_HAND
    size: int = 20
    """Bytes of each replica."""
    behind: set[str] = field(default_factory=set)
    """Nodes whose voters catch up too slowly to take over in time."""
    table: int = 0
    kept: bool = False
    """Whether an administrator has just moved its leader."""

    @property
    def wanted(self) -> int:
        """The number of voters that it should have."""
        return self.rf + self.by_hand.extra


def node_name(number: int) -> NodeId:
    """Identifier of the model's node `number`."""
    return NodeId(f"{number:032x}")


class Cluster:
    """The model. `violations` is empty as long as nothing happened that must never happen."""

    moves: list[tuple[str, str, str, str]]
    """Moves that have begun: kind, tablet, from, to."""

    def __init__(self, machines: int, zones: int, tablets: int, rf: int) -> None:
        self.moves = []
        self.nodes = {
            node_name(i): ModelNode(node_name(i), f"m{i}", f"z{i % zones}") for i in range(1, machines + 1)
        }
        self.epoch = 1
        self.new_leader_rounds = 0
        """While positive, the leader master is new. It has not heard the dead nodes, and does not know that
        they are dead."""
        self.intents: dict[str, Intent] = {}
        self.tablets: dict[str, ModelTablet] = {}
        self.history: list[str] = []
        self.leader_moves: Counter[TabletId] = Counter()
        """How often a driver moved a leader to a node that it named."""
        order = list(self.nodes)
        for t in range(tablets):
            tablet_id = TabletId(f"{t + 1:032x}")
            chosen = [order[(t + k) % len(order)] for k in range(rf)]
            peers = tuple(Peer(n, ReplicaId(i + 1), f"{n[-2:]}:1") for i, n in enumerate(chosen))
            tablet = ModelTablet(tablet_id, Configuration(-1, peers), rf, next_replica_id=rf + 1)
            tablet.replicas = {p.replica_id: ModelReplica(p.node_id, has_data=True) for p in peers}
            self.tablets[tablet_id] = tablet
        self.advance()

    # --- what is seen ---

    def view(self) -> ClusterView:
        """The view that the leader master would give."""
        nodes = tuple(
            NodeView(
                n.node_id,
                n.role,
                n.machine,
                n.zone,
                f"{n.node_id[-2:]}:1",
                n.state,
                heartbeat_age_ms=100 if n.alive or self.new_leader_rounds else 60_000,
                ever_heard=n.alive or not self.new_leader_rounds,
                given_up=n.given_up and n.state is NodeState.DRAINING,
                wanted=n.wanted,
                wanted_by=n.wanted_by,
                wanted_left_ms=3_600_000 if n.wanted is Wanted.PARKED else 0,
            )
            for n in self.nodes.values()
        )
        tablets = tuple(self._tablet_view(t) for t in self.tablets.values())
        intents = tuple(self.intents.values())
        return ClusterView(nodes, tablets, intents, Claim("test", self.epoch, 1 << 60))

    def _tablet_view(self, t: ModelTablet) -> TabletView:
        silence = {
            p.replica_id: 120_000 if self.nodes[p.node_id].cut or not self.nodes[p.node_id].alive else 6_000
            for p in t.config.peers
            if t.leader and not self.reaches(t.leader, p.node_id)
        }
        failed = tuple(ReplicaId(rid) for rid, r in t.replicas.items() if r.said_failed)
        reports = tuple(
            replace(self._report(rid, r), unreached_ms=silence, failed_peers=failed)
            if r.node_id == t.leader
            else self._report(rid, r)
            for rid, r in t.replicas.items()
            if not self.nodes[r.node_id].opening
        )
        reports = tuple(replace(r, bytes_on_disk=t.size) for r in reports)
        table = TableId(f"{t.table:x}" * 32 if t.table else "f" * 32)
        kept = 1 if t.kept else 0  # the view's clock shows 0
        name = f"t{t.table or ''}"
        return TabletView(
            *(t.tablet_id, table, name, "RUNNING", t.config, 1, t.leader, t.wanted, reports, kept, t.by_hand)
        )

    def _report(self, replica_id: int, r: ModelReplica) -> ReplicaView:
        state = ReplicaState.FAILED if r.failed else ReplicaState.RUNNING
        data = DataState.READY if r.copied >= COPY_ROUNDS else DataState.COPYING
        if r.tombstoned:
            data = DataState.TOMBSTONED
        moving = "Waiting" if r.waiting else "Fetching"
        copy = CopyView("Done" if r.copied >= COPY_ROUNDS else moving, r.copied * 10, COPY_ROUNDS * 10)
        return ReplicaView(r.node_id, ReplicaId(replica_id), state, data, r.has_data, OpId(1, 9), 20, copy)

    # --- what is true ---

    def live(self, t: ModelTablet, peer: Peer) -> bool:
        """Whether the peer's replica can vote and answer."""
        replica = t.replicas.get(peer.replica_id)
        answers = replica is not None and not replica.failed and not replica.tombstoned
        return answers and self._heard(self.nodes[peer.node_id])

    def reaches(self, leader: str, node_id: str) -> bool:
        """Whether replicas on one node answer the leader on another. A leader that is cut off reaches nobody."""
        ends = (leader, node_id)
        return node_id == leader or all(self._heard(self.nodes[NodeId(n)]) for n in ends)

    @staticmethod
    def _heard(node: ModelNode) -> bool:
        """Whether other replicas hear those on this node."""
        return node.alive and not node.cut and not node.opening

    def live_voters(self, t: ModelTablet, config: Configuration | None = None) -> list[Peer]:
        """Voters of the configuration that answer."""
        return [p for p in (config or t.config).voters if self.live(t, p)]

    def data_voters(self, t: ModelTablet, config: Configuration | None = None) -> list[Peer]:
        """Those of them that hold the rows."""
        return [p for p in self.live_voters(t, config) if p.member_type is MemberType.VOTER]

    def has_quorum(self, t: ModelTablet) -> bool:
        """Whether the group can commit."""
        return len(self.live_voters(t)) >= t.config.majority and bool(self.data_voters(t))

    def spare(self, t: ModelTablet) -> int:
        """How many more voters may fail."""
        return len(self.live_voters(t)) - t.config.majority

    # --- what the driver orders ---

    def apply(self, step: Step) -> None:
        """Carry a step out as real servers would, or refuse it."""
        match step:
            case BeginIntent():
                self._begin(step)
            case TakeOverIntent():
                intent = self.intents[step.tablet_id]
                self.intents[step.tablet_id] = replace(intent, epoch=self.epoch)
            case StartCopy():
                self._start_copy(step)
            case DemotePeer():
                self._check_kept(step.tablet_id, step.replica_id)
                self._modify(step, step.replica_id, member_type=MemberType.NON_VOTER, promote=False)
            case PromoteBack():
                self._modify(step, step.replica_id, member_type=MemberType.NON_VOTER, promote=True)
            case AddWitness():
                peer = Peer(step.target_node, step.replica_id, "", MemberType.WITNESS)
                self._add(step, peer)
            case AddPreFollower():
                peer = Peer(step.target_node, step.replica_id, "", MemberType.NON_VOTER, promote=True)
                self._add(step, peer)
            case RemovePeer():
                self._remove(step)
            case CancelCopy():
                self._change(step.tablet_id, step.cas, self.tablets[step.tablet_id].config.peers, added=None)
                self._end(step.tablet_id, step.replica_id, cancelled=True)
            case EndIntent():
                self._end(step.tablet_id, step.replica_id, cancelled=False)
            case MoveLeader():
                self._move_leader(step)
            case DrainNode():
                self._drain(step)
            case ParkNode():
                node = self.nodes[step.node_id]
                node.state, node.given_up = NodeState.ACTIVE, False
                node.wanted, node.wanted_by = Wanted.PARKED, self._by_driver(node)
            case EndWish():
                node = self.nodes[step.node_id]
                assert self._by_driver(node) == node.wanted_by, "took back a state that nobody wanted"
                node.state, node.given_up, node.wanted, node.wanted_by = NodeState.ACTIVE, False, None, ""
            case ReturnNode():
                self._return(self.nodes[step.node_id])
            case RetireNode():
                self._retire(step.node_id)
            case _:
                pass

    def _begin(self, step: BeginIntent) -> None:
        t = self.tablets[step.tablet_id]
        target = self.nodes[step.target_node]
        if step.tablet_id in self.intents or target.state is not NodeState.ACTIVE or target.parked:
            raise Refused("intent")
        self._check_kept(step.tablet_id, step.replaces_replica)
        if step.kind in (MOVE, MOVE_BY_HAND):
            source = t.config.peer(ReplicaId(step.replaces_replica))
            assert source is not None and self.live(t, source), "only a healthy replica is moved"
            assert len(self.live_voters(t)) == len(t.config.voters), "a move begins while a voter is lost"
            self.moves.append((step.kind, t.tablet_id, source.node_id, step.target_node))
        rid = ReplicaId(t.next_replica_id)
        t.next_replica_id += 1
        self.intents[step.tablet_id] = Intent(
            step.tablet_id,
            rid,
            step.target_node,
            step.kind,
            self.epoch,
            step.source_node,
            step.replaces_replica,
            step.witness,
            cause=step.cause,
        )

    def _start_copy(self, step: StartCopy) -> None:
        t = self.tablets[step.tablet_id]
        if not self.nodes[step.target_node].alive:
            raise Refused("target does not answer")
        held = t.replicas.get(step.replica_id)
        if held is not None and held.tombstoned:
            raise Refused("a replica_id is never used again")
        if held is None:
            t.replicas[step.replica_id] = ModelReplica(
                step.target_node, has_data=False, copied=0, waiting=step.log_only
            )
        elif not step.log_only:
            held.waiting = False

    def _move_leader(self, step: MoveLeader) -> None:
        t = self.tablets[step.tablet_id]
        heirs = [p.node_id for p in self.data_voters(t)]
        if not step.target_node:
            t.leader = next((n for n in heirs if n not in {*t.behind, t.leader}), t.leader)
            return
        if not t.leader:
            raise Refused("NOT_LEADER")
        if step.target_node not in heirs:
            raise Refused("UNSAFE_CHANGE")
        if step.target_node in t.behind:
            raise Refused("NOT_READY")
        if step.target_node != t.leader:
            self.leader_moves[t.tablet_id] += 1
        t.leader = step.target_node

    def _modify(self, step: Step, replica_id: int, *, member_type: MemberType, promote: bool) -> None:
        t = self.tablets[step.tablet_id]
        peers = tuple(
            replace(p, member_type=member_type, promote=promote) if p.replica_id == replica_id else p
            for p in t.config.peers
        )
        self._change(step.tablet_id, step.cas, peers, added=None)

    def _add(self, step: Step, peer: Peer) -> None:
        t = self.tablets[step.tablet_id]
        if t.config.peer(peer.replica_id) is not None:
            raise Refused("there already")
        self._change(step.tablet_id, step.cas, (*t.config.peers, peer), added=peer)
        replica = t.replicas.get(peer.replica_id)
        assert replica is not None, "added before it was prepared"
        assert not replica.tombstoned, "a late order added a replica whose intent had ended"

    def _remove(self, step: RemovePeer) -> None:
        t = self.tablets[step.tablet_id]
        left = tuple(p for p in t.config.peers if p.replica_id != step.replica_id)
        if t.leader == step.node_id and self.nodes[step.node_id].alive:
            raise Refused("STEPPING_DOWN")
        self._change(step.tablet_id, step.cas, left, added=None)
        after = t.config
        assert len(self.data_voters(t)) >= after.majority, (
            f"no majority of {after} holds the rows after {step}"
        )

    def _change(self, tablet_id: str, cas: int, peers: tuple[Peer, ...], *, added: Peer | None) -> None:
        t = self.tablets[tablet_id]
        before = t.config
        if cas != before.opid_index:
            raise Refused("CAS_FAILED")
        if not self.has_quorum(t):
            raise Refused("NO_QUORUM")
        t.log_index += 1
        after = Configuration(t.log_index, peers)
        reachable = [p for p in self.live_voters(t, after) if p != added]
        if len(before.voters) > 1 and len(reachable) < after.majority:
            raise Refused("UNSAFE_CHANGE")
        self.check_step(before, after)
        t.config = after
        self.history.append(f"{tablet_id[-2:]} {after.opid_index}: {[_short(p) for p in peers]}")
        if t.leader not in [p.node_id for p in self.data_voters(t)]:
            t.leader = ""

    def check_step(self, before: Configuration, after: Configuration) -> None:
        """Check that any two majorities of neighbouring configurations meet, and that no machine has two
        replicas."""
        old = {p.replica_id for p in before.voters}
        new = {p.replica_id for p in after.voters}
        assert len(old ^ new) <= 1, f"more than one voter changed: {before} to {after}"
        for left in combinations(sorted(old), before.majority):
            for right in combinations(sorted(new), after.majority):
                assert set(left) & set(right), f"two majorities might not meet: {before} to {after}"
        machines = [self.nodes[p.node_id].machine for p in after.peers]
        assert len(set(machines)) == len(machines), f"two replicas on one machine: {after}"
        witnesses = sum(p.member_type is MemberType.WITNESS for p in after.peers)
        assert witnesses < after.majority, f"witnesses alone could be a majority: {after}"

    def _end(self, tablet_id: str, replica_id: int, *, cancelled: bool) -> None:
        t = self.tablets[tablet_id]
        intent = self.intents.get(tablet_id)
        if intent is None or intent.replica_id != replica_id:
            raise Refused("no such intent")
        member = t.config.peer(replica_id)
        if not cancelled and member is None:
            raise Refused("its replica is not in the configuration")
        assert not (cancelled and member is not None), "cancelled although a member"
        del self.intents[tablet_id]

    def _check_kept(self, tablet_id: str, replica_id: int) -> None:
        """A voter on a parked node is not replaced while its node is only away."""
        peer = self.tablets[TabletId(tablet_id)].config.peer(replica_id)
        if peer is None or peer.member_type is not MemberType.VOTER:
            return
        node = self.nodes[peer.node_id]
        failed = node.gone or self.tablets[TabletId(tablet_id)].replicas[replica_id].failed
        assert failed or not node.parked, f"replica {replica_id} on a parked node goes"

    def _by_driver(self, node: ModelNode) -> str:
        if node.wanted_by == "administrator":
            raise Refused("an administrator asked for it")
        return "driver"

    def _drain(self, step: DrainNode) -> None:
        node = self.nodes[step.node_id]
        by = "" if step.given_up else self._by_driver(node)
        node.state, node.given_up = NodeState.DRAINING, step.given_up
        node.wanted, node.wanted_by = None, by

    def _retire(self, node_id: NodeId) -> None:
        named = {p.node_id for t in self.tablets.values() for p in t.config.peers}
        named |= {i.target_node for i in self.intents.values()}
        assert node_id not in named, "retired a node that a configuration or an intent names"
        node = self.nodes[node_id]
        assert node.wanted is not Wanted.DRAINED or not node.alive, "retired a node that was to stay"
        node.state, node.wanted = NodeState.RETIRED, None

    def _return(self, node: ModelNode) -> None:
        if node.state is not NodeState.DRAINING or not node.given_up:
            raise Refused("it was not given up as silent")
        node.state, node.given_up = NodeState.ACTIVE, False

    # --- what happens without orders ---

    def advance(self) -> None:
        """One round: copies progress, leaders are elected and promote, the master orders tombstones."""
        self.new_leader_rounds = max(0, self.new_leader_rounds - 1)
        for t in self.tablets.values():
            intent = self.intents.get(t.tablet_id)
            for rid, r in t.replicas.items():
                node = self.nodes[r.node_id]
                moves = r.copied < COPY_ROUNDS and not r.waiting
                if node.alive and not node.hangs and moves and self.data_voters(t):
                    r.copied += 1
                if r.copied >= COPY_ROUNDS:
                    r.has_data = True
                claimed = t.config.peer(rid) is not None or (intent is not None and intent.replica_id == rid)
                if not claimed and self.nodes[r.node_id].alive:
                    r.tombstoned = True
                if t.leader and self.reaches(t.leader, r.node_id):
                    r.said_failed = r.failed
            if not self.has_quorum(t):
                t.leader = ""
                continue
            if t.leader not in [p.node_id for p in self.data_voters(t)]:
                t.leader = self.data_voters(t)[0].node_id
            self._promote(t)

    def _promote(self, t: ModelTablet) -> None:
        for p in t.config.peers:
            waits = p.member_type is MemberType.WITNESS or p.promote
            ready = self.live(t, p) and t.replicas[p.replica_id].has_data
            if not (waits and ready and p.member_type is not MemberType.VOTER):
                continue
            changed = replace(p, member_type=MemberType.VOTER, promote=False)
            peers = tuple(changed if o == p else o for o in t.config.peers)
            added = changed if p.member_type is MemberType.NON_VOTER else None
            try:
                self._change(t.tablet_id, t.config.opid_index, peers, added=added)
            except Refused:
                continue
            return

    # --- what goes wrong ---

    def may_die(self, node_id: str) -> bool:
        """Whether every group keeps a majority and its rows without this node, or with it cut off from the
        others."""
        node = self.nodes[NodeId(node_id)]
        node.alive = False
        fine = all(self.has_quorum(t) for t in self.tablets.values())
        node.alive = True
        return fine

    def may_fail(self, t: ModelTablet, replica_id: int) -> bool:
        """Whether the group keeps a majority, and its rows, without this replica."""
        replica = t.replicas[replica_id]
        was, replica.failed = replica.failed, True
        fine = self.has_quorum(t)
        replica.failed = was
        return fine

    def healthy(self) -> bool:
        """Whether all groups are as wanted, and nothing is left over."""
        if self.intents:
            return False
        for t in self.tablets.values():
            good = [p for p in self.data_voters(t) if self.nodes[p.node_id].state is NodeState.ACTIVE]
            if len(t.config.peers) != t.wanted or len(good) != t.wanted:
                return False
        return True


def _short(p: Peer) -> str:
    return f"{p.replica_id}@{p.node_id[-2:]}{'' if p.member_type is MemberType.VOTER else p.member_type.name}"
