"""A driver's memory of failed copies and refused witnesses between its rounds. Fed by executor, read by
planner.

Remembers how often each copy failed or stalled, and which targets were useless. Invariant: safety does not
depend on this memory. A new driver begins with an empty one and loses only time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stele.driver.leader_trials import NO_LEADER_TRIALS, LeaderTrials
from stele.driver.situation import unreached_ms
from stele.driver.steps import AddWitness, CancelCopy, Step
from stele.driver.view import ClusterView, CopyView, DataState, Intent, TabletView
from stele.model.config import MemberType
from stele.model.errors import Code, SteleError

TRIES = 3
"""A copy that failed or stalled this often without progress in between is tried on another node."""
STALL_MS = 120_000
"""A copy that received nothing for this long is stalled. If its source sends nothing, the copy fails by
itself earlier.
"""
PROMOTE_MS = 300_000
"""The longest time that a new replica with its rows may wait for its promotion. Normally it takes seconds."""
_WITNESS_REFUSALS_MAX = 5
"""This many refusals in a row mean that the leader's log no longer has the witness's start. Then a new intent
is begun with a later start.
"""
_APART_MS = 10_000
"""Failures closer together count once: a restarting node fails several times in a second."""
_AVOID_MS = 600_000

Key = tuple[str, int]
"""A copy, by tablet and replica id."""


@dataclass(frozen=True, slots=True)
class Trials:
    """What a driver remembers of copies, for one plan.

    `failures`: how often the copies under way failed. `stalled`: copies that stand still now. `avoid`: nodes
    on which copies failed lately, or whose new replicas their leaders did not reach.
    """

    failures: Mapping[Key, int] = field(default_factory=dict)
    stalled: frozenset[Key] = frozenset()
    avoid: frozenset[str] = frozenset()
    late: frozenset[Key] = frozenset()
    """New replicas that have had their rows for PROMOTE_MS and are not voters yet."""
    leaders: LeaderTrials = NO_LEADER_TRIALS

    def of(self, tablet_id: str, replica_id: int) -> int:
        """How often this copy has failed or stalled."""
        return self.failures.get((tablet_id, replica_id), 0)

    @property
    def tablets(self) -> frozenset[str]:
        """The tablets of copies that are remembered."""
        return frozenset(tablet_id for tablet_id, _ in (*self.failures, *self.stalled, *self.late))

    def is_late(self, tablet_id: str, replica_id: int) -> bool:
        """Whether the promotion of this replica takes too long."""
        return (tablet_id, replica_id) in self.late


NO_TRIALS = Trials()


def receives_bytes(copy: CopyView) -> bool:
    """Whether the copy still receives bytes. False while it is installed, which at times waits for the
    replica's log.
    """
    return copy.state in ("Starting", "Fetching")


def failed(copy: CopyView) -> bool:
    """Whether the copy ended without a replica."""
    return copy.state == "Failed"


def _waits_for_promotion(tablet: TabletView | None, intent: Intent) -> bool:
    peer = tablet.config.peer(intent.replica_id) if tablet is not None else None
    if tablet is None or peer is None or peer.node_id != intent.target_node:
        return False
    report = tablet.report(intent.replica_id, intent.target_node)
    has_rows = report is not None and report.has_data and report.data_state is DataState.READY
    return peer.member_type is not MemberType.VOTER and has_rows


@dataclass(slots=True)
class _Course:
    """How one copy went so far, over all its attempts. Times are the driver's clock, in ms.

    - `bytes_done`: what the copy had when it was last looked at. `furthest`: the most that any attempt had.
    - `moved_ms`: when bytes last arrived, or a failure was last counted.
    - `counted_ms`: when a failure last counted. `failures`: those since `furthest` last rose.
    """

    bytes_done: int
    furthest: int
    moved_ms: int
    counted_ms: int
    failures: int = 0


class CopyMemory:
    """What one driver remembers of copies. Call `look` once a round."""

    def __init__(self) -> None:
        self._courses: dict[Key, _Course] = {}
        self._arrived_ms: dict[Key, int] = {}  # when each got its rows, for those that are not voters yet
        self._avoid: dict[str, int] = {}  # node to the time until which it is avoided

    def look(self, view: ClusterView, now_ms: int) -> Trials:
        """Record the state of the copies. Returns the trials for this round."""
        late = self._late(view, now_ms)
        before, self._courses = self._courses, {}
        stalled: set[Key] = set()
        for intent in view.intents:
            tablet = view.tablet(intent.tablet_id)
            report = tablet.report(intent.replica_id, intent.target_node) if tablet is not None else None
            key = (intent.tablet_id, int(intent.replica_id))
            if report is not None and report.copy is not None:
                course = before.get(key)
                if course is None:
                    done = report.copy.bytes_done
                    course = _Course(done, done, now_ms, now_ms - _APART_MS)
                self._courses[key] = course
                if self._judge(course, report.copy, now_ms):
                    stalled.add(key)
                self._consider_target(course, intent, now_ms)
            elif key in before:
                self._courses[key] = before[key]
            if tablet is not None and intent.replica_id in unreached_ms(tablet, view):
                # After the replica is removed, nothing else shows that leaders do not reach this node.
                self._avoid[intent.target_node] = now_ms + _AVOID_MS
            if key in late:
                self._avoid[intent.target_node] = now_ms + _AVOID_MS
        self._avoid = {node: until for node, until in self._avoid.items() if now_ms < until}
        failures = {key: c.failures for key, c in self._courses.items() if c.failures}
        return Trials(failures, frozenset(stalled), frozenset(self._avoid), late)

    def _late(self, view: ClusterView, now_ms: int) -> frozenset[Key]:
        """The replicas whose promotion takes too long. A replica that was removed for that stays in the set
        until its intent ends.
        """
        before, self._arrived_ms = self._arrived_ms, {}
        for intent in view.intents:
            key = (intent.tablet_id, int(intent.replica_id))
            since_ms = before.get(key)
            if _waits_for_promotion(view.tablet(intent.tablet_id), intent):
                self._arrived_ms[key] = now_ms if since_ms is None else since_ms
            elif since_ms is not None and now_ms - since_ms >= PROMOTE_MS:
                self._arrived_ms[key] = since_ms
        return frozenset(k for k, since_ms in self._arrived_ms.items() if now_ms - since_ms >= PROMOTE_MS)

    def _judge(self, course: _Course, copy: CopyView, now_ms: int) -> bool:
        """Count the failures of a copy. Returns whether it is stalled now."""
        if copy.bytes_done != course.bytes_done or not receives_bytes(copy):
            course.bytes_done, course.moved_ms = copy.bytes_done, now_ms
        if copy.bytes_done > course.furthest:
            course.furthest, course.failures = copy.bytes_done, 0
        if failed(copy) and now_ms - course.counted_ms >= _APART_MS:
            course.counted_ms = course.moved_ms = now_ms
            course.failures += 1
        if receives_bytes(copy) and now_ms - course.moved_ms >= STALL_MS:
            course.counted_ms = course.moved_ms = now_ms
            course.failures += 1
            return True
        return False

    def _consider_target(self, course: _Course, intent: Intent, now_ms: int) -> None:
        if course.failures >= TRIES:
            self._avoid[intent.target_node] = now_ms + _AVOID_MS


class WitnessRefusals:
    """How many times in a row leaders have refused each witness, as one driver remembers it."""

    def __init__(self) -> None:
        self._counts: Counter[Key] = Counter()

    def count(self, step: Step, error: SteleError | None) -> None:
        """Record how a step ended."""
        if not isinstance(step, AddWitness):
            return
        key = (step.tablet_id, int(step.replica_id))
        if error is not None and error.code is Code.UNSAFE_CHANGE:
            self._counts[key] += 1
        else:
            self._counts.pop(key, None)

    def instead(self, step: Step) -> Step:
        """The step, or its cancellation if the leader keeps refusing the witness. After a cancellation the
        next round chooses a later start.
        """
        if not isinstance(step, AddWitness):
            return step
        if self._counts[step.tablet_id, int(step.replica_id)] < _WITNESS_REFUSALS_MAX:
            return step
        reason = "the leader keeps refusing the witness because its start is too old"
        return CancelCopy(
            step.tablet_id, step.cas, reason, step.replica_id, step.target_node, cause=step.cause
        )
