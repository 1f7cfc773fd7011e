"""Worlds that the plan's tests start from, and what holds in every one of them."""

from __future__ import annotations

from collections import Counter

from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import Action, SetDriverPolicy
from stele_operator.plan.observation import GroupObject, Observation
from stele_operator.plan.status import cluster_status, group_status
from tests.operator.world import World

NOW = "2026-01-01T00:00:00Z"
MORE = {"name": "more", "type": "int8", "nullable": True}
"""A column that a TabletGroup may add."""


def names(world: World, kind: str) -> list[str]:
    """Names of all objects of a kind."""
    return [o["metadata"]["name"] for o in world.of(kind)]


def touching(plan: Plan) -> list[Action]:
    """What a plan does to the cluster. What it tells the masters of its own policy is not among it."""
    return [a for a in plan.actions if not isinstance(a, SetDriverPolicy)]


def made() -> World:
    """A cluster that has formed, with a table of four tablets."""
    world = World({"nodes": {"replicas": 5}})
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    return world


def node_of(world: World, machine: str, role: str = "node") -> str:
    """The member of a role on a machine."""
    return next(
        p["metadata"]["name"]
        for p in world.of("Pod")
        if p["spec"].get("nodeName") == machine and p["metadata"]["labels"]["stele.dev/role"] == role
    )


def check(world: World) -> None:
    """What holds at every moment."""
    used = Counter(name for kind, name in world.names_used if kind == "PersistentVolumeClaim")
    assert all(n == 1 for n in used.values()), f"a serial was used twice: {used}"
    claims = {o["metadata"]["name"]: o for o in world.of("PersistentVolumeClaim")}
    ids = [o["metadata"]["annotations"]["stele.dev/node-id"] for o in claims.values()]
    assert len(set(ids)) == len(ids)
    for pod in world.of("Pod"):
        claim = claims[pod["metadata"]["name"]]
        for key in ("stele.dev/node-id",):
            assert pod["metadata"]["annotations"][key] == claim["metadata"]["annotations"][key]


def conditions(world: World, name: str = "") -> dict[str, tuple[str, str, str]]:
    """Conditions of a TabletGroup, or of the cluster, by type."""
    o = world.observe()
    plan = make_plan(o)
    status = group_status(o, plan, the_group(o, name), NOW) if name else cluster_status(o, plan, (), NOW)
    return {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}


def the_group(o: Observation, name: str) -> GroupObject:
    """The TabletGroup of this name."""
    return next(g for g in o.groups if g.name == name)
