"""A size that the storage class, or a quota, refuses: said in the API server's words, tried seldom, and taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stele_operator.act import Actor, Outcome
from stele_operator.growth import Growth
from stele_operator.observe import parse_claim
from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import GrowClaim
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import cluster_status
from tests.operator.cluster import bench
from tests.operator.world import World
from tests.operator.worlds import made

Json = dict[str, Any]
WORDS = "only dynamically provisioned pvc can be resized and the storageclass must support resize"


class Passes:
    """Passes over a world whose API server refuses that volumes grow."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.growth = Growth()
        self.tries: list[float] = []
        self.reconciling: list[tuple[str, str]] = []

    def one(self) -> Plan:
        """One pass, a second after the last."""
        o = self.growth.with_refusals(self.world.observe())
        plan = make_plan(o)
        outcomes = []
        for action in plan.actions:
            if isinstance(action, GrowClaim):
                self.tries.append(self.world.now_s)
                outcomes.append(Outcome(action, WORDS, refused=True))
            else:
                self.world.apply(action)
        self.growth.learn(outcomes, o.now_s)
        (found,) = [
            c
            for c in cluster_status(o, plan, (), "2026-01-01T00:00:00Z")["conditions"]
            if c["type"] == "Reconciling"
        ]
        self.reconciling.append((found["status"], found["reason"]))
        self.world.settle()
        self.world.now_s += 1
        return plan


def stalled(plan: Plan) -> list[tuple[str, str]]:
    """Reasons and messages of what waits for a human."""
    return [(f.reason, f.message) for f in plan.findings if f.kind is Kind.STALLED]


def test_a_growth_that_is_refused_is_told_and_tried_seldom() -> None:
    world = made()
    world.cluster["spec"]["nodes"] |= {"storage": {"size": "20Gi"}}
    passes = Passes(world)
    for _ in range(1200):
        plan = passes.one()
    ((reason, message),) = stalled(plan)
    assert reason == "GrowthRefused"
    assert WORDS in message and "nodes.storage.size is 20Gi" in message and "flights-node-0" in message
    assert len(passes.tries) <= 5 * 10, "five claims"
    assert max(b - a for a, b in zip(passes.tries, passes.tries[1:], strict=False)) <= 300
    assert set(passes.reconciling[2:]) == {("False", "Waiting")}


def test_a_size_that_is_taken_back_ends_it_and_one_that_is_changed_is_tried_at_once() -> None:
    world = made()
    world.cluster["spec"]["nodes"] |= {"storage": {"size": "20Gi"}}
    passes = Passes(world)
    for _ in range(3):
        passes.one()
    assert len(passes.tries) == 5
    world.cluster["spec"]["nodes"] |= {"storage": {"size": "15Gi"}}
    passes.one()
    assert len(passes.tries) == 10
    world.cluster["spec"]["nodes"] |= {"storage": {"size": "10Gi"}}
    plan = passes.one()
    assert not plan.findings and not plan.actions
    assert passes.reconciling[-1] == ("False", "AsAskedFor")


def test_what_is_refused_to_one_claim_is_done_to_others_and_forgotten_when_it_is_done() -> None:
    world = made()
    world.cluster["spec"]["nodes"] |= {"storage": {"size": "20Gi"}}
    growth = Growth()
    plan = make_plan(growth.with_refusals(world.observe()))
    first, *others = [a for a in plan.actions if isinstance(a, GrowClaim)]
    for other in others:
        world.apply(other)
    growth.learn([Outcome(first, WORDS, refused=True), *map(Outcome, others)], world.now_s)
    plan = make_plan(growth.with_refusals(world.observe()))
    assert not plan.actions and [reason for reason, _ in stalled(plan)] == ["GrowthRefused"]
    world.now_s += 11
    world.settle()
    (again,) = make_plan(growth.with_refusals(world.observe())).actions
    assert isinstance(again, GrowClaim) and again.again
    world.apply(again)
    growth.learn([Outcome(again)], world.now_s)
    plan = make_plan(growth.with_refusals(world.observe()))
    assert not plan.actions and not plan.findings


def test_what_did_not_reach_the_api_server_was_not_refused() -> None:
    world = made()
    world.cluster["spec"]["nodes"] |= {"storage": {"size": "20Gi"}}
    growth = Growth()
    actions = [a for a in make_plan(world.observe()).actions if isinstance(a, GrowClaim)]
    growth.learn([Outcome(a, "connection refused") for a in actions], world.now_s)
    assert not growth.with_refusals(world.observe()).refused_growth


async def test_the_api_servers_refusal_is_known_for_one(tmp_path: Path) -> None:
    """Here for another reason, since a volume that is not bound yet has no size to change."""
    async with bench(tmp_path, machines=1) as made:
        body = {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "flights-node-0"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}},
        }  # fmt: skip
        raw = await made.kube.create("PersistentVolumeClaim", "default", body)
        claim = parse_claim(raw, "flights")
        assert claim is not None
        patch: Json = {"spec": {"resources": {"requests": {"storage": "20Gi"}}}}
        seen = (claim.name, claim.uid, claim.resource_version)
        action = GrowClaim("larger", "PersistentVolumeClaim", *seen, patch, "20Gi", False)
        (found,) = await Actor(made.kube, "default", None).carry_out([action])
        assert found.refused and "spec is immutable after creation" in found.error
        (old,) = await Actor(made.kube, "default", None).carry_out([replace(action, resource_version="1")])
        assert old.changed_under and not old.refused
