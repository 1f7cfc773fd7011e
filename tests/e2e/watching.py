"""Watches the pods of a cluster from beside a test: who is away at once. Every state that the API server sends is seen."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from examples.demo.kube import GROUP
from tests.e2e.bench import CLUSTER, NAMESPACE, Bench

_ROUND_S = 20


class Away:
    """Pods of a role that end, or were made again and are not ready yet: `most` at once, and each set of two or more.

    A pod that was ready and misses a probe does not count: nobody took it away. `with Away(bench, "node") as away: ...; assert away.most == 1`
    """

    def __init__(self, bench: Bench, role: str) -> None:
        self._core: Any = client.CoreV1Api(bench.api)
        self._selector = f"{GROUP}/cluster={CLUSTER},{GROUP}/role={role}"
        self._names = {p.metadata.name for p in bench.pods(role)}
        self._there: dict[str, str] = {}
        self._served: set[str] = set()
        self._stop = threading.Event()
        self._seen = threading.Event()
        self._thread = threading.Thread(target=self._look, name="away", daemon=True)
        self.most = 0
        self.together: set[frozenset[str]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._seen.wait(60), "the API server sends nothing"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(2 * _ROUND_S)

    def _look(self) -> None:
        while not self._stop.is_set():
            try:
                self._round()
            except (ApiException, OSError):
                time.sleep(1)  # the API server is away: it sends all again

    def _round(self) -> None:
        listed = self._core.list_namespaced_pod(NAMESPACE, label_selector=self._selector)
        self._there = {p.metadata.name: p.metadata.uid for p in listed.items if self._serves(p)}
        self._judge()
        asked = {"label_selector": self._selector, "resource_version": listed.metadata.resource_version}
        for event in watch.Watch().stream(
            self._core.list_namespaced_pod, NAMESPACE, timeout_seconds=_ROUND_S, **asked
        ):
            self._take(event["type"], event["object"])
            if self._stop.is_set():
                return

    def _take(self, kind: str, pod: Any) -> None:
        name, uid = pod.metadata.name, pod.metadata.uid
        if kind != "DELETED" and self._serves(pod):
            self._there[name] = uid
        elif self._there.get(name) == uid:
            del self._there[name]
        self._judge()

    def _serves(self, pod: Any) -> bool:
        conditions = {c.type: c.status for c in pod.status.conditions or ()}
        if conditions.get("Ready") == "True":
            self._served.add(pod.metadata.uid)
        return pod.metadata.uid in self._served and pod.metadata.deletion_timestamp is None

    def _judge(self) -> None:
        away = frozenset(self._names - self._there.keys())
        self.most = max(self.most, len(away))
        if len(away) > 1:
            self.together.add(away)
        self._seen.set()
