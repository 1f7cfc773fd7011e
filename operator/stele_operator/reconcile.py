"""One task per TabletCluster: observe, plan, act, heal, report. Started and woken by handlers.

Owns the task's connections; everything else is read again in each pass. Invariant: a pass works on the object
that it has just read. So a TabletCluster that was deleted and created again under its name counts as a
different one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from stele.driver.progress import Progress
from stele.driver.steps import Blocked
from stele.driver.view import ClusterView
from stele.model.errors import SteleError
from stele_operator import metrics
from stele_operator.act import Actor, Outcome, refusals
from stele_operator.answers import Answers
from stele_operator.backoff import Backoff
from stele_operator.growth import Growth
from stele_operator.heal import Healer
from stele_operator.kube import UNREACHABLE, Kube, KubeError
from stele_operator.masters import MasterLink
from stele_operator.observe import (
    cluster_of,
    observe_kubernetes,
    observe_masters,
    observe_unlisted,
    parse_group,
)
from stele_operator.plan import Observation, Plan, make_plan
from stele_operator.plan.actions import (
    Action,
    AlterTable,
    CreateClaim,
    CreatePod,
    CreateTable,
    DeleteTable,
    SetFinalizers,
    SetMasterCount,
    SetReplicationFactor,
)
from stele_operator.plan.cluster_plan import BUSY_S, QUIET_S, plan_keeping
from stele_operator.plan.fates import Member, State
from stele_operator.plan.findings import SLEEP, Finding, Kind
from stele_operator.plan.health import patience_s
from stele_operator.plan.observation import GroupObject
from stele_operator.plan.status import cluster_status, group_status, healing_status, orphan_status
from stele_operator.plan.tables import let_go
from stele_operator.report import Reporter, at_once, timestamp

log = structlog.get_logger("stele.operator")
Json = dict[str, Any]
_BACKOFF_MAX_S = 15.0
_SETTLE_S = 0.25
_SETTLE_MAX = 40
_WORDS = (Kind.STALLED, Kind.DEGRADED, Kind.REMARK)


class ClusterTask:
    """Reconciles one TabletCluster and the TabletGroups that name it."""

    def __init__(
        self,
        kube: Kube,
        reporter: Reporter,
        namespace: str,
        name: str,
        image: str,
        on_pass: Callable[[bool], None],
    ):
        self.namespace = namespace
        self.name = name
        self._kube = kube
        self._reporter = reporter
        self._image = image
        self._on_pass = on_pass
        self._wake = asyncio.Event()
        self._link: MasterLink | None = None
        self._answers = Answers(self._wake.set)
        self._healer = Healer(kube.now_s)
        self._growth = Growth()
        self._backoff = Backoff()
        self._seen: Json | None = None
        self._told: set[tuple[str, str, str, str]] = set()
        self._ailing = False
        self._unsettled = 0
        self._led_s: float | None = None
        """When a master last led, by the API server's clock. Until one has led, when this task began."""
        self._log = log.bind(namespace=namespace, cluster=name)

    @property
    def link(self) -> MasterLink | None:
        """The connections to the cluster; None while its identity is not known."""
        return self._link

    def wake(self) -> None:
        """Run a pass now, because something changed."""
        self._wake.set()

    async def run(self) -> None:
        """Run passes until the TabletCluster and all TabletGroups that name it are gone."""
        failures = 0
        try:
            while True:
                self._wake.clear()
                started = time.monotonic()
                try:
                    wait_s = await self.run_pass()
                except Exception as exc:  # noqa: BLE001 - a fault over one cluster must not stop the others
                    failures += 1
                    wait_s = min(_BACKOFF_MAX_S, 0.5 * 2 ** min(failures, 5))
                    metrics.PASSES.labels(self.namespace, self.name, "failed").inc()
                    ours = not isinstance(exc, KubeError | SteleError)
                    self._log.warning(
                        "pass over a cluster failed; it is tried again",
                        error=str(exc),
                        again_in_s=wait_s,
                        exc_info=ours,
                    )
                    if not ours and not _unreachable(exc):
                        self._on_pass(False)
                    if failures > 1:
                        await self._tell_failure(exc)
                else:
                    failures = 0
                    metrics.PASSES.labels(self.namespace, self.name, "done").inc()
                    self._on_pass(True)
                    if wait_s is None and not self._wake.is_set():
                        self._log.info("the TabletCluster and its TabletGroups are gone; the task ends")
                        return
                metrics.PASS_SECONDS.observe(time.monotonic() - started)
                try:
                    async with asyncio.timeout(wait_s):  # wait_for of Python 3.11 can swallow a cancellation
                        await self._wake.wait()
                    await asyncio.sleep(0.05)  # one change brings several events
                except TimeoutError:
                    continue
        finally:
            metrics.forget(self.namespace, self.name)
            await self._hang_up()

    async def _tell_failure(self, exc: Exception) -> None:
        """Send an event that a pass failed. Status and conditions are not updated then, so they may be
        outdated.
        """
        if self._seen is not None and not _unreachable(exc):
            text = f"the operator can do nothing for this cluster until this error is fixed: {str(exc) or type(exc).__name__}"
            with contextlib.suppress(Exception):  # it is in the log already
                await self._reporter.event(
                    "TabletCluster", self._seen, "PassFailed", text, self._kube.now_s(), True
                )

    async def _hang_up(self) -> None:
        await self._answers.close()
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def run_pass(self) -> float | None:
        """Run one pass. Returns the seconds until the next pass, or None if the cluster and its TabletGroups
        are gone.

        Raises:
            KubeError, SteleError: the pass failed. No action was based on incomplete lists.
        """
        raw = self._seen = await self._kube.get("TabletCluster", self.namespace, self.name)
        if raw is None:
            return await self._orphans()
        o, groups = await observe_kubernetes(self._kube, raw, self._image)
        if keeping := plan_keeping(o):
            await self._tell(raw, o, await self._act(o, keeping))
            o, groups = await observe_kubernetes(self._kube, raw, self._image)
        o = self._growth.with_refusals(await observe_unlisted(self._kube, await self._with_masters(o)))
        if o.catalog is not None or self._led_s is None:
            self._led_s = o.now_s
        if self._must_settle(o):
            return _SETTLE_S
        # Thousands of tablets take seconds to judge. Such steps are pure and run in a thread, because this
        # loop serves the Lease, probes and watches.
        plan = await asyncio.to_thread(make_plan, o)
        if self._link is not None:
            self._link.at_work = plan.policy is not None
        outcomes = await self._act(o, plan.actions)
        self._backoff.end_pass()
        self._growth.learn(outcomes, o.now_s)
        view = o.catalog.view if o.catalog is not None else None
        refused = refusals(outcomes)
        if refused:  # refusals change the findings, not the actions
            o = replace(o, refused=refused)
            plan = await asyncio.to_thread(make_plan, o)
        await self._tell(raw, o, outcomes)
        known = self._link.driver.known if self._link is not None else None
        resting = await asyncio.to_thread(self._healer.rests, view, plan.policy, known)
        # Write the cluster's status before healing, which takes long, so that it is true meanwhile.
        # TabletGroups may be hundreds, so they are written during healing.
        told = await self._try_report(raw, o, partial(self._report_cluster, raw, o, plan))
        rest = asyncio.create_task(
            self._try_report(raw, o, partial(self._report_groups, raw, groups, o, plan, outcomes))
        )
        try:
            await self._heal(raw, None if resting else view, plan)
            told &= await rest
        finally:
            rest.cancel()
        failed = any(
            x.error
            and not (
                isinstance(x.action, CreateTable | AlterTable | SetReplicationFactor | SetMasterCount)
                and x.refused
            )
            for x in outcomes
        )
        return BUSY_S if not told or failed or self._healer.more else plan.wait_s

    async def _act(self, o: Observation, actions: Sequence[Action]) -> list[Outcome]:
        self._backoff.of(o.cluster.generation)
        waits = partial(self._backoff.early, now_s=o.now_s)
        outcomes = await Actor(self._kube, self.namespace, self._link, waits).carry_out(actions)
        self._backoff.learn(outcomes, o.now_s)
        return outcomes

    async def _with_masters(self, o: Observation) -> Observation:
        if o.identity is None:
            return o
        wanted = (o.identity.cluster_id, o.identity.fork_id)
        if self._link is not None and (self._link.cluster_id, self._link.fork_id) != wanted:
            await self._hang_up()
        if self._link is None:
            holder = f"operator/{o.cluster.uid}"
            self._link = MasterLink(o.identity.cluster_id, holder, o.identity.fork_id)
        reports, catalog, problem = await observe_masters(self._link, o)
        return replace(o, master_reports=reports, catalog=catalog, catalog_problem=problem)

    def _must_settle(self, o: Observation) -> bool:
        """Whether to wait for a new leading master that has not heard from all nodes yet. Until then most
        nodes seem silent to it.
        """
        # A cluster that wakes has no nodes yet that could be heard, and nothing is judged by their silence.
        unsettled = o.catalog is not None and not o.catalog.view.settled and not o.asleep
        self._unsettled = self._unsettled + 1 if unsettled else 0
        return 0 < self._unsettled <= _SETTLE_MAX

    async def _heal(self, raw: Json, view: ClusterView | None, plan: Plan) -> None:
        """Let the driver work, and report each of its rounds at once."""

        async def tell() -> None:
            await self._tell_news(raw)
            await self._reporter.healing(raw, healing_status(self._healer.progress))

        if self._link is not None:
            names = {m.node_id[:8]: m.name for m in plan.members}
            problem = await self._healer.run(self._link, view, plan.policy, names, tell)
            await self._tell_news(raw)
            if problem:
                await self._reporter.event(
                    "TabletCluster", raw, "HealingWaits", problem, self._kube.now_s(), True
                )

    async def _tell_news(self, raw: Json) -> None:
        now_s = self._kube.now_s()
        for news in self._healer.news():
            await self._reporter.event(
                "TabletCluster", raw, news.reason, news.message, now_s, news.warning, news.about
            )

    async def _orphans(self) -> float | None:
        """Handle TabletGroups whose TabletCluster does not exist: say so in their status, and remove
        finalizers of those that are being deleted. Returns the seconds until the next pass, or None if there
        are no such TabletGroups.
        """
        await self._hang_up()
        metrics.gone(self.namespace, self.name)
        groups = [
            g for g in await self._kube.list("TabletGroup", self.namespace) if cluster_of(g) == self.name
        ]
        if not groups:
            return None
        now_s = self._kube.now_s()
        for raw in groups:
            group = parse_group(raw)
            if group.deleting:
                reason = (
                    f"TabletCluster {self.name} is gone; the table went with it, or goes with its volumes"
                )
                await Actor(self._kube, self.namespace, None).carry_out(let_go(group, reason))
                continue
            status = orphan_status(group, self.name, timestamp(now_s))
            await self._reporter.status("TabletGroup", raw, status, now_s)
        return QUIET_S

    async def _try_report(self, raw: Json, o: Observation, report: Callable[[], Awaitable[None]]) -> bool:
        """Write statuses by `report`. Returns whether all were written.

        A failure must not stop healing: a webhook that refuses statuses may run on the very machine that was
        lost.
        """
        try:
            await report()
        except KubeError as exc:
            self._log.warning("status not written; the next pass tries again", error=str(exc))
            if not _unreachable(exc):
                text = f"status and conditions may be outdated until this error is fixed: {exc}"
                await self._reporter.event("TabletCluster", raw, "StatusRefused", text, o.now_s, True)
            return False
        return True

    async def _report_cluster(self, raw: Json, o: Observation, plan: Plan) -> None:
        now = timestamp(o.now_s)
        active = self._healer.progress
        answer = self._answers.to(o, self._link, (raw.get("status") or {}).get("plan"), now)
        status = cluster_status(o, plan, active, now, answer)
        _measure(o, plan, active)
        metrics.conditions(self.namespace, self.name, status["conditions"])
        await self._tell_changes(raw, o, status)
        await self._reporter.status("TabletCluster", raw, status, o.now_s)

    async def _report_groups(
        self, raw: Json, groups: list[Json], o: Observation, plan: Plan, outcomes: list[Outcome]
    ) -> None:
        await self._tell_findings(raw, o, plan)
        now = timestamp(o.now_s)
        refusals = {
            x.action.group: x.error
            for x in outcomes
            if isinstance(x.action, CreateTable | AlterTable)
            and x.error
            and not (x.refused or x.changed_under)
        }

        async def report(group: GroupObject, there: Json) -> None:
            status = group_status(o, plan, group, now, refusals.get(group.name, ""))
            await self._reporter.status("TabletGroup", there, status, o.now_s)

        # A TabletGroup that is being deleted and has findings still exists because of its finalizer.
        told = (
            (group, there)
            for group, there in zip(o.groups, groups, strict=True)
            if not self._stands(o, group) and (not group.deleting or plan.about(group.name))
        )
        await at_once(report(group, there) for group, there in told)

    def _stands(self, o: Observation, group: GroupObject) -> bool:
        """Whether to leave the last status of a TabletGroup unchanged, because no master leads. An election
        mostly takes seconds.
        """
        lately = self._led_s is not None and 0 <= o.now_s - self._led_s < patience_s(o)
        said = {c.observed_generation for c in group.conditions} == {group.generation}
        sleeps = o.asleep and o.cluster.spec is not None and o.cluster.spec.hibernate
        return o.catalog is None and lately and said and not group.deleting and not sleeps

    async def _tell(self, raw: Json, o: Observation, outcomes: list[Outcome]) -> None:
        """Send events for actions that were done, and for failures."""
        for outcome in outcomes:
            action = outcome.action
            if outcome.held:
                continue
            if outcome.error and not outcome.changed_under:
                kind, about = type(action).__name__, action.reason
                if isinstance(action, CreateClaim | CreatePod):
                    about = action.role  # the status describes each member
                text = f"{action.reason}: {outcome.error}"
                await self._say(raw, o, action, f"{kind}Failed", text, True, about)
            elif not outcome.error and action.event:
                await self._say(raw, o, action, action.event, action.reason, False)

    async def _tell_changes(self, raw: Json, o: Observation, status: Json) -> None:
        """Send events when Ready changes, and when all tablets are healthy again. Events of findings tell the
        causes.
        """
        before = next((c for c in o.cluster.conditions if c.type == "Ready"), None)
        ready = next(c for c in status["conditions"] if c["type"] == "Ready")
        was, now = before.reason if before is not None else "", ready["reason"]
        holds = ready["status"] == "True"
        if was != now and now in SLEEP:
            await self._reporter.event("TabletCluster", raw, now, ready["message"], o.now_s)
        elif (before is not None and before.status == "True") != holds or (was != now and was in SLEEP):
            text = ready["message"] if holds else f"{now}: {ready['message']}"
            reason = "Ready" if holds else "NotReady"
            await self._reporter.event("TabletCluster", raw, reason, text, o.now_s, not holds)
        old, new = (raw.get("status") or {}).get("tablets") or {}, status.get("tablets") or {}
        self._ailing |= old.get("underReplicated", 0) > 0 and old.get("total") == new.get("total")
        if self._ailing and new and new["healthy"] == new["total"]:
            self._ailing = False
            text = f"all {new['total']} tablets have all their voters on live machines again"
            await self._reporter.event("TabletCluster", raw, "Healed", text, o.now_s)

    async def _tell_findings(self, raw: Json, o: Observation, plan: Plan) -> None:
        """Send an event for each new finding."""
        found = {f.about for f in plan.findings if f.kind in _WORDS}

        async def tell(finding: Finding) -> None:
            group = o.group(finding.group)
            kind, about = (
                ("TabletGroup", _group_raw(o, group.name, group.uid)) if group else ("TabletCluster", raw)
            )
            await self._reporter.event(kind, about, finding.reason, finding.message, o.now_s, True)

        fresh = (f for f in plan.findings if f.kind in _WORDS and f.about not in self._told)
        await at_once(tell(finding) for finding in fresh)
        self._told = found

    async def _say(
        self,
        raw: Json,
        o: Observation,
        action: Any,
        reason: str,
        message: str,
        warning: bool,
        about: str = "",
    ) -> None:
        if isinstance(action, CreateTable | AlterTable | SetReplicationFactor | DeleteTable | SetFinalizers):
            group = o.group(action.group)
            if group is not None:
                raw = _group_raw(o, group.name, group.uid)
                await self._reporter.event("TabletGroup", raw, reason, message, o.now_s, warning, about)
                return
        await self._reporter.event("TabletCluster", raw, reason, message, o.now_s, warning, about)


