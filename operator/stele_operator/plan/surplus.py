"""Members that are not needed: made for others that have returned since. Called by planner; pure.

The driver retires those that hold nothing; then upkeep lets pod and claim go as of any retired member, the claim after
`keepFor`. Invariant: as many members as the spec asks for are well without them.
"""

from __future__ import annotations

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.plan.fates import Member, State
from stele_operator.plan.health import masters_wanted
from stele_operator.plan.observation import ROLES, Observation, Role


def unneeded(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> frozenset[str]:
    """UUIDs of members beyond what the spec asks for that hold nothing, the newest first."""
    if o.catalog is None:
        return frozenset()
    view = o.catalog.view
    named = {p.node_id for t in view.tablets for p in t.config.peers} | {i.target_node for i in view.intents}
    wanted: dict[Role, int] = {"master": masters_wanted(o, spec), "node": spec.nodes.replicas}
    found: list[str] = []
    for role in ROLES:
        active = [m for m in everyone if m.role == role and m.active]
        well = sum(m.state is State.READY for m in active)
        more = max(0, len(active) - wanted[role])
        empty = [(m.claim.serial, m) for m in active if m.claim and m.node and m.node_id not in named]
        for _, member in sorted(empty, key=lambda e: e[0], reverse=True)[:more]:
            well -= member.state is State.READY
            if well >= wanted[role]:
                found.append(member.node_id)
    return frozenset(found)
