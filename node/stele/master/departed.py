"""A node that is gone for good is forgotten, as an administrator says. Called by service.py on the leader.

A forgotten node is RETIRED: its row stays, since ids are never used again, but nothing waits for it and it is not shown any more.

Invariant: a node is forgotten only while nobody hears it and no configuration or intent names it. From the moment of that
check it is given nothing new. A leader that dies halfway leaves a node that returns to service once it is heard.
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
    """Make a node RETIRED that is silent and that nothing names. Of one that is RETIRED already: nothing.

    Raises:
        Rejected: NOT_FOUND; UNSAFE_CHANGE, it is heard, or something names it.
        Retryable: NOT_READY, this master has not listened for long enough to call a node silent.
    """
    async with lead.locks.hold(tables=(f"node/{node_id}",)):
        node = _node(lead, node_id)
        if node.state == "RETIRED":
            return
        _check(lead, node)
        # A DRAINING node gets no intents, so what is found now stays so. If this leader dies here, the node stays DRAINING: it
        # returns once it is heard, as nobody asked for a drain, unless somebody had.
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
        raise Rejected(f"no node has the id {node_id}", code=Code.NOT_FOUND)
    return node


def _check(lead: Leadership, node: NodeRecord) -> None:
    if lead.is_alive(node):
        raise Rejected(
            f"node {node.name or node.node_id} is heard; a node that lives is drained, not forgotten",
            code=Code.UNSAFE_CHANGE,
        )
    if lead.now_ms() - lead.liveness.began_ms <= lead.options.alive_ms:
        raise Retryable(
            "this master began to listen a moment ago and cannot say who is silent; try again",
            code=Code.NOT_READY,
        )
    check_unnamed(lead, node.node_id)
