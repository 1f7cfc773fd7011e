"""Finds tablets that lost a majority of their voters for good. Pure; shown in the condition MajorityLost, and
in Stalled.

The operator does nothing about them: to continue without the lost replicas gives up rows, which only a person
may do. Invariant: a voter counts as lost only if its node is given up or unknown, or if its replica can never
serve again. Silence alone is reported in other conditions.
"""

from __future__ import annotations

from stele.driver.situation import failed_replicas
from stele.driver.view import NodeState, TabletView
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.plan.fates import SILENT_S, Member
from stele_operator.plan.findings import Finding, Kind
from stele_operator.plan.observation import Observation
from stele_operator.plan.steady import unwell

MAJORITY_LOST = "MajorityLost"
_NAMED_MAX = 5


def find_lost_majorities(o: Observation, everyone: tuple[Member, ...]) -> list[Finding]:
    """A finding if tablets lost their majority for good. It says what to do and has the command to copy."""
    lost = lost_majorities(o, everyone)
    if not lost:
        return []
    named = ", ".join(f"{t.tablet_id[:8]} of {t.table_name}" for t in lost[:_NAMED_MAX])
    more = f" and {len(lost) - _NAMED_MAX} more" if len(lost) > _NAMED_MAX else ""
    where = f"{o.cluster.name}-masters.{o.cluster.namespace}:7051"
    message = (
        f"{len(lost)} tablets lost a majority of their voters for good and serve nothing: {named}{more}. "
        "Bring their machines or volumes back, which loses nothing. Otherwise rows are lost; this command shows "
        f"which, and changes nothing: stele tablet recover --all-lost --masters {where}"
    )
    return [Finding(Kind.STALLED, MAJORITY_LOST, message)]


def lost_majorities(o: Observation, everyone: tuple[Member, ...]) -> tuple[TabletView, ...]:
    """The tablets of tables that can never have a majority again, in the catalog's order.

    A voter is lost if its node is given up, retired or unknown, or if its replica can never serve again.
    """
    if o.catalog is None:
        return ()
    view = o.catalog.view
    given_up = {m.node_id for m in everyone if m.given_up}

    def may_answer(tablet: TabletView) -> int:
        failed = failed_replicas(tablet)
        count = 0
        for peer in tablet.config.voters:
            node = view.node(peer.node_id)
            gone = node is None or node.state is NodeState.RETIRED or peer.node_id in given_up
            count += not gone and peer.replica_id not in failed
        return count

    return tuple(
        t
        for t in unwell(o.catalog, SILENT_S * 1000, given_up)
        if t.tablet_id != CATALOG_TABLET_ID and t.state == "RUNNING" and may_answer(t) < t.config.majority
    )
