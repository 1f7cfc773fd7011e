"""Finds masters that are not needed: the masters that they replaced have returned, or fewer are asked for.
Called by cluster_plan; pure.

The driver retires those of them that do not hold the catalog. Then their pods and claims are deleted like
those of any retired member, the claims after `keepFor`. For nodes leaving.py does this. Invariant: without
these masters, at least as many healthy ones remain as are wanted. A master that leaves already is chosen
first, so the same masters leave from pass to pass.
"""

from __future__ import annotations

from stele_operator.plan.fates import Member, State
from stele_operator.plan.leaving import leaves, staying_masters
from stele_operator.plan.observation import Observation


def unneeded(o: Observation, wanted: int, everyone: tuple[Member, ...]) -> frozenset[str]:
    """UUIDs of masters beyond the wanted number that hold no replica. Those that leave already are chosen
    first, then the newest.
    """
    if o.catalog is None:
        return frozenset()
    view = o.catalog.view
    found: list[str] = []
    staying = staying_masters(everyone)
    well = sum(m.state is State.READY for m in staying)
    more = max(0, len(staying) - wanted)
    if not more:
        return frozenset()
    named = {p.node_id for t in view.tablets for p in t.config.peers} | {i.target_node for i in view.intents}
    empty = [(leaves(m), m.claim.serial, m) for m in staying if m.claim and m.node and m.node_id not in named]
    for *_, member in sorted(empty, key=lambda e: e[:2], reverse=True)[:more]:
        well -= member.state is State.READY
        if well >= wanted:
            found.append(member.node_id)
    return frozenset(found)
