"""Another number of masters: 1, 3 and 5, set back half way, interrupted, with lost machines; when it waits, and why."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from stele.driver.view import NodeState, Wanted
from stele.model.ids import NodeId
from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import CreateClaim, RollPod, SetMasterCount
from stele_operator.plan.fates import State
from stele_operator.plan.observation import MASTERS_REFUSED
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.world_masters import wanted
from tests.operator.worlds import check, names

HEALING = {"witnessAfter": "5s", "silentAfter": "15s", "machineLostAfter": "15s"}


def made(masters: int, machines: int = 7, **more: object) -> World:
    """A cluster of so many masters, with three nodes and a table."""
    spec = {"masters": {"replicas": masters}, "nodes": {"replicas": 3}, "healing": HEALING} | more
    world = World(spec, machines=machines)
    world.finalized = world.readable = 2
    world.masters_stay = True
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 2}]})
    world.run()
    return world


def ask(world: World, masters: int) -> None:
    """Another spec.masters.replicas."""
    world.cluster["spec"]["masters"] = {"replicas": masters}
    world.touch(world.cluster)


def recorded(world: World) -> int:
    """The number in the identity."""
    return int(world.objects["ConfigMap", "flights-identity"]["data"]["masters"])


def pods(world: World) -> list[str]:
    """The masters' pods."""
    return [n for n in names(world, "Pod") if "master" in n]


def found(plan: Plan) -> dict[str, str]:
    """Messages of its findings by reason."""
    return {f.reason: f.message for f in plan.findings}


def step(world: World, prefix: int | None = None) -> Plan:
    """One pass. After it the loss of no volume is told, whoever leads. One master at most came or went, so each majority
    of the catalog before meets each one after."""
    before = {n for n, _ in world.voters}
    plan = world.step(prefix)
    check(world)
    assert "MastersLost" not in found(make_plan(replace(world.observe(), catalog=None)))
    after = {n for n, _ in world.voters}
    assert len(before ^ after) <= 1 <= len(after)
    assert len(before) // 2 + 1 + len(after) // 2 + 1 > len(before | after)
    return plan


def settle(world: World, passes: int = 150, prefix: int | None = None) -> Plan:
    """Passes until the catalog is as asked for and nobody is on the way."""
    asked = world.cluster["spec"]["masters"]["replicas"]
    plan = None
    for _ in range(passes):
        plan = step(world, prefix)
        members = [m for m in plan.members if m.state is not State.RETIRED]
        masters = [m for m in members if m.role == "master"]
        whole = {m.node_id for m in masters} == {n for n, _ in world.voters} and len(masters) == asked
        ready = all(m.state is State.READY for m in members)
        if whole and ready and not plan.actions and world.masters_wanted == recorded(world) == asked:
            return plan
    assert plan is not None
    raise AssertionError((asked, world.masters_wanted, recorded(world), found(plan), plan.members))


@pytest.mark.parametrize("prefix", [None, 1, 2])
@pytest.mark.parametrize("numbers", [(1, 3, 5, 3, 1), (3, 5, 3), (5, 1, 5)])
def test_the_number_is_changed_and_those_that_leave_are_let_go(
    numbers: tuple[int, ...], prefix: int | None
) -> None:
    world = made(numbers[0])
    for before, asked in itertools.pairwise(numbers):
        serials = set(pods(world))
        ask(world, asked)
        plan = settle(world, 300, prefix)
        assert len(pods(world)) == asked and not {"MastersChanging", "MastersWait"} & set(found(plan))
        for name in serials - set(pods(world)):
            notes = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
            assert "stele.dev/released-at" in notes, "it stays for keepFor"
        status = cluster_status(world.observe(), plan, (), "now")
        assert status["readyMasters"] == asked
        assert (status["budget"]["holder"], before != asked) == ("", True)


def test_it_is_told_step_by_step_and_nothing_is_degraded() -> None:
    world = made(3)
    ask(world, 5)
    told, holders, degraded = [], set(), set()
    for _ in range(20):
        plan = step(world)
        told += [m for r, m in found(plan).items() if r == "MastersChanging" and m not in told]
        o = world.observe()
        status = cluster_status(o, make_plan(o), (), "now")
        holders.add(status["budget"]["holder"])
        degraded |= {
            c["message"] for c in status["conditions"] if c["type"] == "Degraded" and c["status"] == "True"
        }
    assert "3 of 5 masters run; once all do" in told[0]
    assert "4 of 5 masters hold the catalog; the others get it one at a time" in " ".join(told)
    assert holders == {"masters", ""} and not degraded
    ask(world, 3)
    told = found(make_plan(world.observe()))["MastersChanging"]
    assert "2 of 5 masters give the catalog up" in told and "Set masters.replicas back" in told
    settle(world)


def test_the_identity_has_a_lower_number_first_and_a_higher_one_last() -> None:
    world = made(1)
    ask(world, 3)
    while len(world.voters) < 3:
        assert recorded(world) == 1
        step(world)
    settle(world)
    ask(world, 1)
    plan = world.step()
    assert recorded(world) == 1 and world.masters_wanted == 3
    assert not [a for a in plan.actions if isinstance(a, SetMasterCount)]
    settle(world)


