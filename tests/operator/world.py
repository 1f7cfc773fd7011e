"""A Kubernetes and a set of masters in a few dicts: what the plan's actions do, and what follows by itself.

Objects are raw, as the API server has them, and go through observe's own parsers. Invariant: preconditions are
checked as the API server checks them; a name that was used stays on record, so that using it twice is seen; no claim
is let go whose node the masters do not call RETIRED.
"""

from __future__ import annotations

import copy
import datetime
from dataclasses import replace
from typing import Any

from stele.driver.policy import StandingPolicy
from stele.driver.view import NodeState, NodeView, TabletView
from stele.model.ids import NodeId
from stele_operator import observe
from stele_operator.act import Outcome, refusals
from stele_operator.plan import Observation, Plan, make_plan
from stele_operator.plan.actions import (
    Action,
    AlterTable,
    ConfirmFormation,
    CreateObject,
    CreateTable,
    DeleteObject,
    DeletePod,
    DeleteTable,
    FinalizeVersion,
    PatchObject,
    RegisterNode,
    ReleaseClaim,
    RetireClaim,
    SetDriverPolicy,
    SetFinalizers,
    SetMasterCount,
    SetReplicationFactor,
)
from stele_operator.plan.observation import Machine, MasterReport, Table
from stele_operator.plan.order import Held
from tests.operator.world_kube import Forbidden, Refused, merged, run_pod, schedule
from tests.operator.world_masters import (
    alter_table,
    catalog,
    create_table,
    heal,
    set_factor,
    set_master_count,
)

Json = dict[str, Any]
START_S = 1_800_000_000.0
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
COLUMNS = [{"name": "id", "type": "int64"}, {"name": "text", "type": "string", "nullable": True}]


