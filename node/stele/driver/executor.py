"""Carries plans out: claim, observe, plan, order, report. Used by `stele driver run` and by the operator.

Owns the claim, its renewal, and recent errors. Each round takes everything else from the masters' view;
keeping.py fetches the changes. It may be interrupted anywhere. Invariant: no order is given under an epoch
that a master has refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from stele.driver.asking import ask_nodes
from stele.driver.copy_checks import CopyCheck, CopyChecks, copies_to_compare
from stele.driver.keeping import ViewKeeper, pages_of, to_its_end
from stele.driver.known import Known
from stele.driver.leader_trials import LeaderMemory
from stele.driver.orders import Orders
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.progress import Pace, Progress, leader_records, spreads_leaders
from stele.driver.situation import Situation
from stele.driver.slots import waits_for_turn
from stele.driver.steps import MEMBERSHIP_STEPS, WAITS, Blocked, Step, WaitCopy
from stele.driver.trials import NO_TRIALS, CopyMemory, WitnessRefusals
from stele.driver.turns import Turns
from stele.driver.view import Claim, ClusterView, NodeState
from stele.driver.wire import claim_from_pb, copy_record_to_pb
from stele.driver.witness_starts import WitnessStarts
from stele.model.config import MemberType
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2

log = structlog.get_logger("stele.driver")

STEPS_AT_ONCE = 16
REPORTED_MS = 15_000
"""After this time the masters know the effect of an order, because nodes report changes each second. Until
then the driver asks the nodes themselves, except silent ones.
"""
MASTERS_TIMEOUT_S, MASTERS_ROUNDS = 10.0, 2
"""The timeout and the attempts of a call to the masters. They are short, so that a round fails early: the next
one comes soon.
"""


class StaleEpoch(Rejected):
    """Another driver has taken the claim, so this one must stop."""

    default_code = Code.STALE_EPOCH


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step in one round. `error` is None if it was done, or needed no order."""

    step: Step
    error: SteleError | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one round: the view, the outcome of each step, and the same as records for users.

    `situations`: those of tablets that are not at rest, on which the steps were planned. `leaders_rest`: no
    leader may move for a moment, so a later round may find more to do. `some_rest`: leaders that moved lately
    may not move again yet.
    """

    view: ClusterView
    outcomes: tuple[Outcome, ...]
    progress: tuple[Progress, ...]
    situations: Mapping[str, Situation] = field(default_factory=dict)
    leaders_rest: bool = False
    some_rest: bool = False

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""
        return not self.outcomes


class Executor:
    """One driver.

    - `holder` names it in the claim. `ttl_ms`: its claim expires this long after its last renewal.
    - `keeper` keeps the view. Pass a keeper that others use too, to share its view.
    - `override_held`: work although the policy in the catalog holds drivers back.
    - `on_copy`: called with each comparison of a replica that a driver made.
    """

    def __init__(
        self,
        pool: ChannelPool,
        masters: Sequence[str],
        *,
        holder: str,
        ttl_ms: int = 10_000,
        on_progress: Callable[[Progress], None] | None = None,
        keeper: ViewKeeper | None = None,
        override_held: bool = False,
        on_copy: Callable[[CopyCheck], None] = lambda check: None,
        now_ms: Callable[[], int] = lambda: int(time.monotonic() * 1000),
    ) -> None:
        self.masters = Masters(
            pool, masters, first_contact_s=None, timeout_s=MASTERS_TIMEOUT_S, rounds=MASTERS_ROUNDS
        )
        self.claim: Claim | None = None
        self.known = Known()
        """Results that are kept from plan to plan. Other plans of the same cluster may use them too."""
        self._pool = pool
        self._keeper = keeper or ViewKeeper()
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._override_held = override_held
        self._on_progress = on_progress
        self._now_ms = now_ms
        self._renewed_ms = 0
        self._ordered: dict[str, tuple[int, Step]] = {}
        """By tablet: the last order that it got, and when."""
        self._asked_in = 0
        """The epoch in which a round was last carried out."""
        self._pace = Pace()
        self._refusals = WitnessRefusals()
        self._copies = CopyMemory()
        self._leaders = LeaderMemory()
        self._claiming = asyncio.Lock()
        self.checks = CopyChecks(pool, self._claim_to_record, self._record, on_copy)
        """Compares the replicas that drivers made."""

    async def ensure_claim(self) -> Claim:
        """Take the claim, or renew it once a third of its lifetime has passed.

        Raises:
            StaleEpoch: another driver took it from this one.
            SteleError: NOT_READY, another driver still holds it. Other codes: no master answers.
        """
        async with self._claiming:  # of two that claim anew, the later would fence the earlier
            return await self._ensure_claim()

    async def _ensure_claim(self) -> Claim:
        now = self._now_ms()
        if self.claim is not None and now - self._renewed_ms < self._ttl_ms // 3:
            return self.claim
        epoch = self.claim.epoch if self.claim is not None else 0
        request = master_pb2.ClaimDriverRequest(
            holder=self._holder, ttl_ms=self._ttl_ms, epoch=epoch, override_held=self._override_held
        )
        try:
            answer = await self.masters.call("ClaimDriver", request)
        except SteleError as exc:
            raise self._stopped(exc) from exc
        self.claim = claim_from_pb(answer.claim)
        self._renewed_ms = now
        if epoch == 0:
            self._leaders.begins(now)
            log.info("driver claim taken", holder=self._holder, epoch=self.claim.epoch)
        return self.claim

    async def release(self) -> None:
        """Release the claim, so that the next driver need not wait. Errors are only logged, because the
        claim expires."""
        if self.claim is None:
            return
        request = master_pb2.ClaimDriverRequest(holder=self._holder, epoch=self.claim.epoch, release=True)
        self.claim = None
        try:
            await self.masters.call("ClaimDriver", request, timeout_s=1.0, rounds=1)
        except SteleError as exc:
            log.info("driver claim was not released; it will expire", error=str(exc))

    async def close(self) -> None:
        """Compare no more copies, and release the claim."""
        await self.checks.close()
        await self.release()

    async def compare_copies(self, view: ClusterView) -> None:
        """Begin, in the background, to compare the replicas of this view that wait for it."""
        self.checks.look(await asyncio.to_thread(copies_to_compare, view))

    async def _claim_to_record(self) -> None:
        """Take or renew the claim, as `ensure_claim`. If another driver took over, the next round raises
        StaleEpoch, too.
        """
        before = self.claim
        try:
            await self.ensure_claim()
        except StaleEpoch:
            self.claim = before
            raise

    async def _record(self, check: CopyCheck) -> None:
        await self._claim_to_record()
        request = master_pb2.RecordCheckRequest(
            epoch=self.claim.epoch if self.claim is not None else 0,
            tablet_id=id_to_pb(check.made.tablet_id),
            copy=copy_record_to_pb(check.record),
        )
        await self.masters.call("RecordCheck", request)

    async def observe(self, policy: Policy) -> ClusterView:
        """The masters' view, with fresh reports from the nodes of tablets that change or must change.

        Fresh reports also hold the present size of a tablet. A new replica needs the size, and nodes report
        it only when asked.
        """
        view = (await self._keeper.renew(pages_of(self.masters, self._holder))).view
        current = (n for n in view.nodes if n.role == "master" and n.state is not NodeState.RETIRED)
        self.masters.learn(n.address for n in current)
        wanted = await asyncio.to_thread(self._to_ask, view, policy)
        return await ask_nodes(self._pool, view, wanted)

    def has_work(self, view: ClusterView, policy: Policy) -> bool:
        """Whether there is a step that can be taken, or must be waited for. Runs in a thread; needs no claim.

        Blocked steps are no work. Nor are leaders that this driver may move again only in some minutes.
        """
        trials = replace(NO_TRIALS, leaders=self._leaders.for_minutes(self._now_ms()))
        return any(not isinstance(step, Blocked) for step in plan(view, policy, trials, self.known))

    async def run_once(self, policy: Policy, view: ClusterView | None = None) -> Report:
        """Run one round: claim, observe (unless a view is given), plan, carry out. Never waits for a copy.

        Raises:
            StaleEpoch: another driver took over; stop for good.
            SteleError: there is no claim or no view; try again later.
        """
        claim = await self.ensure_claim()
        if view is None:
            view = await self.observe(policy)
        if view.claim is not None and view.claim.epoch > claim.epoch and not view.claim.holder:
            self.claim = None  # the masters hold drivers back, and took the claim away
            raise Retryable(
                f"the masters withdrew the driver claim (epoch {claim.epoch}), since a policy forbids this driver to work; try again later",
                code=Code.NOT_READY,
            )
        if view.claim is None or view.claim.epoch != claim.epoch:
            held = f"epoch {view.claim.epoch} ({view.claim.holder})" if view.claim is not None else "no epoch"
            raise self._stopped(
                StaleEpoch(f"driver epoch {claim.epoch} is stale; {held} is in force, so this driver stops")
            )
        now = self._now_ms()
        steps, situations = await to_its_end(self._planned, view, policy, now)
        starts = WitnessStarts()
        await starts.look(self._pool, view, steps, situations)
        orders = Orders(self._pool, self.masters, claim.epoch, policy, starts)
        done = await self._carry_all_out(orders, steps, view)
        self._asked_in = claim.epoch
        await self.compare_copies(view)
        report, stale = await asyncio.to_thread(self._reported, steps, done, view, situations)
        if self._on_progress is not None:
            for record in report.progress:
                self._on_progress(record)
        if stale is not None:
            raise self._stopped(stale)
        return report

    def _reported(
        self,
        steps: Sequence[Step],
        done: Mapping[int, Outcome],
        view: ClusterView,
        situations: Mapping[str, Situation],
    ) -> tuple[Report, SteleError | None]:
        """The report of a round, and the error if another driver took over. `done`: outcomes of orders, by
        their place in the steps.
        """
        now = self._now_ms()
        self._ordered.update({o.step.tablet_id: (now, o.step) for o in done.values()})
        outcomes = tuple(done.get(at) or Outcome(step) for at, step in enumerate(steps))
        records = self._records(outcomes, view)
        self._pace.keep({(s.tablet_id, s.replica_id) for s in steps if isinstance(s, WaitCopy)})
        errors = (o.error for o in done.values() if o.error is not None)
        stale = next((e for e in errors if e.code is Code.STALE_EPOCH), None)
        rest = self._leaders.rests(now), self._leaders.some_rest
        return Report(view, outcomes, records, situations, *rest), stale

    def _to_ask(self, view: ClusterView, policy: Policy) -> dict[str, list[TabletId]]:
        return _to_ask(view, policy, self.known, self._ordered_lately())

    def _ordered_lately(self) -> Mapping[str, Step] | None:
        """The orders that nodes may not have reported yet, by tablet; None: this driver is new."""
        if self.claim is None or self.claim.epoch != self._asked_in:
            return None
        before_ms = self._now_ms() - REPORTED_MS
        self._ordered = {t: last for t, last in self._ordered.items() if last[0] > before_ms}
        return {t: step for t, (_, step) in self._ordered.items()}

    def _records(self, outcomes: Sequence[Outcome], view: ClusterView) -> tuple[Progress, ...]:
        """The outcomes as records for users. Each step has one, but all leaders that move between two nodes
        share one.
        """
        now = self._now_ms()
        moves = [(o.step, o.error) for o in outcomes if spreads_leaders(o.step)]
        tablets = {o.step.tablet_id: view.tablet(o.step.tablet_id) for o in outcomes}
        names = {t.tablet_id: t.table_name for t in tablets.values() if t is not None}
        return (
            *(
                self._pace.record(
                    o.step, names.get(o.step.tablet_id, ""), now, str(o.error) if o.error else ""
                )
                for o in outcomes
                if not spreads_leaders(o.step)
            ),
            *leader_records(moves, {t.tablet_id: t.leader_node for t in tablets.values() if t is not None}),
        )

    def _planned(
        self, view: ClusterView, policy: Policy, now_ms: int
    ) -> tuple[tuple[Step, ...], Mapping[str, Situation]]:
        """Plan this round, and return the plan and its situations. Runs in a thread: with thousands of intents
        each part takes some ms.
        """
        leaders = self._leaders.look(view, policy.leader_moves_per_minute, now_ms)
        trials = replace(self._copies.look(view, now_ms), leaders=leaders)
        with self.known.lock:
            steps = tuple(self._refusals.instead(s) for s in plan(view, policy, trials, self.known))
            kept = self.known.judged.restless() if view.settled else ()
            situations: dict[str, Situation] = {s.tablet.tablet_id: s for s in kept}
        # Before the orders are given as well as after: a round that is cut off has given some of them.
        self._ordered.update({s.tablet_id: (now_ms, s) for s in steps if not isinstance(s, WAITS)})
        return steps, situations

    async def _carry_all_out(
        self, orders: Orders, steps: Sequence[Step], view: ClusterView
    ) -> dict[int, Outcome]:
        """Give the orders, and return their outcomes by their place in the steps.

        At most STEPS_AT_ONCE are under way, and each begins in a turn of the event loop of its own. Otherwise
        thousands of orders would hold the loop.
        """
        left = ((at, step) for at, step in enumerate(steps) if not isinstance(step, WAITS))
        done: dict[int, Outcome] = {}
        turns = Turns()

        async def work() -> None:
            for at, step in left:
                await turns.mine()  # also after an order that failed before it was sent
                done[at] = await self._carry_out(orders, step, view)

        workers = [asyncio.create_task(work()) for _ in range(min(STEPS_AT_ONCE, len(steps)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return done

    async def _carry_out(self, orders: Orders, step: Step, view: ClusterView) -> Outcome:
        error: SteleError | None = None
        try:
            await orders.give(step, view)
        except SteleError as exc:
            error = exc
        told = {"step": type(step).__name__, "tablet": step.tablet_id, "cause": step.because}
        if error is None:
            log.info("step done", **told)
        else:
            log.info("step failed", **told, error=str(error))
        self._refusals.count(step, error)
        self._leaders.note(step, error, self._now_ms())
        return Outcome(step, error)

    def _stopped(self, error: SteleError) -> SteleError:
        if error.code is not Code.STALE_EPOCH:
            return error
        self.claim = None
        return error if isinstance(error, StaleEpoch) else StaleEpoch(str(error.args[0]))


def _to_ask(
    view: ClusterView, policy: Policy, known: Known, lately: Mapping[str, Step] | None = None
) -> dict[str, list[TabletId]]:
    """By node: the tablets that matter now and about which the node knows more than the masters.

    `lately`: by tablet, the newest orders that the masters may not know of yet. None: any tablet may have got
    an order.
    """
    wanted: dict[str, list[TabletId]] = {}
    with known.lock:
        known.renew(view, policy)
        for s in known.judged.restless():
            well = s.needed <= 0 and all(m.kept or (m.live and m.answers) for m in s.members)
            # A tablet with a node that was not heard yet gets no step, so fresh reports are not needed.
            if s.intent is None and (well or any(m.unheard for m in s.members)):
                continue
            if lately is not None and _waits_for_turn(s) and _is_told(s, lately.get(s.tablet.tablet_id)):
                continue
            for node_id in {s.tablet.leader_node, s.intent.target_node if s.intent is not None else ""} - {
                ""
            }:
                wanted.setdefault(node_id, []).append(s.tablet.tablet_id)
    return wanted


def _is_told(s: Situation, ordered: Step | None) -> bool:
    """Whether the masters know the effect of the last order: they know of a configuration after the one that
    it changed.
    """
    if ordered is None:
        return True
    return isinstance(ordered, MEMBERSHIP_STEPS) and s.tablet.config.opid_index > ordered.cas


def _waits_for_turn(s: Situation) -> bool:
    """Whether the tablet waits only for a slot to copy the rows of its witness.

    After the loss of a node, each round has thousands of such tablets.
    """
    m = s.joining
    if m is None or not m.live or m.peer.member_type is not MemberType.WITNESS:
        return False
    return m.report is not None and waits_for_turn(m.report.copy)
