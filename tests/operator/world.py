"""A Kubernetes and a set of masters in a few dicts: what the plan's actions do, and what follows by itself.

Objects are raw, as the API server has them, and go through observe's own parsers. Invariant: preconditions are
checked as the API server checks them; a name that was used stays on record, so that using it twice is seen; no claim
is let go whose node the masters do not call RETIRED.
"""

from __future__ import annotations

import copy
import datetime
from collections import Counter
from dataclasses import replace
from typing import Any

from stele.driver.nodes import node_steps
from stele.driver.planner import plan as plan_steps
from stele.driver.policy import Policy, StandingPolicy
from stele.driver.steps import (
    BeginIntent,
    DemotePeer,
    DrainNode,
    EndWish,
    MoveLeader,
    ParkNode,
    RemovePeer,
    RetireNode,
    ReturnNode,
    Step,
)
from stele.driver.view import ClusterView, NodeState, NodeView, TabletView, Wanted
from stele.model.alter import AddColumn, DropColumn, RenameColumn, SetHistory
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import CATALOG_TABLET_ID, NodeId, ReplicaId, TableId, TabletId
from stele.model.ranges import AddRange, DropRange
from stele_local.scheduler import selected
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
from stele_operator.plan.observation import Catalog, Column, Machine, MasterReport, Table
from stele_operator.plan.order import Held
from stele_operator.plan.ranges import table_ranges, tablets_of
from stele_operator.plan.rules import history_ms

Json = dict[str, Any]
START_S = 1_800_000_000.0
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
COLUMNS = [{"name": "id", "type": "int64"}, {"name": "text", "type": "string", "nullable": True}]


class Refused(Exception):
    """A precondition did not hold."""


