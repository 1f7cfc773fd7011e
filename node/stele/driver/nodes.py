"""Steps for whole nodes: which drain, return or retire. Called by planner; pure.

Invariant: a node retires only when no committed configuration and no intent names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stele.driver.causes import heal_cause
from stele.driver.policy import Policy
from stele.driver.situation import Situation, is_back, is_dead
from stele.driver.steps import DrainNode, RetireNode, ReturnNode, Step
from stele.driver.view import ClusterView, NodeState, NodeView
from stele.model.ids import TabletId


def node_steps(view: ClusterView, policy: Policy) -> Iterable[Step]:
    """Lost and unneeded nodes drain. Lost nodes return if they are heard again. DRAINING nodes that
    nothing names retire."""
    if not policy.retire:
        return
    named = {p.node_id for t in view.tablets if _is_current(t.state) for p in t.config.peers}
    named.update(i.target_node for i in view.intents)
    epoch = view.claim.epoch if view.claim is not None else 0
    for node in sorted(view.nodes, key=lambda n: n.node_id):
        step = _node_step(node, node.node_id in named, policy)
        if step is not None:
            yield replace(step, cause=heal_cause(node.node_id, epoch))


def _node_step(node: NodeView, named: bool, policy: Policy) -> Step | None:
    at = (TabletId(""), -1)
    match node.state:
        case NodeState.ACTIVE if node.node_id in policy.lost and is_dead(node, policy):
            # Do not change this text: masters of the version before store no `given_up`, and this version
            # infers it from the text.
            return DrainNode(*at, "declared lost, and silent", node.node_id, True)
        case NodeState.ACTIVE if node.node_id in policy.unneeded and not named:
            return DrainNode(*at, "not needed: the node that it replaced has returned", node.node_id, False)
        case NodeState.DRAINING if is_back(node, policy):
            return ReturnNode(*at, "it sends heartbeats again, and has its data", node.node_id)
        case NodeState.DRAINING if not named:
            return RetireNode(*at, "no configuration and no intent names it", node.node_id)
    return None


def _is_current(state: str) -> bool:
    return state in ("PREPARING", "CREATING", "RUNNING")


def silent_nodes(situations: Iterable[Situation], role: str, policy: Policy) -> tuple[str, ...]:
    """The nodes of a role that are dead or out of a leader's reach, still in a configuration, and not
    declared lost; sorted."""
    silent = {
        m.peer.node_id
        for s in situations
        if s.tablet.node_role == role
        for m in s.members
        if (m.dead or m.unreached) and m.peer.node_id not in policy.lost
    }
    return tuple(sorted(silent))
