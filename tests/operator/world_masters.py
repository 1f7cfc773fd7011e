"""The masters of a World: tables, the number of masters, and a driver that heals in no time.

Invariant: the catalog is changed only as a majority of its voters would commit it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from stele.driver.nodes import node_steps
from stele.driver.planner import plan as plan_steps
from stele.driver.policy import Policy
from stele.driver.steps import (
    BeginIntent,
    DemotePeer,
    DrainNode,
    EndWish,
    MoveLeader,
    ParkNode,
    RemovePeer,
    RetireNode,
    ReturnNode,
    Step,
)
from stele.driver.view import ClusterView, NodeState, NodeView, TabletView, Wanted
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import CATALOG_TABLET_ID, NodeId, ReplicaId, TableId, TabletId
from stele.model.ranges import AddRange, DropRange
from stele.model.steps import AddColumn, DropColumn, RenameColumn, SetHistory
from stele_operator.plan import Plan
from stele_operator.plan.actions import (
    AlterTable,
    CreateTable,
    SetMasterCount,
    SetReplicationFactor,
)
from stele_operator.plan.observation import Catalog, Column, Table
from stele_operator.plan.ranges import table_ranges, tablets_of
from stele_operator.plan.rules import history_ms
from tests.operator.world_kube import Forbidden

if TYPE_CHECKING:
    from tests.operator.world import World


def wanted(node: NodeView, what: Wanted, by: str = "", reason: str = "", left_ms: int = 0) -> NodeView:
    """The node once somebody has asked for it."""
    given_away = what in (Wanted.DRAINED, Wanted.RETIRED)
    return replace(
        node,
        state=NodeState.DRAINING if given_away else NodeState.ACTIVE,
        given_up=False,
        wanted=what,
        wanted_by=by,
        wanted_reason=reason,
        wanted_left_ms=left_ms,
    )


def alter_table(world: World, action: AlterTable) -> None:
    """Do all steps of a change at once."""
    (table,) = [t for t in world.tables if t.table_id == action.table_id]
    columns = list(table.columns)
    covered = list(table.range.covered) if table.range is not None else []
    for step in action.steps:
        match step:
            case DropRange():
                covered.remove((step.start, step.end))
            case AddRange():
                covered.append((step.start, step.end))
            case AddColumn():
                columns.append(Column(step.name, step.type, step.nullable))
            case DropColumn():
                columns = [c for c in columns if c.name != step.name]
            case RenameColumn():
                columns = [replace(c, name=step.new_name) if c.name == step.name else c for c in columns]
            case SetHistory():
                table = replace(table, history_ms=step.history_ms)
    ranges = replace(table.range, covered=tuple(sorted(covered))) if table.range is not None else None
    altered = replace(table, columns=tuple(columns), range=ranges, **dict(action.notes))
    world.tables = [altered if t.table_id == altered.table_id else t for t in world.tables]


def set_master_count(world: World, action: SetMasterCount) -> None:
    """As the masters do it; and the identity must have a lower number before."""
    nodes = {n.node_id: n for n in world.nodes.values()}
    assert action.before == world.masters_wanted != action.masters
    recorded = int(world.objects["ConfigMap", "flights-identity"]["data"]["masters"])
    assert recorded <= action.masters, "those that leave would look like lost volumes"
    if action.masters > world.masters_wanted:
        able = [n for n in nodes.values() if n.role == "master" and n.takes_replicas and _heard(world, n)]
        assert len({n.host for n in able}) >= action.masters
    live = [n for n, _ in world.voters if n in nodes and _heard(world, nodes[NodeId(n)])]
    if action.masters < world.masters_wanted and len(live) < action.masters:
        raise Forbidden("NOT_READY: too few of them are heard")
    world.masters_wanted = action.masters


def _heard(world: World, node: NodeView) -> bool:
    return node.ever_heard and world.now_s - world.heard_s[node.node_id] < 3


def create_table(world: World, action: CreateTable) -> None:
    """Make a table once, with its replicas on ACTIVE nodes by turns."""
    if any(t.table_id == action.table_id for t in world.tables):
        return
    spec = action.spec
    hashes = tuple((tuple(h.columns), h.buckets) for h in spec.partitioning.hash)
    count = tablets_of(spec)
    ranges = table_ranges(spec)
    columns = tuple(Column(c.name, c.type, c.nullable) for c in spec.columns)
    key = tuple(spec.primaryKey)
    factor = spec.replicationFactor
    made = Table(action.table_id, action.name, "RUNNING", columns, key, hashes, ranges, factor, count)
    notes = {
        "owner": spec.owner or "",
        "comment": spec.comment or "",
        "history_ms": history_ms(spec) or 0,
    }
    world.tables.append(replace(made, **notes))
    able = [n for n in world.nodes.values() if n.role == "node" and n.state is NodeState.ACTIVE]
    for i in range(count):
        peers = tuple(
            Peer(able[(i + k) % len(able)].node_id, ReplicaId(k + 1), "a:1", MemberType.VOTER)
            for k in range(factor)
        )
        world.tablets.append(
            TabletView(
                TabletId(f"{len(world.tablets) + 1:08x}{i:024x}"), TableId(action.table_id), action.name, "RUNNING", Configuration(-1, peers),
                1, peers[0].node_id, factor,
            )
        )  # fmt: skip


def set_factor(world: World, action: SetReplicationFactor) -> None:
    """Record the replication factor. Replicas are not moved."""
    for number, table in enumerate(world.tables):
        if table.table_id == action.table_id and table.replication_factor != action.factor:
            before = table.replication_factor
            world.tables[number] = replace(
                table, replication_factor=action.factor, replication_factor_before=before
            )
    world.tablets = [
        replace(t, replication_factor=action.factor) if t.table_id == action.table_id else t
        for t in world.tablets
    ]


def heal(world: World, plan: Plan) -> None:
    """What a driver would end at: nothing names a lost node any more, and it is retired."""
    if plan.policy is None:
        return
    for _ in range(world.rounds):
        for step in node_steps(catalog(world).view, plan.policy):
            _state(world, step)
        for node in list(world.nodes.values()):
            asked = world.drains and node.asked is not Wanted.IN_SERVICE
            if node.state is NodeState.DRAINING and (node.node_id in plan.policy.lost or asked):
                move(world, node.node_id)

    _follow(world, plan.policy)


def _follow(world: World, policy: Policy) -> None:
    """One step of the driver for the catalog. A copy takes no time, and its replica votes at once."""
    view = catalog(world).view
    for step in plan_steps(view, policy):
        if step.tablet_id != CATALOG_TABLET_ID:
            continue
        match step:
            case BeginIntent():
                world.voters.append((step.target_node, world.changes + 100))
                world.confirmed.add(step.target_node)
            case RemovePeer() | DemotePeer():
                left = [v for v in world.voters if v[0] != step.node_id]
                if world.accept(left):
                    world.voters = left
            case MoveLeader():
                world.voters = [*world.voters[1:], world.voters[0]]
        world.changes += 1


def _state(world: World, step: Step) -> None:
    node = replace(world.nodes[step.node_id], given_up=False)  # type: ignore[attr-defined]
    match step:
        case DrainNode(given_up=True):
            node = replace(node, state=NodeState.DRAINING, given_up=True, wanted=None, wanted_by="")
        case DrainNode():
            node = wanted(node, Wanted.RETIRED, "driver", step.reason)
        case ParkNode():
            node = wanted(node, Wanted.PARKED, "driver", step.reason, step.for_ms)
        case EndWish():
            assert node.wanted_by == "driver"
            node = wanted(node, Wanted.IN_SERVICE)
        case ReturnNode():
            node = replace(node, state=NodeState.ACTIVE)
        case RetireNode():
            assert node.node_id not in {n for n, _ in world.voters}, "it holds the catalog"
            node = replace(node, state=NodeState.RETIRED)
        case _:
            raise AssertionError(step)
    world.nodes[node.node_id] = node
    if node.state is NodeState.DRAINING and not world.masters_stay:
        world.voters = [v for v in world.voters if v[0] != node.node_id]


def move(world: World, node_id: str) -> None:
    """Every tablet that has another place leaves the node."""
    alive = [
        n
        for n in world.nodes.values()
        if n.role == "node"
        and n.state is NodeState.ACTIVE
        and n.ever_heard
        and world.now_s - world.heard_s[n.node_id] < 3
    ]
    moved = []
    for tablet in world.tablets:
        there = {p.node_id for p in tablet.config.peers}
        target = next((n.node_id for n in alive if n.node_id not in there), "")
        if not target:
            moved.append(tablet)
            continue
        peers = tuple(replace(p, node_id=target) if p.node_id == node_id else p for p in tablet.config.peers)
        leader = target if tablet.leader_node == node_id else tablet.leader_node
        moved.append(
            replace(tablet, config=Configuration(9, peers), leader_node=leader)
            if node_id in there
            else tablet
        )
    world.tablets = moved


def catalog(world: World) -> Catalog:
    """What a master would answer, with the catalog as a tablet."""
    held = Counter(p.node_id for t in world.tablets for p in t.config.peers)
    nodes = tuple(
        replace(
            n,
            heartbeat_age_ms=int((world.now_s - max(world.heard_s[n.node_id], world.led_since_s)) * 1000),
            ever_heard=n.ever_heard and world.heard_s[n.node_id] >= world.led_since_s,
            replicas=held[n.node_id],
        )
        for n in world.nodes.values()
    )
    by_id = {n.node_id: n for n in nodes}
    running = world.running()
    live = [n for n, _ in world.voters if n in by_id and n in running]
    peers = tuple(Peer(NodeId(n), ReplicaId(i), "a:1", MemberType.VOTER) for n, i in world.voters)
    itself = TabletView(
        TabletId(CATALOG_TABLET_ID), TableId(""), "", "RUNNING", Configuration(world.changes - 1, peers), 1,
        live[0] if live else world.voters[0][0], world.masters_wanted,
    )  # fmt: skip
    view = ClusterView(nodes, (itself, *world.tablets))
    return Catalog(
        view,
        tuple(t for t in world.tables if t.state != "REMOVED"),
        frozenset(world.formed_nodes),
        dict(world.node_names),
        world.standing,
        world.finalized,
        world.readable,
    )