def merged(there: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(there) if isinstance(there, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def suits(spec: Json, machine: Machine) -> bool:
    """What Kubernetes makes of a pod's nodeSelector, node affinity and tolerations."""
    node = {
        "metadata": {
            "name": machine.name,
            "labels": {**machine.labels, "topology.kubernetes.io/zone": machine.zone},
        }
    }
    if not selected(spec, node):
        return False
    for taint in machine.taints:
        borne = [
            t
            for t in spec["tolerations"]
            if t["key"] == taint.key
            and t.get("effect", taint.effect) == taint.effect
            and (t["operator"] == "Exists" or t.get("value", "") == taint.value)
        ]
        if taint.effect != "PreferNoSchedule" and not borne:
            return False
    return True


def wanted(node: NodeView, what: Wanted, by: str = "", reason: str = "", left_ms: int = 0) -> NodeView:
    """The node once somebody has asked for it."""
    given_away = what in (Wanted.DRAINED, Wanted.RETIRED)
    return replace(
        node,
        state=NodeState.DRAINING if given_away else NodeState.ACTIVE,
        given_up=False,
        wanted=what,
        wanted_by=by,
        wanted_reason=reason,
        wanted_left_ms=left_ms,
    )


class Forbidden(Exception):
    """The API server does not take it: a quota, or an admission rule."""


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
                self._set_master_count(action)
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
                self._create_table(action)
            case SetReplicationFactor():
                self._set_factor(action)
            case AlterTable():
                self._alter_table(action)
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

    def _alter_table(self, action: AlterTable) -> None:
        (table,) = [t for t in self.tables if t.table_id == action.table_id]
        columns = list(table.columns)
        covered = list(table.range.covered) if table.range is not None else []
        for step in action.steps:
            match step:
                case DropRange():
                    covered.remove((step.start, step.end))
                case AddRange():
                    covered.append((step.start, step.end))
                case AddColumn():
                    columns.append(Column(step.name, step.type, step.nullable))
                case DropColumn():
                    columns = [c for c in columns if c.name != step.name]
                case RenameColumn():
                    columns = [replace(c, name=step.new_name) if c.name == step.name else c for c in columns]
                case SetHistory():
                    table = replace(table, history_ms=step.history_ms)
        ranges = replace(table.range, covered=tuple(sorted(covered))) if table.range is not None else None
        altered = replace(table, columns=tuple(columns), range=ranges, **dict(action.notes))
        self.tables = [altered if t.table_id == altered.table_id else t for t in self.tables]

    def _set_master_count(self, action: SetMasterCount) -> None:
        """As the masters do it; and the identity must have a lower number before."""
        nodes = {n.node_id: n for n in self.nodes.values()}
        assert action.before == self.masters_wanted != action.masters
        recorded = int(self.objects["ConfigMap", "flights-identity"]["data"]["masters"])
        assert recorded <= action.masters, "those that leave would look like lost volumes"
        if action.masters > self.masters_wanted:
            able = [n for n in nodes.values() if n.role == "master" and n.takes_replicas and self._heard(n)]
            assert len({n.host for n in able}) >= action.masters
        live = [n for n, _ in self.voters if n in nodes and self._heard(nodes[NodeId(n)])]
        if action.masters < self.masters_wanted and len(live) < action.masters:
            raise Forbidden("NOT_READY: too few of them are heard")
        self.masters_wanted = action.masters

    def _heard(self, node: NodeView) -> bool:
        return node.ever_heard and self.now_s - self.heard_s[node.node_id] < 3

    def _create_table(self, action: CreateTable) -> None:
        if any(t.table_id == action.table_id for t in self.tables):
            return
        spec = action.spec
        hashes = tuple((tuple(h.columns), h.buckets) for h in spec.partitioning.hash)
        count = tablets_of(spec)
        ranges = table_ranges(spec)
        columns = tuple(Column(c.name, c.type, c.nullable) for c in spec.columns)
        key = tuple(spec.primaryKey)
        factor = spec.replicationFactor
        made = Table(action.table_id, action.name, "RUNNING", columns, key, hashes, ranges, factor, count)
        notes = {
            "owner": spec.owner or "",
            "comment": spec.comment or "",
            "history_ms": history_ms(spec) or 0,
        }
        self.tables.append(replace(made, **notes))
        able = [n for n in self.nodes.values() if n.role == "node" and n.state is NodeState.ACTIVE]
        for i in range(count):
            peers = tuple(
                Peer(able[(i + k) % len(able)].node_id, ReplicaId(k + 1), "a:1", MemberType.VOTER)
                for k in range(factor)
            )
            self.tablets.append(
                TabletView(
                    TabletId(f"{len(self.tablets) + 1:08x}{i:024x}"), TableId(action.table_id), action.name, "RUNNING", Configuration(-1, peers),
                    1, peers[0].node_id, factor,
                )
            )  # fmt: skip

    def _set_factor(self, action: SetReplicationFactor) -> None:
        for number, table in enumerate(self.tables):
            if table.table_id == action.table_id and table.replication_factor != action.factor:
                before = table.replication_factor
                self.tables[number] = replace(
                    table, replication_factor=action.factor, replication_factor_before=before
                )
        self.tablets = [
            replace(t, replication_factor=action.factor) if t.table_id == action.table_id else t
            for t in self.tablets
        ]

    # -- what happens by itself

    def settle(self) -> None:
        """Scheduler, kubelets and processes do their work."""
        if self.volumes_move:
            for claim in self.of("PersistentVolumeClaim"):
                claim["status"] = {"phase": "Bound"}
        for raw in self.of("Pod"):
            if not raw["spec"].get("nodeName"):
                self._schedule(raw)
            self._run(raw)
        leads = self.leads()
        if leads and not self._led:
            self.led_since_s = self.now_s
        self._led = leads or not self.formed_nodes

    def _schedule(self, raw: Json) -> None:
        role = raw["metadata"]["labels"]["stele.dev/role"]
        claim = self.objects["PersistentVolumeClaim", raw["metadata"]["name"]]
        pinned = claim["metadata"]["annotations"].get("volume.kubernetes.io/selected-node")
        taken = {
            p["spec"].get("nodeName")
            for p in self.of("Pod")
            if p["metadata"]["labels"]["stele.dev/role"] == role
        }
        for machine in self.machines:
            free = machine.name not in taken and pinned in (None, machine.name)
            if machine.ready and free and suits(raw["spec"], machine):
                raw["spec"]["nodeName"] = machine.name
                if not self.volumes_move:
                    claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = machine.name
                claim["status"] = {"phase": "Bound"}
                self.touch(claim)
                return
        raw["status"] = {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5 machines fit"}
        ]}  # fmt: skip

    def _run(self, raw: Json) -> None:
        machine = next((m for m in self.machines if m.name == raw["spec"].get("nodeName")), None)
        if machine is None:
            return
        metadata = raw["metadata"]
        name, node_id = metadata["name"], NodeId(metadata["annotations"]["stele.dev/node-id"])
        role = metadata["labels"]["stele.dev/role"]
        up = machine.ready and name not in self.silent
        fenced = node_id in self.nodes and self.nodes[node_id].asked is Wanted.FENCED
        holders = {n for n, _ in self.voters}
        waits = role == "master" and holders and node_id not in holders  # for a copy of the catalog
        raw["status"] = {
            "phase": "Running",
            "podIP": f"10.0.0.{int(metadata['uid'][:8], 16) % 250}",
            "conditions": [
                {"type": "Ready", "status": "True" if up and not fenced and not waits else "False"}
            ],
            "containerStatuses": [
                {"name": "stele", "state": {"running": {}} if machine.ready else {}, "restartCount": 0}
            ],
        }
        self.touch(raw)
        if not up:
            return
        if role == "master":
            self.formats.setdefault(node_id, f"format-{node_id[:8]}")
            if "--first-masters" in raw["spec"]["containers"][0]["args"] and node_id not in self.confirmed:
                return
        if self.leads() or role == "master":
            view = self.nodes.get(node_id) or NodeView(node_id, role, "", "", "")
            self.nodes[node_id] = replace(view, machine=machine.name, ever_heard=True, address="a:1")
            self.heard_s[node_id] = self.now_s
            self.formed_nodes.add(node_id)

    def leads(self) -> bool:
        """Whether a majority of the catalog's voters is confirmed and runs."""
        running = self._running()
        able = [n for n, _ in self.voters if n in self.confirmed and n in running]
        return len(able) > len(self.voters) // 2

    def _accept(self, voters: list[tuple[str, int]]) -> bool:
        """Whether a leader would commit a configuration of these voters, as raft decides it."""
        running = self._running()
        return sum(n in running for n, _ in voters) > len(voters) // 2

    def _running(self) -> set[str]:
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

    def heal(self, plan: Plan) -> None:
        """What a driver would end at: nothing names a lost node any more, and it is retired."""
        if plan.policy is None:
            return
        for _ in range(self.rounds):
            for step in node_steps(self._catalog().view, plan.policy):
                self._state(step)
            for node in list(self.nodes.values()):
                asked = self.drains and node.asked is not Wanted.IN_SERVICE
                if node.state is NodeState.DRAINING and (node.node_id in plan.policy.lost or asked):
                    self._move(node.node_id)

        self._follow(plan.policy)

    def _follow(self, policy: Policy) -> None:
        """One step of the driver for the catalog. A copy takes no time, and its replica votes at once."""
        view = self._catalog().view
        for step in plan_steps(view, policy):
            if step.tablet_id != CATALOG_TABLET_ID:
                continue
            match step:
                case BeginIntent():
                    self.voters.append((step.target_node, self.changes + 100))
                    self.confirmed.add(step.target_node)
                case RemovePeer() | DemotePeer():
                    left = [v for v in self.voters if v[0] != step.node_id]
                    if self._accept(left):
                        self.voters = left
                case MoveLeader():
                    self.voters = [*self.voters[1:], self.voters[0]]
            self.changes += 1

    def _state(self, step: Step) -> None:
        node = replace(self.nodes[step.node_id], given_up=False)  # type: ignore[attr-defined]
        match step:
            case DrainNode(given_up=True):
                node = replace(node, state=NodeState.DRAINING, given_up=True, wanted=None, wanted_by="")
            case DrainNode():
                node = wanted(node, Wanted.RETIRED, "driver", step.reason)
            case ParkNode():
                node = wanted(node, Wanted.PARKED, "driver", step.reason, step.for_ms)
            case EndWish():
                assert node.wanted_by == "driver"
                node = wanted(node, Wanted.IN_SERVICE)
            case ReturnNode():
                node = replace(node, state=NodeState.ACTIVE)
            case RetireNode():
                assert node.node_id not in {n for n, _ in self.voters}, "it holds the catalog"
                node = replace(node, state=NodeState.RETIRED)
            case _:
                raise AssertionError(step)
        self.nodes[node.node_id] = node
        if node.state is NodeState.DRAINING and not self.masters_stay:
            self.voters = [v for v in self.voters if v[0] != node.node_id]

    def _move(self, node_id: str) -> None:
        """Every tablet that has another place leaves the node."""
        alive = [
            n
            for n in self.nodes.values()
            if n.role == "node"
            and n.state is NodeState.ACTIVE
            and n.ever_heard
            and self.now_s - self.heard_s[n.node_id] < 3
        ]
        moved = []
        for tablet in self.tablets:
            there = {p.node_id for p in tablet.config.peers}
            target = next((n.node_id for n in alive if n.node_id not in there), "")
            if not target:
                moved.append(tablet)
                continue
            peers = tuple(
                replace(p, node_id=target) if p.node_id == node_id else p for p in tablet.config.peers
            )
            leader = target if tablet.leader_node == node_id else tablet.leader_node
            moved.append(
                replace(tablet, config=Configuration(9, peers), leader_node=leader)
                if node_id in there
                else tablet
            )
        self.tablets = moved

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
            catalog=self._catalog() if formed and self.leads() else None,
            catalog_problem="" if formed and self.leads() else "no master leads",
            fresh_ids=tuple(f"{self._count:08x}{i:024x}" for i in range(1, 129)),
        )

    def _catalog(self) -> Catalog:
        held = Counter(p.node_id for t in self.tablets for p in t.config.peers)
        nodes = tuple(
            replace(
                n,
                heartbeat_age_ms=int((self.now_s - max(self.heard_s[n.node_id], self.led_since_s)) * 1000),
                ever_heard=n.ever_heard and self.heard_s[n.node_id] >= self.led_since_s,
                replicas=held[n.node_id],
            )
            for n in self.nodes.values()
        )
        by_id = {n.node_id: n for n in nodes}
        running = self._running()
        live = [n for n, _ in self.voters if n in by_id and n in running]
        peers = tuple(Peer(NodeId(n), ReplicaId(i), "a:1", MemberType.VOTER) for n, i in self.voters)
        catalog = TabletView(
            TabletId(CATALOG_TABLET_ID), TableId(""), "", "RUNNING", Configuration(self.changes - 1, peers), 1,
            live[0] if live else self.voters[0][0], self.masters_wanted,
        )  # fmt: skip
        view = ClusterView(nodes, (catalog, *self.tablets))
        return Catalog(
            view,
            tuple(t for t in self.tables if t.state != "REMOVED"),
            frozenset(self.formed_nodes),
            dict(self.node_names),
            self.standing,
            self.finalized,
            self.readable,
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
        self.heal(plan)
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
