"""Clusters at rest whose pods take some seconds to start, and what a plan makes again. Used by tests of the budget."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import RollPod
from stele_operator.plan.status import cluster_status
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


def budget(world: World, plan: Plan) -> Json:
    """Who holds the budget and who waits, as the status says."""
    told: Json = cluster_status(world.observe(), plan, (), "now")["budget"]
    return told


def least(world: World, role: str = "node") -> int:
    """How many pods of a role must stay."""
    return int(world.objects["PodDisruptionBudget", f"flights-{role}s"]["spec"]["minAvailable"])


def drains(world: World) -> Json:
    """The condition DrainBlocked."""
    observed = world.observe()
    conditions = cluster_status(observed, make_plan(observed), (), "now")["conditions"]
    return next(c for c in conditions if c["type"] == "DrainBlocked")
