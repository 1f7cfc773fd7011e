"""Steps of a joining replica: its copy, its turn to copy, its promotion. Called by planner; pure.

Invariant: a witness gets the order to fetch its rows only when it has a slot.
"""

from __future__ import annotations

from stele.driver.copying import Copying
from stele.driver.policy import Policy
from stele.driver.situation import Member, Situation
from stele.driver.slots import Slots, fetches_rows, waits_for_turn
from stele.driver.steps import Blocked, PromoteBack, StartCopy, Step, WaitCopy, WaitPromotion
from stele.driver.trials import Trials
from stele.driver.view import CopyView, Intent, ReplicaView
from stele.model.config import MemberType
from stele.model.ids import NodeId, TabletId


def at(s: Situation, reason: str) -> tuple[TabletId, int, str]:
    """The first three fields of each step: tablet, configuration index and reason."""
    return s.tablet.tablet_id, s.tablet.config.opid_index, reason


def blocked(s: Situation, code: str, reason: str) -> Blocked:
    """The step that says why nothing may be done for the tablet now."""
    return Blocked(*at(s, reason), code)


class Joining:
    """The joining replicas in one round."""

    def __init__(self, copying: Copying, slots: Slots, policy: Policy, trials: Trials) -> None:
        self._copying = copying
        self._slots = slots
        self._trials = trials
        self.turn = f"one of the {policy.max_copies} copies that may run at once"

    def start_copy(self, s: Situation, intent: Intent, report: ReplicaView | None) -> Step:
        """Order the intent's target to start its copy, or to restart it."""
        source = self._copying.source(s, intent.replica_id)
        reason = f"node {intent.target_node[:8]} gets the new replica {intent.replica_id}"
        if report is not None and report.copy is not None:
            reason = self._copying.anew(s, intent.replica_id, report.copy) or reason
        return StartCopy(
            *at(s, reason),
            intent.replica_id,
            intent.target_node,
            source,
            intent.witness,
            intent.witness_start,
            # Its vote is needed first, and a vote needs no rows.
            log_only=intent.witness and not (fetches_rows(report) or self._slots.begin()),
        )

    def wait_copy(self, s: Situation, intent: Intent, copy: CopyView | None) -> Step:
        """The step for a running copy: wait, or change its rate."""
        if copy is not None and (pace := self._copying.pace(copy)):
            source, start = NodeId(copy.source_node), intent.witness_start
            return StartCopy(
                *at(s, pace), intent.replica_id, intent.target_node, source, intent.witness, start
            )
        done, total = (copy.bytes_done, copy.bytes_total) if copy is not None else (0, 0)
        reason = f"{done} of {total} bytes have arrived"
        return WaitCopy(*at(s, reason), intent.replica_id, intent.target_node, done, total, intent.witness)

    def help_along(self, s: Situation, m: Member) -> Step:
        """The step for a live WITNESS, PRE_FOLLOWER or NON_VOTER that is not yet a voter with rows."""
        peer = m.peer
        if peer.member_type is MemberType.NON_VOTER and not peer.promote:
            reason = f"{m.name} {'lacks' if m.rowless else 'has'} its data; {s.needed} more voters are needed"
            return PromoteBack(*at(s, reason), peer.replica_id, peer.node_id)
        copy = m.report.copy if m.report is not None else None
        if not m.rowless:
            if self._trials.is_late(s.tablet.tablet_id, peer.replica_id):
                why = "it does not keep up with its leader, or too few voters answer"
                return blocked(
                    s,
                    "NotPromoted",
                    f"{m.name} has its data, but after some minutes it is still no voter: {why}",
                )
            reason = f"{m.name} has its data; the leader promotes it once it has caught up"
            return WaitPromotion(*at(s, reason), peer.replica_id, peer.node_id)
        anew = self._copying.anew(s, peer.replica_id, copy)
        if copy is None or anew or waits_for_turn(copy):
            if not (fetches_rows(m.report) or self._slots.take()):
                does = "logs and votes" if peer.votes else "logs"
                return blocked(s, "CopyLimit", f"{m.name} {does}; its rows wait for {self.turn}")
            origin = self._copying.source(s, peer.replica_id)
            reason = f"{m.name} lacks its rows: {anew or 'nothing copies them'}"
            return StartCopy(*at(s, reason), peer.replica_id, peer.node_id, origin, True, peer.witness_start)
        if pace := self._copying.pace(copy):
            origin = NodeId(copy.source_node)
            return StartCopy(*at(s, pace), peer.replica_id, peer.node_id, origin, True, peer.witness_start)
        reason = f"{copy.bytes_done} of {copy.bytes_total} bytes have arrived"
        return WaitCopy(
            *at(s, reason), peer.replica_id, peer.node_id, copy.bytes_done, copy.bytes_total, True
        )
