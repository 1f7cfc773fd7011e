"""spec.budget.maxUnavailable: how many pods are made again, evicted and parked at once, and where tablets allow fewer."""

from __future__ import annotations

import datetime
import random
from dataclasses import replace
from typing import Any

import pytest

from stele.driver.view import Away, Holder
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.observe import read_spec
from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import RollPod
from stele_operator.plan.fates import State
from stele_operator.plan.status import cluster_status
from tests.operator.test_budgets import with_failed
from tests.operator.world import World
from tests.operator.worlds import check

Json = dict[str, Any]
NEXT = "stele/node:next"
START_S = 5.0


class Slow(World):
    """Processes need some seconds to start, so pods are away for that long. Leaders leave nodes that end."""

    def settle(self) -> None:
        super().settle()
        running = up(self)
        for number, tablet in enumerate(self.tablets):
            left = [p.node_id for p in tablet.config.voters if p.node_id in running]
            if tablet.leader_node and tablet.leader_node not in running and left:
                self.tablets[number] = replace(tablet, leader_node=left[0])

    def run_pod(self, raw: Json) -> None:
        born = datetime.datetime.fromisoformat(raw["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        if raw["spec"].get("nodeName") and self.now_s - born.timestamp() < START_S:
            raw["status"] = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [{"name": "stele", "state": {"running": {}}, "restartCount": 0}],
            }
            self.touch(raw)
            return
        super().run_pod(raw)


def made(most: int, nodes: int = 6, factor: int = 3, tablets: int = 2) -> Slow:
    """A cluster at rest. Tablet i has its replicas on the nodes i, i + 1 and so on."""
    world = Slow({"nodes": {"replicas": nodes}, "budget": {"maxUnavailable": most}}, machines=nodes)
    pass_by(world, 40)
    if factor:
        hashes = [{"columns": ["id"], "buckets": tablets}] if tablets > 1 else []
        world.group("events", replicationFactor=factor, partitioning={"hash": hashes})
        pass_by(world, 10)
    assert not world.step().actions
    return world


def pass_by(world: World, passes: int) -> None:
    """So many passes, whatever they do."""
    for _ in range(passes):
        world.step()


def up(world: World) -> set[str]:
    """Nodes whose pods are ready, by UUID."""
    return {
        p["metadata"]["annotations"]["stele.dev/node-id"]
        for p in world.of("Pod")
        if p["status"]["conditions"][0] == {"type": "Ready", "status": "True"}
    }


def rolled(plan: Plan) -> list[str]:
    """Pods that a plan makes anew for the spec."""
    return [a.name for a in plan.actions if isinstance(a, RollPod)]


def found(plan: Plan) -> dict[str, str]:
    """Messages of its findings by reason."""
    return {f.reason: f.message for f in plan.findings}


def change_nodes(world: World, note: str = "x") -> None:
    """Another spec for the pods of nodes."""
    world.cluster["spec"]["nodes"]["podAnnotations"] = {"note": note}


def of_nodes(world: World) -> dict[str, str]:
    """UUIDs of the nodes by name."""
    return {m.name: m.node_id for m in make_plan(world.observe()).members if m.role == "node"}


def safe(world: World) -> None:
    """What holds of every tablet while nothing fails: a majority of its voters runs, and one more if it has replicas
    on two nodes that are away. A dumb twin of the plan's rule."""
    running = up(world)
    for tablet in world.tablets:
        voters = [p.node_id for p in tablet.config.voters]
        gone = [n for n in voters if n not in running]
        spare = len(voters) - len(gone) - (len(voters) // 2 + 1)
        assert spare >= (1 if len(gone) > 1 else 0) or len(voters) == 1, (tablet.tablet_id, gone)


def roll(world: World, passes: int = 200) -> tuple[list[str], int]:
    """Step until all is rolled; the order, and how many nodes were away at most."""
    order: list[str] = []
    most = 0
    ids = of_nodes(world)
    for _ in range(passes):
        plan = world.step()
        check(world)
        safe(world)
        order += rolled(plan)
        most = max(most, len(set(ids.values()) - up(world)))
        if not {"Rolling", "RollWaits"} & set(found(plan)) and set(ids.values()) <= up(world):
            break
    return order, most


@pytest.mark.parametrize(
    ("most", "factor", "tablets", "away"),
    [
        (1, 3, 2, 1),
        (2, 3, 2, 2),  # node 4 holds nothing, and goes beside others
        (2, 3, 6, 2),  # nodes 0 and 3 share no tablet
        (3, 3, 6, 2),
        (2, 5, 6, 1),  # each two nodes share a tablet, which would be left without a spare
        (4, 0, 0, 4),
        (2, 1, 6, 2),
    ],
)
def test_as_many_nodes_are_made_again_at_once_as_tablets_allow(
    most: int, factor: int, tablets: int, away: int
) -> None:
    world = made(most, factor=factor, tablets=tablets)
    change_nodes(world)
    order, at_most = roll(world)
    assert sorted(order) == [f"flights-node-{n}" for n in range(6)]
    assert at_most == away


def test_a_tablet_of_seven_replicas_can_spare_two_and_keep_a_spare() -> None:
    world = made(2, nodes=7, factor=7, tablets=1)
    change_nodes(world)
    assert roll(world)[1] == 2
    world = made(3, nodes=7, factor=7, tablets=1)
    change_nodes(world)
    assert roll(world)[1] == 2


def test_the_first_node_goes_alone_and_if_it_does_not_come_back_no_other_goes() -> None:
    world = made(3, factor=0)
    change_nodes(world)
    plan = world.step()
    (first,) = rolled(plan)
    world.silent.add(first)
    more: list[str] = []
    for _ in range(20):
        more += rolled(world.step())
    assert not more
    world.silent.clear()
    for _ in range(12):
        more += rolled(world.step())
    assert len(more) >= 3


def test_a_pod_that_was_started_again_by_itself_lets_no_other_go() -> None:
    world = made(3, factor=0)
    change_nodes(world)
    (first,) = rolled(world.step())
    while not rolled(plan := world.step()):
        pass
    (second,) = rolled(plan)
    world.step()
    raw = world.objects["Pod", second]
    world.settle()
    raw["status"]["containerStatuses"][0]["restartCount"] = 1
    observed = world.observe()
    assert not rolled(make_plan(observed))
    assert "must be ready first" in found(make_plan(observed))["RollWaits"]
    raw["status"]["containerStatuses"][0]["restartCount"] = 0
    assert rolled(make_plan(world.observe())) and first != second


@pytest.mark.parametrize("ails", ["a lost machine", "a failed replica", "a leader that left"])
def test_heals_go_first_whatever_the_budget(ails: str) -> None:
    world = made(3, nodes=8)
    change_nodes(world)
    for _ in range(30):
        plan = world.step()
        if rolled(plan) and rolled(plan) != ["flights-node-0"]:
            break
    if ails == "a lost machine":
        world.kill("n8")
        world.settle()
    elif ails == "a failed replica":
        world.tablets[0] = with_failed(world.tablets[0])
    else:
        world.tablets[0] = replace(world.tablets[0], leader_node="")
    for _ in range(4):
        plan = world.step()
        assert not rolled(plan)
    assert "RollWaits" in found(plan)


def test_a_parked_node_and_a_roll_share_the_budget() -> None:
    world = made(2, factor=3, tablets=6)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    for _ in range(3):
        world.step()
    parked = of_nodes(world)["flights-node-1"]
    assert world.nodes[parked].parked
    world.silent.add("flights-node-1")
    for _ in range(8):
        world.step()
    change_nodes(world)
    taken: list[str] = []
    for _ in range(60):
        plan = world.step()
        safe(world)
        taken += rolled(plan)
        status = cluster_status(world.observe(), plan, (), "now")["budget"]
        if rolled(plan):
            assert status == {"holder": "park/flights-node-1, upgrade", "waiting": []}
    assert taken == ["flights-node-4"], "the only one that shares no tablet with the parked one"
    assert status == {"holder": "park/flights-node-1", "waiting": ["upgrade"]}


def test_a_second_node_is_not_parked_while_one_is_and_the_budget_is_one() -> None:
    world = made(1, factor=0)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-0", "flights-node-1"]
    for _ in range(3):
        plan = world.step()
    ids = of_nodes(world)
    assert [world.nodes[ids[f"flights-node-{n}"]].parked for n in (0, 1)] == [True, False]
    assert found(plan)["ParkRefused"] == (
        "flights-node-1 cannot be parked: flights-node-0 is parked, and budget.maxUnavailable is 1; raise it, or take a name "
        "from nodes.park"
    )
    world.silent.add("flights-node-0")
    for _ in range(5):
        plan = world.step()
    status = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert status == {"holder": "park/flights-node-0", "waiting": ["park/flights-node-1"]}
    world.cluster["spec"]["budget"]["maxUnavailable"] = 2
    for _ in range(2):
        plan = world.step()
    assert world.nodes[ids["flights-node-1"]].parked and "ParkRefused" not in found(plan)


def test_a_node_waits_to_be_parked_for_one_that_is_made_again() -> None:
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    assert rolled(world.step()) == ["flights-node-0"]
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-3"]
    plan = world.step()
    assert found(plan)["ParkWaits"] == (
        "flights-node-3 waits to be parked: flights-node-0 must be back first, since budget.maxUnavailable is 1"
    )
    told = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert told == {"holder": "upgrade", "waiting": ["park/flights-node-3"]}
    for _ in range(12):
        plan = world.step()
    assert world.nodes[of_nodes(world)["flights-node-3"]].parked


def budget(world: World, plan: Plan) -> Json:
    """Who holds the budget and who waits, as the status says."""
    told: Json = cluster_status(world.observe(), plan, (), "now")["budget"]
    return told


def test_a_roll_and_a_park_do_not_begin_together() -> None:
    """Both were begun in one pass: nobody was away when it began."""
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    o = world.observe()
    plan = make_plan(o)
    assert plan.policy is not None and list(plan.policy.parked) == [of_nodes(world)["flights-node-1"]]
    assert rolled(plan) == []
    assert found(plan)["RollWaits"].endswith("flights-node-0 waits: flights-node-1 must be parked first")
    assert cluster_status(o, plan, (), "now")["budget"] == {
        "holder": "park/flights-node-1",
        "waiting": ["upgrade"],
    }
    world.step()
    world.cluster["spec"]["nodes"]["park"] = []
    order, most = roll(world)
    assert len(order) == 6 and most == 1


def test_a_roll_waits_while_nodes_leave_and_is_told() -> None:
    """It was in no list: neither did it hold the budget, nor did it wait."""
    world = made(1, factor=3, tablets=6)
    world.drains = False
    change_nodes(world)
    world.cluster["spec"]["nodes"] |= {"replicas": 5, "retire": ["flights-node-1"]}
    for _ in range(4):
        o = world.observe()
        plan = make_plan(o)
        assert not rolled(plan)
        assert "flights-node-1 must leave first" in found(plan)["RollWaits"]
        told = cluster_status(o, plan, (), "now")["budget"]
        assert told == {"holder": "drain/flights-node-1", "waiting": ["upgrade"]}
        world.step()


def test_the_catalog_names_the_holder_before_a_pod_goes_and_until_it_is_back() -> None:
    """And another operator, which remembers nothing, finds it there."""
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    plan = make_plan(world.observe())
    names = [type(a).__name__ for a in plan.actions]
    assert names.index("SetDriverPolicy") < names.index("RollPod")
    world.step()
    assert world.standing is not None
    away = of_nodes(world)["flights-node-0"]
    incarnation = world.nodes[away].incarnation
    assert world.standing.holding == (Holder("upgrade", (Away(away, incarnation),)),)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-3"]
    plan = world.step()
    assert world.standing.holding == (Holder("upgrade", (Away(away, incarnation),)),)
    assert world.standing.waiting == ("park/flights-node-3",)
    assert rolled(plan) == []
    for _ in range(12):
        world.step()
        assert (away in up(world)) or [a.node_id for a in world.standing.holding[-1].away] == [away]
    assert world.standing.holding == (Holder("park/flights-node-3"),)
    assert world.standing.waiting == ("upgrade",)
    world.cluster["spec"]["nodes"]["park"] = []
    roll(world)
    for _ in range(3):
        world.step()
    assert (world.standing.holding, world.standing.waiting) == ((), ())


def test_a_pod_that_never_comes_back_is_lost_and_the_roll_lets_go_of_it() -> None:
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    world.step()
    world.silent.add("flights-node-0")
    world.drains = False
    for _ in range(60):
        plan = world.step()
    assert world.standing is not None
    assert world.standing.holding == (Holder("heal/flights-node-0"),)
    assert budget(world, plan) == {"holder": "heal/flights-node-0", "waiting": ["upgrade"]}


def test_whoever_is_away_in_any_case_may_be_parked() -> None:
    """Parked, it is waited for and not replaced."""
    world = made(1, factor=3, tablets=6)
    world.silent.add("flights-node-2")
    for _ in range(5):
        world.step()
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-2"]
    world.step()
    assert world.nodes[of_nodes(world)["flights-node-2"]].parked


def test_each_lost_member_holds_the_budget_and_none_of_them_waits() -> None:
    world = made(1, nodes=8, factor=3, tablets=8)
    world.cluster["spec"]["healing"] = {"witnessAfter": "5s", "maxLostNodes": 2}
    world.cluster["spec"]["image"] = NEXT
    world.drains = False
    for name in ("flights-node-1", "flights-node-5"):
        world.silent.add(name)
    for _ in range(10):
        plan = world.step()
    lost = {m.name for m in plan.members if m.state is State.LOST}
    assert lost == {"flights-node-1", "flights-node-5"}
    told = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert told == {"holder": "heal/flights-node-1, heal/flights-node-5", "waiting": ["upgrade"]}


def least(world: World, role: str = "node") -> int:
    """How many pods of a role must stay."""
    return int(world.objects["PodDisruptionBudget", f"flights-{role}s"]["spec"]["minAvailable"])


def drains(world: World) -> Json:
    """The condition DrainBlocked."""
    observed = world.observe()
    conditions = cluster_status(observed, make_plan(observed), (), "now")["conditions"]
    return next(c for c in conditions if c["type"] == "DrainBlocked")


@pytest.mark.parametrize(
    ("most", "factor", "stay", "told", "bound"),
    [
        (1, 5, 5, "one node and", False),
        (2, 5, 4, "2 nodes and", False),
        (3, 5, 4, "2 nodes and", True),
        (2, 3, 5, "one node and", True),
        (3, 0, 3, "3 nodes and", False),
        (100, 0, 0, "6 nodes and", False),
    ],
)
def test_as_many_pods_may_be_evicted_as_any_tablet_can_lose(
    most: int, factor: int, stay: int, told: str, bound: bool
) -> None:
    world = made(most, factor=factor, tablets=6)
    assert (least(world), least(world, "master")) == (stay, 2)
    message = drains(world)["message"]
    assert message.startswith(f"{told} one master may be evicted at a time")
    assert ("with more nodes away, these could lose their majority: " in message) == bound
    assert ("with more masters away, these could lose their majority: the catalog" in message) == (most > 1)


@pytest.mark.parametrize("heard", [False, True])
def test_after_one_was_evicted_only_as_many_more_may_go_as_before(heard: bool) -> None:
    """Also while the masters still hear the node of a pod that has gone."""
    world = made(3, factor=5, tablets=6)
    assert least(world) == 4
    world.silent.add("flights-node-2")
    world.settle()
    if heard:
        world.step()
    else:
        for _ in range(6):
            world.step()
    assert least(world) == 4
    assert drains(world)["status"] == "False"
    world.silent.add("flights-node-3")
    for _ in range(6):
        world.step()
    assert least(world) in (4, 6) and drains(world)["status"] == "True"


def test_a_tablet_that_lacks_a_voter_for_another_reason_lets_fewer_go() -> None:
    world = made(2, factor=5, tablets=6)
    world.tablets[0] = with_failed(world.tablets[0])
    world.step()
    assert least(world) == 5
    world.tablets[0] = with_failed(world.tablets[0], 2)
    world.step()
    assert least(world) == 6


def test_five_masters_may_be_evicted_two_at_a_time_and_are_made_again_one_by_one() -> None:
    world = Slow({"nodes": {"replicas": 3}, "masters": {"replicas": 5}, "budget": {"maxUnavailable": 2}})
    pass_by(world, 40)
    assert least(world, "master") == 3
    world.cluster["spec"]["masters"]["podAnnotations"] = {"note": "x"}
    ids = {p["metadata"]["name"] for p in world.of("Pod") if "master" in p["metadata"]["name"]}
    for _ in range(80):
        world.step()
        ready = {
            p["metadata"]["name"] for p in world.of("Pod") if p["status"]["conditions"][0]["status"] == "True"
        }
        assert len(ids - ready) <= 1


@pytest.mark.parametrize("value", [0, -1, 101, "50%", 1.5])
def test_the_operator_refuses_bad_values_by_itself(value: object) -> None:
    """Not every API server runs the rules of the schema."""
    spec, faults, _ = read_spec(TabletClusterSpec, {"spec": {"budget": {"maxUnavailable": value}}})
    assert spec is None and "spec.budget.maxUnavailable" in faults[0]


@pytest.mark.parametrize("seed", range(6))
def test_at_random_no_tablet_loses_its_majority_by_our_doing_and_a_roll_always_ends(seed: int) -> None:
    """Machines fail and come back, nodes are parked and wanted back, and the spec changes again meanwhile."""
    rng = random.Random(seed)
    most, factor = rng.choice([2, 3]), rng.choice([3, 5])
    world = made(most, nodes=7, factor=factor, tablets=rng.choice([2, 4, 7]))
    down = ""
    for _ in range(160):
        if rng.random() < 0.08:
            change_nodes(world, rng.choice("abc"))
        if rng.random() < 0.05:
            world.cluster["spec"]["nodes"]["park"] = rng.sample(
                sorted(of_nodes(world)), rng.choice([0, 1, 2])
            )
        if not down and rng.random() < 0.03:
            down = rng.choice(["n1", "n2", "n3"])
            world.kill(down)
            world.settle()
        elif down and rng.random() < 0.2:
            world.machines = [replace(m, ready=True) for m in world.machines]
            down = ""
        before = up(world)
        plan = world.step()
        check(world)
        taken = rolled(plan)
        assert len(taken) <= 1
        if taken:
            ids = of_nodes(world)
            after = before - {ids.get(name, name) for name in taken}
            away = set(ids.values()) - after
            assert len(away) <= most
            for tablet in world.tablets:
                voters = {p.node_id for p in tablet.config.voters}
                spare = len(voters & after) - (len(voters) // 2 + 1)
                if voters - before or voters - after:
                    assert spare >= (1 if len(voters & away) > 1 else 0)
    world.machines = [replace(m, ready=True) for m in world.machines]
    world.cluster["spec"]["nodes"]["park"] = []
    for _ in range(300):
        plan = world.step()
    assert not {"Rolling", "RollWaits", "RollStopped"} & set(found(plan)), found(plan)


@pytest.mark.parametrize(("most", "taken"), [(1, []), (2, ["flights-node-4"])])
def test_a_parked_node_that_is_still_there_counts_as_away(most: int, taken: list[str]) -> None:
    """Whoever parked it may switch its machine off at any moment, without asking again."""
    world = made(most, factor=3, tablets=6)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    for _ in range(3):
        world.step()
    change_nodes(world)
    order: list[str] = []
    parked = of_nodes(world)["flights-node-1"]
    world.tablets = [  # leaders leave it
        replace(t, leader_node=next(p.node_id for p in t.config.voters if p.node_id != parked))
        for t in world.tablets
    ]
    for _ in range(40):
        plan = world.step()
        order += rolled(plan)
        gone = set(of_nodes(world).values()) - up(world) | {parked}
        for tablet in world.tablets:
            voters = {p.node_id for p in tablet.config.voters}
            assert len(voters - gone) > len(voters) // 2, (tablet.tablet_id, gone)
    assert order == taken
    assert "flights-node-1 must be ready first" in found(plan)["RollWaits"]
    status = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert status == {"holder": "park/flights-node-1", "waiting": ["upgrade"]}
    world.cluster["spec"]["nodes"]["park"] = []
    assert set(roll(world)[0]) == {f"flights-node-{n}" for n in range(6)} - set(taken)


def test_beside_a_parked_node_that_still_runs_only_its_own_pod_may_be_evicted() -> None:
    """Any pod could be, and then whoever parked the node switched its machine off."""
    world = made(1, factor=3, tablets=6)
    assert least(world) == 5
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    for _ in range(4):
        world.step()
    counted = {
        p["metadata"]["name"] for p in world.of("Pod") if "stele.dev/parked" not in p["metadata"]["labels"]
    }
    assert "flights-node-1" not in counted and "flights-node-2" in counted
    selector = world.objects["PodDisruptionBudget", "flights-nodes"]["spec"]["selector"]
    assert selector["matchExpressions"] == [{"key": "stele.dev/parked", "operator": "DoesNotExist"}]
    assert least(world) == 5, "all of the five that count"
    told = drains(world)
    assert (told["status"], told["reason"]) == ("True", "NodeParked")
    assert "flights-node-1 is parked" in told["message"]
    world.cluster["spec"]["budget"]["maxUnavailable"] = 2
    world.tablets, world.tables = [], []
    del world.objects["TabletGroup", "events"]
    world.step()
    assert least(world) == 4 and drains(world)["reason"] == "Drainable"
    world.cluster["spec"]["nodes"]["park"] = []
    for _ in range(4):
        world.step()
    assert all("stele.dev/parked" not in p["metadata"]["labels"] for p in world.of("Pod"))
    assert least(world) == 4
    assert not world.step().actions
