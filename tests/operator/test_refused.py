"""Members that cannot start: the API server refuses their claims or pods, or their containers never get ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import ReplaceIdentity
from stele_operator.plan.fates import START_PATIENCE_S, State
from stele_operator.plan.findings import Finding, Kind
from stele_operator.plan.observation import Machine
from tests.operator.cluster import Bench, bench
from tests.operator.world import START_S, World
from tests.operator.world_kube import merged
from tests.operator.worlds import check, conditions, made, names, node_of

Json = dict[str, Any]
QUOTA = '"{name}" is forbidden: exceeded quota: storage, requested: 1, used: 8, limited: 8'


def pending(found: tuple[Finding, ...], role: str = "Node") -> list[str]:
    """What is told of members that wait."""
    return [f.message for f in found if f.kind is Kind.DEGRADED and f.reason == f"{role}Pending"]


def hear_all(world: World, now_s: float) -> None:
    """That time has come, and everybody is heard."""
    world.now_s = now_s
    world.heard_s = dict.fromkeys(world.heard_s, now_s)


def identity(world: World) -> Json:
    return dict(world.objects["ConfigMap", "flights-identity"]["data"])


def test_claims_that_are_refused_take_one_serial_each_and_are_told() -> None:
    world = made()
    world.forbidden["PersistentVolumeClaim", ""] = QUOTA
    world.cluster["spec"]["nodes"]["replicas"] = 7
    first = world.step()
    before = identity(world)
    assert before["nextNode"] == "7"
    expected = [
        f"flights-node-{n}: its claim cannot be created: {QUOTA.format(name=f'flights-node-{n}')}"
        for n in (5, 6)
    ]
    assert pending(first.findings) == expected
    for _ in range(10):
        plan = world.step()
        assert pending(plan.findings) == expected
        assert not [a for a in plan.actions if isinstance(a, ReplaceIdentity)]
    assert identity(world) == before
    world.forbidden.clear()
    world.machines += [Machine(name, True, "z1") for name in ("n6", "n7")]
    world.run()
    assert {"flights-node-5", "flights-node-6"} <= set(names(world, "Pod"))
    check(world)


def test_a_first_masters_claim_that_is_refused_is_told() -> None:
    world = World()
    world.forbidden["PersistentVolumeClaim", "flights-master-1"] = QUOTA
    for _ in range(3):
        plan = world.step()
    (told,) = pending(plan.findings, "Master")
    assert told.startswith("flights-master-1: its claim cannot be created: ")


def test_a_lost_masters_successor_that_is_refused_is_told() -> None:
    world = made()
    world.forbidden["PersistentVolumeClaim", ""] = QUOTA
    world.kill("n2")
    for _ in range(610):
        plan = world.step()
    assert [m.partition(":")[0] for m in pending(plan.findings, "Master")] == ["flights-master-3"]
    assert [m.partition(":")[0] for m in pending(plan.findings)] == ["flights-node-5"]
    assert identity(world)["nextNode"] == "6"


def test_a_serial_with_which_a_node_ran_is_not_used_again() -> None:
    """Its claim is gone for good, and so is its pod: only the masters know of it."""
    world = made()
    gone = node_of(world, "n2")
    world.kill("n2")
    for _ in range(610):
        world.step()
    assert gone not in names(world, "Pod")
    del world.objects["PersistentVolumeClaim", gone]
    world.cluster["spec"]["nodes"]["replicas"] = 7
    for _ in range(8):
        world.step()
    there = names(world, "PersistentVolumeClaim")
    assert gone not in there and {"flights-node-6", "flights-node-7"} <= set(there)
    check(world)


def test_serials_of_an_earlier_cluster_of_this_name_are_not_used_again() -> None:
    world = made()
    world.forbidden["PersistentVolumeClaim", ""] = QUOTA
    world.cluster["spec"]["nodes"]["replicas"] = 7
    world.step()
    world.forbidden.clear()
    for kind in ("Pod", "PersistentVolumeClaim"):
        for name in names(world, kind):
            del world.objects[kind, name]
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    for known in (world.nodes, world.node_names, world.formed_nodes, world.confirmed, world.formats):
        known.clear()
    world.cluster["spec"]["nodes"]["replicas"] = 3
    world.run()
    serials = sorted(int(n.rpartition("-")[2]) for n in names(world, "PersistentVolumeClaim") if "node" in n)
    assert serials == [7, 8, 9]


def test_an_identity_that_an_older_operator_wrote_gives_no_serial_twice() -> None:
    """It does not say which of them were this cluster's: new ones are set aside once, and those are kept."""
    world = made()
    data = world.objects["ConfigMap", "flights-identity"]["data"]
    del data["ownNode"], data["ownMaster"]
    data["nextNode"] = "9"
    world.forbidden["PersistentVolumeClaim", ""] = QUOTA
    world.cluster["spec"]["nodes"]["replicas"] = 6
    for _ in range(3):
        world.step()
    assert (identity(world)["nextNode"], identity(world)["ownNode"]) == ("10", "9")


