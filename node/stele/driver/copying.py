"""Decides how a copy continues: from which source, whether to restart it, whether to try another target.

Called by planner; pure, plans no step itself. Invariant: a target is given up only if another node could take
the copy.
"""

from __future__ import annotations

from stele.driver.policy import Policy
from stele.driver.situation import Situation, is_dead
from stele.driver.targets import Load, choose_target, has_room
from stele.driver.trials import TRIES, Trials, failed, receives_bytes
from stele.driver.view import ClusterView, CopyView, Intent
from stele.model.ids import NodeId


class Copying:
    """The decisions of one round. Except for `source`, each answer is a reason in words for a step; "" means
    no.

    Tablets in `trials` are planned anew in each round. For any other tablet, `load.asked` notes when an answer
    depends on more than its situation (kept_steps.py).
    """

    def __init__(self, view: ClusterView, policy: Policy, trials: Trials, load: Load) -> None:
        self._view = view
        self._policy = policy
        self._trials = trials
        self._load = load

    def source(self, s: Situation, replica_id: int) -> NodeId:
        """The node to copy from: normally the leader. After the first, third, ... failure it is another live
        voter with rows that answers the leader.

        A replica whose rows differ from another voter's is used only if there is no other.
        """
        first = s.leader() or s.data_voters[0]
        candidates = [first, *(m for m in s.data_voters if m is not first and m.answers)]
        doubted = {c.replica_id for c in s.tablet.copies if c.differs}
        first, *others = [m for m in candidates if m.peer.replica_id not in doubted] or candidates
        times = self._trials.of(s.tablet.tablet_id, replica_id)
        if times % 2 and others:
            return others[times // 2 % len(others)].peer.node_id
        return first.peer.node_id

    def anew(self, s: Situation, replica_id: int, copy: CopyView | None) -> str:
        """Why a copy must be restarted, perhaps from another source; "" if it goes on, or has not begun."""
        if copy is None:
            return ""
        if failed(copy):
            return (
                f"the copy failed ({copy.error}); trying again"
                if copy.error
                else "the copy failed; trying again"
            )
        if not (receives_bytes(copy) and copy.source_node) or self.source(s, replica_id) == copy.source_node:
            return ""
        self._load.asked.others = True
        if is_dead(self._view.node(copy.source_node), self._policy):
            return f"the copy's source, node {copy.source_node[:8]}, is silent; trying another source"
        if (s.tablet.tablet_id, replica_id) in self._trials.stalled:
            return f"node {copy.source_node[:8]} sends no data; trying another source"
        return ""

    def pace(self, copy: CopyView | None) -> str:
        """Why to order a running copy again from the same source: its rate is not the policy's rate.

        A policy without a rate does not change copies that another driver began with one.
        """
        if copy is None or not receives_bytes(copy):
            return ""
        self._load.asked.others = True
        if self._view.node(copy.source_node) is None:
            return ""
        wanted = self._policy.bytes_per_second
        if not wanted or copy.bytes_per_second in (None, wanted):
            return ""
        return f"the limit of the copy is now {wanted:,} bytes/s"

    def useless_target(self, s: Situation) -> str:
        """Why to give up this target: the copy keeps failing or must fail, and another node could take it."""
        intent, report = s.intent, s.target_report
        if intent is None or report is None:
            return ""
        why = self._never_promoted(s, intent)
        if report.copy is not None:
            why = why or self._too_full(s, report.copy) or self._tried_in_vain(intent, report.copy)
        if not why:
            return ""
        if intent.moves:
            return why  # nothing is lost: the source of the move stays
        other = choose_target(s, self._view, self._policy, self._load)
        return why if other is not None and other.node_id not in self._trials.avoid else ""

    def _too_full(self, s: Situation, copy: CopyView) -> str:
        """Why to give up a target whose copy failed because other copies took the room since it was chosen."""
        if not failed(copy):
            return ""
        self._load.asked.others = True
        target = self._view.node(s.target.node_id) if s.target is not None else None
        if target is None:
            return ""
        if has_room(target, self._load.bytes_due[target.node_id], self._policy):
            return ""
        return f"the copy failed ({copy.error}), and node {target.node_id[:8]} has no room for it"

    def _never_promoted(self, s: Situation, intent: Intent) -> str:
        """Why to give up a target that does not become a voter. A witness is never given up for this: without
        its vote the group tolerates no fault.
        """
        late = self._trials.is_late(intent.tablet_id, intent.replica_id)
        if not late or (s.joining is not None and s.joining.peer.votes):
            return ""
        return f"the leader has not promoted replica {intent.replica_id} on node {intent.target_node[:8]} for a long time"

    def _tried_in_vain(self, intent: Intent, copy: CopyView) -> str:
        times = self._trials.of(intent.tablet_id, intent.replica_id)
        if times < TRIES or not (failed(copy) or receives_bytes(copy)):
            return ""
        error = f" ({copy.error})" if copy.error else ""
        return f"the copy to node {intent.target_node[:8]} failed or stalled {times} times{error}"
