"""What the end-to-end tests share: one release of the chart in a namespace of its own, and questions to the cluster.

Speaks to the API server and to the commands of examples/demo/outside.py alone; data go through Jobs. Every wait is
noted with what it waited for and how long it took.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream

from examples.demo import flights
from examples.demo.__main__ import last_json
from examples.demo.kube import GROUP, PLURALS, VERSION, condition
from examples.demo.kube_place import RELEASE, KubePlace, KubeProgram
from examples.demo.outside import image

Json = dict[str, Any]
NAMESPACE = "stele-e2e"
CLUSTER = "flights"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ERRANDS = {
    "TabletBackup": "tabletbackups",
    "TabletBackupSchedule": "tabletbackupschedules",
    "TabletRestore": "tabletrestores",
}
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
_POLL_S = 0.3
_SOME_ROWS = re.compile("stream: [1-9][0-9]* rows acknowledged")


class Bench:
    """The release, and everything one asks of its cluster."""

    def __init__(self, place: KubePlace, note: Callable[[str], None]) -> None:
        self.place = place
        self.kube = place.kube
        self.power = place.power
        self.jobs = place.jobs
        self.note = note
        self.api: Any = place.api
        self.core: Any = client.CoreV1Api(place.api)
        self.custom: Any = client.CustomObjectsApi(place.api)
        self._streams: list[KubeProgram] = []

    # -- waiting

    def until(self, what: str, true: Callable[[], Any], seconds: float = 120.0) -> float:
        """Wait for something; returns, and notes, how long it took."""
        started = time.monotonic()
        while True:
            try:
                if true():
                    break
            except (ApiException, OSError) as exc:
                last: object = exc
            else:
                last = "not yet"
            if time.monotonic() - started > seconds:
                raise AssertionError(f"not within {seconds:.0f} s: {what} ({last})\n{self.story()}")
            time.sleep(_POLL_S)
        took = time.monotonic() - started
        if took >= 0.1:
            self.note(f"{took:6.1f} s  {what}")
        return took

    def story(self) -> str:
        """What one would look at when something went wrong."""
        try:
            status = self.kube.status("TabletCluster", CLUSTER)
        except ApiException:
            status = {}
        pods = [
            f"{p.metadata.name} {p.status.phase} on {p.spec.node_name}"
            for p in self.core.list_namespaced_pod(NAMESPACE).items
        ]
        events = [f"{e.reason}: {e.message}" for e in self.kube.events()[-15:]]
        return "\n".join([json.dumps(status, indent=1)[:6000], *pods, *events])

    # -- the cluster

    def where(self, kind: str, namespace: str = NAMESPACE) -> tuple[str, str, str, str]:
        """Where the API serves a kind of ours."""
        return GROUP, VERSION, namespace, (PLURALS | ERRANDS)[kind]

    def apply(self, example: str, **spec: Any) -> Json:
        """Create an example, with parts of its spec replaced."""
        body = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
        body["metadata"]["namespace"] = NAMESPACE
        body["spec"] |= spec
        made: Json = self.custom.create_namespaced_custom_object(*self.where(body["kind"]), body)
        return made

    def names(self, kind: str) -> set[str]:
        """Names of all resources of a kind of ours."""
        return {
            o["metadata"]["name"]
            for o in self.custom.list_namespaced_custom_object(*self.where(kind))["items"]
        }

    def _none_of(self, kind: str) -> bool:
        return not self.names(kind)

    def clear(self) -> None:
        """No cluster, no table, no volume, no identity: as if there had never been one."""
        for kind in ("TabletGroup", "TabletCluster"):
            for name in self.names(kind):
                self.custom.delete_namespaced_custom_object(*self.where(kind), name)
            self.until(f"no {kind} is left", partial(self._none_of, kind))
        selector = f"stele.dev/cluster={CLUSTER}"
        self.until("no pod is left", lambda: not self.pods())
        self.core.delete_collection_namespaced_persistent_volume_claim(NAMESPACE, label_selector=selector)
        self.until("no claim is left", lambda: not self.claims())
        self.core.delete_collection_namespaced_config_map(NAMESPACE, label_selector=selector)

    def have(
        self, *, patient: bool = False, limit: str = "", fresh: bool = False, policy: str = "Delete"
    ) -> None:
        """A whole cluster as in examples/, with the table of flights; the one that is there if it will do.

        `patient`: nobody is taken for lost within the test's time. `limit`: of each node's memory. `fresh`: a new
        one in any case, with empty tables. `policy`: deletionPolicy of cluster and table, of a new one.
        """
        example = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text())["spec"]
        healing = {**example["healing"], **({"witnessAfter": "10m", "silentAfter": "20m"} if patient else {})}
        nodes = {**example["nodes"]}
        if limit:
            size = {
                "cpu": "1",
                "memory": limit,
            }  # Guaranteed: the kernel scores what we start like the node itself
            nodes["resources"] = {"requests": size, "limits": size}
        there = {kind: self.names(kind) for kind in PLURALS}
        will_do = not fresh and all(names == {CLUSTER} for names in there.values()) and self.whole()
        if will_do:
            spec = self.custom.get_namespaced_custom_object(*self.where("TabletCluster"), CLUSTER)["spec"]
            will_do = spec["nodes"].get("resources") == nodes.get("resources")
        if will_do:
            self.patch("TabletCluster", {"healing": healing})
        else:
            self.clear()
            self.apply("cluster", healing=healing, nodes=nodes, deletionPolicy=policy)
            self.apply("flights", deletionPolicy=policy)
        self.until("the cluster is whole", lambda: self.whole() and self.ready("TabletGroup"), 240)

    def operators(self) -> list[Any]:
        """Pods of the operator that are not going."""
        found = self.kube.pods(f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/name=stele")
        return [p for p in found if p.metadata.deletion_timestamp is None]

    def leader(self) -> str:
        """Name of the operator that holds the Lease."""
        lease: Any = client.CoordinationV1Api(self.api).read_namespaced_lease("stele-operator", NAMESPACE)
        return str(lease.spec.holder_identity or "")

    def scale_operator(self, replicas: int) -> None:
        """Set how many operators are to run."""
        apps: Any = client.AppsV1Api(self.api)
        (deployment,) = apps.list_namespaced_deployment(
            NAMESPACE, label_selector=f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/name=stele"
        ).items
        apps.patch_namespaced_deployment_scale(
            deployment.metadata.name, NAMESPACE, {"spec": {"replicas": replicas}}
        )

    def machines_ready(self) -> None:
        """Wait until Kubernetes sees every machine."""

        def all_ready() -> bool:
            machines: list[Any] = self.core.list_node().items
            return all(c.status == "True" for m in machines for c in m.status.conditions if c.type == "Ready")

        if not all_ready():
            self.until("every machine is Ready again", all_ready)

    def patch(self, kind: str, spec: Json) -> Json:
        """Change a spec, by merge patch."""
        made: Json = self.custom.patch_namespaced_custom_object(*self.where(kind), CLUSTER, {"spec": spec})
        return made

    def ready(self, kind: str, name: str = CLUSTER) -> bool:
        """Whether its condition Ready holds."""
        return bool(self.condition(kind, "Ready", name)["status"] == "True")

    def condition(self, kind: str, which: str, name: str = CLUSTER) -> Json:
        """One of its conditions."""
        return condition(self.kube.status(kind, name), which)

    def whole(self) -> bool:
        """Ready, every tablet healthy, all members Ready (or retired), nothing being healed."""
        status = self.kube.status("TabletCluster", CLUSTER)
        tablets = status.get("tablets", {})
        return bool(
            condition(status, "Ready")["status"] == "True"
            and condition(status, "Reconciling")["status"] == "False"
            and condition(status, "Degraded")["status"] == "False"
            and tablets.get("total")
            and tablets["healthy"] == tablets["total"]
            and all(m["state"] in ("Ready", "Retired") for m in status["members"])
        )

    def tablets_healthy(self) -> bool:
        """All tablets of all tables; the catalog is none of them."""
        tablets = self.kube.status("TabletCluster", CLUSTER).get("tablets", {})
        return bool(tablets.get("total") and tablets["healthy"] == tablets["total"])

    def members(self) -> dict[str, Json]:
        """Members by name, as the status has them."""
        return {m["name"]: m for m in self.kube.status("TabletCluster", CLUSTER).get("members", ())}

    def pods(self, role: str = "") -> list[Any]:
        """Pods of masters and nodes."""
        selector = f"stele.dev/cluster={CLUSTER}" + (f",stele.dev/role={role}" if role else "")
        return self.kube.pods(selector)

    def pod(self, name: str) -> Any:
        """One pod, or None."""
        return next((p for p in self.pods() if p.metadata.name == name), None)

    def claims(self) -> dict[str, Any]:
        """Claims by name."""
        selector = f"stele.dev/cluster={CLUSTER}"
        found = self.core.list_namespaced_persistent_volume_claim(NAMESPACE, label_selector=selector).items
        return {c.metadata.name: c for c in found}

    def disruption_budget(self, role: str) -> Any:
        """The PodDisruptionBudget of a role."""
        policy: Any = client.PolicyV1Api(self.api)
        return policy.read_namespaced_pod_disruption_budget(f"{CLUSTER}-{role}s", NAMESPACE)

    def told(self, reason: str, since: float = 0.0) -> list[str]:
        """Messages of events with this reason, from this moment on."""
        events = self.core.list_namespaced_event(NAMESPACE).items
        return [
            e.message or ""
            for e in events
            if e.reason == reason and e.last_timestamp and e.last_timestamp.timestamp() >= since - 1
        ]

    def healing(self) -> list[dict[str, Any]]:
        """The tablets that are being healed, as the status has them."""
        return list(self.kube.status("TabletCluster", CLUSTER).get("healing", {}).get("active", ()))

    def witnessed(self) -> bool:
        """Whether a witness stands in for some tablet's voter, and waits for its rows."""
        return any(h["step"] == "Copying" and h.get("next") == "Promoting" for h in self.healing())

    def first(self, reason: str, since: float) -> float:
        """When an event with this reason first came, from this moment on; 0 if none did."""
        times = [
            e.first_timestamp.timestamp()
            for e in self.core.list_namespaced_event(NAMESPACE).items
            if e.reason == reason and e.first_timestamp and e.first_timestamp.timestamp() >= since - 1
        ]
        return min(times, default=0.0)

    def released(self) -> set[str]:
        """Claims that were let go."""
        key = "stele.dev/released-at"
        return {n for n, c in self.claims().items() if key in (c.metadata.annotations or {})}

    def no_copy_left(self) -> bool:
        """Nothing is being healed any more."""
        return not self.healing()

    def sound(self, without: str = "nowhere") -> None:
        """By the masters' own view: every tablet has its voters, all of them voters, on machines other than this."""
        with self.place.checker(without) as checker:
            self.until("every tablet has three voters and no other member", lambda: checker.healed(without))

    def new_leader(self) -> Callable[[], bool]:
        """Whether another operator holds the Lease than now."""
        before = self.leader()
        return lambda: self.leader() not in ("", before)

    def columns(self, kind: str, name: str = CLUSTER) -> dict[str, Any]:
        """The columns of `kubectl get`, by title."""
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{self.where(kind)[3]}/{name}"
        sent = self.api.param_serialize(
            "GET", path, header_params={"Accept": TABLE}, auth_settings=["BearerToken"]
        )
        answer = self.api.call_api(*sent)
        answer.read()
        table = json.loads(answer.data)
        titles = [c["name"] for c in table["columnDefinitions"]]
        return dict(zip(titles, table["rows"][0]["cells"], strict=True))

    # -- data

    def program(self, name: str, *arguments: str, seconds: float = 300.0) -> Json:
        """Run one of the demo's programs as a Job; returns its result."""
        started = time.monotonic()
        output = self.place.run(name, *arguments, seconds=seconds, say=lambda line: None)
        self.note(f"{time.monotonic() - started:6.1f} s  job {name}")
        return last_json(output, name)

    def stream(self) -> KubeProgram:
        """Start to write single rows, one after another. When this returns, some are acknowledged."""
        writer = self.place.begin("stream")
        self._streams.append(writer)
        self.until("rows are written", lambda: _SOME_ROWS.search(writer.output()))
        return writer

    def written(self, stream: KubeProgram) -> Json:
        """End the writer. What it wrote is acknowledged."""
        result = last_json(stream.stop(60), "stream")
        self._streams.remove(stream)
        self.note(f"          {result['rows']:,} rows written, longest wait {result['longest_wait_ms']} ms")
        return result

    def kill_streams(self) -> None:
        """Those that a test which failed has left would write into the tables of the next one."""
        while self._streams:
            self._streams.pop().kill()

    def compare(self, *written: Json, table: str = CLUSTER) -> None:
        """Everything that was acknowledged is read back at one snapshot, from this table."""
        newest = max(w["timestamp"] for w in written)
        read = self.program("verify", "--at-least", str(newest), "--table", table)
        checksum = 0
        for one in written:
            checksum = flights.add(checksum, one["checksum"])
        assert (read["rows"], read["checksum"]) == (sum(w["rows"] for w in written), checksum)
        self.note(f"          {read['rows']:,} rows compared equal")

    # -- violence

    def execute(self, pod: str, *command: str) -> str:
        """Run something in a pod."""
        said: str = stream(
            self.core.connect_get_namespaced_pod_exec,
            pod,
            NAMESPACE,
            command=list(command),
            stderr=True,
            stdin=False,
            stdout=True,
            tty=False,
        )
        return said

    def signal(self, machine: str, pattern: str, name: str) -> None:
        """Send a signal to the process on a machine whose command line has `pattern`, from outside its container."""
        script = (
            "import os, signal, pathlib\n"
            "for p in pathlib.Path('/proc').glob('[0-9]*'):\n"
            "    try: line = (p / 'cmdline').read_bytes().replace(b'\\0', b' ').decode()\n"
            "    except OSError: continue\n"
            f"    if {pattern!r} in line and 'import os, signal' not in line:\n"
            f"        os.kill(int(p.name), signal.{name}); print('sent', p.name, line[:80])\n"
        )
        pod = f"signal-{int(time.time() * 1000) % 10**8}"
        body = {
            "metadata": {"name": pod},
            "spec": {
                "nodeName": machine,
                "hostPID": True,
                "restartPolicy": "Never",
                "tolerations": [{"operator": "Exists"}],
                "containers": [
                    {
                        "name": "signal",
                        "image": image("operator"),
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["python", "-c", script],
                        "securityContext": {"privileged": True, "runAsUser": 0},
                    }
                ],
            },
        }
        self.core.create_namespaced_pod(NAMESPACE, body)
        self.until(
            f"a process on {machine} got {name}",
            lambda: self.core.read_namespaced_pod(pod, NAMESPACE).status.phase == "Succeeded",
            60,
        )
        said = self.core.read_namespaced_pod_log(pod, NAMESPACE)
        self.core.delete_namespaced_pod(pod, NAMESPACE, grace_period_seconds=0)
        assert "sent" in said, f"no process with {pattern!r} on {machine}"

    def machine_with_both(self) -> str:
        """A machine that carries a master and a node, and not the operator."""
        by_role = {role: {p.spec.node_name for p in self.pods(role)} for role in ("master", "node")}
        return self.place.victim(sorted(by_role["master"] & by_role["node"]))

    def member_on(self, machine: str, role: str) -> str:
        """Name of the member of a role on a machine."""
        return str(next(p.metadata.name for p in self.pods(role) if p.spec.node_name == machine))