def test_masters_whose_disks_are_full_get_larger_volumes_and_pods_come_back_meanwhile() -> None:
    """They refuse to register a node, and the pass ended there: what would have mended it came after."""
    world = made()
    world.masters_full = True
    world.cluster["spec"]["nodes"]["replicas"] = 6
    world.machines.append(Machine("n6", True, "z1"))
    for _ in range(3):
        world.step()
    assert "flights-node-5" not in names(world, "Pod"), "no pod without its registration"
    del world.objects["Pod", "flights-node-2"]
    world.cluster["spec"]["masters"] = {"replicas": 3, "storage": {"size": "20Gi"}}
    world.step()
    for n in range(3):
        claim = world.objects["PersistentVolumeClaim", f"flights-master-{n}"]
        assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert "flights-node-2" in names(world, "Pod")
    world.masters_full = False
    world.run()
    assert "flights-node-5" in names(world, "Pod")
    check(world)


def test_a_pod_that_is_refused_is_told_where_the_node_is_told() -> None:
    world = made()
    name = node_of(world, "n2")
    world.forbidden["Pod", name] = "pods {name} is forbidden: no such priority class"
    del world.objects["Pod", name]
    for _ in range(40):
        plan = world.step()
    (member,) = (m for m in plan.members if m.name == name)
    why = f"its pod cannot be created: pods {name} is forbidden: no such priority class"
    assert (member.state, member.why) == (State.LOST, why)
    (told,) = [f.message for f in plan.findings if f.reason == "NodeLost"]
    assert why in told


def test_a_new_nodes_pod_that_is_refused_is_told_at_once() -> None:
    world = made()
    world.forbidden["Pod", "flights-node-5"] = "pods {name} is forbidden: no such priority class"
    world.cluster["spec"]["nodes"]["replicas"] = 6
    for _ in range(3):
        plan = world.step()
    (told,) = pending(plan.findings)
    assert (
        told
        == "flights-node-5: its pod cannot be created: pods flights-node-5 is forbidden: no such priority class"
    )


def container(state: Json, last: Json | None = None) -> Json:
    status = {"name": "stele", "restartCount": 3, "state": state, "lastState": last or {}}
    return {"phase": "Pending", "containerStatuses": [status]}


