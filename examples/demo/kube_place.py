"""Where the demo runs with KUBE=1: a namespace of its own in the cluster that KUBECONFIG names.

Images are loaded, the operator comes by Helm, and every program is a Job; nothing runs beside the cluster but the demo
itself, which speaks to the API server alone. Invariant: when the place is left, the namespace is gone, machines are on
again, and CustomResourceDefinitions that were not there before are gone too, unless it was told to keep them.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from examples.demo.jobs import Job, Jobs
from examples.demo.kube import GROUP, PLURALS, VERSION, Kube
from examples.demo.outside import ROOT, TAG, Missing, Power, helm, load_images, nothing

NAMESPACE = "stele-demo"
RELEASE = "stele"
_GONE_WITHIN_S = 180.0
_ASK_EVERY_S = 10.0


class KubeHealth:
    """Whether the cluster is whole again, judged by a Job that asks the masters."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.delete()

    def healed(self, lost_machine: str) -> bool:
        """Whether the Job, which looks for voters on machines other than this one, is content.

        Raises:
            RuntimeError: the Job failed.
        """
        phase = self._job.phase()
        if phase == "Failed":
            raise RuntimeError(f"the Job that asks the masters failed: {self._job.output()[-500:]}")
        return phase == "Succeeded"

    def summary(self) -> str:
        """What it found, in a few words."""
        for line in reversed(self._job.output().strip().splitlines()):
            if line.startswith("{"):
                return str(json.loads(line)["healed"])
        return "nothing is known"