class World:
    """Five machines by default, n1 to n5, in zones z1 to z3."""

    def __init__(self, spec: Json | None = None, machines: int = 5) -> None:
        self.now_s = START_S
        self._count = 0
        self.objects: dict[tuple[str, str], Json] = {}
        self.names_used: list[tuple[str, str]] = []
        self.machines = [Machine(f"n{i + 1}", True, f"z{i % 3 + 1}") for i in range(machines)]
        self.machines_known = True
        self.cluster = self._new("TabletCluster", {"metadata": {"name": "flights"}, "spec": spec or {}})
        self.nodes: dict[str, NodeView] = {}
        self.formed_nodes: set[str] = set()
        self.unconfirmed: set[str] = set()  # masters that say they are not formed, whatever the catalog has
        self.node_names: dict[str, str] = {}
        self.formats: dict[str, str] = {}
        self.confirmed: set[str] = set()
        self.heard_s: dict[str, float] = {}
        self.tables: list[Table] = []
        self.tablets: list[TabletView] = []
        self.masters_wanted = int(self.cluster["spec"].get("masters", {}).get("replicas", 3))
        """How many masters the catalog wants: as many as the cluster was formed with, until another number is set."""
        self.voters: list[tuple[str, int]] = []
        """Masters that hold the catalog, with their replica ids; the first live one leads."""
        self.masters_stay = False
        """A master that is DRAINING holds the catalog until another has taken its place; else it leaves at once."""
        self.changes = 0
        """Changes of the catalog's configuration."""
        self.silent: set[str] = set()
        """Names of pods whose process says nothing."""
        self.forbidden: dict[tuple[str, str], str] = {}
        """Kinds, and how the names begin, of which no new object is taken; and the API server's sentence."""
        self.masters_full = False
        """The masters' disks are full: they take no registration."""
        self.rounds = 2
        """Rounds of the driver in a pass. Two are enough for DRAINING and RETIRED; with one it is cut off between them."""
        self.drains = True
        """Whether replicas leave the nodes that somebody wants drained."""
        self.finalized = self.readable = 1
        self.standing: StandingPolicy | None = StandingPolicy(30_000, 1, 4, 0, 120_000)
        """The policy in the catalog; None: the masters are of a version that keeps none."""
        self.led_since_s = float("-inf")
        """When a master began to lead again. Silence counts from then."""
        self._led = True
        self.volumes_move = False
        """Volumes are bound before their pods have machines, and reach all of them."""

    # -- objects

    def _new(self, kind: str, manifest: Json) -> Json:
        self._count += 1
        created = datetime.datetime.fromtimestamp(self.now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        raw = merged(copy.deepcopy(manifest), {
            "kind": kind,
            "metadata": {
                "namespace": "data",
                "uid": f"{self._count:08x}-0000-0000-0000-000000000000",
                "resourceVersion": str(self._count),
                "creationTimestamp": created,
                "generation": 1,
            },
        })  # fmt: skip
        self.objects[kind, raw["metadata"]["name"]] = raw
        self.names_used.append((kind, raw["metadata"]["name"]))
        return raw

    def touch(self, raw: Json) -> None:
        """Another resourceVersion."""
        self._count += 1
        raw["metadata"]["resourceVersion"] = str(self._count)

    def of(self, kind: str) -> list[Json]:
        """All objects of a kind, by name."""
        return [self.objects[k] for k in sorted(self.objects) if k[0] == kind]

    def group(self, name: str, **spec: Any) -> Json:
        """A TabletGroup that names the cluster."""
        body = {
            "clusterRef": {"name": "flights"},
            "columns": COLUMNS,
            "primaryKey": ["id"],
            "deletionPolicy": "Delete",
        }
        return self._new("TabletGroup", {"metadata": {"name": name}, "spec": {**body, **spec}})

    # -- actions

    def apply(self, action: Action) -> None:
        """What act would have done, and the API server and the masters with it."""
        match action:
            case CreateObject():
                if (action.kind, action.name) in self.objects:
                    if action.must_be_new:
                        raise Refused(f"{action.name} exists")
                    return
                for (kind, begin), sentence in self.forbidden.items():
                    if kind == action.kind and action.name.startswith(begin):
                        raise Forbidden(sentence.format(name=action.name))
                self._new(action.kind, action.manifest)
            case PatchObject():
                raw = self._seen(action.kind, action.name, action.uid, action.resource_version)
                if isinstance(action, RetireClaim | ReleaseClaim):
                    self._check_retired(raw)
                changed = merged(raw, action.patch)
                self.objects[action.kind, action.name] = changed
                self.touch(changed)
            case DeleteObject():
                raw = self._seen(action.kind, action.name, action.uid, action.resource_version)
                machine = raw["spec"].get("nodeName")
                down = machine and not any(m.name == machine and m.ready for m in self.machines)
                if action.kind == "Pod" and down and not (isinstance(action, DeletePod) and action.force):
                    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # nobody there to stop it
                    return
                del self.objects[action.kind, action.name]
            case SetDriverPolicy():
                self.standing = action.policy
            case SetMasterCount():
                set_master_count(self, action)
            case FinalizeVersion():
                assert self.finalized < action.version <= self.readable
                self.finalized = action.version
            case SetFinalizers():
                raw = self._seen("TabletGroup", action.group, action.uid, action.resource_version)
                raw["metadata"]["finalizers"] = list(action.finalizers)
                self.touch(raw)
                if raw["metadata"].get("deletionTimestamp") and not action.finalizers:
                    del self.objects["TabletGroup", action.group]
            case RegisterNode():
                if self.masters_full:
                    raise Forbidden("DISK_FULL: the masters' disks are full")
                node_id = NodeId(action.node_id)
                self.nodes.setdefault(node_id, NodeView(node_id, action.role, "", "", "", ever_heard=False))
                self.heard_s.setdefault(node_id, self.now_s)
                self.node_names[node_id] = action.name
            case ConfirmFormation():
                assert (action.node_id, self.formats[action.node_id]) in [
                    (n, f) for n, f, _ in action.masters
                ]
                if not self.confirmed:
                    self.voters = [(n, i + 1) for i, (n, _, _) in enumerate(action.masters)]
                self.confirmed.add(action.node_id)
            case CreateTable():
                create_table(self, action)
            case SetReplicationFactor():
                set_factor(self, action)
            case AlterTable():
                alter_table(self, action)
            case DeleteTable():
                self.tables = [
                    replace(t, state="REMOVED") if t.table_id == action.table_id else t for t in self.tables
                ]
                self.tablets = [t for t in self.tablets if t.table_id != action.table_id]

    def _seen(self, kind: str, name: str, uid: str, version: str) -> Json:
        raw = self.objects.get((kind, name))
        if (
            raw is None
            or (uid and raw["metadata"]["uid"] != uid)
            or raw["metadata"]["resourceVersion"] != version
        ):
            raise Refused(f"{kind} {name} is not what was seen")
        return raw

    def _check_retired(self, claim: Json) -> None:
        node = self.nodes.get(NodeId(claim["metadata"]["annotations"]["stele.dev/node-id"]))
        if node is None or node.state is not NodeState.RETIRED:
            raise Refused(
                f"{claim['metadata']['name']}: its node is {node.state.name if node else 'unknown'}, not RETIRED"
            )

    # -- what happens by itself

    def settle(self) -> None:
        """Scheduler, kubelets and processes do their work."""
        if self.volumes_move:
            for claim in self.of("PersistentVolumeClaim"):
                claim["status"] = {"phase": "Bound"}
        for raw in self.of("Pod"):
            if not raw["spec"].get("nodeName"):
                self.schedule(raw)
            self.run_pod(raw)
        leads = self.leads()
        if leads and not self._led:
            self.led_since_s = self.now_s
        self._led = leads or not self.formed_nodes

    def schedule(self, raw: Json) -> None:
        """The scheduler gives a pod a machine."""
        schedule(self, raw)

    def run_pod(self, raw: Json) -> None:
        """The kubelet runs a pod, and its process speaks."""
        run_pod(self, raw)

    def leads(self) -> bool:
        """Whether a majority of the catalog's voters is confirmed and runs."""
        running = self.running()
        able = [n for n, _ in self.voters if n in self.confirmed and n in running]
        return len(able) > len(self.voters) // 2

    def accept(self, voters: list[tuple[str, int]]) -> bool:
        """Whether a leader would commit a configuration of these voters, as raft decides it."""
        running = self.running()
        return sum(n in running for n, _ in voters) > len(voters) // 2

    def running(self) -> set[str]:
        """Nodes whose processes run and speak."""
        ready = {m.name for m in self.machines if m.ready}
        return {
            raw["metadata"]["annotations"]["stele.dev/node-id"]
            for raw in self.of("Pod")
            if raw["spec"].get("nodeName") in ready and raw["metadata"]["name"] not in self.silent
        }

    def kill(self, machine: str) -> None:
        """The machine loses its power."""
        self.machines = [replace(m, ready=m.ready and m.name != machine) for m in self.machines]

    # -- observing

    def observe(self) -> Observation:
        """As observe would have found it: by label, and by name what must be there."""
        seen = self._listed()
        found = (self.objects.get(("PersistentVolumeClaim", name)) for name in observe.unlisted_claims(seen))
        return observe.with_claims(seen, [raw for raw in found if raw is not None])

    def _labelled(self, kind: str) -> list[Json]:
        return [
            raw
            for raw in self.of(kind)
            if raw["metadata"].get("labels", {}).get("stele.dev/cluster") == "flights"
        ]

    def _listed(self) -> Observation:
        identity = self.objects.get(("ConfigMap", "flights-identity"))
        pods = tuple(p for p in map(observe.parse_pod, self._labelled("Pod")) if p)
        running = [p for p in pods if p.role == "master" and p.running]
        parsed = observe.parse_identity(identity) if identity else None
        reports = tuple(
            MasterReport(
                p.node_id,
                parsed.cluster_id,
                f"{p.ip}:7051",
                self.formats[p.node_id],
                p.node_id not in self.unconfirmed and p.node_id in {*self.confirmed, *self.formed_nodes},
            )
            for p in running
            if parsed and p.node_id in self.formats
        )
        formed = parsed is not None and bool(parsed.formed)
        return Observation(
            now_s=self.now_s,
            cluster=observe.parse_cluster(self.cluster),
            default_image="stele/node:test",
            identity=parsed,
            claims=tuple(
                c
                for c in (
                    observe.parse_claim(raw, "flights") for raw in self._labelled("PersistentVolumeClaim")
                )
                if c is not None
            ),
            pods=pods,
            machines=tuple(self.machines) if self.machines_known else None,
            existing=tuple(
                observe.parse_existing(kind, raw)
                for kind in ("Service", "PodDisruptionBudget")
                for raw in self._labelled(kind)
            ),
            groups=tuple(observe.parse_group(g) for g in self.of("TabletGroup")),
            master_reports=reports,
            catalog=catalog(self) if formed and self.leads() else None,
            catalog_problem="" if formed and self.leads() else "no master leads",
            fresh_ids=tuple(f"{self._count:08x}{i:024x}" for i in range(1, 129)),
        )

    # -- running

    def step(self, prefix: int | None = None) -> Plan:
        """One pass, of which only the first `prefix` actions happen; then the world goes on for a second."""
        seen = self.observe()
        plan = make_plan(seen)
        outcomes, held = [], Held()
        for action in plan.actions[: len(plan.actions) if prefix is None else prefix]:
            if held.why(action):
                continue
            try:
                self.apply(action)
            except Forbidden as exc:
                outcomes.append(Outcome(action, str(exc)))
                held.failed(action, outcomes[-1])
        if outcomes:
            plan = make_plan(replace(seen, refused=refusals(outcomes)))
        heal(self, plan)
        self.settle()
        self.now_s += 1
        return plan

    def run(self, passes: int = 60) -> Plan:
        """Passes until one has nothing to do, twice in a row."""
        quiet = 0
        for _ in range(passes):
            plan = self.step()
            quiet = 0 if plan.actions else quiet + 1
            if quiet == 2:
                return plan
        raise AssertionError(f"still at work after {passes} passes: {[a.reason for a in plan.actions]}")