STUCK: dict[str, tuple[Json, str]] = {
    "no image": (
        container({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image nope"}}),
        "ImagePullBackOff Back-off pulling image nope",
    ),
    "killed for memory": (
        container(
            {"waiting": {"reason": "CrashLoopBackOff"}},
            {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
        ),
        "CrashLoopBackOff; ended with 137 (OOMKilled)",
    ),
    "between two crashes": (
        container(
            {"running": {}}, {"terminated": {"exitCode": 2, "reason": "Error", "message": "upgrade it"}}
        ),
        "ended with 2: upgrade it",
    ),
    "held by a gate": (
        {
            "phase": "Pending",
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "SchedulingGated",
                    "message": "has gates",
                }
            ],
        },
        "SchedulingGated has gates",
    ),
    "nobody says why": (
        container({"waiting": {"reason": "ContainerCreating"}}),
        "kubectl describe pod flights-node-3 may say why",
    ),
}


class Stuck(World):
    """The pod of one member stays as it is described."""

    stuck: Json
    name = ""

    def run_pod(self, raw: Json) -> None:
        if raw["metadata"]["name"] != self.name:
            super().run_pod(raw)
            return
        if "conditions" in self.stuck:
            raw["spec"].pop("nodeName", None)
        raw["status"] = merged({}, self.stuck)


@pytest.mark.parametrize("what", STUCK)
def test_a_new_node_that_does_not_start_is_told_after_a_while(what: str) -> None:
    world = Stuck({"nodes": {"replicas": 3}})
    world.run()
    world.stuck, why = STUCK[what]
    world.name = "flights-node-3"
    world.cluster["spec"]["nodes"]["replicas"] = 4
    for _ in range(10):
        plan = world.step()
        assert not pending(plan.findings)
    hear_all(world, world.now_s + START_PATIENCE_S)
    plan = make_plan(world.observe())
    assert pending(plan.findings) == [f"flights-node-3: its pod has not been ready for more than 60 s: {why}"]
    assert conditions(world)["Degraded"][:2] == ("True", "NodePending")


def test_a_node_that_has_only_just_become_unready_is_given_its_time() -> None:
    """Its pod is old, its container was started again a moment ago."""
    world = made()
    name = node_of(world, "n2")
    (ready,) = world.objects["Pod", name]["status"]["conditions"]
    ready |= {"status": "False", "lastTransitionTime": "2027-01-15T09:00:00Z"}
    hear_all(world, START_S + 3_605)
    assert not pending(make_plan(world.observe()).findings)
    hear_all(world, START_S + 3_600 + START_PATIENCE_S)
    (told,) = pending(make_plan(world.observe()).findings)
    assert told.startswith(f"{name}: its pod has not been ready for more than 60 s")


def test_a_node_that_has_run_and_waits_for_a_moment_is_not_told_as_a_new_one() -> None:
    """It is still heard of when its pod is made again; that no machine takes it yet is what restarts look like."""
    world = made()
    name = node_of(world, "n2")
    del world.objects["Pod", name]
    world.kill("n2")
    world.step()
    plan = make_plan(world.observe())
    (member,) = (m for m in plan.members if m.name == name)
    assert member.state is State.STARTING and member.pod is not None and member.pod.unschedulable
    assert not pending(plan.findings)


async def one_event(made: Bench, reason: str) -> Json:
    """The only event of that reason."""
    (event,) = [e for e in await made.events("TabletCluster") if e["reason"] == reason]
    return event


@pytest.mark.chaos
async def test_an_api_server_refuses_claims_and_pods_and_says_so_where_users_look(tmp_path: Path) -> None:
    """As a quota or a webhook does, for days: no serial and no event is made in each pass."""
    claims, pods = "exceeded quota: used: 8, limited: 8", "no such priority class"
    async with bench(tmp_path, machines=2) as made:
        forbidden, forbade = made.guard.forbidden, made.guard.forbade
        forbidden["persistentvolumeclaims", "flights-node-"] = claims
        await made.start()
        small = {"size": "1Gi"}
        await made.apply(
            "cluster", masters={"replicas": 1, "storage": small}, nodes={"replicas": 2, "storage": small}
        )

        async def degraded() -> bool:
            _, reason, message = await made.condition("TabletCluster", "flights", "Degraded")
            return (
                reason == "NodePending"
                and f"flights-node-0: its claim cannot be created: {claims}" in message
            )

        await made.until("it is told that claims are refused", degraded)

        async def tried_on() -> bool:
            return len(forbade) >= 8

        await made.until("it is tried again and again", tried_on)
        assert set(forbade) == {"flights-node-0", "flights-node-1"}
        identity = await made.kube.get("ConfigMap", "default", "flights-identity")
        assert identity is not None and identity["data"]["nextNode"] == "2"
        assert claims in (await one_event(made, "CreateClaimFailed"))["message"]
        forbidden.clear()

        async def ready() -> bool:
            found = await made.kube.get("TabletCluster", "default", "flights")
            well = (await made.condition("TabletCluster", "flights", "Degraded"))[1] == "Healthy"
            return well and found is not None and found["status"]["readyReplicas"] == 2

        await made.until("claims are taken, and nodes start", ready)

        name = "flights-node-1"
        forbidden["pods", name] = pods
        pod = await made.kube.get("Pod", "default", name)
        assert pod is not None
        await made.kube.delete("Pod", "default", name, pod["metadata"]["uid"], "")

        async def told() -> bool:
            found = await made.kube.get("TabletCluster", "default", "flights")
            members = ((found or {}).get("status") or {}).get("members", ())
            return f"its pod cannot be created: {pods}" in [
                m.get("message") for m in members if m["name"] == name
            ]

        await made.until("the status says why its pod is not made", told)
        assert pods in (await one_event(made, "CreatePodFailed"))["message"]
        forbidden.clear()
        await made.until("it is back", ready)
