"""Whole stories, step by step: what the planner does, in order, until nothing is left to do. Waits are left out."""

from __future__ import annotations

from collections.abc import Callable

from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.steps import (
    WAITS,
    Blocked,
)
from tests.driver.model import POLICY, Cluster, ModelNode, ModelTablet


def story(
    cluster: Cluster, *, policy: Policy = POLICY, after: dict[str, Callable[[], None]] | None = None
) -> list[str]:
    """The steps taken until all is well or nothing but waiting is left; `after[step]` happens once, after it."""
    told: list[str] = []
    idle = 0
    happenings = dict(after or {})
    for _ in range(60):
        steps = plan(cluster.view(), policy)
        if not steps:
            return told
        idle = idle + 1 if all(isinstance(s, WAITS) for s in steps) else 0
        if idle > 5:
            return [*told, *(f"Blocked:{s.code}" for s in steps if isinstance(s, Blocked))]
        for step in steps:
            if isinstance(step, WAITS):
                continue
            cluster.apply(step)
            told.append(type(step).__name__)
            happenings.pop(type(step).__name__, lambda: None)()
        cluster.advance()
    raise AssertionError(f"no end: {told}")


def one(rf: int = 3, machines: int = 5) -> tuple[Cluster, ModelTablet]:
    cluster = Cluster(machines, 1, 1, rf)
    return cluster, next(iter(cluster.tablets.values()))


def node_of(cluster: Cluster, t: ModelTablet, replica: int) -> ModelNode:
    return cluster.nodes[t.config.peers[replica].node_id]