class KubePlace:
    """A real Kubernetes. See the module's own words."""

    title = "the images onto the machines, and the operator by Helm"
    patience = 3.0
    """Against the times of LocalPlace: a real kubelet and scheduler take theirs."""

    def __init__(self, folder: Path, *, keep: bool, namespace: str = NAMESPACE) -> None:
        self.folder = folder
        self.keep = keep
        self.namespace = namespace
        self.kubeconfig: Path | None = None
        self.power = Power()
        self.api: Any = config.new_client_from_config()  # type: ignore[no-untyped-call]
        self._core: Any = client.CoreV1Api(self.api)
        self.jobs = Jobs(self.api, namespace)
        self.kube = Kube(self.api, namespace)
        self._brought_crds = False
        self._victim = ""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._core.create_namespace({"metadata": {"name": self.namespace}})
        except ApiException as exc:
            if exc.status != 409:
                raise
            raise Missing(
                f"namespace {self.namespace} is there already, from a demo that was kept or killed: "
                f"kubectl delete tabletgroups,tabletclusters --all -n {self.namespace}; "
                f"helm uninstall {RELEASE} -n {self.namespace}; kubectl delete namespace {self.namespace}"
            ) from exc
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the stopping
        try:
            if error is not None:
                self.save_logs(self.folder)
            self.power.restore()
            if not self.keep or error is not None:
                self.clean_up()
        finally:
            signal.signal(signal.SIGINT, old)

    def set_up(self, kube: Kube, say: Callable[[str], None]) -> None:
        """Images, chart, operator."""
        version = client.VersionApi(self.api).get_code().git_version
        machines = self._core.list_node().items
        say(f"Kubernetes {version}, {len(machines)} machines, namespace {self.namespace}")
        load_images(str(self._core.read_namespace("kube-system").metadata.uid), say)
        self.install(say)

    def install(self, say: Callable[[str], None], *settings: str) -> None:
        """helm install, with `--set` of each setting; waits until the operator is ready."""
        there = self._crds()
        self._brought_crds = not there
        given = (
            f"image.tag={TAG}",
            f"nodeImage.tag={TAG}",
            "rbac.machines=true",
            f"crds.install={str(not there).lower()}",
            *settings,
        )
        started = time.monotonic()
        helm(
            *("install", RELEASE, str(ROOT / "charts" / "stele"), "--namespace", self.namespace),
            *("--wait", "--timeout", "5m"),
            *(word for setting in given for word in ("--set", setting)),
        )
        say(f"helm install {RELEASE}: the operator is ready after {time.monotonic() - started:.0f} s")

    def upgrade(self, *settings: str) -> None:
        """helm upgrade, with `--set` of each setting; waits until the operator is ready."""
        helm(
            *("upgrade", RELEASE, str(ROOT / "charts" / "stele"), "--namespace", self.namespace),
            *("--reuse-values", "--wait", "--timeout", "5m"),
            *(word for setting in settings for word in ("--set", setting)),
        )

    def roll_back(self) -> None:
        """helm rollback: as it was before the last upgrade. (`--reuse-values` keeps a value that is set to null.)"""
        helm("rollback", RELEASE, "--namespace", self.namespace, "--wait", "--timeout", "5m")

    def test(self) -> None:
        """helm test."""
        helm("test", RELEASE, "--namespace", self.namespace, "--timeout", "2m")

    def operator_alive(self) -> bool:
        """Kubernetes starts it again whatever becomes of it."""
        return True

    def masters(self) -> str:
        """Names of the masters of the moment, as the Jobs reach them."""
        pods = self.kube.pods("stele.dev/cluster=flights,stele.dev/role=master")
        names = sorted(p.metadata.name for p in pods if p.metadata.deletion_timestamp is None)
        return ",".join(f"{n}.flights-peers.{self.namespace}.svc:7051" for n in names)

    def victim(self, candidates: list[str]) -> str:
        """Of machines that carry a master and a node, one on which the operator does not run."""
        pods = self.kube.pods(f"app.kubernetes.io/instance={RELEASE}")
        operators = {p.spec.node_name for p in pods}
        self._victim = next((m for m in candidates if m not in operators), candidates[0])
        return self._victim

    def power_off(self, machine: str, meanwhile: Callable[[], None] = nothing) -> None:
        """As STELE_POWER does it."""
        self.power("off", machine, meanwhile)

    def wipe(self, machine: str, meanwhile: Callable[[], None] = nothing) -> None:
        """As STELE_POWER does it."""
        self.power("wipe", machine, meanwhile)

    def shows_bar(self, program: str) -> bool:
        """None does: they run elsewhere."""
        return False

    def run(
        self,
        program: str,
        *arguments: str,
        seconds: float,
        say: Callable[[str], None],
        meanwhile: Callable[[], None] = nothing,
    ) -> str:
        """One of the demo's programs as a Job, until it has ended; returns what it printed."""
        job = self.jobs.begin(program, "--masters", self.masters(), *arguments)

        def tell(line: str) -> None:
            if line.startswith(f"{program}: "):
                say(f"job     {line}")

        output = job.wait(seconds * self.patience, tell, meanwhile)
        (self.folder / f"{program}.log").write_text(output)
        job.delete()
        return output

    def begin(self, program: str, *arguments: str) -> KubeProgram:
        """Start one of the programs, away from the machine that will be lost."""
        job = self.jobs.begin(program, "--masters", self.masters(), *arguments, avoid=self._victim)
        job.until_runs()
        return KubeProgram(job, self.folder / f"{program}.log")

    def checker(self, lost_machine: str) -> KubeHealth:
        """Asks the masters whether all is whole again without this machine."""
        arguments = ("--masters", self.masters(), "--lost", lost_machine)
        return KubeHealth(self.jobs.begin("health", *arguments, avoid=lost_machine))

    def logs(self) -> str:
        """Where to look when something went wrong."""
        return f"kubectl -n {self.namespace} logs deployment/{RELEASE}"

    def lines_to_try(self) -> str:
        """For one who was told to keep it all."""
        crds = f"; kubectl delete crd {' '.join(self._crds())}" if self._brought_crds else ""
        return f"""
  kubectl -n {self.namespace} get tc,tg,pods -o wide
  kubectl -n {self.namespace} describe tc flights
  kubectl -n {self.namespace} exec flights-master-1 -- stele ksck --masters flights-masters:7051

To stop it and remove its data:
  kubectl -n {self.namespace} delete tg,tc --all; helm -n {self.namespace} uninstall {RELEASE}; kubectl delete namespace {self.namespace}{crds}
"""

    def clean_up(self) -> None:
        """Clusters, release, namespace; the definitions if they came with us and nobody else uses them."""
        for kind in ("TabletGroup", "TabletCluster"):
            self._until_gone(kind)
        helm("uninstall", RELEASE, "--namespace", self.namespace, "--ignore-not-found", "--wait")
        if self._brought_crds and not self._used_elsewhere():
            for name in self._crds():
                client.ApiextensionsV1Api(self.api).delete_custom_resource_definition(name)
        self._core.delete_namespace(self.namespace)
        deadline = time.monotonic() + _GONE_WITHIN_S
        while any(n.metadata.name == self.namespace for n in self._core.list_namespace().items):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"namespace {self.namespace} does not go: kubectl get namespace -o yaml says why"
                )
            time.sleep(1)

    def _until_gone(self, kind: str) -> None:
        custom: Any = client.CustomObjectsApi(self.api)
        where = (GROUP, VERSION, self.namespace, PLURALS[kind])
        deadline = time.monotonic() + _GONE_WITHIN_S
        try:
            custom.delete_collection_namespaced_custom_object(*where)
            while custom.list_namespaced_custom_object(*where)["items"]:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"a {kind} does not go; see {self.logs()}")
                time.sleep(0.5)
        except ApiException as exc:
            if exc.status != 404:  # the definitions were never there
                raise

    def _crds(self) -> list[str]:
        found: Any = client.ApiextensionsV1Api(self.api).list_custom_resource_definition().items
        return [d.metadata.name for d in found if d.spec.group == GROUP]

    def _used_elsewhere(self) -> bool:
        custom: Any = client.CustomObjectsApi(self.api)
        return any(custom.list_cluster_custom_object(GROUP, VERSION, p)["items"] for p in PLURALS.values())

    def save_logs(self, folder: Path) -> None:
        """What every pod last said, a file each."""
        folder.mkdir(parents=True, exist_ok=True)
        for pod in self._core.list_namespaced_pod(self.namespace).items:
            try:
                text = self._core.read_namespaced_pod_log(pod.metadata.name, self.namespace, tail_lines=5_000)
            except ApiException:
                continue  # never started, or its machine is off
            (folder / f"{pod.metadata.name}.log").write_text(text)


class KubeProgram:
    """A program that runs until it is told to stop."""

    def __init__(self, job: Job, log: Path) -> None:
        self._job = job
        self._log = log

    def output(self) -> str:
        """What it has printed so far."""
        return self._job.output()

    def stop(self, seconds: float) -> str:
        """Ask it to stop; returns what it printed.

        Raises:
            RuntimeError: it failed, or did not stop.
        """
        asked_s = time.monotonic() - _ASK_EVERY_S

        def ask() -> None:
            """Again and again: one that has just started does not hear the first time."""
            nonlocal asked_s
            if time.monotonic() - asked_s >= _ASK_EVERY_S and self._job.phase() == "Running":
                asked_s = time.monotonic()
                with contextlib.suppress(ApiException):  # it has ended meanwhile
                    self._job.terminate()

        output = self._job.wait(seconds, meanwhile=ask)
        self._log.write_text(output)
        return output

    def kill(self) -> None:
        """Away with it."""
        self._job.delete()
