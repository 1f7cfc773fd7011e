"""The demo's programs as Jobs in the cluster, from the image `tools`. Used by kube_place.py and tests/e2e.

Owns the Jobs it makes. Invariant: what a program printed is read before its pod goes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream

from examples.demo.outside import image, nothing

_POLL_S = 0.5
_START_S = 120.0
_LABEL = "stele.dev/program"


class Job:
    """One program that runs in the cluster."""

    def __init__(self, api: Any, namespace: str, name: str) -> None:
        self._core = client.CoreV1Api(api)
        self._batch = client.BatchV1Api(api)
        self._namespace = namespace
        self.name = name
        self._shown = 0

    def _pod(self) -> Any:
        pods = self._core.list_namespaced_pod(self._namespace, label_selector=f"job-name={self.name}").items
        return pods[0] if pods else None

    def phase(self) -> str:
        """Of its pod: Pending, Running, Succeeded, Failed."""
        pod = self._pod()
        return str(pod.status.phase) if pod is not None else "Pending"

    def output(self) -> str:
        """What it has printed so far, errors too."""
        pod = self._pod()
        if pod is None or pod.status.phase == "Pending":
            return ""
        try:
            text: str = self._core.read_namespaced_pod_log(pod.metadata.name, self._namespace)
        except ApiException:
            return ""  # its machine does not answer just now
        return text

    def news(self) -> list[str]:
        """Lines since the last call."""
        lines = self.output().splitlines()
        fresh, self._shown = lines[self._shown :], max(self._shown, len(lines))
        return fresh

    def wait(
        self,
        seconds: float,
        tell: Callable[[str], None] = lambda line: None,
        meanwhile: Callable[[], None] = nothing,
    ) -> str:
        """Until it has ended; returns all it printed. `tell` takes its lines, `meanwhile` is called again and again.

        Raises:
            RuntimeError: it failed, or took longer.
        """
        deadline = time.monotonic() + seconds
        while True:
            phase = self.phase()
            for line in self.news():
                tell(line)
            meanwhile()
            if phase == "Succeeded":
                return self.output()
            if phase == "Failed":
                raise RuntimeError(f"{self.name} failed: {self.output().strip()[-800:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name} is {phase} after {seconds:.0f} s: {self.output().strip()[-800:]}"
                )
            time.sleep(_POLL_S)

    def until_runs(self) -> None:
        """Until its program has begun.

        Raises:
            RuntimeError: it does not begin.
        """
        deadline = time.monotonic() + _START_S
        while self.phase() == "Pending":
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not start within {_START_S:.0f} s: is the image there?")
            time.sleep(_POLL_S)

    def terminate(self) -> None:
        """SIGTERM to the program itself, so that its pod and what it printed stay."""
        pod = self._pod()
        stream(
            self._core.connect_get_namespaced_pod_exec,
            pod.metadata.name,
            self._namespace,
            command=["sh", "-c", "kill -TERM 1"],
            stderr=True,
            stdin=False,
            stdout=True,
            tty=False,
        )

    def delete(self) -> None:
        """Away with it and its pod."""
        try:
            self._batch.delete_namespaced_job(self.name, self._namespace, propagation_policy="Background")
        except ApiException as exc:
            if exc.status != 404:
                raise


class Jobs:
    """Makes Jobs of our programs in one namespace."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._serials = itertools.count(1)

    def begin(self, program: str, *arguments: str, avoid: str = "") -> Job:
        """Start `python -m examples.demo.tools PROGRAM`, not on machine `avoid`."""
        name = f"{program}-{next(self._serials)}"
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": program,
                    "image": image("tools"),
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "-m", "examples.demo.tools", program, *arguments],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        }
        if avoid:
            elsewhere = {"key": "metadata.name", "operator": "NotIn", "values": [avoid]}
            pod["affinity"] = {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchFields": [elsewhere]}]
                    }
                }
            }
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": {_LABEL: program}},
            "spec": {
                "backoffLimit": 0,
                "template": {"metadata": {"labels": {_LABEL: program}}, "spec": pod},
            },
        }
        batch: Any = client.BatchV1Api(self._api)
        batch.create_namespaced_job(self._namespace, body)
        return Job(self._api, self._namespace, name)
