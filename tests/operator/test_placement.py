"""Where a user lets the pods of masters and nodes run, and where they land."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.observation import Taint
from tests.operator.placing import (
    DEDICATED,
    PREFERRED,
    SSD,
    asks,
    label,
    name,
    where,
    world_of,
)
from tests.operator.worlds import check, conditions

Json = dict[str, Any]


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
