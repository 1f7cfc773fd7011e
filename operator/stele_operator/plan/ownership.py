"""Finds the node of a claim whose labels or annotations somebody changed. Called by cluster_plan; pure.

Names of members are never used again, so each name belongs to one node. The catalog says which. Before there
is a catalog, the identity (`Identity`) does. The name alone proves nothing, because somebody else may have
created a claim of that name. So there must be a second proof: the pod was created for this very claim, or the
claim's remaining metadata names this cluster. If the volume belongs to another node nevertheless, the node
refuses it.

Invariant: the node that a claim names has precedence, if the claim's name is on record for that node. A claim
without such proof is left alone.
"""

from __future__ import annotations

from dataclasses import replace

from stele_operator.plan.observation import Claim, Observation


def with_owners(o: Observation) -> Observation:
    """The observation, with the identities of its claims restored. Claims whose node cannot be determined are
    left out.
    """
    claims = (_as_made(o, claim) for claim in o.claims)
    return replace(o, claims=tuple(c for c in claims if c.node_id))


def _as_made(o: Observation, claim: Claim) -> Claim:
    cluster_id = o.identity.cluster_id if o.identity is not None else ""
    node_id = _node_of(o, claim, cluster_id)
    if not node_id or (claim.node_id, claim.cluster_id) == (node_id, cluster_id):
        return claim
    return replace(claim, node_id=node_id, cluster_id=cluster_id, identified=False)


def _node_of(o: Observation, claim: Claim, cluster_id: str) -> str:
    """The id of the node for which the claim was created; "" if that is not certain."""
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
    """Ids of the nodes registered under this name. Normally there is at most one. There are more if the
    operator once believed a changed claim.
    """
    found = (
        {m.node_id for m in o.identity.first_masters if m.name == name} if o.identity is not None else set()
    )
    if o.catalog is not None:
        found |= {node_id for node_id, known in o.catalog.names.items() if known == name}
    return found
