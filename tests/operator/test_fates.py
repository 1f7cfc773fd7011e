"""What became of a member, when it is given up, and when too many are lost to give up any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.situation import is_dead
from stele.driver.view import NodeState
from stele.model.ids import NodeId
from stele.rpc.proto.consensus_pb2 import StartTabletCopyRequest
from stele_operator.api.scalars import RATE_MAX, RATE_MIN
from stele_operator.plan import make_plan
from stele_operator.plan.actions import DeleteClaim, DeletePod, ReleaseClaim, RetireClaim
from stele_operator.plan.cluster_plan import BUSY_S
from stele_operator.plan.fates import SILENT_S, Fate, State, members
from tests.operator.worlds import made, node_of, touching

FATES = [
    # what happens to flights-node-1 on n2 → fate
    ("pod deleted", Fate.RESTARTING),
    ("process silent", Fate.MACHINE_SILENT),
    ("machine off", Fate.MACHINE_LOST),
    ("machine deleted", Fate.MACHINE_DELETED),
    ("claim gone", Fate.VOLUME_LOST),
    ("claim lost", Fate.VOLUME_LOST),
    ("volume empty", Fate.VOLUME_EMPTY),
    ("volume foreign", Fate.VOLUME_EMPTY),
    ("disk corrupt", Fate.VOLUME_LOST),
    ("volume old", Fate.VOLUME_LOST),
]


@pytest.mark.parametrize(("what", "fate"), FATES)
def test_each_fate_has_its_name(what: str, fate: Fate) -> None:
    world = made()
    name = node_of(world, "n2")
    pod = world.objects["Pod", name]
    exits = {"volume empty": 3, "volume foreign": 4, "disk corrupt": 5, "volume old": 6}
    match what:
        case "pod deleted":
            del world.objects["Pod", name]
        case "process silent":
            pass
        case "machine off":
            world.kill("n2")
        case "machine deleted":
            world.machines = [m for m in world.machines if m.name != "n2"]
        case "claim gone":
            del world.objects["PersistentVolumeClaim", name]
        case "claim lost":
            world.objects["PersistentVolumeClaim", name]["status"] = {"phase": "Lost"}
        case _:
            ended = {"terminated": {"exitCode": exits[what], "message": "told why"}}
            pod["status"]["containerStatuses"] = [
                {"name": "stele", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
            ]
    world.now_s += 31
    node_id = pod["metadata"]["annotations"]["stele.dev/node-id"]
    for other in world.heard_s:
        if other != node_id:
            world.heard_s[other] = world.now_s
    member = next(m for m in members(world.observe()) if m.node_id == node_id)
    assert (member.state, member.fate) == (State.LOST, fate)
    assert member.given_up == (fate in (Fate.MACHINE_DELETED, Fate.VOLUME_LOST, Fate.VOLUME_EMPTY))


@pytest.mark.parametrize("sidecar", ["istio-proxy", "vault-agent"])
def test_a_container_that_somebody_put_into_the_pod_says_nothing_of_the_node(sidecar: str) -> None:
    """As service meshes do. The kubelet tells of containers by their names, in order."""
    world = made()
    name = node_of(world, "n2")
    ended = {"terminated": {"exitCode": 3, "message": "told why"}}
    statuses = [
        {"name": "stele", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended},
        {"name": sidecar, "state": {"running": {}}, "restartCount": 9},
    ]
    world.objects["Pod", name]["status"]["containerStatuses"] = sorted(statuses, key=lambda s: str(s["name"]))
    pod = world.observe().pod(name)
    assert pod is not None
    assert (pod.running, pod.exit_code, pod.restarts, pod.waiting) == (False, 3, 0, "CrashLoopBackOff")


def test_how_a_node_ended_counts_no_more_once_it_runs_again() -> None:
    """Its volume was mounted wrongly once; now it replays its log, and has its time for that."""
    world = made()
    name = node_of(world, "n2")
    pod = world.objects["Pod", name]
    ended = {"terminated": {"exitCode": 4, "message": "told why"}}
    pod["status"]["containerStatuses"] = [{"name": "stele", "state": {"running": {}}, "lastState": ended}]
    node_id = pod["metadata"]["annotations"]["stele.dev/node-id"]
    world.now_s += 31
    world.heard_s |= {n: world.now_s for n in world.heard_s if n != node_id}
    member = next(m for m in members(world.observe()) if m.node_id == node_id)
    assert member.fate is Fate.MACHINE_SILENT and not member.given_up


def test_the_machine_that_a_volume_was_made_on_may_be_long_gone() -> None:
    """A volume that any machine can mount: its pod ran on n2, and is being started again."""
    world = made()
    name = node_of(world, "n2")
    node_id = world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"]
    claim = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
    claim["volume.kubernetes.io/selected-node"] = "n9"
    del world.objects["Pod", name]
    world.heard_s[node_id] -= 6
    member = next(m for m in members(world.observe()) if m.node_id == node_id)
    assert (member.fate, member.given_up) == (Fate.RESTARTING, False)


@pytest.mark.parametrize("pod", ["is not made yet", "waits for a machine"])
def test_a_node_does_not_go_with_the_machine_it_was_drained_from(pod: str) -> None:
    """Machines are renewed one by one: drained, deleted, and only then the new one joins, which the volume can come to."""
    world = made()
    name = node_of(world, "n2")
    node_id = world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"]
    del world.objects["Pod", name]
    world.machines = [m for m in world.machines if m.name != "n2"]
    if pod == "waits for a machine":
        world.step()
        assert "nodeName" not in world.objects["Pod", name]["spec"]
    for age_s, state, given_up in (
        (4, State.SILENT, False),
        (31, State.LOST, False),
        (301, State.LOST, True),
    ):
        world.now_s += age_s
        for other in world.heard_s:
            world.heard_s[other] = world.now_s - (age_s if other == node_id else 0)
        member = next(m for m in members(world.observe()) if m.node_id == node_id)
        assert (member.state, member.fate, member.given_up) == (state, Fate.RESTARTING, given_up)


def test_without_the_right_to_read_machines_the_longest_time_out_counts() -> None:
    world = made()
    world.machines_known = False
    name = node_of(world, "n2")
    node_id = world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"]
    for age_s, given_up in ((301, False), (601, True)):
        for other in world.heard_s:
            world.heard_s[other] = world.now_s - (age_s if other == node_id else 0)
        member = next(m for m in members(world.observe()) if m.node_id == node_id)
        assert (member.fate, member.given_up) == (Fate.MACHINE_SILENT, given_up)


def test_nothing_is_given_up_before_its_time() -> None:
    world = made()
    world.kill("n1")
    for n in range(590):
        plan = world.step()
        assert plan.policy is not None
        assert not plan.policy.lost
        taken = [
            a for a in plan.actions if isinstance(a, DeletePod | RetireClaim | ReleaseClaim | DeleteClaim)
        ]
        assert not taken, f"after {n} s"
    assert plan.policy.dead_after_ms == 30_000


@pytest.mark.parametrize("text", ["0s", "250ms", "2s"])
def test_nobody_who_is_heard_counts_as_dead_however_short_the_patience(text: str) -> None:
    """Between two heartbeats each node is silent for a second or two: all were, and nothing was ever healed."""
    world = made()
    world.cluster["spec"]["healing"] = {"witnessAfter": text}
    policy = make_plan(world.observe()).policy
    assert policy is not None
    assert policy.dead_after_ms == SILENT_S * 1000


@pytest.mark.parametrize("at_look_s", [None, 2.9], ids=["silent after a look", "silent before a look"])
@pytest.mark.parametrize("text", ["0s", "3s", "10s", "30s", "5m"])
def test_a_cluster_at_rest_is_looked_at_in_time_to_see_who_is_silent(
    text: str, at_look_s: float | None
) -> None:
    """A process that hangs wakes nobody: its pod stays as it was, and at rest the next look was 30 s away."""
    world = made()
    world.cluster["spec"]["healing"] = {"witnessAfter": text}
    node_id = world.objects["Pod", node_of(world, "n2")]["metadata"]["annotations"]["stele.dev/node-id"]
    plan = make_plan(world.observe())
    assert plan.policy is not None and not touching(plan)
    if at_look_s is not None:
        world.heard_s[node_id] += plan.wait_s - at_look_s
    member = next(m for m in plan.members if m.node_id == node_id)
    while not is_dead(member.node, plan.policy):
        world.now_s += plan.wait_s
        world.heard_s.update({other: world.now_s for other in world.heard_s if other != node_id})
        plan = make_plan(world.observe())
        assert plan.policy is not None
        member = next(m for m in plan.members if m.node_id == node_id)
    assert member.silent_s <= plan.policy.dead_after_ms / 1000 + SILENT_S + BUSY_S


@pytest.mark.parametrize(
    ("rate", "asked", "copies", "each"),
    [
        ("100Mi", 4, 4, 25 << 20),
        ("0", 4, 1, RATE_MIN),
        ("100", 1, 1, RATE_MIN),
        ("200Ki", 64, 3, (200 << 10) // 3),
        ("16Ei", 1, 1, RATE_MAX),
    ],
)
def test_of_a_small_budget_fewer_copies_are_made(rate: str, asked: int, copies: int, each: int) -> None:
    """Whatever stands in a cluster from before there was a rule: a node that asked for single bytes died of it."""
    world = made()
    world.cluster["spec"]["budget"] = {"copies": asked, "bytesPerSecond": rate}
    policy = make_plan(world.observe()).policy
    assert policy is not None
    assert (policy.max_copies, policy.bytes_per_second) == (copies, each)
    StartTabletCopyRequest(bytes_per_second=policy.bytes_per_second)  # it can be sent


def test_with_too_many_lost_healing_stops_and_says_so() -> None:
    world = made()
    for machine in ("n4", "n5"):
        world.kill(machine)
    for _ in range(700):
        plan = world.step()
    assert plan.policy is not None
    assert not plan.policy.lost
    (stalled,) = [f for f in plan.findings if f.reason == "TooManyLost"]
    assert "flights-node-" in stalled.message
    assert "maxLostNodes=1" in stalled.message


def test_too_many_lost_are_too_many_also_where_witnesses_wait_longest() -> None:
    world = made()
    world.cluster["spec"]["healing"] = {"witnessAfter": "10m", "machineLostAfter": "1m"}
    for machine in ("n4", "n5"):
        world.kill(machine)
    for _ in range(70):
        plan = world.step()
        assert plan.policy is not None
        assert not plan.policy.lost
    assert "TooManyLost" in {f.reason for f in plan.findings}


def test_a_claim_made_anew_under_its_name_is_another_volume() -> None:
    world = made()
    name = node_of(world, "n2")
    world.objects["PersistentVolumeClaim", name]["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.silent.add(name)
    for _ in range(4):
        world.now_s += 1
        world.settle()
    observed = world.observe()
    member = next(m for m in members(observed) if m.name == name)
    assert (member.fate, member.given_up) == (Fate.VOLUME_LOST, True) and "created another one" in member.why
    (deleted,) = [a for a in make_plan(observed).actions if isinstance(a, DeletePod)]
    assert (deleted.name, deleted.force) == (name, False) and "another claim" in deleted.reason


def test_a_first_master_whose_volume_was_formatted_again_has_lost_it() -> None:
    """It would form a second cluster of the same name, or vote as if it had never voted. Not so once it was given a copy of the
    catalog under a new replica_id."""
    world = made()
    name = node_of(world, "n2", "master")
    node_id = world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"]
    world.silent.add(name)
    for formatted, unconfirmed, fate in (
        (world.formats[node_id], set[str](), Fate.MACHINE_SILENT),
        ("another format", {node_id}, Fate.VOLUME_EMPTY),
        ("another format", set[str](), Fate.MACHINE_SILENT),
    ):
        world.formats[node_id], world.unconfirmed = formatted, unconfirmed
        for _ in range(4):
            world.now_s += 1
            world.settle()
        member = next(m for m in members(world.observe()) if m.name == name)
        assert (member.fate, member.given_up) == (fate, fate is Fate.VOLUME_EMPTY)


@pytest.mark.parametrize("machine_is_up", [True, False])
def test_a_pod_is_deleted_by_force_only_where_nobody_is_left_to_stop_it(machine_is_up: bool) -> None:
    world = made()
    name = node_of(world, "n2")
    node_id = NodeId(world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"])
    world.tables, world.tablets = [], []
    world.nodes[node_id] = replace(world.nodes[node_id], state=NodeState.RETIRED)
    if not machine_is_up:
        world.kill("n2")
    deleted = [a for _ in range(4) for a in world.step().actions if isinstance(a, DeletePod)]
    assert [(a.name, a.force) for a in deleted] == [(name, not machine_is_up)]
