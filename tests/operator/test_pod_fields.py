"""What a user says of the pods of masters and nodes: who takes it, where they land, and what stays as it was."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.observe import parse_machine
from stele_operator.plan import make_plan
from stele_operator.plan.actions import CreatePod, DeletePod
from stele_operator.plan.fates import State
from stele_operator.plan.findings import Kind
from stele_operator.plan.manifests import pod, spec_hash
from stele_operator.plan.observation import Role, Taint
from stele_operator.plan.status import restart_pending
from tests.operator.cluster import Bench, bench
from tests.operator.test_tables import conditions
from tests.operator.world import World
from tests.operator.worlds import check, made, node_of

Json = dict[str, Any]
SSD = {"disk": "ssd"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
DEDICATED = {"key": "stele", "operator": "Equal", "value": "nodes", "effect": "NoSchedule"}
OURS = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
    for taint in ("not-ready", "unreachable")
]


def world_of(spec: Json, labels: Json | None = None, taints: Json | None = None, machines: int = 5) -> World:
    """Machines with labels and taints of their own, by name; nothing has been done yet."""
    world = World(spec, machines=machines)
    world.machines = [
        replace(m, labels=(labels or {}).get(m.name, {}), taints=(taints or {}).get(m.name, ()))
        for m in world.machines
    ]
    return world


def asks(*terms: Json) -> Json:
    """An affinity for machines of which one of the terms holds."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


def label(key: str, operator: str, *values: str) -> Json:
    """A term that says something of one label."""
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def name(operator: str, value: str) -> Json:
    """A term that says something of the machine's name."""
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": [value]}]}


def pods(world: World, role: str) -> list[Json]:
    """Pods of a role."""
    return [p for p in world.of("Pod") if p["metadata"]["labels"]["stele.dev/role"] == role]


def where(world: World, role: str) -> set[str]:
    """Machines of a role's pods; the empty one of those that have none."""
    return {p["spec"].get("nodeName", "") for p in pods(world, role)}


EVEN = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/rack",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {},  # all: not the same as none
}

# -- what pods are told


def test_each_field_is_in_the_pods_it_is_said_of() -> None:
    world = World(
        {
            "imagePullSecrets": [{"name": "registry"}, {"name": "mirror"}],
            "serviceAccountName": "tablets",
            "masters": {"priorityClassName": "high", "podLabels": {"team": "data"}},
            "nodes": {
                "replicas": 3,
                "priorityClassName": "higher",
                "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "stele", "value": "nodes"}],
                "podLabels": {"cost.example.org/centre": "42"},
                "podAnnotations": {"sidecar.istio.io/inject": "false"},
                "topologySpreadConstraints": [EVEN],
                "runtimeClassName": "kata",
                "schedulerName": "volcano",
            },
        }
    )
    world.run()
    for role in ("master", "node"):
        for raw in pods(world, role):
            spec, metadata = raw["spec"], raw["metadata"]
            assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
            assert spec["serviceAccountName"] == "tablets"
            assert spec["automountServiceAccountToken"] is False
            assert spec["priorityClassName"] == ("high" if role == "master" else "higher")
            assert "nodeSelector" not in spec
            others = {
                "topologySpreadConstraints": [EVEN],
                "runtimeClassName": "kata",
                "schedulerName": "volcano",
            }
            assert {name: spec.get(name) for name in others} == (
                dict.fromkeys(others) if role == "master" else others
            )
            more = [
                {"key": "gpu", "operator": "Exists"},
                {"key": "stele", "operator": "Equal", "value": "nodes"},
            ]
            assert spec["tolerations"] == (OURS if role == "master" else OURS + more)
            own = {
                "stele.dev/cluster": "flights",
                "stele.dev/role": role,
                "app.kubernetes.io/managed-by": "stele-operator",
            }
            theirs = {"team": "data"} if role == "master" else {"cost.example.org/centre": "42"}
            assert metadata["labels"] == own | theirs
            assert metadata["annotations"].get("sidecar.istio.io/inject") == (
                None if role == "master" else "false"
            )
    check(world)


