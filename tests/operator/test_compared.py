"""The condition CopiesEqual: a new replica that holds other rows is told, with its table, its nodes and the command, until it is mended."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.view import TabletView
from stele.model.copies import CopyRecord
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.plan import make_plan
from stele_operator.plan.status import cluster_status, group_status
from tests.operator.world import World
from tests.operator.worlds import made

NOW = "2026-01-01T00:00:00Z"


def told(world: World) -> dict[str, tuple[str, str, str]]:
    """Status, reason and message of the condition, of the cluster and of its group; written down, as the operator would."""
    observed = world.observe()
    plan = make_plan(observed)
    world.cluster["status"] = cluster_status(observed, plan, (), NOW)
    found = {"cluster": world.cluster["status"]}
    for group in observed.groups:
        found[group.name] = group_status(observed, plan, group, NOW)
    return {
        name: (c["status"], c["reason"], c["message"])
        for name, status in found.items()
        for c in status["conditions"]
        if c["type"] == "CopiesEqual"
    }


def with_copies(world: World, tablet: TabletView, *copies: CopyRecord) -> None:
    world.tablets = [
        replace(t, copies=copies) if t.tablet_id == tablet.tablet_id else t for t in world.tablets
    ]


def test_a_copy_that_differs_is_told_until_it_is_equal_or_replaced() -> None:
    world = made()
    tablet = next(t for t in world.tablets if t.tablet_id != CATALOG_TABLET_ID)
    first, second = tablet.config.peers[:2]
    differs = CopyRecord(second.replica_id, "heal/1", first.replica_id, 5, rows=7, other_rows=8)
    before = told(world)
    assert set(before) == {"cluster", "events"}
    assert {found[:2] for found in before.values()} == {("True", "NoneDiffers")}

    with_copies(world, tablet, replace(differs, other_id=0))
    waits = told(world)
    assert {found[:2] for found in waits.values()} == {("Unknown", "CopiesWait")}
    assert waits["events"][2] == "1 new replica waits to be compared with another voter"

    with_copies(world, tablet, differs)
    for found in told(world).values():
        assert found[:2] == ("False", "CopyDiffers"), found
        assert (
            f"tablet {tablet.tablet_id[:8]} of events: replica {second.replica_id} on flights-node-"
            in found[2]
        )
        assert "`stele table verify events` compares all replicas" in found[2]
        assert f"`stele tablet move {tablet.tablet_id[:8]} --from NODE --to NODE`" in found[2]

    with_copies(world, tablet, replace(differs, other_rows=7))
    assert {found[:2] for found in told(world).values()} == {("True", "NoneDiffers")}
    with_copies(world, tablet, replace(differs, replica_id=99))
    assert {found[:2] for found in told(world).values()} == {("True", "NoneDiffers")}, "it was replaced"


def test_while_no_master_leads_the_condition_stays_as_it_was() -> None:
    world = made()
    tablet = next(t for t in world.tablets if t.tablet_id != CATALOG_TABLET_ID)
    peers = tablet.config.peers
    with_copies(world, tablet, CopyRecord(peers[1].replica_id, "", peers[0].replica_id, 5, rows=7))
    before = told(world)["cluster"]
    assert before[0] == "False"
    observed = replace(world.observe(), catalog=None)
    status = cluster_status(observed, make_plan(observed), (), NOW)
    (kept,) = [c for c in status["conditions"] if c["type"] == "CopiesEqual"]
    assert (kept["status"], kept["reason"]) == ("False", "CopyDiffers")