@pytest.mark.parametrize(
    ("passes", "prefix"), [*((n, None) for n in range(9)), *((n, 1) for n in (3, 6, 9, 12))]
)
@pytest.mark.parametrize(("first", "then"), [(3, 5), (5, 3), (1, 3), (3, 1)])
def test_set_back_half_way(first: int, then: int, passes: int, prefix: int | None) -> None:
    world = made(first)
    ask(world, then)
    for _ in range(passes):
        step(world, prefix)
    ask(world, first)
    settle(world, 300, prefix)
    assert len(pods(world)) == first


def test_one_that_was_not_retired_yet_stays_when_it_is_set_back() -> None:
    """The drain was ordered, and before it is carried out somebody wants five again."""
    world = made(5)
    ask(world, 3)
    while len(world.voters) > 3:
        step(world)
    plan = make_plan(world.observe())
    assert plan.policy is not None
    (leaving,) = map(NodeId, plan.policy.unneeded)
    world.nodes[leaving] = wanted(world.nodes[leaving], Wanted.RETIRED, "driver", "not needed")
    (name,) = [m.name for m in plan.members if m.node_id == leaving]
    ask(world, 5)
    settle(world)
    assert name in pods(world)
    assert "flights-master-6" not in names(world, "PersistentVolumeClaim"), "one was made in its place"
    assert world.nodes[leaving].state is NodeState.ACTIVE


@pytest.mark.parametrize("passes", range(0, 12, 2))
@pytest.mark.parametrize(("first", "then"), [(3, 5), (5, 3), (3, 1)])
def test_a_master_lost_meanwhile_is_replaced_or_leaves(first: int, then: int, passes: int) -> None:
    world = made(first, machines=9)
    ask(world, then)
    for _ in range(passes):
        step(world)
    leader = next(iter(world.voters))[0]
    machine = next(n.machine for n in world.nodes.values() if n.node_id == leader)
    if len(world.voters) > 2:  # otherwise nobody leads until it is back
        world.kill(machine)
    settle(world, 300)
    assert len(pods(world)) == then


def test_a_lost_master_goes_first_where_fewer_are_asked_for() -> None:
    """No other machine is there for it, and none is needed."""
    world = made(5, machines=5)
    lost = world.voters[1][0]
    world.kill(next(n.machine for n in world.nodes.values() if n.node_id == lost))
    for _ in range(3):
        step(world)
    world.cluster["spec"]["nodes"] = {"replicas": 3}
    ask(world, 3)
    for _ in range(60):
        step(world)
    assert len(world.voters) == 3 and lost not in {n for n, _ in world.voters}


def test_it_waits_for_heals_drains_and_rolls() -> None:
    world = made(3)
    world.silent.add("flights-node-1")
    for _ in range(7):
        step(world)
    ask(world, 5)
    plan = step(world)
    assert "the change waits for heal/flights-node-1" in found(plan)["MastersWait"]
    assert not [a for a in plan.actions if isinstance(a, CreateClaim)]
    o = world.observe()
    assert cluster_status(o, make_plan(o), (), "now")["budget"] == {
        "holder": "heal/flights-node-1",
        "waiting": ["masters"],
    }
    world.silent.clear()
    world.run()
    ask(world, 3)
    settle(world)
    world.cluster["spec"]["image"] = "stele/node:next"
    ask(world, 5)
    plan = step(world)
    assert "the change waits for upgrade" in found(plan)["MastersWait"] and "Rolling" in found(plan)
    while any(p["spec"]["containers"][0]["image"] != "stele/node:next" for p in world.of("Pod")):
        plan = step(world)
        assert world.masters_wanted == 3
    settle(world)


@pytest.mark.parametrize("passes", range(1, 10, 2))
@pytest.mark.parametrize(("first", "then"), [(3, 5), (5, 3)])
def test_a_roll_that_is_asked_for_meanwhile_waits_and_then_goes(first: int, then: int, passes: int) -> None:
    """New masters are not ready before they have the catalog: neither waits for the other."""
    world = made(first)
    ask(world, then)
    for _ in range(passes):
        step(world)
    begun = world.masters_wanted != first or len(pods(world)) > 3
    world.cluster["spec"]["image"] = "stele/node:next"
    rolled = False
    for _ in range(200):
        plan = step(world)
        now = any(isinstance(a, RollPod) for a in plan.actions)
        if begun and now and not rolled:
            assert world.masters_wanted == then and len(world.voters) == then
        rolled |= now
    settle(world)
    assert {p["spec"]["containers"][0]["image"] for p in world.of("Pod")} == {"stele/node:next"}


def test_machines_that_are_too_few_are_told_and_nothing_is_made() -> None:
    world = made(3, machines=4)
    ask(world, 5)
    for _ in range(5):
        plan = step(world)
        assert "only 4 machines can run masters" in found(plan)["TooFewMachines"]
    assert len(pods(world)) == 3 and world.masters_wanted == 3
    ask(world, 3)
    settle(world)