def test_what_an_affinity_says_holds_beside_the_operators_own_terms() -> None:
    """Terms for machines are said with "or": the zone, and who is to be left where it is, must be in each."""
    here = {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "kubernetes.io/hostname"}
    better = [{"weight": 5, "preference": label("disk", "In", "nvme")}]
    weighed = [{"weight": 9, "podAffinityTerm": here}]
    terms = [label("disk", "Exists"), name("NotIn", "n1"), {}]
    part = {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}, PREFERRED: better},
        "podAffinity": {PREFERRED: weighed},
        "podAntiAffinity": {REQUIRED: [here], PREFERRED: weighed},
    }
    spec = TabletClusterSpec.model_validate({"nodes": {"affinity": part}})
    shared = TabletClusterSpec.model_validate({"nodes": {"affinity": part, "machineSpread": "Preferred"}})

    def told(spec: TabletClusterSpec, zone: str, *off: str) -> Json:
        seen = made().observe()
        claim = replace(next(c for c in seen.claims if c.role == "node"), zone=zone)
        found: Json = pod(seen.cluster, spec, claim, "stele/node:test", [], [], off)["spec"]["affinity"]
        return found

    ours = told(TabletClusterSpec(), "")["podAntiAffinity"][REQUIRED]
    assert told(spec, "") == {
        "nodeAffinity": {
            REQUIRED: {"nodeSelectorTerms": [label("disk", "Exists") | {}, name("NotIn", "n1"), {}]},
            PREFERRED: better,
        },
        "podAffinity": {PREFERRED: weighed},
        "podAntiAffinity": {REQUIRED: [*ours, here], PREFERRED: weighed},
    }
    zone = label("topology.kubernetes.io/zone", "In", "z1")["matchExpressions"]
    off = name("NotIn", "n2")["matchFields"]
    disk, not_n1 = label("disk", "Exists")["matchExpressions"], name("NotIn", "n1")["matchFields"]
    assert told(spec, "z1", "n2")["nodeAffinity"] == {
        REQUIRED: {
            "nodeSelectorTerms": [
                {"matchExpressions": [*disk, *zone], "matchFields": off},
                {"matchFields": [*not_n1, *off], "matchExpressions": zone},
                {},  # no machine meets it; with more in it some would
            ]
        },
        PREFERRED: better,
    }
    (own,) = told(TabletClusterSpec.model_validate({"nodes": {"machineSpread": "Preferred"}}), "")[
        "podAntiAffinity"
    ][PREFERRED]
    assert told(shared, "")["podAntiAffinity"] == {REQUIRED: [here], PREFERRED: [own, *weighed]}


def test_labels_and_notes_of_the_operator_win() -> None:
    """The API server refuses others in their place; one whose definitions are not ours might not."""
    mine = {"stele.dev/role": "bystander", "stele.dev/claim-uid": "x", "stele.dev/spec-hash": "y"}
    world = World({"nodes": {"replicas": 3, "podLabels": mine, "podAnnotations": mine}})
    world.run()
    assert len(pods(world, "node")) == 3 and not pods(world, "bystander")
    assert not restart_pending(world.observe())


# -- what is compared

AS_BEFORE: list[tuple[Json, Role, str]] = [
    ({}, "master", "f5f13bdba11f13ff"),
    ({}, "node", "f5f13bdba11f13ff"),
    ({"nodes": {"resources": {"requests": {"memory": "2Gi"}}}}, "node", "14d2cc0b836540cb"),
    ({"nodes": {"machineSpread": "Preferred"}}, "node", "016265402a61d132"),
]
NOTHING: Json = {
    "nodeSelector": {},
    "tolerations": [],
    "affinity": {"podAffinity": {}},
    "topologySpreadConstraints": [],
    "podLabels": {},
    "podAnnotations": {},
}


@pytest.mark.parametrize(("spec", "role", "before"), AS_BEFORE, ids=["masters", "nodes", "memory", "shared"])
def test_pods_that_an_earlier_release_made_are_as_asked_for(spec: Json, role: Role, before: str) -> None:
    """An upgrade of the operator makes nothing RestartPending, whatever a template leaves empty."""
    assert spec_hash(TabletClusterSpec.model_validate(spec), role, "stele/node:test") == before
    empty = {part: {**spec.get(part, {}), **NOTHING} for part in ("masters", "nodes")}
    same = TabletClusterSpec.model_validate({**spec, **empty, "imagePullSecrets": []})
    assert spec_hash(same, role, "stele/node:test") == before


