"""Worlds that the plan's tests start from, and what holds in every one of them."""

from __future__ import annotations

from collections import Counter

from stele_operator.plan import Plan
from stele_operator.plan.actions import Action, SetDriverPolicy
from tests.operator.world import World


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
