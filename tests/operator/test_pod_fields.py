"""What a user says of the pods of masters and nodes: who takes it, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import pytest

from stele.cli.processes import master_run, node_run
from stele_operator.api.cluster import LogLevel, TabletClusterSpec
from stele_operator.plan.manifests import pod, spec_hash
from stele_operator.plan.observation import Role
from stele_operator.plan.status import restart_pending
from tests.operator.placing import (
    EVEN,
    OURS,
    PREFERRED,
    REQUIRED,
    SSD,
    asks,
    label,
    name,
    pods,
)
from tests.operator.world import World
from tests.operator.worlds import check, made

Json = dict[str, Any]


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


def test_the_log_is_as_the_cluster_says_and_pods_of_which_it_says_nothing_get_no_flag() -> None:
    world = World({"nodes": {"replicas": 3, "log": {"segmentSize": "16Mi", "spareSegments": 1}}})
    world.run()
    for raw in pods(world, "node"):
        arguments = " ".join(raw["spec"]["containers"][0]["args"])
        assert "--wal-segment-mib 16 --wal-spare-segments 1" in arguments
    for raw in pods(world, "master"):
        assert "wal" not in " ".join(raw["spec"]["containers"][0]["args"])


def test_members_get_the_lease_of_leaders_that_the_cluster_says() -> None:
    world = World({"leaderLease": "300ms"})
    world.run()
    members = [*pods(world, "node"), *pods(world, "master")]
    assert len(members) == 6
    for raw in members:
        assert "--leader-lease-ms 300" in " ".join(raw["spec"]["containers"][0]["args"])
    assert not restart_pending(world.observe())
    for spec, pending in (
        ({"leaderLease": "1s"}, 6),
        ({"leaderLease": "0s"}, 6),
        ({"leaderLease": "300ms"}, 0),
    ):
        world.cluster["spec"] |= spec
        assert len(restart_pending(world.observe())) == pending


def test_members_log_at_the_level_that_the_cluster_says() -> None:
    world = World({"logLevel": "debug"})
    world.run()
    members = [*pods(world, "node"), *pods(world, "master")]
    assert len(members) == 6
    for raw in members:
        arguments = raw["spec"]["containers"][0]["args"]
        assert arguments[arguments.index("--log-level") + 1] == "debug"
    assert not restart_pending(world.observe())
    for spec, pending in (({"logLevel": "warning"}, 6), ({"logLevel": None}, 6), ({"logLevel": "debug"}, 0)):
        world.cluster["spec"] |= spec
        assert len(restart_pending(world.observe())) == pending


def test_pods_of_a_cluster_that_says_no_level_get_no_flag() -> None:
    world = World()
    world.run()
    for raw in (*pods(world, "node"), *pods(world, "master")):
        assert "--log-level" not in raw["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("command", [node_run, master_run], ids=["node", "master"])
def test_the_levels_of_a_cluster_are_those_that_members_take(command: click.Command) -> None:
    (option,) = (each for each in command.params if each.name == "log_level")
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == list(LogLevel)


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
    same = TabletClusterSpec.model_validate({**spec, **empty, "imagePullSecrets": [], "leaderLease": "0s"})
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
    ("log", {"masters": {"log": {"segmentSize": "16Mi"}}}, 3),
    ("logLevel", {"logLevel": "debug"}, 8),
    ("podLabels", {"masters": {"podLabels": {"team": "data"}}}, 3),
    ("podAnnotations", {"nodes": {"replicas": 5, "podAnnotations": {"note": "x"}}}, 5),
]


@pytest.mark.parametrize(("change", "count"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_what_runs_keeps_what_it_has_until_it_is_made_again(change: Json, count: int) -> None:
    """As with another image, where updateStrategy is OnDelete."""
    world = made()
    world.cluster["spec"]["updateStrategy"] = "OnDelete"
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