CHANGES: list[tuple[str, Json, int]] = [
    ("imagePullSecrets", {"imagePullSecrets": [{"name": "registry"}]}, 8),
    ("serviceAccountName", {"serviceAccountName": "tablets"}, 8),
    ("nodeSelector", {"nodes": {"replicas": 5, "nodeSelector": SSD}}, 5),
    ("tolerations", {"masters": {"tolerations": [{"key": "stele", "operator": "Exists"}]}}, 3),
    ("priorityClassName", {"nodes": {"replicas": 5, "priorityClassName": "high"}}, 5),
    ("affinity", {"nodes": {"replicas": 5, "affinity": asks(name("NotIn", "n9"))}}, 5),
    ("topologySpreadConstraints", {"masters": {"topologySpreadConstraints": [EVEN]}}, 3),
    ("runtimeClassName", {"masters": {"runtimeClassName": "kata"}}, 3),
    ("schedulerName", {"nodes": {"replicas": 5, "schedulerName": "volcano"}}, 5),
    ("podLabels", {"masters": {"podLabels": {"team": "data"}}}, 3),
    ("podAnnotations", {"nodes": {"replicas": 5, "podAnnotations": {"note": "x"}}}, 5),
]


@pytest.mark.parametrize(("change", "count"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_what_runs_keeps_what_it_has_until_it_is_made_again(change: Json, count: int) -> None:
    """As with another image."""
    world = made()
    before = {p["metadata"]["uid"] for p in world.of("Pod")}
    world.cluster["spec"] |= change
    world.run()
    assert {p["metadata"]["uid"] for p in world.of("Pod")} == before
    pending = restart_pending(world.observe())
    assert len(pending) == count
    if "nodeSelector" in change.get("nodes", {}):
        return  # no machine carries it: see below
    del world.objects["Pod", pending[0]]
    world.run()
    assert restart_pending(world.observe()) == pending[1:]


# -- where they land


def test_members_go_where_node_selector_and_tolerations_let_them() -> None:
    taint = Taint("stele", "nodes", "NoSchedule")
    world = world_of(
        {
            "masters": {"nodeSelector": {"role": "control"}},
            "nodes": {"replicas": 3, "nodeSelector": SSD, "tolerations": [DEDICATED]},
        },
        labels={**{f"n{n}": {"role": "control"} for n in (1, 2, 3)}, **{f"n{n}": SSD for n in (4, 5, 6)}},
        taints={f"n{n}": (taint,) for n in (4, 5, 6)},
        machines=7,
    )
    world.run()
    assert where(world, "master") == {"n1", "n2", "n3"} and where(world, "node") == {"n4", "n5", "n6"}
    assert not make_plan(world.observe()).findings
    check(world)


BARRED: list[tuple[str, Json, Json]] = [
    ("labels", {"nodeSelector": SSD}, {"labels": {"n2": SSD, "n3": SSD}}),
    ("a name", {"affinity": asks(name("NotIn", "n1"))}, {}),
    ("another name", {"affinity": asks(name("In", "n2"))}, {}),
    ("a term that says nothing", {"affinity": asks({}, name("In", "n2"))}, {}),
    (
        "another value",
        {"affinity": asks(label("disk", "In", "ssd", "nvme"))},
        {"labels": {"n1": {"disk": "hdd"}, "n2": SSD}},
    ),
    ("this value", {"affinity": asks(label("disk", "NotIn", "ssd"))}, {"labels": {"n1": SSD}}),
    ("any value", {"affinity": asks(label("disk", "DoesNotExist"))}, {"labels": {"n1": SSD}}),
    ("no value", {"affinity": asks(label("disk", "Exists"))}, {"labels": {"n2": SSD}}),
    (
        "as many",
        {"affinity": asks(label("cores", "Gt", "8"))},
        {"labels": {"n1": {"cores": "8"}, "n2": {"cores": "9"}}},
    ),
    (
        "too many",
        {"affinity": asks(label("cores", "Lt", "9"))},
        {"labels": {"n1": {"cores": "9"}, "n2": {"cores": "8"}}},
    ),
    (
        "no number",
        {"affinity": asks(label("cores", "Lt", "9"))},
        {"labels": {"n1": {"cores": "x"}, "n2": {"cores": "8"}}},
    ),
    (
        "one of two that must hold",
        {"affinity": asks({**name("NotIn", "n3"), **label("disk", "Exists")})},
        {"labels": {"n2": SSD, "n3": SSD}},
    ),
    ("a taint", {}, {"taints": {"n1": (Taint("gpu", "", "NoSchedule"),)}}),
    ("a taint that evicts", {}, {"taints": {"n1": (Taint("gpu", "", "NoExecute"),)}}),
    (
        "a taint of another value",
        {"tolerations": [{"key": "gpu", "value": "a100"}]},
        {"taints": {"n1": (Taint("gpu", "h100", "NoSchedule"),)}},
    ),
    (
        "a taint of another effect",
        {"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]},
        {"taints": {"n1": (Taint("gpu", "", "NoSchedule"),)}},
    ),
]
FREE: list[tuple[str, Json, Json]] = [
    ("a wish", {}, {"taints": {"n1": (Taint("gpu", "", "PreferNoSchedule"),)}}),
    ("one of two terms", {"affinity": asks(label("disk", "Exists"), name("In", "n1"))}, {}),
    (
        "a machine that would be better",
        {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": name("In", "n2")}]}}},
        {},
    ),
    (
        "any value",
        {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
        {"taints": {"n1": (Taint("gpu", "h100", "NoSchedule"),)}},
    ),
    (
        "its value",
        {"tolerations": [{"key": "gpu", "value": "h100", "effect": "NoSchedule"}]},
        {"taints": {"n1": (Taint("gpu", "h100", "NoSchedule"),)}},
    ),
]


@pytest.mark.parametrize(
    ("part", "machines", "zone"),
    [(*case[1:], "z2") for case in BARRED] + [(*case[1:], "z1") for case in FREE],
    ids=[f"not {case[0]}" for case in BARRED] + [case[0] for case in FREE],
)
def test_a_new_member_is_given_no_zone_where_no_machine_is_for_it(
    part: Json, machines: Json, zone: str
) -> None:
    """A zone stands for good: the member would wait there, though there is room in others."""
    world = world_of(
        {"zones": ["z1", "z2", "z3"], "masters": {"replicas": 1}, "nodes": {"replicas": 1, **part}},
        **machines,
        machines=3,
    )
    world.run()
    (claim,) = (c for c in world.of("PersistentVolumeClaim") if "node" in c["metadata"]["name"])
    assert claim["metadata"]["annotations"]["stele.dev/zone"] == zone
    assert where(world, "node") == {f"n{zone[1]}"}


def test_one_that_replaces_a_lost_node_waits_for_a_machine_that_is_for_it_and_says_why() -> None:
    spec = {"nodes": {"replicas": 3, "nodeSelector": SSD}, "healing": {"machineLostAfter": "5s"}}
    world = world_of(spec, labels={f"n{n}": SSD for n in (1, 2, 3)})
    world.run()
    world.kill("n3")
    for _ in range(8):
        world.step()
    world.run()
    assert where(world, "node") == {"n1", "n2", ""}  # n4 and n5 are up and free
    assert conditions(world)["Degraded"][1] == "NodePending"
    assert "no machine takes it: 0/5 machines fit" in conditions(world)["Degraded"][2]
    world.machines = [replace(m, labels=SSD) if m.name == "n5" else m for m in world.machines]
    world.run()
    assert where(world, "node") == {"n1", "n2", "n5"}
    check(world)


# -- what is told


def test_a_selector_that_no_machine_carries_is_told_before_a_pod_waits_for_it() -> None:
    world = made()
    world.cluster["spec"]["nodes"] |= {"nodeSelector": {"disk": "sdd", "arch": "x"}}
    plan = world.run()
    (stalled,) = [f for f in plan.findings if f.kind is Kind.STALLED]
    assert stalled.reason == "NoMachineSelected"
    assert stalled.message == "nodes.nodeSelector asks for arch=x, disk=sdd, which no machine carries"
    assert {m.state for m in plan.members} == {State.READY}, "nothing that runs is touched"
    world.cluster["spec"]["nodes"] |= {"affinity": asks(label("cores", "Gt", "8"), name("In", "n9"))}
    (both,) = [f for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED]
    terms = "cores Gt 8 or metadata.name In n9"
    asked = f"nodes.nodeSelector and nodes.affinity ask for arch=x, disk=sdd, and for {terms}"
    assert both.message == f"{asked}, which no machine carries"
    del world.cluster["spec"]["nodes"]["nodeSelector"]
    (alone,) = [f for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED]
    assert alone.message == f"nodes.affinity asks for {terms}, which no machine carries"
    world.machines_known = False
    assert not [f for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED]


def test_a_zone_in_which_no_machine_carries_it_is_named() -> None:
    """Else members would stand in fewer zones than were asked for, and nobody would know."""
    world = world_of(
        {
            "zones": ["z1", "z2", "z3"],
            "masters": {"replicas": 1},
            "nodes": {"replicas": 2, "nodeSelector": SSD},
        },
        labels={"n1": SSD, "n2": SSD, "n4": SSD},
    )
    plan = world.run()
    assert [(f.kind, f.message) for f in plan.findings] == [
        (Kind.STALLED, "nodes.nodeSelector asks for disk=ssd, which no machine in zone z3 carries")
    ]
    assert where(world, "node") == {"n1", "n2"}


def test_members_on_machines_that_the_selector_leaves_out_are_named_and_stay() -> None:
    world = world_of({"nodes": {"replicas": 3}}, labels={"n1": SSD, "n2": SSD, "n4": SSD})
    world.run()
    out = node_of(world, "n3")
    world.cluster["spec"]["nodes"] |= {"nodeSelector": SSD}
    plan = world.run()
    (told,) = [f for f in plan.findings if f.reason == "Misplaced"]
    assert f"{out} (on machine n3, which nodes.nodeSelector leaves out)" in told.message
    assert "n1" not in told.message and where(world, "node") == {"n1", "n2", "n3"}
    status, reason, message = conditions(world)["Reconciling"]
    assert (status, reason) == ("False", "Misplaced") and "RestartPending" not in reason
    assert "made from an older spec" in message
    world.cluster["spec"]["nodes"] |= {"nodeSelector": {}, "affinity": asks(name("NotIn", "n1"))}
    (told,) = [f for f in world.run().findings if f.reason == "Misplaced"]
    assert f"{node_of(world, 'n1')} (on machine n1, which nodes.affinity leaves out)" in told.message


def test_a_scheduler_that_places_nothing_is_named() -> None:
    """Nobody else would: such a pod has no condition."""
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"] |= {"replicas": 4, "schedulerName": "volcano"}
    world.machines = world.machines[:3]
    world.run()
    waits = world.objects["Pod", "flights-node-3"]
    waits["status"] = {"phase": "Pending"}
    for seconds, told in ((1, ""), (60, "volcano (nodes.schedulerName) has not placed it")):
        world.now_s += seconds
        found = [f.message for f in make_plan(world.observe()).findings if f.reason == "NodePending"]
        assert [told in message for message in found] == [True] * bool(told)


def test_one_whose_machine_is_left_out_since_is_made_anew_elsewhere_once_its_claim_is_deleted() -> None:
    """As the message says."""
    world = world_of({"nodes": {"replicas": 3}}, labels={"n1": SSD, "n2": SSD, "n4": SSD})
    world.run()
    out = node_of(world, "n3")
    world.cluster["spec"]["nodes"] |= {"nodeSelector": SSD}
    world.run()
    del world.objects["PersistentVolumeClaim", out]
    del world.objects["Pod", out]
    for _ in range(8):
        world.step()
    world.run()
    assert where(world, "node") == {"n1", "n2", "n4"}
    check(world)


def test_a_selector_that_is_put_right_reaches_pods_that_wait() -> None:
    world = world_of({"nodes": {"replicas": 3, "nodeSelector": {"disk": "sdd"}}})
    world.machines = [replace(m, labels=SSD) for m in world.machines]
    for _ in range(20):
        world.step()
    assert where(world, "node") == {""}
    assert not make_plan(world.observe()).actions, "nothing is tried in vain"
    assert conditions(world)["Stalled"][1] == "NoMachineSelected"
    world.cluster["spec"]["nodes"] |= {"nodeSelector": SSD}
    plan = world.step()
    assert len([a for a in plan.actions if isinstance(a, DeletePod)]) == 3
    world.run()
    assert "" not in where(world, "node") and not restart_pending(world.observe())
    check(world)


REFUSED = {
    "priority": 'pods "{name}" is forbidden: no PriorityClass with name high was found',
    "account": 'pods "{name}" is forbidden: error looking up service account data/tablets: serviceaccount "tablets" not found',
}


@pytest.mark.parametrize("sentence", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_pod_names_and_is_not_there_is_told_in_the_api_servers_words(sentence: str) -> None:
    world = made()
    name = node_of(world, "n2")
    world.forbidden["Pod", name] = sentence
    del world.objects["Pod", name]
    node_id = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]["stele.dev/node-id"]
    world.heard_s[node_id] -= 60
    plan = world.step()
    assert any(isinstance(a, CreatePod) for a in plan.actions), "it is tried again"
    (lost,) = [f for f in plan.findings if f.reason == "NodeLost"]
    assert sentence.format(name=name) in lost.message


def test_labels_and_taints_of_a_machine_are_read() -> None:
    raw = {
        "metadata": {"name": "n1", "labels": {"disk": "ssd", "topology.kubernetes.io/zone": "z1"}},
        "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "a", "value": "b", "effect": "NoExecute"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip
    seen = parse_machine(copy.deepcopy(raw))
    assert seen.labels == raw["metadata"]["labels"] and seen.zone == "z1"
    assert seen.taints == (Taint("gpu", "", "NoSchedule"), Taint("a", "b", "NoExecute"))
    bare = parse_machine({"metadata": {"name": "n2"}})
    assert (bare.labels, bare.taints, bare.schedulable) == ({}, (), True)


# -- on a Kubernetes


async def give(made: Bench, machine: str, label: str, tainted: bool) -> None:
    """What `kubectl label node` and `kubectl taint node` do."""
    taint = {"key": "stele", "value": label, "effect": "NoSchedule"}
    patch: Json = {"metadata": {"labels": {"stele": label}}, "spec": {"taints": [taint] if tainted else None}}
    await made.kube.patch("Node", "", machine, patch)


async def test_a_cluster_on_machines_of_its_own_stands_there_and_says_for_what_it_waits(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as made:

        async def there() -> bool:
            return await made.names("Node") == {f"n{n}" for n in range(1, 6)}

        async def placed(role: str) -> list[str]:
            found = await made.kube.list("Pod", "default", f"stele.dev/role={role}")
            return sorted(p["spec"].get("nodeName", "") for p in found)

        async def waits() -> bool:
            _, reason, message = await made.condition("TabletCluster", "flights", "Degraded")
            words = (
                "no machine takes it: 0/5 nodes are available",
                "didn't match Pod's node affinity/selector",
            )
            told = reason == "NodePending" and all(word in message for word in words)
            return told and await placed("node") == ["", "n4", "n5"]

        async def ready() -> bool:
            cluster = await made.kube.get("TabletCluster", "default", "flights")
            return ((cluster or {}).get("status") or {}).get("readyReplicas") == 3

        await made.until("the machines are there", there)
        await give(made, "n2", "masters", tainted=False)
        for machine in ("n4", "n5"):
            await give(made, machine, "nodes", tainted=True)
        await made.start()
        await made.apply(
            "cluster",
            imagePullSecrets=[{"name": "registry"}],
            masters={"replicas": 1, "storage": {"size": "1Gi"}, "nodeSelector": {"stele": "masters"}},
            nodes={
                "replicas": 3,
                "storage": {"size": "1Gi"},
                "nodeSelector": {"stele": "nodes"},
                "tolerations": [{"key": "stele", "value": "nodes", "effect": "NoSchedule"}],
                "podLabels": {"team": "data"},
            },
        )
        await made.until("the third node says why it waits", waits)
        assert await placed("master") == ["n2"]
        await give(made, "n1", "nodes", tainted=True)
        await made.until("all nodes are ready", ready)
        assert await placed("node") == ["n1", "n4", "n5"]
        teams = await made.kube.list("Pod", "default", "team=data")
        assert len(teams) == 3
