"""A spec that was wrong at first, and is put right: what never ran takes the correction, what serves keeps what it has."""

from __future__ import annotations

from typing import Any

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import CreatePod, DeletePod
from stele_operator.plan.fates import State
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import restart_pending
from tests.operator.world import World
from tests.operator.worlds import check, conditions, made, names, node_of

Json = dict[str, Any]
TYPO = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image stele/node:typo"}}
CRASHES = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


def memory(text: str) -> Json:
    """Resources of nodes."""
    return {"resources": {"requests": {"memory": text}}}


class Strict(World):
    """There is no image `typo`, no machine has 640Gi, and no node lives with 64Mi."""

    def schedule(self, raw: Json) -> None:
        machines = self.machines
        if self._memory(raw) == "640Gi":
            self.machines = []
        super().schedule(raw)
        self.machines = machines

    def run_pod(self, raw: Json) -> None:
        (container,) = raw["spec"]["containers"]
        state: Json = {}
        if container["image"].endswith(":typo"):
            state = {"state": TYPO, "restartCount": 0}
        elif self._memory(raw) == "64Mi":
            state = {"state": CRASHES, "lastState": KILLED, "restartCount": 3}
        if state and raw["spec"].get("nodeName"):
            raw["status"] = {"phase": "Pending", "containerStatuses": [{"name": "stele", **state}]}
            self.touch(raw)
        else:
            super().run_pod(raw)

    def _memory(self, raw: Json) -> str:
        (container,) = raw["spec"]["containers"]
        return str(container.get("resources", {}).get("requests", {}).get("memory", ""))


def stand(world: World, passes: int = 20) -> None:
    """Pass after pass, also where nothing comes to rest."""
    for _ in range(passes):
        world.step()


@pytest.mark.parametrize("role", ["masters", "nodes"])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [({"image": "stele/node:typo"}, {"image": "stele/node:test"}), ("640Gi", "4Gi"), ("64Mi", "4Gi")],
    ids=["image", "more memory than any machine has", "too little memory"],
)
def test_a_correction_reaches_pods_that_never_ran_or_do_nothing_but_crash(
    role: str, wrong: Json | str, right: Json | str
) -> None:
    def spec(what: Json | str) -> Json:
        parts: Json = {"masters": {"replicas": 3}, "nodes": {"replicas": 3}}
        if isinstance(what, dict):
            return {**parts, **what}
        parts[role] |= memory(what)
        return parts

    world = Strict(spec(wrong))
    stand(world)
    assert not [m for m in make_plan(world.observe()).members if m.role == "node" and m.state is State.READY]
    assert not make_plan(world.observe()).actions, "nothing is tried in vain"
    world.cluster["spec"] |= spec(right)
    world.run()
    assert {m.state for m in make_plan(world.observe()).members} == {State.READY}
    assert not restart_pending(world.observe())
    check(world)


@pytest.mark.parametrize(
    "change", [{"image": "stele/node:next"}, {"nodes": {"replicas": 5, **memory("4Gi")}}]
)
def test_what_serves_is_not_restarted_under_on_delete(change: Json) -> None:
    world = made()
    world.cluster["spec"]["updateStrategy"] = "OnDelete"
    before = {p["metadata"]["uid"] for p in world.of("Pod")}
    world.cluster["spec"] |= change
    world.run()
    assert {p["metadata"]["uid"] for p in world.of("Pod")} == before
    assert restart_pending(world.observe())


UNKNOWN: list[tuple[str, Json]] = [
    ("its kubelet has said nothing yet", {}),
    ("its container is being made", {"state": {"waiting": {"reason": "ContainerCreating"}}}),
    ("it ran and ended just now", {"state": KILLED, "restartCount": 0}),
]


