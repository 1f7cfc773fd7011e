"""Steps for whole nodes: which drain, park, return or retire. Called by planner; pure.

Invariants: a node retires only when no committed configuration and no intent names it. A state that an
administrator wants for a node is not changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from stele.driver.causes import heal_cause
from stele.driver.policy import Policy
from stele.driver.situation import is_back, is_dead
from stele.driver.steps import DrainNode, EndWish, ParkNode, RetireNode, ReturnNode, Step
from stele.driver.view import ClusterView, NodeState, NodeView, Wanted
from stele.model.ids import TabletId

ADMINISTRATOR, DRIVER = "administrator", "driver"
"""The values of `NodeView.wanted_by`: who wants the state of a node."""


def node_steps(
    view: ClusterView, policy: Policy, in_configurations: Collection[str] | None = None
) -> Iterable[Step]:
    """The steps for whole nodes. Lost and unneeded nodes drain, as do those that the policy wants retired.
    Lost nodes return if they are heard again. DRAINING nodes that nothing names retire, unless they are to
    stay.

    `in_configurations`: the nodes that configurations of current tablets name, if the caller knows them.
    """
    if not policy.retire:
        return
    if in_configurations is None:
        in_configurations = {p.node_id for t in view.tablets if t.is_current for p in t.config.peers}
    named = {*in_configurations, *(i.target_node for i in view.intents)}
    epoch = view.claim.epoch if view.claim is not None else 0
    for node in sorted(view.nodes, key=lambda n: n.node_id):
        step = _node_step(node, node.node_id in named, policy)
        if step is not None:
            yield replace(step, cause=heal_cause(node.node_id, epoch))


def _node_step(node: NodeView, named: bool, policy: Policy) -> Step | None:
    at = (TabletId(""), -1)
    if wish := _wish(node, policy):
        return wish
    match node.state:
        case NodeState.ACTIVE if node.node_id in policy.lost and is_dead(node, policy):
            # Do not change this text: masters of the version before store no `given_up`, and this version
            # infers it from the text.
            return DrainNode(*at, "declared lost, and silent", node.node_id, True)
        case NodeState.ACTIVE if node.node_id in policy.unneeded and not named:
            return DrainNode(*at, "not needed: there are enough without it", node.node_id, False)
        case NodeState.DRAINING if is_back(node, policy):
            return ReturnNode(*at, "it sends heartbeats again, and has its data", node.node_id)
        case NodeState.DRAINING if not named and _retires(node, policy):
            return RetireNode(*at, "no configuration and no intent names it", node.node_id)
    return None


def _retires(node: NodeView, policy: Policy) -> bool:
    """Whether an empty DRAINING node becomes RETIRED. A node that is to stay retires only if it is lost."""
    lost = node.node_id in policy.lost and is_dead(node, policy)
    return node.asked is not Wanted.DRAINED or lost


def _wish(node: NodeView, policy: Policy) -> Step | None:
    """The step to the state that the policy wants for the node. If the policy no longer wants one, the step
    back to service.
    """
    if policy.retiring is None or node.state is NodeState.RETIRED or node.wanted_by == ADMINISTRATOR:
        return None
    at = (TabletId(""), -1)
    if (reason := policy.retiring.get(node.node_id)) is not None:
        asked = node.asked is Wanted.RETIRED
        return None if asked else DrainNode(*at, reason, node.node_id, False)
    if (reason := policy.parked.get(node.node_id)) is not None and node.node_id not in policy.lost:
        asked = node.asked is Wanted.PARKED and node.wanted_left_ms > policy.park_ms // 2
        return None if asked else ParkNode(*at, reason, node.node_id, policy.park_ms)
    if node.wanted_by == DRIVER and node.node_id not in policy.unneeded | policy.lost:
        return EndWish(*at, "nobody asks for it to be away any more", node.node_id)
    return None


def silent_nodes(astray: Mapping[tuple[str, str], int], role: str, policy: Policy) -> tuple[str, ...]:
    """The ids of this role's nodes that count as silent, sorted.

    A node counts if it is dead or out of a leader's reach, and still in a configuration. It must be neither
    declared lost nor parked. `astray`: by role and node, how many of its members are dead or out of reach.
    """
    away = (node for (of, node), count in astray.items() if count and of == role)
    return tuple(sorted(node for node in away if node not in policy.lost))
