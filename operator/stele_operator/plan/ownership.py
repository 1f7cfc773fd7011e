"""Whose volume a claim is, where somebody changed what it says of that. Called by planner; pure.

A member's name is made of a serial, so the catalog, and before it the identity, tells of each name which node has it. That
is no proof for a claim that somebody else may have made under this name: its pod has to be made for this very claim, or
else what is left on it has to say that it is ours. Should its volume be another's all the same, the node refuses it.
Invariant: what a claim says is believed before anything else; where nothing proves it ours it is left as it is.
"""

from __future__ import annotations

from dataclasses import replace

from stele_operator.plan.observation import Claim, Observation


def with_owners(o: Observation) -> Observation:
    """The observation with claims as they were made; those that name no node, and that nothing leads to one, left out."""
    claims = (_as_made(o, claim) for claim in o.claims)
    return replace(o, claims=tuple(c for c in claims if c.node_id))


def _as_made(o: Observation, claim: Claim) -> Claim:
    cluster_id = o.identity.cluster_id if o.identity is not None else ""
    node_id = _node_of(o, claim, cluster_id)
    if not node_id or (claim.node_id, claim.cluster_id) == (node_id, cluster_id):
        return claim
    return replace(claim, node_id=node_id, cluster_id=cluster_id, identified=False)


def _node_of(o: Observation, claim: Claim, cluster_id: str) -> str:
    """The node of this cluster that it was made for; empty where that is not certain."""
    recorded = _recorded(o, claim.name)
    pod = o.pod(claim.name)
    if claim.node_id in recorded:
        return claim.node_id
    if pod is not None and pod.claim_uid == claim.uid and pod.node_id in recorded:
        return pod.node_id
    unmarked = claim.labelled and not claim.node_id and not claim.cluster_id
    if len(recorded) == 1 and (unmarked or claim.cluster_id == cluster_id):
        return next(iter(recorded))
    return ""


def _recorded(o: Observation, name: str) -> set[str]:
    """Nodes on record under this name: one at most, unless somebody's change was believed once."""
    found = (
        {m.node_id for m in o.identity.first_masters if m.name == name} if o.identity is not None else set()
    )
    if o.catalog is not None:
        found |= {node_id for node_id, known in o.catalog.names.items() if known == name}
    return found
