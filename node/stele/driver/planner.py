"""Plans membership changes: a view and a policy in, steps out. Pure; called by executor, operator and `stele
ksck`.

Invariant: each tablet gets at most one step, planned from the present view and never from an earlier plan. So
anyone may carry out any prefix of a plan, and planning again continues from there. The checks of a tablet
stand in a tuple; the first that returns a step decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stele.driver.beginning import Beginning, waits_for_parked
from stele.driver.budget import reserved_by
from stele.driver.causes import cause_of
from stele.driver.copying import Copying
from stele.driver.joining import Joining, at, blocked
from stele.driver.judgements import Judgements
from stele.driver.kept_steps import Asked, Found, KeptSteps
from stele.driver.known import Known
from stele.driver.leader_leaves import LeaderLeaves
from stele.driver.leader_moves import leader_steps
from stele.driver.moves import no_longer_wanted, unrest
from stele.driver.nodes import node_steps, silent_nodes
from stele.driver.policy import Policy
from stele.driver.removing import demote, remove, remove_excess, remove_replaced, replaced_by_joining
from stele.driver.replica_balance import begin_moves
from stele.driver.situation import Member, Situation, majority
from stele.driver.slots import Slots
from stele.driver.steps import (
    AddPreFollower,
    AddWitness,
    Blocked,
    CancelCopy,
    EndIntent,
    PromoteBack,
    Step,
    TakeOverIntent,
)
from stele.driver.targets import Load
from stele.driver.trials import NO_TRIALS, Trials
from stele.driver.view import (
    MOVE,
    ClusterView,
    DataState,
    Intent,
    NodeState,
    ReplicaState,
)
from stele.model.config import MemberType
from stele.model.ids import TabletId


def plan(
    view: ClusterView, policy: Policy, trials: Trials = NO_TRIALS, known: Known | None = None
) -> tuple[Step, ...]:
    """The steps that may be taken now, most urgent tablets first; empty if all tablets are healthy.

    `trials`: how the copies under way have gone so far. `known`: the results of the caller's earlier plans.
    They save time and change no step.
    """
    if not view.settled:
        return (
            Blocked(TabletId(""), -1, "the leading master has not heard from all nodes yet", "NotSettled"),
        )
    known = known or Known()
    with known.lock:
        known.renew(view, policy)
        try:
            return _plan(view, policy, trials, known)
        except BaseException:
            known.forget()
            raise


def _plan(view: ClusterView, policy: Policy, trials: Trials, known: Known) -> tuple[Step, ...]:
    judged = known.judged
    planner = _Planner(view, policy, judged, known.steps, trials)
    named = {n for n, count in judged.replicas.items() if count}
    steps = planner.tablets() + list(node_steps(view, policy, named))
    if policy.rebalance and not unrest(judged, steps, view, policy, planner.load):
        moved = (planner.load, planner.slots, planner.epoch)
        steps += begin_moves(view, policy, judged.situation, known.places, *moved)
    return tuple(steps + leader_steps(view, policy, trials.leaders, judged, known.groups, steps))


class _Planner:
    """One round. It counts the copies and the replicas per node that it has planned itself.

    A quiet tablet (`is_quiet`) needs no step, so it is skipped. For the others, `kept` has the steps of
    earlier rounds that are still valid.
    """

    def __init__(
        self, view: ClusterView, policy: Policy, judged: Judgements, kept: KeptSteps, trials: Trials
    ) -> None:
        self.view = view
        self.policy = policy
        self.situations = judged.restless()
        self.kept, self.asked = kept, Asked()
        self.epoch = view.claim.epoch if view.claim is not None else 0
        out_of_reach = frozenset(n for n, count in judged.unreached.items() if count)
        self.load = Load(view, trials.avoid, out_of_reach, judged.replicas, judged.coming, self.asked)
        self.copying = Copying(view, policy, trials, self.load)
        self.silent = {role: silent_nodes(judged.astray, role, policy) for role in ("node", "master")}
        late = (s for t in sorted({t for t, _ in trials.late}) if (s := judged.situation(t)) is not None)
        self.slots = Slots(judged.uses, policy, trials, late, self.asked)
        self.joining = Joining(self.copying, self.slots, policy, trials)
        self.leaves = LeaderLeaves(judged.leads, policy, trials, self.asked)
        reserved = reserved_by(view, policy, judged.replicas)
        kept.begin((self.epoch, *self.silent.values(), reserved), trials.tablets)
        beginning = Beginning(view, policy, self.load, self.slots, self.joining, self.epoch, reserved)
        self.checks: tuple[Callable[[Situation], Step | None], ...] = (
            self.not_heard,
            self.lost_majority,
            self.no_leader,
            self.take_over,
            self.finish,
            self.promote_back,
            self.too_many_lost,
            self.drop_target,
            self.drop_move,
            self.drop_unneeded,
            self.make_room,
            self.bring_target,
            self.wait_for_target,
            remove_replaced,
            self.remove_leftover,
            partial(remove_excess, load=self.load),
            beginning.begin,
            beginning.begin_by_hand,
        )

    def tablets(self) -> list[Step]:
        """The steps of all tablets, at most one each."""
        refuses = self.slots.refuses
        found = [self.kept.find(s, refuses) or self._look(s) for s in self.situations]
        if any(f.waits for f in found):
            return [self._making_way(f.situation, f.step) for f in found if f.step is not None]
        return [f.step for f in found if f.step is not None]

    def _look(self, s: Situation) -> Found:
        """Run a tablet's checks, and keep the result if it stays valid."""
        self.asked.clear()
        step = self.tablet(s)
        found = Found(s, step, self.asked.refused, step is not None and _heal_waits(s, step))
        self.kept.keep(found, self.asked)
        return found

    def _making_way(self, s: Situation, step: Step) -> Step:
        """The step itself, unless a heal needs the slot of this move for balance. Then it is the end of the
        move.

        A move that has its copy continues.
        """
        if s.intent is None or s.intent.kind != MOVE or s.joining is not None:
            return step
        return replace(_cancel(s, s.intent, "a heal needs its turn to copy"), cause=step.cause)

    def tablet(self, s: Situation) -> Step | None:
        """The one step for this tablet, or None."""
        found = (step for check in self.checks if (step := check(s)) is not None)
        step = self.leaves.instead(s, next(found, None))
        if step is None or step.cause:
            return step
        return replace(step, cause=cause_of(s, self.epoch))

    def not_heard(self, s: Situation) -> Step | None:
        """Wait for members of unknown state.

        A new leading master must not treat a node as dead or returned before it has heard it. A replica that
        had FAILED is unknown until its restarted node has reported it.
        """
        unheard = [m for m in s.members if m.unheard]
        if not unheard:
            return None
        if untold := ", ".join(m.name for m in unheard if m.untold):
            why = f"{untold} had FAILED; its node was restarted and has not reported it yet"
        else:
            names = ", ".join(m.name for m in unheard)
            why = f"the leading master is new and has not heard of {names} yet"
        return blocked(s, "NotHeard", why)

    def lost_majority(self, s: Situation) -> Step | None:
        if _serves(s):
            return None
        faults = "; ".join(f"{m.name}: {m.fault}" for m in s.voters if not m.live)
        alive, needed = len(s.live_voters), majority(len(s.voters))
        return blocked(s, "LostMajority", f"{alive} live voters, but {needed} are needed ({faults})")

    def no_leader(self, s: Situation) -> Step | None:
        if s.leader() is not None:
            return None
        return blocked(s, "NoLeader", "no live replica reports that it leads")

    def take_over(self, s: Situation) -> Step | None:
        intent = s.intent
        if intent is None or intent.epoch == self.epoch:
            return None
        reason = (
            f"an earlier driver (epoch {intent.epoch}) left this intent; this driver has epoch {self.epoch}"
        )
        return TakeOverIntent(
            s.tablet.tablet_id, s.tablet.config.opid_index, reason, intent.replica_id, intent.target_node
        )

    def finish(self, s: Situation) -> Step | None:
        """End the intent once the joining replica is a voter and nothing is left to do.

        That is so if the replica that it replaces is gone, is healthy again, or cannot be removed yet.
        """
        joining = s.joining
        if s.intent is None or joining is None or joining.peer.member_type is not MemberType.VOTER:
            return None
        if joining.live and (replaced := replaced_by_joining(s)) is not None:
            if not s.can_remove(replaced):
                return _end(s, joining, "it is a voter; the replica that it replaces cannot be removed yet")
            return None
        return _end(s, joining, "it is a voter, and nothing is left to do")

    def promote_back(self, s: Situation) -> Step | None:
        if s.needed <= 0:
            return None
        for m in s.members:
            comes_back = m.peer.member_type is MemberType.NON_VOTER and not m.peer.promote
            if comes_back and m.live and m.active:
                reason = f"{m.name} is back; {s.needed} more voters are needed"
                return PromoteBack(*at(s, reason), m.peer.replica_id, m.peer.node_id)
        return None

    def too_many_lost(self, s: Situation) -> Step | None:
        silent = self.silent[s.tablet.node_role]
        if len(silent) <= self.policy.max_lost_nodes or not any(m.astray for m in s.members):
            return None
        names = ", ".join(n[:8] for n in silent)
        limit = self.policy.max_lost_nodes
        return blocked(
            s,
            "TooManyLost",
            f"{len(silent)} nodes are silent or out of reach ({names}); healing stops above {limit} "
            f"(maxLostNodes)",
        )

    def drop_target(self, s: Situation) -> Step | None:
        """Give up the target: its node died, drains, or cannot take the copy, or the new replica FAILED."""
        intent, joining = s.intent, s.joining
        if intent is None or _is_voter(joining):
            return None
        useless = self.copying.useless_target(s)
        if joining is not None:
            if joining.live and joining.active:
                return remove(s, joining, useless) if useless and s.can_remove(joining) else None
            of_no_use = joining.unreached or (joining.failed and not joining.peer.votes)
            if of_no_use and not joining.dead:
                # If it were removed and added again, it would fail again. As a leftover it is replaced by
                # another replica.
                return _end(s, joining, f"it cannot join: {joining.fault}")
            return remove(s, joining, f"it cannot join: {joining.fault}")
        if s.member(intent.replica_id) is not None:
            return _cancel(s, intent, f"a replica on another node has the id {intent.replica_id}")
        if s.target_dead:
            return _cancel(s, intent, f"target node {intent.target_node[:8]} does not answer")
        if s.target is None or s.target.state is not NodeState.ACTIVE:
            return _cancel(s, intent, f"target node {intent.target_node[:8]} is not ACTIVE")
        if not s.target.takes_replicas:
            return _cancel(s, intent, f"target node {intent.target_node[:8]} is parked")
        if useless:
            return _cancel(s, intent, useless)
        report = s.target_report
        gone = (DataState.TOMBSTONED, DataState.DELETED)
        if report is not None and (report.data_state in gone or report.state is ReplicaState.FAILED):
            return _cancel(
                s, intent, f"the new replica cannot be used: {report.error or report.data_state.name}"
            )
        return None

    def drop_move(self, s: Situation) -> Step | None:
        """Give up a move that nobody wants any more, or that stands in the way of a heal."""
        why = no_longer_wanted(s)
        if s.intent is None or not why or _is_voter(s.joining):
            return None
        if s.joining is not None:
            return remove(s, s.joining, why)
        return _cancel(s, s.intent, why)

    def drop_unneeded(self, s: Situation) -> Step | None:
        """Give up the joining replica if there are enough good voters without it: the dead one returned, or
        fewer are wanted.

        If a witness's vote is needed for a majority, a dead voter is demoted first. If that is not possible,
        the witness gets its rows after all.
        """
        intent = s.intent
        if intent is None or s.needed > 0 or _is_voter(s.joining):
            return None
        reason = f"{len(s.good)} healthy voters without it"
        if s.joining is not None:
            if s.joining.peer.votes and not s.can_remove(s.joining):
                return demote(s, f"so that {s.joining.name} can be removed, which is not needed any more")
            return remove(s, s.joining, reason)
        return _cancel(s, intent, reason)

    def make_room(self, s: Situation) -> Step | None:
        """Demote a dead voter if a PRE_FOLLOWER waits and the group could not accept it as voter otherwise."""
        waits = any(m.peer.promote and not m.peer.votes and m.live for m in s.members)
        if not waits or s.can_grow():
            return None
        return demote(s, "so that the waiting replica can be promoted")

    def bring_target(self, s: Situation) -> Step | None:
        """Prepare the target, then add it: a witness before its rows, a PRE_FOLLOWER after its copy."""
        intent = s.intent
        if intent is None or s.joining is not None:
            return None
        report = s.target_report
        copy = report.copy if report is not None else None
        if (
            report is None
            or report.state is ReplicaState.UNKNOWN
            or self.copying.anew(s, intent.replica_id, copy)
        ):
            return self.joining.start_copy(s, intent, report)
        prepared = report.state in (ReplicaState.CONFIGURING, ReplicaState.RUNNING)
        if not (prepared if intent.witness else report.data_state is DataState.READY):
            if report.copy is None:
                return self.joining.start_copy(s, intent, report)
            return self.joining.wait_copy(s, intent, report.copy)
        if not s.can_grow():
            step = demote(s, "so that the new replica can be added without its vote")
            if step := step or waits_for_parked(s):
                return step
        if intent.witness:
            reason = f"new replica {intent.replica_id} is prepared and can log and vote while its rows arrive"
            return AddWitness(*at(s, reason), intent.replica_id, intent.target_node, intent.witness_start)
        reason = f"new replica {intent.replica_id} has its copy"
        return AddPreFollower(*at(s, reason), intent.replica_id, intent.target_node)

    def wait_for_target(self, s: Situation) -> Step | None:
        """Wait for a joining member that is not yet a voter with its rows, or help it along."""
        joining = s.joining
        if s.intent is None or joining is None or _is_voter(joining):
            return None
        return self.joining.help_along(s, joining)

    def remove_leftover(self, s: Situation) -> Step | None:
        """Deal with members without rows or without a vote, for which there is no intent.

        A live member without rows gets them, even a witness that was demoted before they came. Removed are
        witnesses that are not live, and non-voters once there are enough healthy voters.
        """
        for m in s.members:
            if m.peer.member_type is MemberType.WITNESS:
                if m.live:
                    return self.joining.help_along(s, m)
                if s.can_remove(m):
                    return remove(s, m, f"a witness; {m.fault}")
            elif m.peer.member_type is MemberType.NON_VOTER and s.needed <= 0:
                return remove(s, m, f"{len(s.good)} healthy voters without it")
            elif m.rowless and m.live:
                return self.joining.help_along(s, m)
        return None


def _serves(s: Situation) -> bool:
    """Whether the tablet has a live majority. Without one its copies stand still, so they hold no slot that
    another tablet could use.
    """
    return s.spare >= 0 and bool(s.data_voters)


def _heal_waits(s: Situation, step: Step) -> bool:
    """Whether the heal of a tablet waits until fewer copies run."""
    heals = any(not m.live or m.peer.member_type is MemberType.WITNESS for m in s.members)
    return heals and isinstance(step, Blocked) and step.code == "CopyLimit"


def _is_voter(m: Member | None) -> bool:
    return m is not None and m.peer.member_type is MemberType.VOTER


def _end(s: Situation, joining: Member, reason: str) -> EndIntent:
    return EndIntent(*at(s, f"{joining.name}: {reason}"), joining.peer.replica_id)


def _cancel(s: Situation, intent: Intent, reason: str) -> CancelCopy:
    return CancelCopy(*at(s, reason), intent.replica_id, intent.target_node)
