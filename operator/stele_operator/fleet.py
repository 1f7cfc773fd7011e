"""All cluster tasks of this process, and the sweep that finds dead watches. Used by app and handlers.

Owns the tasks. Events only wake a task sooner. The sweep lists all resources every 30 s, and starts tasks for
clusters whose events did not arrive. Invariant: at most one task per namespace and name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from stele_operator import metrics
from stele_operator.kube import Kube, KubeError
from stele_operator.masters import MasterLink
from stele_operator.observe import cluster_of
from stele_operator.plan.naming import ANNOTATION_PLAN
from stele_operator.reconcile import ClusterTask
from stele_operator.report import Reporter

log = structlog.get_logger("stele.operator.fleet")
Json = dict[str, Any]
SWEEP_S = 30.0
WATCH_LAG_MAX_S = 120.0
STUCK_S = 180.0
_KINDS = ("TabletCluster", "TabletGroup")
_REFUSED = (403, 404)


class Fleet:
    """Starts, wakes and ends cluster tasks. `namespaces`: empty for all namespaces."""

    def __init__(
        self,
        kube: Kube,
        reporter: Reporter,
        namespaces: Sequence[str],
        image: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._kube = kube
        self._reporter = reporter
        self._namespaces = tuple(namespaces) or ("",)
        self._image = image
        self._tasks: dict[tuple[str, str], tuple[ClusterTask, asyncio.Task[None]]] = {}
        self._seen: dict[str, tuple[str, float]] = {}
        self._behind: dict[str, float] = {}
        self._marks: dict[str, tuple[Any, ...]] = {}
        self._refused: set[str] = set()
        self._swept = self._passed = self._clock()
        self._leads = False
        self._closed = False

    def lead(self) -> None:
        """Record that the lease is held. From now on the liveness probe expects lists and passes."""
        self._swept = self._passed = self._clock()
        self._leads = True

    def wake(self, namespace: str, name: str) -> None:
        """Run a pass over a cluster now. If the cluster has no task, start one."""
        if self._closed or not name:
            return
        entry = self._tasks.get((namespace, name))
        if entry is not None and not entry[1].done():
            entry[0].wake()
            return
        task = ClusterTask(self._kube, self._reporter, namespace, name, self._image, self.note_pass)
        self._tasks[namespace, name] = (
            task,
            asyncio.create_task(task.run(), name=f"cluster {namespace}/{name}"),
        )

    def link(self, namespace: str, name: str) -> MasterLink | None:
        """The connections to a cluster; None if it has none."""
        entry = self._tasks.get((namespace, name))
        return None if entry is None or entry[1].done() else entry[0].link

    def saw(self, raw: Json, *, deleted: bool) -> None:
        """Handle a watch event of a TabletCluster or TabletGroup. The operator's own status writes wake no
        task."""
        metadata = raw["metadata"]
        uid = metadata["uid"]
        self._seen[uid] = (metadata["resourceVersion"], self._clock())
        mark = (
            metadata.get("generation"),
            metadata.get("deletionTimestamp"),
            tuple(metadata.get("finalizers") or ()),
            (metadata.get("annotations") or {}).get(ANNOTATION_PLAN),
        )
        known = self._marks.get(uid)
        self._marks[uid] = mark
        if deleted:
            for memory in (self._seen, self._behind, self._marks):
                memory.pop(uid, None)
            self._reporter.forget(uid)
        if deleted or known != mark:
            self.wake(metadata["namespace"], _cluster_name(raw))

    def note_pass(self, done: bool = True) -> None:
        """Record that a pass has ended. `done` is false if the API server refused the pass or gave an
        unusable answer.

        A pass that was refused still counts as a sign of life. A restart of the process would not help, and
        the kubelet delays each further restart, up to minutes.
        """
        self._passed = self._clock()
        if done:
            metrics.LAST_PASS.set_to_current_time()

    async def sweep_for_ever(self) -> None:
        """Run a sweep every 30 s: list all resources, and keep a task for each cluster."""
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Run one sweep. Each namespace is handled by itself, so that one that was deleted, with its Role,
        does not stop the others.
        """
        now = self._clock()
        listed: dict[str, str] = {}
        answered = True
        for namespace in self._namespaces:
            try:
                found = await self._list(namespace)
            except KubeError as exc:
                if exc.status not in _REFUSED:
                    log.warning(
                        "cannot list TabletClusters and TabletGroups; is the API server reachable?",
                        namespace=namespace,
                        error=str(exc),
                    )
                    answered = False
                    continue
                await self._leave(namespace, exc)
            else:
                self._serve(namespace, found)
                listed |= {raw["metadata"]["uid"]: raw["metadata"]["resourceVersion"] for raw in found}
            self._swept = self._clock()  # a refusal is an answer too, and a restart would not help
        for key in [key for key, (_, task) in self._tasks.items() if task.done()]:
            del self._tasks[key]
        if answered and not self._tasks:
            metrics.LAST_PASS.set_to_current_time()
        self._compare(listed, now)

    async def _list(self, namespace: str) -> list[Json]:
        return [raw for kind in _KINDS for raw in await self._kube.list(kind, namespace)]

    def _serve(self, namespace: str, found: list[Json]) -> None:
        if namespace in self._refused:
            self._refused.discard(namespace)
            log.info("the API server allows lists in this namespace again", namespace=namespace)
        metrics.REFUSED.labels(namespace).set(0)
        for raw in found:
            key = (raw["metadata"]["namespace"], _cluster_name(raw))
            if key not in self._tasks or self._tasks[key][1].done():
                self.wake(*key)

    async def _leave(self, namespace: str, exc: KubeError) -> None:
        """End the tasks of a namespace that the operator may not list. They start again once a sweep succeeds
        there.
        """
        if namespace not in self._refused:
            self._refused.add(namespace)
            log.warning(
                "the API server refuses lists in this namespace; do the namespace and the operator's Role in it exist?",
                namespace=namespace,
                error=str(exc),
            )
        metrics.REFUSED.labels(namespace).set(1)
        await _end(task for key, (_, task) in self._tasks.items() if namespace in ("", key[0]))

    def _compare(self, listed: dict[str, str], now: float) -> None:
        """Compare the listed resources with those that the watch showed. Record since when the watch lacks a
        change.
        """
        for uid, version in listed.items():
            seen_version, seen_at = self._seen.get(uid, ("", 0.0))
            if seen_version == version:
                self._behind.pop(uid, None)
            elif self._behind.setdefault(uid, now) < seen_at:
                self._behind[uid] = now  # the watch brings changes, only not the newest yet
        for uid in [u for u in self._behind if u not in listed]:
            del self._behind[uid]
        metrics.WATCH_LAG_SECONDS.set(now - min(self._behind.values(), default=now))

    def not_live(self) -> str:
        """Why this process should be restarted; "" while it works."""
        now = self._clock()
        if not self._leads:
            return ""
        if now - self._swept > STUCK_S:
            return f"the API server has answered no list of TabletClusters for {now - self._swept:.0f} s"
        running = any(not task.done() for _, task in self._tasks.values())
        if running and now - self._passed > STUCK_S:
            return f"no pass over any cluster has ended for {now - self._passed:.0f} s"
        lag = now - min(self._behind.values(), default=now)
        return f"the watch is dead: it lacks a change for {lag:.0f} s" if lag > WATCH_LAG_MAX_S else ""

    async def close(self) -> None:
        """End all tasks. The next process of the operator continues their work."""
        self._closed = True
        await _end(task for _, task in self._tasks.values())


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _cluster_name(raw: Json) -> str:
    return cluster_of(raw) if raw.get("kind") == "TabletGroup" else str(raw["metadata"]["name"])
