"""Ranges of TabletGroups: made, added and dropped with all that is asked for, or not at all; what their bounds mean."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from stele.model.keys import decode_key
from stele.model.ranges import AddRange, DropRange
from stele.model.steps import AddColumn
from stele_operator.api.group import TabletGroupSpec
from stele_operator.plan import make_plan
from stele_operator.plan.actions import AlterTable
from stele_operator.plan.ranges import range_faults, ranges_of
from tests.operator.test_foretold import ask
from tests.operator.world import COLUMNS, World
from tests.operator.worlds import MORE, conditions, made


def span(start: Any, end: Any) -> dict[str, Any]:
    """A range as a TabletGroup has it; None for no bound."""
    ends = {"from": start, "to": end}
    return {name: [value] for name, value in ends.items() if value is not None}


def ranged(*ranges: dict[str, Any], **hashes: Any) -> World:
    """A world with a table of these ranges."""
    world = World({"nodes": {"replicas": 5}})
    world.group("events", partitioning={"range": {"columns": ["id"], "ranges": list(ranges)}, **hashes})
    world.run()
    return world


def bounds(world: World) -> list[tuple[Any, Any]]:
    """The ranges of the first table."""
    assert world.tables[0].range is not None
    return [
        tuple(decode_key(end, [pa.int64()])[0] if end else None for end in pair)
        for pair in world.tables[0].range.covered
    ]


def test_ranges_are_made_added_and_dropped() -> None:
    hashes = {"hash": [{"columns": ["id"], "buckets": 2}]}
    world = ranged(span(None, 0), span("0", 1000), **hashes)
    assert bounds(world) == [(None, 0), (0, 1000)] and len(world.tablets) == 4
    assert not make_plan(world.observe()).actions
    asked = world.objects["TabletGroup", "events"]["spec"]["partitioning"]["range"]
    asked["ranges"] = [span(0, 1000), span(None, 0), span(1000, 2000)]
    (alter,) = make_plan(world.observe()).actions
    assert isinstance(alter, AlterTable) and [type(s) for s in alter.steps] == [AddRange]
    assert conditions(world, "events")["Reconciling"][:2] == ("True", "Altering")
    world.run()
    assert bounds(world) == [(None, 0), (0, 1000), (1000, 2000)]
    asked["ranges"] = [span(0, 1000), span(1000, 2000)]
    assert not make_plan(world.observe()).actions
    status, reason, message = conditions(world, "events")["Stalled"]
    assert (status, reason) == ("True", "TableDiffers")
    assert "the table has a range ..0 that the TabletGroup lacks; set allowRangeDrop" in message
    assert conditions(world, "events")["Ready"][0] == "True"
    world.objects["TabletGroup", "events"]["spec"]["allowRangeDrop"] = True
    (drop,) = make_plan(world.observe()).actions
    assert isinstance(drop, AlterTable) and [type(s) for s in drop.steps] == [DropRange]
    world.run()
    assert bounds(world) == [(0, 1000), (1000, 2000)] and not make_plan(world.observe()).actions


def test_it_is_foretold_that_a_range_is_dropped_with_its_rows() -> None:
    world = ranged(span(0, 1000), span(1000, 2000))
    spec = world.objects["TabletGroup", "events"]["spec"]
    parts = {"range": {"columns": ["id"], "ranges": [span(1000, 2000), span(2000, 3000)]}}
    for allowed in (False, True):
        told = ask(
            world,
            {"nodes": {"replicas": 5}},
            {"events": {**spec, "partitioning": parts, "allowRangeDrop": allowed}},
        )
        assert told.complete and told.fine == allowed, told.lines()
        assert any("1 range dropped with all rows" in line for line in told.order()) == allowed
        assert [u.reason for u in told.unmet] == ([] if allowed else ["TableDiffers"])


def test_columns_and_ranges_change_together_or_not_at_all() -> None:
    world = ranged(span(0, 1000))
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec["columns"] = [*COLUMNS, MORE]
    spec["partitioning"]["range"]["ranges"] = [span(0, 2000)]
    assert not make_plan(world.observe()).actions, "another upper bound is another range, and empty"
    assert "a range 0..1000 that the TabletGroup lacks" in conditions(world, "events")["Stalled"][2]
    spec["allowRangeDrop"] = True
    (alter,) = make_plan(world.observe()).actions
    assert isinstance(alter, AlterTable)
    assert [type(s) for s in alter.steps] == [AddColumn, DropRange, AddRange]
    world.run()
    assert bounds(world) == [(0, 2000)] and len(world.tables[0].columns) == 3


def test_a_table_without_ranges_gets_none_and_one_with_others_is_foreign() -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["partitioning"]["range"] = {
        "columns": ["id"],
        "ranges": [span(0, None)],
    }
    assert not make_plan(world.observe()).actions
    assert "partitioned in another way" in conditions(world, "events")["Stalled"][2]
    world = ranged(span(0, 1000))
    world.tables = [replace(t, table_id="f" * 32) for t in world.tables]
    world.tablets = [replace(t, table_id="f" * 32) for t in world.tablets]
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec["partitioning"]["range"]["ranges"] = [span(0, 1000), span(1000, 2000)]
    assert not make_plan(world.observe()).actions
    assert "the table has other ranges" in conditions(world, "events")["Stalled"][2]


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ([span(0, 1000), span(500, 2000)], "ranges 0..1000 and 500..2000 overlap"),
        ([span(None, None), span(0, 1)], "ranges .. and 0..1 overlap"),
        ([span(10, 10)], "range 10..10 is empty: it ends before it begins"),
        ([span("x", None)], "range x..: "),
        ([{"from": [1, 2]}], "expected a value for each of id"),
        ([span("[" * 1000, None)], f"partitioning.range: range {'[' * 40}.....: column id"),
        ([span("1_0", None)], "range 1_0..: "),
        ([span("9" * 30, None)], "range 999"),
    ],
)
def test_ranges_that_cannot_be(ranges: list[dict[str, Any]], why: str) -> None:
    world = ranged(span(0, 1000))
    world.objects["TabletGroup", "events"]["spec"]["partitioning"]["range"]["ranges"] = ranges
    assert not make_plan(world.observe()).actions
    found = conditions(world, "events")["Stalled"]
    assert found[1] == "InvalidSpec" and why in found[2], found


def test_bounds_are_read_by_the_types_of_their_columns() -> None:
    columns = [
        {"name": "day", "type": "date"},
        {"name": "code", "type": "string"},
        {"name": "price", "type": "decimal(9,2)"},
    ]
    body = {
        "clusterRef": {"name": "flights"},
        "columns": columns,
        "primaryKey": ["day", "code", "price"],
        "partitioning": {
            "range": {
                "columns": ["day", "code", "price"],
                "ranges": [{"from": ["2024-01-01", 7, "1.50"], "to": ["2024-02-01", "7", 2]}],
            }
        },
    }
    spec = TabletGroupSpec.model_validate(body)
    assert not range_faults(spec)
    part = ranges_of(spec, {"day": 0, "code": 1, "price": 2})
    assert part is not None
    types = [pa.date32(), pa.string(), pa.decimal128(9, 2)]
    ((start, end, _),) = part.covered
    assert decode_key(start, types) == (
        date(2024, 1, 1).toordinal() - date(1970, 1, 1).toordinal(),
        "7",
        Decimal("1.50"),
    )
    assert decode_key(end, types) == (
        date(2024, 2, 1).toordinal() - date(1970, 1, 1).toordinal(),
        "7",
        Decimal("2.00"),
    )