def test_an_earlier_release_that_may_come_back_refuses_it() -> None:
    world = made(3)
    world.finalized = 1
    for asked in (5, 1):
        ask(world, asked)
        plan = step(world)
        assert "needs cluster version 2" in found(plan)["MastersRefused"] and not plan.actions
        assert (len(pods(world)), recorded(world)) == (3, 3)
    world.finalized = 2
    settle(world)


@pytest.mark.parametrize("asked", [5, 1])
def test_what_the_masters_refuse_is_told_and_tried_again(asked: int) -> None:
    world = made(3)
    ask(world, asked)
    while not [a for a in make_plan(world.observe()).actions if isinstance(a, SetMasterCount)]:
        step(world)
    there = len(pods(world))
    plan = make_plan(replace(world.observe(), refused={MASTERS_REFUSED: "odd"}))
    assert f"masters.replicas is {asked}, and the cluster keeps 3: odd" in found(plan)["MastersRefused"]
    assert plan.policy is not None and not plan.policy.unneeded and len(pods(world)) == there


def test_the_number_cannot_change_before_the_cluster_has_formed() -> None:
    world = World({"masters": {"replicas": 3}, "nodes": {"replicas": 3}})
    world.step()
    ask(world, 5)
    plan = world.step()
    assert "cannot change before the cluster has formed" in found(plan)["InvalidSpec"]


@pytest.mark.parametrize("passes", range(0, 14, 2))
@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 5), (5, 1)])
def test_an_identity_lost_meanwhile_is_restored(first: int, then: int, passes: int) -> None:
    world = made(first)
    ask(world, then)
    for _ in range(passes):
        step(world)
    del world.objects["ConfigMap", "flights-identity"]
    world.step()
    settle(world)


def test_an_identity_of_the_release_before_has_the_number_that_formed_it() -> None:
    world = made(3)
    del world.objects["ConfigMap", "flights-identity"]["data"]["masters"]
    identity = world.observe().identity
    assert identity is not None and identity.masters == 3


@pytest.mark.parametrize(("first", "then"), [(5, 3), (3, 1), (5, 1)])
def test_a_driver_that_is_cut_off_between_drain_and_retire_goes_on_with_the_same_masters(
    first: int, then: int
) -> None:
    world = made(first)
    world.rounds = 1
    ask(world, then)
    drained: set[str] = set()
    for _ in range(60):
        step(world)
        now = {n.node_id for n in world.nodes.values() if n.state is not NodeState.ACTIVE}
        assert drained <= now, "one that began to leave was taken back"
        drained = now
    settle(world)
    assert len(drained) == first - then


def test_a_master_that_is_not_needed_is_never_one_with_a_vote() -> None:
    world = made(5)
    ask(world, 3)
    for _ in range(30):
        plan = make_plan(world.observe())
        assert plan.policy is not None
        assert plan.policy.unneeded.isdisjoint({NodeId(n) for n, _ in world.voters})
        step(world)


@pytest.mark.parametrize("seed", range(12))
def test_random_numbers_losses_rolls_and_interrupted_passes(seed: int) -> None:
    """Whatever happens: one master at a time, no volume is called lost, and in the end all is as asked for."""
    rng = random.Random(seed)
    world = made(rng.choice((1, 3, 5)), machines=8)
    off = ""
    for _ in range(120):
        if rng.random() < 0.06:
            ask(world, rng.choice((1, 3, 5)))
        if rng.random() < 0.02:
            world.cluster["spec"]["image"] = f"stele/node:{rng.randrange(3)}"
        if off and rng.random() < 0.08:
            world.machines = [replace(m, ready=True) for m in world.machines]
            off = ""
        elif not off and rng.random() < 0.04:
            off = rng.choice(world.machines).name
            world.kill(off)
        step(world, rng.choice((None, None, 0, 1, 2, 3)))
    world.machines = [replace(m, ready=True) for m in world.machines]
    settle(world, 500)


def test_lost_masters_that_are_too_many_are_named_and_keep_their_places() -> None:
    """The driver neither replaces them nor lets them go. So fewer masters do not come about either."""
    world = made(5, machines=9)
    lost = [n for n, _ in world.voters[3:]]
    killed = [m.name for m in make_plan(world.observe()).members if m.node_id in lost]
    for machine in [n.machine for n in world.nodes.values() if n.node_id in lost]:
        world.kill(machine)
    while not all(m.state is State.LOST for m in make_plan(world.observe()).members if m.node_id in lost):
        world.step()
    ask(world, 3)
    for _ in range(3):
        plan = world.step()
    message = found(plan)["TooManyLost"]
    assert all(name in message for name in killed) and "2 masters are lost at once" in message
    assert "more than healing.maxLostNodes=1" in message and len(world.voters) == 5
    status = cluster_status(world.observe(), plan, (), "now")
    stalled = next(c for c in status["conditions"] if c["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "TooManyLost")
    world.machines = [replace(m, ready=True) for m in world.machines]
    settle(world, 300)
