"""The change budget as drivers see it: who holds it, and what may not begin meanwhile. Used by planner and by
masters that drive; pure.

The operator decides who holds the budget, and writes the holder to the catalog before it acts. Only that
entry names the nodes whose pods are made again: by their states these nodes are in service. Heals, drains and
parked nodes also show in the states of nodes.

Invariant: heals never wait for the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stele.driver.policy import HOLDERS_MAX, Policy
from stele.driver.situation import is_dead
from stele.driver.view import Away, ClusterView, Holder, NodeState, NodeView, Wanted

_KINDS = ("heal", "drain", "park")
"""The kinds of holders that show in the states of nodes, in the order of display."""


def reserved_by(view: ClusterView, policy: Policy, named: Mapping[str, int]) -> str:
    """Name the first holder that still has a node away. While there is one, no drain and no move begins. "":
    there is none.

    `named`: how many tablets name each node. Nobody waits for a node that no tablet names any more: it was
    replaced.
    """
    for holder in view.holding:
        away = [(a, node) for a in holder.away if (node := view.node(a.node_id)) is not None]
        gone = [n.node_id[:8] for a, n in away if _counts(n, named) and not _is_back(a, n, policy)]
        if gone:
            return f"{holder.name} has node{'s' if len(gone) > 1 else ''} {', '.join(gone)} away"
    return ""


def _counts(node: NodeView, named: Mapping[str, int]) -> bool:
    """Whether somebody waits for the node: it is in service, and tablets name it."""
    return node.takes_replicas and bool(named.get(node.node_id))


def _is_back(away: Away, node: NodeView, policy: Policy) -> bool:
    """Whether the node is heard as a newer process than the one that was taken away."""
    return node.incarnation > away.incarnation and not _is_silent(node, policy)


def _is_silent(node: NodeView, policy: Policy) -> bool:
    """Whether nobody hears the node. A new leading master counts a node's silence from its own start."""
    return not node.ever_heard or node.heartbeat_age_ms > policy.lost_after_ms


def taken_over(
    view: ClusterView, policy: Policy, waiting: Collection[str], names: Mapping[str, str]
) -> tuple[tuple[Holder, ...], tuple[str, ...]]:
    """Determine who holds the budget, and who waits, while the driver that wrote it down is away. `names`: of
    nodes, by id.

    A holder keeps the budget while nodes that it has taken away are silent. If none is silent, either they
    are back, or the driver has not taken them away yet. Such a holder waits until its driver returns.
    """
    named: dict[str, int] = {n.node_id: n.replicas for n in view.nodes}
    stays, waits = [], []
    for holder in view.holding:
        nodes = [(a, node) for a in holder.away if (node := view.node(a.node_id)) is not None]
        away = tuple(a for a, n in nodes if _counts(n, named) and _is_silent(n, policy))
        if away:
            stays.append(Holder(holder.name, away))
        elif holder.name.partition("/")[0] not in _KINDS:
            waits.append(holder.name)
    kinds = [(kind, n.node_id) for n in view.nodes if (kind := _kind(n, policy))]
    seen = [
        Holder(f"{k}/{names.get(n) or n[:8]}") for k, n in sorted(kinds, key=lambda at: _KINDS.index(at[0]))
    ]
    # What is away shows nowhere else. So with many holders, others are left out.
    holding = (*seen[: HOLDERS_MAX - len(stays)], *stays)
    held = {h.name for h in holding}
    waits += [name for name in waiting if name not in waits]
    return holding, tuple(name for name in waits if name not in held)[:HOLDERS_MAX]


def _kind(node: NodeView, policy: Policy) -> str:
    """The work on this node that holds the budget: park, drain or heal; "": none."""
    if node.parked:
        return "park"
    if not node.replicas:
        return ""
    if node.state is NodeState.DRAINING and node.asked is not Wanted.IN_SERVICE:
        return "drain"
    lost = node.state is NodeState.DRAINING or (node.state is NodeState.ACTIVE and is_dead(node, policy))
    return "heal" if lost else ""
