"""Whole stories, step by step: what the planner does, in order, until nothing is left to do. Waits are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.steps import WAITS, Blocked
from stele.driver.view import ClusterView, ReplicaView
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, ModelTablet

REPLACED = ["BeginIntent", "StartCopy", "DemotePeer", "AddWitness", "RemovePeer", "EndIntent"]
"""The story of a replica that is replaced while the tablet can spare none."""


def story(
    cluster: Cluster, *, policy: Policy = POLICY, after: dict[str, Callable[[], None]] | None = None
) -> list[str]:
    """The steps until all is well or only waits are left. `after[step]` happens once, after that step."""
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
    """A cluster of one tablet."""
    cluster = Cluster(machines, 1, 1, rf)
    return cluster, next(iter(cluster.tablets.values()))


def node_of(cluster: Cluster, t: ModelTablet, replica: int) -> ModelNode:
    """The node of the replica in this place of the tablet's configuration."""
    return cluster.nodes[t.config.peers[replica].node_id]


def one_dead(rf: int = 3, machines: int = 5) -> tuple[Cluster, ModelTablet]:
    """A cluster of one tablet. The node of its last replica is dead."""
    cluster, t = one(rf, machines)
    node_of(cluster, t, rf - 1).alive = False
    cluster.advance()
    return cluster, t


def one_cut(machines: int = 5) -> tuple[Cluster, ModelTablet]:
    """A cluster of one tablet. Only the masters hear the node of its last replica."""
    cluster, t = one(machines=machines)
    node_of(cluster, t, 2).cut = True
    cluster.advance()
    return cluster, t


def reported(view: ClusterView, change: Callable[[ReplicaView], ReplicaView]) -> ClusterView:
    """The view as it would be if its replicas had reported something else."""
    tablets = tuple(replace(t, replicas=tuple(change(r) for r in t.replicas)) for t in view.tablets)
    return replace(view, tablets=tablets)
