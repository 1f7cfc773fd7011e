"""Tablets that lost a majority for good: told in a condition of their own, with the command; nothing is done about them."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.view import TabletView
from stele.model.config import Configuration
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.plan import make_plan
from stele_operator.plan.actions import DeleteClaim
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.worlds import made, node_of, touching

NOW = "2026-01-01T00:00:00Z"


def condition(world: World, kind: str = "MajorityLost") -> tuple[str, str, str]:
    """Status, reason and message of a condition; written down, as the operator would."""
    observed = world.observe()
    world.cluster["status"] = cluster_status(observed, make_plan(observed), (), NOW)
    (found,) = [c for c in world.cluster["status"]["conditions"] if c["type"] == kind]
    return found["status"], found["reason"], found["message"]


def on_both(world: World, *members: str) -> list[TabletView]:
    """Tablets with replicas on these members."""
    ids = {
        world.objects["PersistentVolumeClaim", m]["metadata"]["annotations"]["stele.dev/node-id"]
        for m in members
    }
    return [t for t in world.tablets if len(ids & {p.node_id for p in t.config.peers}) >= 2]


def test_it_is_told_once_the_nodes_are_given_up_and_nothing_is_done_about_it() -> None:
    world = made()
    assert condition(world)[:2] == ("False", "NoneLost")
    lost = on_both(world, node_of(world, "n4"), node_of(world, "n5"))
    assert lost, "the table has a tablet on both"
    world.cluster["spec"]["healing"] = {"machineLostAfter": "60s", "silentAfter": "60s"}
    for machine in ("n4", "n5"):
        world.kill(machine)
    for _ in range(45):
        world.step()
    assert "MajorityLost" not in {f.reason for f in make_plan(world.observe()).findings}, "they may be back"
    for _ in range(25):
        plan = world.step()
    found = [f for f in plan.findings if f.reason == "MajorityLost"]
    assert len(found) == 1 and lost[0].tablet_id[:8] in found[0].message
    assert "stele tablet recover --all-lost --masters flights-masters.data:7051" in found[0].message
    assert not [a for a in touching(plan) if isinstance(a, DeleteClaim)]


def test_nodes_that_the_catalog_has_no_more_count_as_lost_and_the_condition_is_true_until_there_is_a_majority() -> (
    None
):
    world = made()
    tablet = next(t for t in world.tablets if t.tablet_id != CATALOG_TABLET_ID)
    world.tablets = [
        replace(t, config=Configuration(9, (t.config.peers[0], *unknown(t)))) if t is tablet else t
        for t in world.tablets
    ]
    status, reason, message = condition(world)
    assert (status, reason) == ("True", "RecoverOrRestore") and tablet.tablet_id[:8] in message
    assert condition(world, "Stalled")[:2] == ("True", "MajorityLost")
    world.tablets = [tablet if t.tablet_id == tablet.tablet_id else t for t in world.tablets]
    assert condition(world)[:2] == ("False", "NoneLost")


def unknown(tablet: TabletView) -> tuple[object, ...]:
    """Its other peers, on nodes that the catalog does not have any more."""
    return tuple(replace(p, node_id=f"{i:032x}") for i, p in enumerate(tablet.config.peers[1:], 0xDEAD))
