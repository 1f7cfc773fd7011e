"""Names of causes: why a driver acts, as one word that events, status and the logs of nodes share. Pure.

A heal is named after the node that it replaces and the epoch of the driver that began it: `heal/7f3a91c2-12`.
The intent in the catalog keeps the name. So all steps of a tablet have the same cause, even if another driver
takes over.
"""

from __future__ import annotations

from stele.driver.situation import Situation


def heal_cause(node_id: str, epoch: int) -> str:
    """The cause of the steps for one node that is lost, drains, or holds a replica that FAILED."""
    return f"heal/{node_id[:8]}-{epoch}"


def move_cause(kind: str, tablet_id: str, epoch: int) -> str:
    """The cause of a move of a healthy replica: `move/9a2e41c0-12`, or `move-by-hand/...`."""
    return f"{kind}/{tablet_id[:8]}-{epoch}"


def cause_of(s: Situation, epoch: int) -> str:
    """The cause of the next step of a tablet, if a driver of this epoch takes the step."""
    if s.intent is not None and s.intent.cause:
        return s.intent.cause
    at_fault = s.at_fault
    if at_fault is not None:
        return heal_cause(at_fault.peer.node_id, epoch)
    return f"tablet/{s.tablet.tablet_id[:8]}-{epoch}"  # the number of wanted replicas changed
