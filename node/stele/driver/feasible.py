"""Says beforehand whether nodes can be drained or parked, and why not. Used by the command line and the
operator; pure.

It uses the planner's own choice of targets, so it refuses a drain that would end in Blocked. It is no
promise, because the cluster may change meanwhile. Safety does not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from stele.driver.policy import Policy
from stele.driver.situation import is_dead, judge, majority
from stele.driver.targets import Load, choose_target, tablet_bytes
from stele.driver.view import ClusterView, NodeState, NodeView, TabletView, Wanted
from stele.model.config import Peer
from stele.model.ids import CATALOG_TABLET_ID, ReplicaId

NAMED_MAX = 3
"""The most tablets that a sentence names."""


@dataclass(slots=True)
class _Kind:
    """The tablets with one fault: their number, the first few in words, and the ids of those tables that are
    dropped.
    """

    count: int = 0
    named: list[str] = field(default_factory=list)
    dropped: dict[str, None] = field(default_factory=dict)

    def add(self, tablet: TabletView) -> None:
        self.count += 1
        if tablet.of_dropped_table:
            self.dropped[tablet.table_id[:8]] = None
        if len(self.named) < NAMED_MAX:
            self.named.append(_name(tablet))

    @property
    def words(self) -> str:
        more = f" and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
        return ", ".join(self.named) + more


def _name(tablet: TabletView) -> str:
    if tablet.tablet_id == CATALOG_TABLET_ID:
        return "the catalog"
    return f"tablet {tablet.tablet_id[:8]} of {tablet.table_name}"


def drain_faults(view: ClusterView, policy: Policy, leaving: Collection[str]) -> tuple[str, ...]:
    """Why these nodes cannot all be drained: a sentence for each cause, with a remedy. Empty if they can.

    Only the nodes in `leaving` are checked. Other nodes that drain already take no replicas.
    """
    nodes = tuple(_away(n) if n.node_id in leaving else n for n in view.nodes)
    after = replace(view, nodes=nodes)
    by_id: dict[str, NodeView] = {n.node_id: n for n in nodes}
    load = Load(after)
    machines: dict[tuple[int, bool], _Kind] = {}
    room: dict[tuple[str, bool], _Kind] = {}
    for tablet in sorted(after.tablets, key=lambda t: (-tablet_bytes(t), t.tablet_id)):
        if tablet.state != "RUNNING":
            continue
        for peer in [p for p in tablet.config.peers if p.node_id in leaving]:
            situation = judge(tablet, after, policy, by_id)
            if situation.needed <= 0:
                break  # it has more replicas than are wanted, so those that leave need no other place
            target = choose_target(situation, after, policy, load)
            if target is None:
                any_room = choose_target(situation, after, policy, load, any_room=True)
                if any_room is not None:
                    room.setdefault((tablet.node_role, tablet.of_dropped_table), _Kind()).add(tablet)
                else:
                    kind = (tablet.replication_factor, tablet.of_dropped_table)
                    machines.setdefault(kind, _Kind()).add(tablet)
                break
            load.planned(target.node_id, tablet_bytes(tablet))
            moved = Peer(target.node_id, ReplicaId(peer.replica_id), target.address)
            peers = tuple(moved if p is peer else p for p in tablet.config.peers)
            tablet = replace(tablet, config=replace(tablet.config, peers=peers))
    return (
        *(_too_few(after, policy, key[0], machines[key]) for key in sorted(machines)),
        *_no_room(room),
    )


def _away(node: NodeView) -> NodeView:
    return replace(node, state=NodeState.DRAINING, given_up=False, wanted=Wanted.RETIRED)


def _too_few(after: ClusterView, policy: Policy, factor: int, kind: _Kind) -> str:
    role = "master" if kind.named[0] == "the catalog" else "node"
    left = {n.host for n in after.nodes if n.role == role and n.takes_replicas and not is_dead(n, policy)}
    lower = "" if role == "master" else ", or lower the replication factor"
    if kind.dropped:
        lower = f"; or {_give_up(kind)}, or recall it (`stele table recall`) and lower its replication factor"
    return (
        f"{kind.words}: {factor} "
        f"{'replica needs a machine' if factor == 1 else 'replicas need a machine each'}, and {len(left)} "
        f"{'machine' if len(left) == 1 else 'machines'} with a {role} in service would be left; add a {role} "
        f"on another machine{lower}"
    )


def _no_room(room: dict[tuple[str, bool], _Kind]) -> tuple[str, ...]:
    return tuple(
        f"{kind.words}: no {role} in service on another machine has room for it; enlarge the volumes or add "
        f"a {role}{f'; or {_give_up(kind)}' if kind.dropped else ''}"
        for (role, _), kind in sorted(room.items(), key=lambda item: item[0])
    )


def _give_up(kind: _Kind) -> str:
    """Advice for dropped tables only: delete them for good. They serve nobody and only wait to be recalled."""
    ids = list(kind.dropped)
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    commands = ", ".join(f"`stele table delete {table_id}`" for table_id in ids[:NAMED_MAX])
    return f"delete the dropped table for good ({commands}{more})"


@dataclass(frozen=True, slots=True)
class Absence:
    """The effects of nodes being away. `faults`: why they must not be away, a sentence for each cause.

    `notes`: the tablets that stop meanwhile. That cannot be avoided, because they have a single replica.
    """

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def absence(view: ClusterView, policy: Policy, away: Collection[str]) -> Absence:
    """The effects if these nodes are away, besides those that are parked already.

    A silent node is away in any case, so it is not a fault.
    """
    nodes: dict[str, NodeView] = {n.node_id: n for n in view.nodes}
    stopped, single = _Kind(), _Kind()
    for tablet in view.tablets:
        if tablet.state != "RUNNING":
            continue
        situation = judge(tablet, view, policy, nodes)
        going = [m for m in situation.voters if m.peer.node_id in away and m.live]
        if not going:
            continue
        left = [m for m in situation.live_voters if m not in going and not m.parked and m.answers]
        if len(left) >= majority(len(situation.voters)):
            continue
        (single if tablet.replication_factor == 1 else stopped).add(tablet)
    faults = (
        f"{stopped.words}: too few voters would be left to read or write; wait until the nodes that are away or "
        f"parked are back, or until the tablets are healed (`stele ksck`)"
    )
    notes = f"{single.words}: cannot be read or written meanwhile, because the replication factor is 1"
    return Absence((faults,) if stopped.count else (), (notes,) if single.count else ())
