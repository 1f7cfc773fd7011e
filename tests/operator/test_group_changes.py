"""Changed columns, owner, comment and history of a TabletGroup: its table follows whole, or is left as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stele.model.steps import AddColumn, DropColumn, RenameColumn, SetHistory
from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    AlterTable,
)
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import group_status
from tests.operator.world import COLUMNS, World
from tests.operator.worlds import MORE, NOW, conditions, made, the_group, touching


def test_new_columns_renamed_ones_and_dropped_ones() -> None:
    world = made()
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec["columns"] = [COLUMNS[0], MORE, {**COLUMNS[1], "name": "said", "renamedFrom": "text"}]
    plan = make_plan(world.observe())
    (alter,) = plan.actions
    assert isinstance(alter, AlterTable) and alter.event == "TableAltered"
    assert alter.steps == (RenameColumn("text", "said"), AddColumn("more", "int8", True))
    assert conditions(world, "events")["Reconciling"][:2] == ("True", "Altering")
    assert conditions(world, "events")["Ready"][0] == "True", "it is written on meanwhile"
    world.run()
    assert [c.name for c in world.tables[0].columns] == ["id", "said", "more"]
    assert not make_plan(world.observe()).actions, "renamedFrom may stay"
    assert conditions(world, "events")["Stalled"][0] == "False"
    del spec["columns"][1]
    assert not make_plan(world.observe()).actions
    found = conditions(world, "events")["Stalled"]
    assert (
        found[1] == "TableDiffers"
        and "column more that the TabletGroup lacks; set allowColumnDrop" in found[2]
    )
    spec["allowColumnDrop"] = True
    (drop,) = make_plan(world.observe()).actions
    assert isinstance(drop, AlterTable) and drop.steps == (DropColumn("more"),)
    world.run()
    assert [c.name for c in world.tables[0].columns] == ["id", "said"]


def test_all_of_a_change_or_nothing() -> None:
    """Also while its tablets take an earlier one over, and where the masters refuse it."""
    world = made()
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec["columns"] = [COLUMNS[0], {**COLUMNS[1], "type": "binary"}, MORE]
    assert not make_plan(world.observe()).actions
    assert "that cannot change" in conditions(world, "events")["Stalled"][2]
    spec["columns"] = [*COLUMNS, MORE]
    world.tables = [replace(t, state="ALTERING") for t in world.tables]
    assert not make_plan(world.observe()).actions
    world.tables = [replace(t, state="RUNNING") for t in world.tables]
    told = replace(world.observe(), refused={("TabletGroup", "events"): "too many columns"})
    (stalled,) = [f for f in make_plan(told).findings if f.kind is Kind.STALLED]
    assert stalled.reason == "Refused" and "too many columns" in stalled.message


def test_owner_comment_and_history_are_set_with_the_table_and_follow_its_resource() -> None:
    world = World()
    notes = {"owner": "ops", "comment": "clicks", "historyRetention": "168h"}
    world.group("events", **notes)
    world.run()
    (table,) = world.tables
    assert (table.owner, table.comment, table.history_ms) == ("ops", "clicks", 604_800_000)
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec |= {"owner": "data", "historyRetention": "1h30m", "columns": [*COLUMNS, MORE]}
    (alter,) = make_plan(world.observe()).actions
    assert isinstance(alter, AlterTable)
    assert alter.steps == (AddColumn("more", "int8", True), SetHistory(5_400_000))
    assert alter.notes == (("owner", "data"),)
    assert (
        alter.reason == "TabletGroup events asks for other columns or ranges and history retention and owner"
    )
    world.run()
    assert (world.tables[0].owner, world.tables[0].comment) == ("data", "clicks")
    for name in notes:
        del spec[name]
    assert not make_plan(world.observe()).actions, "what the resource does not name is left as it is"
    spec["comment"] = ""
    (alter,) = make_plan(world.observe()).actions
    assert isinstance(alter, AlterTable) and (alter.steps, alter.notes) == ((), (("comment", ""),))
    spec["historyRetention"] = "90m"
    world.run()
    assert (world.tables[0].comment, world.tables[0].history_ms) == ("", 5_400_000)


def test_the_default_retention_alters_no_table_that_has_it() -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["historyRetention"] = "15m"
    assert not make_plan(world.observe()).actions


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("historyRetention", "30s", "historyRetention is 30s; it must be 1m to 3650d"),
        ("historyRetention", "3651d", "it must be 1m to 3650d"),
        ("historyRetention", "soon", "spec.historyRetention"),
        ("owner", "a\nb", "owner of 3 characters"),
        ("owner", "x" * 129, "spec.owner"),
        ("comment", "a\x07", "comment of 2 characters"),
    ],
)
def test_bad_notes(field: str, value: str, why: str) -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"][field] = value
    assert not make_plan(world.observe()).actions
    found = conditions(world, "events")["Stalled"]
    assert found[1] == "InvalidSpec" and why in found[2]


def test_a_table_that_was_there_before_is_not_altered() -> None:
    world = made()
    world.tables = [replace(t, table_id="f" * 32) for t in world.tables]
    world.tablets = [replace(t, table_id="f" * 32) for t in world.tablets]
    world.objects["TabletGroup", "events"]["spec"]["columns"] = [*COLUMNS, MORE]
    assert not make_plan(world.observe()).actions
    assert conditions(world, "events")["Stalled"][1] == "TableDiffers"


def test_notes_and_history_of_an_adopted_table_are_told_first_and_followed_later() -> None:
    """Another made it. What differs at first is told, and nothing is changed; once it is adopted, they follow."""
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["deletionPolicy"] = "Retain"
    world.run()
    del world.objects["TabletGroup", "events"]
    notes = {"owner": "ops", "comment": "clicks", "historyRetention": "2d"}
    world.group(
        "events",
        deletionPolicy="Retain",
        partitioning={"hash": [{"columns": ["id"], "buckets": 4}]},
        **notes,
    )
    assert not touching(make_plan(world.observe()))
    stalled = conditions(world, "events")["Stalled"]
    assert stalled[1] == "TableDiffers"
    for told in (
        "owner of the table is empty",
        "comment of the table is empty",
        "retention of the table is 15m",
    ):
        assert told in stalled[2]
    o = world.observe()
    assert "tableID" not in group_status(o, make_plan(o), the_group(o, "events"), NOW)
    (table,) = world.tables
    world.tables = [replace(table, owner="ops", comment="clicks", history_ms=2 * 86_400_000)]
    o = world.observe()
    group = world.objects["TabletGroup", "events"]
    group["status"] = group_status(o, make_plan(o), the_group(o, "events"), NOW)
    assert group["status"]["tableID"] == table.table_id
    group["spec"] |= {"owner": "data", "historyRetention": "1h"}
    world.run()
    (table,) = world.tables
    assert (table.owner, table.comment, table.history_ms) == ("data", "clicks", 3_600_000)
    assert conditions(world, "events")["Ready"][0] == "True"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ([{**MORE, "renamedFrom": "text"}, *COLUMNS], "which columns also names"),
        (
            [COLUMNS[0], {**MORE, "renamedFrom": "x"}, {**MORE, "name": "n", "renamedFrom": "x"}],
            "two columns are renamedFrom x",
        ),
    ],
)
def test_unclear_renames(columns: list[dict[str, Any]], why: str) -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["columns"] = columns
    assert not make_plan(world.observe()).actions
    assert conditions(world, "events")["Stalled"][1] == "InvalidSpec"
    assert why in conditions(world, "events")["Stalled"][2]
