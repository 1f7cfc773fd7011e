"""The condition CopiesEqual: whether new replicas hold the same rows as another voter, as the catalog records
it. Pure.

The operator replaces no replica that differs, since nobody knows which one is right. Invariant: the condition
is True only if no replica is known to differ and none waits to be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stele.driver.progress import with_names
from stele.driver.view import DROPPED_MARK, TabletView
from stele.model.amounts import plural
from stele.model.copies import CopyRecord, of_members
from stele_operator.plan.fates import Member
from stele_operator.plan.observation import Condition, Observation

COPIES_EQUAL = "CopiesEqual"
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class OpenCopy:
    """A new replica that differs from another voter, or still waits to be compared with one."""

    tablet: TabletView
    record: CopyRecord

    @property
    def in_words(self) -> str:
        """The difference in words. Nodes are named by the first digits of their ids."""
        t, c = self.tablet, self.record
        return (
            f"tablet {t.tablet_id[:8]} of {t.table_name}: replica {c.replica_id}{_on(t, c.replica_id)} holds other rows than replica "
            f"{c.other_id}{_on(t, c.other_id)}"
        )


def _on(tablet: TabletView, replica_id: int) -> str:
    peer = tablet.config.peer(replica_id)
    return f" on node {peer.node_id[:8]}" if peer is not None else ", which is gone"


def open_copies(o: Observation) -> tuple[OpenCopy, ...]:
    """The new replicas of all tables that differ or wait to be compared, in the catalog's order."""
    if o.catalog is None:
        return ()
    return tuple(
        OpenCopy(tablet, record)
        for tablet in o.catalog.view.tablets
        if tablet.copies
        for record in of_members(tablet.copies, tablet.config)
        if not record.equal
    )


def copies_equal(
    known: bool, found: Sequence[OpenCopy], members: Sequence[Member], there: Sequence[Condition]
) -> Condition:
    """The condition CopiesEqual. `known`: whether the state of the tablets is known; if not, the condition
    stays as it was. `found`: the open copies. `there`: the conditions of the present status.
    """
    before = next((c for c in there if c.type == COPIES_EQUAL), None)
    if not known:
        return before or Condition(
            COPIES_EQUAL, "Unknown", "Unknown", "the state of the tablets is not known yet"
        )
    differ = [copy for copy in found if copy.record.differs]
    if differ:
        names = {m.node_id[:8]: m.name for m in members if m.node_id}
        told = "; ".join(with_names(copy.in_words, names) for copy in differ[:_NAMED_MAX])
        more = f"; and {len(differ) - _NAMED_MAX} more" if len(differ) > _NAMED_MAX else ""
        first = differ[0].tablet
        advice = (
            f"`stele table verify {first.table_name.removesuffix(DROPPED_MARK)}` compares all replicas, and "
            f"`stele tablet move {first.tablet_id[:8]} --from NODE --to NODE` replaces a wrong one"
        )
        return Condition(COPIES_EQUAL, "False", "CopyDiffers", f"{told}{more}. {advice}")
    if found:
        wait = f"{plural(len(found), 'new replica')} {'waits' if len(found) == 1 else 'wait'} to be compared with another voter"
        return Condition(COPIES_EQUAL, "Unknown", "CopiesWait", wait)
    return Condition(
        COPIES_EQUAL,
        "True",
        "NoneDiffers",
        "each new replica that was compared holds the rows of another voter",
    )