def _unreachable(exc: Exception) -> bool:
    return isinstance(exc, KubeError) and not exc.status and exc.reason == UNREACHABLE


def _group_raw(o: Observation, name: str, uid: str) -> Json:
    return {"metadata": {"namespace": o.cluster.namespace, "name": name, "uid": uid}}


def _measure(o: Observation, plan: Plan, heals: Sequence[Progress]) -> None:
    where = (o.cluster.namespace, o.cluster.name)
    for role in ("master", "node"):
        for state in State:
            count = sum(_is(m, role, state) for m in plan.members)
            metrics.MEMBERS.labels(*where, role, state.value).set(count)
    if o.catalog is None:
        metrics.no_tablets(*where)
    else:
        counts = plan.tablets
        for health, count in (
            ("healthy", counts.healthy),
            ("under_replicated", counts.under_replicated),
            ("unavailable", counts.unavailable),
        ):
            metrics.TABLETS.labels(*where, health).set(count)
    blocked = sum(p.kind == Blocked.__name__ for p in heals)
    spread = sum(p.leaders is not None for p in heals)
    metrics.HEALS.labels(*where, "blocked").set(blocked)
    metrics.HEALS.labels(*where, "under_way").set(len(heals) - blocked - spread)
    metrics.STALLED.labels(*where).set(any(f.kind is Kind.STALLED for f in plan.findings))


def _is(member: Member, role: str, state: State) -> bool:
    return member.role == role and member.state is state