@pytest.mark.parametrize("status", [s for _, s in UNKNOWN], ids=[name for name, _ in UNKNOWN])
def test_a_pod_that_may_run_is_left_alone(status: Json) -> None:
    world = made()
    pod = world.objects["Pod", node_of(world, "n2")]
    world.cluster["spec"]["image"] = "stele/node:next"
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "stele", **status}] if status else []}
    assert not [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod)]


def test_a_pod_whose_machine_is_silent_is_left_alone_whatever_its_kubelet_said_last() -> None:
    world = made()
    pod = world.objects["Pod", node_of(world, "n2")]
    world.cluster["spec"]["image"] = "stele/node:next"
    pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "stele", "state": CRASHES}]}
    (deleted,) = [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod)]
    assert deleted.name == pod["metadata"]["name"] and not deleted.force
    world.kill("n2")
    assert not [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod)]


def test_what_a_node_said_when_it_ended_for_good_is_not_forgotten_for_a_correction() -> None:
    """Its volume is empty: that is why it is replaced."""
    world = made()
    name = node_of(world, "n2")
    node_id = world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"]
    world.heard_s[node_id] -= 60
    world.cluster["spec"]["image"] = "stele/node:next"
    ended = {"terminated": {"exitCode": 3, "message": "empty"}}
    world.objects["Pod", name]["status"] = {
        "phase": "Running",
        "containerStatuses": [{"name": "stele", "state": CRASHES, "lastState": ended, "restartCount": 2}],
    }
    plan = make_plan(world.observe())
    (member,) = [m for m in plan.members if m.name == name]
    assert member.given_up, member
    assert not [a for a in plan.actions if isinstance(a, DeletePod)]


def test_nodes_that_wait_for_machines_of_their_own_may_share_as_soon_as_the_spec_says_so() -> None:
    world = World({"nodes": {"replicas": 4}}, machines=3)
    stand(world)
    waiting = next(p for p in world.of("Pod") if not p["spec"].get("nodeName"))
    world.cluster["spec"]["nodes"] |= {"machineSpread": "Preferred"}
    plan = world.step()
    (deleted,) = [a for a in plan.actions if isinstance(a, DeletePod)]
    assert deleted.name == waiting["metadata"]["name"]
    (again,) = [a for a in world.step().actions if isinstance(a, CreatePod)]
    spread = again.manifest["spec"]["affinity"]["podAntiAffinity"]
    assert list(spread) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert set(restart_pending(world.observe())) == {n for n in names(world, "Pod") if "node" in n} - {
        deleted.name
    }


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"zones": ["z1", "z2", "z3"]}, {"zones": ["z1", "z2"]}, "flights-node-2 (in zone z3)"),
        ({}, {"zones": ["z1", "z2"]}, "(in zone z3)"),
    ],
    ids=["zones that were chosen", "zones that fell out so"],
)
def test_members_that_no_longer_fit_the_zones_are_named(before: Json, after: Json, words: str) -> None:
    world = World({"nodes": {"replicas": 3}, **before})
    world.run()
    assert not make_plan(world.observe()).findings
    world.cluster["spec"] |= after
    plan = world.run()
    assert [(f.kind, f.reason) for f in plan.findings] == [(Kind.REMARK, "Misplaced")]
    assert words in plan.findings[0].message
    status, reason, message = conditions(world)["Reconciling"]
    assert (status, reason) == ("False", "Misplaced") and words in message


def test_nodes_that_share_a_machine_though_they_are_not_to_any_more_are_named() -> None:
    world = World({"nodes": {"replicas": 3, "machineSpread": "Preferred"}})
    world.run()
    where = node_of(world, "n1")
    other = next(n for n in names(world, "Pod") if "node" in n and n != where)
    world.objects["Pod", other]["spec"]["nodeName"] = "n1"
    assert not make_plan(world.observe()).findings
    world.cluster["spec"]["nodes"]["machineSpread"] = "Required"
    found = [f for f in make_plan(world.observe()).findings if f.kind is Kind.REMARK]
    assert [f.reason for f in found] == ["Misplaced"]
    assert "on machine n1" in found[0].message
