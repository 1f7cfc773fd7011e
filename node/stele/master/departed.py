"""Forgets a node that is gone for good, when an administrator asks for it. Called by service.py on the
leader.

A forgotten node is RETIRED. Its row stays, because ids are never used again, but nothing waits for the node
and no view shows it.

Invariant: a node is forgotten only while it is silent and no configuration or intent names it. Once this was
checked, the node gets no new replicas. If the leader dies halfway, the node returns to service with its next
heartbeat.
"""

from __future__ import annotations

from dataclasses import replace

from stele.master.driving import check_unnamed
from stele.master.leadership import Leadership
from stele.master.port import swap
from stele.master.records import NodeRecord
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import NodeId


async def forget_node(lead: Leadership, node_id: str, reason: str) -> None:
    """Retire a node that is silent and that no configuration or intent names. Does nothing if it is RETIRED
    already.

    Raises:
        Rejected: NOT_FOUND. UNSAFE_CHANGE, the node sends heartbeats, or a configuration or an intent names
            it.
        Retryable: NOT_READY, this master has not listened for long enough to call a node silent.
    """
    async with lead.locks.hold(tables=(f"node/{node_id}",)):
        node = _node(lead, node_id)
        if node.state == "RETIRED":
            return
        _check(lead, node)
        # A DRAINING node gets no intents, so the checks below stay true. If this leader dies here, the node
        # stays DRAINING. It then returns to service with its next heartbeat, unless somebody had asked for a
        # drain before.
        returns = node.state == "ACTIVE" or node.returns
        draining = replace(node, state="DRAINING", reason=reason, given_up=returns)
        await lead.commit([swap(node, draining)])
        found = _node(lead, node_id)
        try:
            _check(lead, found)
        except SteleError:
            back = replace(found, state=node.state, reason=node.reason, given_up=node.given_up)
            await lead.commit([swap(found, back)])
            raise
        await lead.commit([swap(found, replace(found, state="RETIRED", given_up=False))])


def _node(lead: Leadership, node_id: str) -> NodeRecord:
    node = lead.catalog.nodes.get(NodeId(node_id))
    if node is None:
        raise Rejected(
            f"there is no node with the id {node_id[:8]}; `stele node list` shows all", code=Code.NOT_FOUND
        )
    return node


def _check(lead: Leadership, node: NodeRecord) -> None:
    if lead.is_alive(node):
        raise Rejected(
            f"node {node.name or node.node_id[:8]} sends heartbeats, so it is not gone; drain it instead",
            code=Code.UNSAFE_CHANGE,
        )
    if lead.now_ms() - lead.liveness.began_ms <= lead.options.alive_ms:
        raise Retryable(
            "this master has not listened long enough to know which nodes are silent; try again",
            code=Code.NOT_READY,
        )
    check_unnamed(lead, node.node_id)
