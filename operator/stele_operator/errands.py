"""Serves TabletBackups, TabletBackupSchedules and TabletRestores of all namespaces, as Jobs. Started by app,
woken by handlers.

A pass lists, decides (plan/errands.py, plan/schedules.py), acts and reports. Everything that it remembers the
next pass could find out again. Invariant: a fault of one resource stops no other resource and no cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from stele_operator import metrics
from stele_operator.api.backup import TabletBackupScheduleSpec, TabletBackupSpec, TabletRestoreSpec
from stele_operator.held import Held, LinkOf
from stele_operator.kube import Conflict, Kube, KubeError, NotFound
from stele_operator.observe import cluster_of, parse_cluster, read_spec
from stele_operator.plan.errand_holds import HoldSeen, Seen
from stele_operator.plan.errands import (
    ClusterSeen,
    Create,
    Decision,
    Errand,
    Finalize,
    JobSeen,
    Remove,
    World,
    decide,
    holds_of,
)
from stele_operator.plan.moments import seconds_of
from stele_operator.plan.naming import LABEL_ERRAND
from stele_operator.plan.schedules import decide_schedule
from stele_operator.report import Reporter

log = structlog.get_logger("stele.operator.errands")
Json = dict[str, Any]
_MODELS: dict[str, Any] = {
    "TabletBackup": TabletBackupSpec,
    "TabletBackupSchedule": TabletBackupScheduleSpec,
    "TabletRestore": TabletRestoreSpec,
}
QUIET_S = 30.0
BUSY_S = 2.0
_FAILED_S = 5.0
_LOG_LINES = 30
_LOG_WITHIN_S = 5.0
"""Seconds to wait for the log of one pod. Its machine may be off, and all other resources wait for this pass."""
_HANGS_AFTER_S = 60.0
"""How many seconds after its grace period a deleted pod may still exist, before it is removed by force."""
_TRACKED = "batch.kubernetes.io/job-tracking"
"""The finalizer of a Job's pod. Kubernetes' Job controller removes it once the pod has ended. If the pod's
machine is gone, nothing reports that end.
"""
_STARTED_AFTER_S = 20.0
"""How many seconds a pod may wait for a machine, a volume or an image before the status says so."""


class Errands:
    """The task that serves these resources. `namespaces`: empty for all namespaces. `link_of` returns the
    connections to a cluster.
    """

    def __init__(
        self,
        kube: Kube,
        reporter: Reporter,
        namespaces: Sequence[str],
        image: str,
        link_of: LinkOf,
    ) -> None:
        self._kube = kube
        self._reporter = reporter
        self._namespaces = tuple(namespaces) or ("",)
        self._image = image
        self._held = Held(link_of)
        self._woken = asyncio.Event()
        self._unserved = False
        self._measured: dict[str, set[str]] = {}
        """Namespaces that have series of metrics, by the namespace in which they were listed ("" for all)."""

    def wake(self) -> None:
        """Run a pass now, because something changed."""
        self._woken.set()

    async def run_for_ever(self) -> None:
        """Run passes: every 2 s while something runs, otherwise every 30 s. Also when a backup is due or
        `wake` was called.
        """
        while True:
            self._woken.clear()
            wait_s = min([await self._try(namespace) for namespace in self._namespaces])
            try:
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
                await asyncio.sleep(0.1)  # one change brings several events
            except TimeoutError:
                continue

    async def _try(self, namespace: str) -> float:
        try:
            return await self.run_pass(namespace)
        except KubeError as exc:
            log.warning(
                "backups could not be served; the next pass tries again", namespace=namespace, error=str(exc)
            )
        except Exception:
            log.exception("backups could not be served; the next pass tries again", namespace=namespace)
        return _FAILED_S

    async def run_pass(self, namespace: str) -> float:
        """Run one pass over a namespace, or over all (""). Returns the seconds until the next pass.

        Raises:
            KubeError: a list failed; nothing was done.
        """
        raws = await self._resources(namespace)
        there = sorted({raw["metadata"]["namespace"] for raw in raws})
        for gone in self._measured.get(namespace, set()).difference(there):
            metrics.backups(gone, ())
        self._measured[namespace] = set(there)
        wait_s = QUIET_S
        for each in there:
            mine = [raw for raw in raws if raw["metadata"]["namespace"] == each]
            try:
                wait_s = min(wait_s, await self._serve(each, mine))
            except KubeError as exc:
                log.warning(
                    "backups could not be served; the next pass tries again", namespace=each, error=str(exc)
                )
                wait_s = min(wait_s, _FAILED_S)
        return wait_s

    async def _resources(self, namespace: str) -> list[Json]:
        found: list[Json] = []
        for kind in _MODELS:
            try:
                listed = await self._kube.list(kind, namespace)
            except KubeError as exc:
                if exc.status != 404:
                    raise
                if not self._unserved:
                    self._unserved = True
                    log.info("the API server does not serve backups yet: kubectl apply -f crds/", kind=kind)
                continue
            found += [{**raw, "kind": kind} for raw in listed]
        return found

    async def _serve(self, namespace: str, raws: list[Json]) -> float:
        errands = [parse(raw) for raw in raws]
        world = await self._world(namespace, errands)
        wait_s = QUIET_S
        told: list[tuple[str, str, Mapping[str, Any]]] = []
        for raw, errand in zip(raws, errands, strict=True):
            by_time = errand.kind == "TabletBackupSchedule"
            decision = decide_schedule(world, errand) if by_time else decide(world, errand)
            told.append((errand.kind, errand.name, decision.status or errand.status))
            try:
                acted = await self._carry_out(raw, errand, decision, world.now_s)
            except (Conflict, NotFound) as exc:
                log.info(
                    "the resource changed meanwhile; the next pass looks again",
                    name=errand.name,
                    error=str(exc),
                )
                acted = True
            except KubeError as exc:
                log.warning(
                    "an action was refused; the next pass tries again", name=errand.name, error=str(exc)
                )
                text = f"the API server refused the next action: {exc}"
                await self._reporter.event(errand.kind, raw, "Refused", text, world.now_s, True)
                acted = True
            if acted or decision.busy:
                wait_s = min(wait_s, BUSY_S)
            if decision.again_s:
                wait_s = min(wait_s, max(0.5, decision.again_s - world.now_s))
        metrics.backups(namespace, told)
        return wait_s

    async def _world(self, namespace: str, errands: Sequence[Errand]) -> World:
        jobs = await self._kube.list("Job", namespace, LABEL_ERRAND)
        pods = await self._kube.list("Pod", namespace, LABEL_ERRAND)
        clusters = [seen_cluster(raw) for raw in await self._kube.list("TabletCluster", namespace)]
        groups = await self._kube.list("TabletGroup", namespace)
        names = {
            g["metadata"]["name"]: (g.get("spec") or {}).get("tableName") for g in groups if cluster_of(g)
        }
        now_s = self._kube.now_s()
        await self._free(namespace, pods, now_s)
        seen = []
        for job in jobs:
            uid = job["metadata"]["uid"]
            its = [
                p for p in pods if any(o["uid"] == uid for o in p["metadata"].get("ownerReferences") or ())
            ]
            seen.append(await self._seen_job(namespace, job, its, now_s))
        by_name = {job.name: job for job in seen}
        return World(
            now_s=now_s,
            image=self._image,
            clusters={c.name: c for c in clusters},
            tables={name: table or name for name, table in names.items()},
            jobs=by_name,
            backups=[e for e in errands if e.kind == "TabletBackup"],
            holds=await self._holds(namespace, errands, by_name),
        )

    async def _holds(self, namespace: str, errands: Sequence[Errand], jobs: Mapping[str, JobSeen]) -> Seen:
        """What the holds of these backups cost now, by cluster and name."""
        wanted: dict[str, set[str]] = {}
        for e in errands:
            if isinstance(e.spec, TabletBackupSpec) and not e.deleting and (names := holds_of(e, jobs)):
                wanted.setdefault(e.spec.clusterRef.name, set()).update(names)
        found: dict[tuple[str, str], HoldSeen | None] = {}
        for cluster, its in wanted.items():
            held = await self._held.of(namespace, cluster, its)
            found |= {(cluster, name): hold for name, hold in held.items()}
        return found

    async def _free(self, namespace: str, pods: Sequence[Json], now_s: float) -> None:
        """Remove by force the pods that hang in deletion, for example on a machine that died. Otherwise their
        Jobs would never make another pod.

        The process of such a pod may still run, beside the one of the next pod. For a backup, the claim on
        its folder allows only one writer. Two restores write the same rows, which does no harm.
        """
        for pod in pods:
            metadata = pod["metadata"]
            gone_s = seconds_of(metadata.get("deletionTimestamp"))
            if gone_s and now_s - gone_s > _HANGS_AFTER_S:
                log.info("removing a pod that hangs in deletion", pod=metadata["name"])
                with contextlib.suppress(Conflict, NotFound):  # the next pass looks again
                    await self._remove(namespace, metadata)

    async def _remove(self, namespace: str, metadata: Json) -> None:
        name, uid = metadata["name"], metadata["uid"]
        finalizers = metadata.get("finalizers") or []
        if _TRACKED in finalizers:
            others = [f for f in finalizers if f != _TRACKED]
            patch = {
                "uid": uid,
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": others or None,
            }
            await self._kube.patch("Pod", namespace, name, {"metadata": patch})
        await self._kube.delete("Pod", namespace, name, uid, "", force=True)

    async def _seen_job(self, namespace: str, job: Json, pods: list[Json], now_s: float) -> JobSeen:
        found = seen_job(job, pods, now_s)
        running = [p for p in pods if (p.get("status") or {}).get("phase") == "Running"]
        if found.state != "running" or not running:
            return found
        pod = running[-1]["metadata"]["name"]
        try:
            async with asyncio.timeout(_LOG_WITHIN_S):
                text = await self._kube.log(namespace, pod, _LOG_LINES)
        except (KubeError, TimeoutError) as exc:
            # The API server asks the pod's machine, which may be off. Only the progress is unknown then.
            log.info(
                "the log of a Job's pod cannot be read, so its progress is not shown now",
                pod=pod,
                error=str(exc) or "no answer in time",
            )
            return found
        progress = last_line(text).get("progress")
        return found if not isinstance(progress, dict) else _with(found, progress)

    async def _carry_out(self, raw: Json, e: Errand, decision: Decision, now_s: float) -> bool:
        """Act, then write the status, then send the events. Returns whether anything was changed.

        Raises:
            KubeError: an action failed; the steps after it were not done.
        """
        for action in decision.actions:
            match action:
                case Create():
                    try:
                        await self._kube.create(action.kind, e.namespace, action.manifest)
                    except Conflict as exc:
                        if exc.reason != "AlreadyExists":
                            raise
                case Remove():
                    await self._kube.delete(
                        action.kind, e.namespace, action.name, action.uid, action.resource_version
                    )
                case Finalize():
                    metadata = {
                        "uid": e.uid,
                        "resourceVersion": e.resource_version,
                        "finalizers": list(action.finalizers) or None,
                    }
                    await self._kube.patch(e.kind, e.namespace, e.name, {"metadata": metadata})
        wrote = False
        if decision.status is not None:
            wrote = await self._reporter.status(e.kind, raw, decision.status, now_s)
        for said in decision.events:
            await self._reporter.event(
                e.kind, raw, said.reason, said.message, now_s, said.warning, said.about
            )
        return bool(decision.actions) or wrote


# -- what the API server gave, as values


def parse(raw: Json) -> Errand:
    """A TabletBackup, TabletBackupSchedule or TabletRestore as the API server gave it."""
    metadata = raw["metadata"]
    spec, faults, _ = read_spec(_MODELS[raw["kind"]], raw)
    owners = metadata.get("ownerReferences") or ()
    return Errand(
        kind=raw["kind"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        generation=int(metadata.get("generation", 0)),
        created_s=seconds_of(metadata.get("creationTimestamp")),
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers") or ()),
        owner_uid=next((str(o["uid"]) for o in owners if o.get("controller")), ""),
        spec=spec,
        faults=faults,
        status=raw.get("status") or {},
    )


def seen_cluster(raw: Json) -> ClusterSeen:
    """A TabletCluster, as far as Jobs need it."""
    cluster = parse_cluster(raw)
    status = raw.get("status") or {}
    ready = any(c.type == "Ready" and c.status == "True" for c in cluster.conditions)
    return ClusterSeen(cluster.name, cluster.spec, ready, int(status.get("readyMasters") or 0))


def seen_job(job: Json, pods: Sequence[Json], now_s: float) -> JobSeen:
    """A Job and its pods."""
    metadata, status = job["metadata"], job.get("status") or {}
    state, reason, ended = "running", "", status.get("completionTime")
    for condition in status.get("conditions") or ():
        if condition.get("status") == "True" and condition["type"] in ("Complete", "Failed"):
            state = "complete" if condition["type"] == "Complete" else "failed"
            reason, ended = condition.get("reason", ""), ended or condition.get("lastTransitionTime")
    ordered = sorted(pods, key=lambda p: (p["metadata"].get("creationTimestamp", ""), p["metadata"]["name"]))
    ends = [end for pod in ordered if (end := _end(pod)) is not None]
    live = [p for p in ordered if (p.get("status") or {}).get("phase") in ("Pending", "Running")]
    newest = live[-1] if live else None
    return JobSeen(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        state=state,
        reason=reason,
        started_s=seconds_of(status.get("startTime")),
        ended_s=seconds_of(ended),
        failed=int(status.get("failed") or 0),
        deleting="deletionTimestamp" in metadata,
        last=max(ends, key=lambda end: end[:2])[2] if ends else {},
        pod_started_s=seconds_of((newest or {}).get("status", {}).get("startTime")) if newest else 0.0,
        waits=_waits(newest, now_s) if newest is not None else "",
    )


def _end(pod: Json) -> tuple[float, bool, Json] | None:
    """When the pod's container ended, whether it ended well, and what it said; None while it runs.

    If several pods end in the same second, the one that ended well counts as the last: a Job starts no pod
    after it.
    """
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        ended = (status.get("state") or {}).get("terminated")
        if ended is None:
            continue
        said = last_line(str(ended.get("message") or ""))
        if not said and ended.get("exitCode"):
            reason, code = ended.get("reason") or "Error", ended["exitCode"]
            text = " ".join(str(ended.get("message") or "").split())[-300:]
            said = {"killed": f"its pod ended with {code} ({reason}){f': {text}' if text else ''}"}
        return seconds_of(ended.get("finishedAt")), not ended.get("exitCode"), said
    return None


def _waits(pod: Json, now_s: float) -> str:
    """Why a pod has not started, if that takes long; otherwise ""."""
    status = pod.get("status") or {}
    if status.get("phase") != "Pending":
        return ""
    if now_s - seconds_of(pod["metadata"].get("creationTimestamp")) < _STARTED_AFTER_S:
        return ""
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("message") or waiting.get("reason"):
            return f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "it has no machine")
    return "its machine has not started it yet"


def last_line(text: str) -> Json:
    """The last line of the text that is a JSON object; {} if there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return {}


def _with(job: JobSeen, progress: Json) -> JobSeen:
    return replace(job, progress=progress)
