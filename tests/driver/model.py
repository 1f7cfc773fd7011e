"""A simple model of a cluster: configurations, replicas, catalog. It has no messages, and no time except
heartbeat ages.

It carries out the driver's orders, and refuses what a real leader refuses (model_orders.py). What must never happen is
checked at every change of a configuration.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from stele.driver.steps import (
    Step,
)
from stele.driver.view import (
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
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import NodeId, OpId, ReplicaId, TableId, TabletId
from tests.driver.model_orders import Orders
from tests.driver.model_parts import (
    COPY_ROUNDS,
    ModelNode,
    ModelReplica,
    ModelTablet,
    Refused,
    node_name,
)


class Cluster:
    """The model. `violations` is empty as long as nothing happened that must never happen."""

    moves: list[tuple[str, str, str, str]]
    """Moves that have begun: kind, tablet, from, to."""

    def __init__(self, machines: int, zones: int, tablets: int, rf: int) -> None:
        self.moves = []
        self.orders = Orders(self)
        self.nodes = {
            node_name(i): ModelNode(node_name(i), f"m{i}", f"z{i % zones}") for i in range(1, machines + 1)
        }
        self.epoch = 1
        self.new_leader_rounds = 0
        """While positive, the leading master is new. It has not heard the dead nodes, and does not know that
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
        """The view that the leading master would give."""
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

    def apply(self, step: Step) -> None:
        """Carry a step out as real servers would, or refuse it."""
        self.orders.apply(step)

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
                self.orders.change(t.tablet_id, t.config.opid_index, peers, added=added)
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
