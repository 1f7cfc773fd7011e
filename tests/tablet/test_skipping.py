"""Predicates on any column: groups that can hold no wanted row are passed over, and older rows that they hide stay hidden."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from stele.model import keys
from stele.model.alter import altered
from stele.model.block import RowOp, encode_block
from stele.model.ids import HybridTime
from stele.model.predicate import Changes, Predicate, ScanSpec
from stele.model.steps import AddColumn
from stele.tablet import colwriter, order
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import PART_BLOOM, PART_BOUNDS, PART_DELETED, PART_KEYS, PART_TIMES
from stele.tablet.filters import Filter
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.golden import ROWS_2, SCHEMA_2, block_2, row_2
from tests.tablet.test_alter import alter_entry
from tests.tablet.test_changes import OF_KEY
from tests.tablet.test_store_twin import StoreMachine, blocks
from tests.tablet.twin import (
    FOREVER,
    SCHEMA,
    START_US,
    Row,
    block_of,
    compact,
    flush,
    new_store,
    rows_of,
    write_entry,
)

K, N, V, W, D = (int(SCHEMA.by_name[name].id) for name in "knvwd")
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda value, other: value == other,
    "!=": lambda value, other: value != other,
    "<": lambda value, other: value < other,
    "<=": lambda value, other: value <= other,
    ">": lambda value, other: value > other,
    ">=": lambda value, other: value >= other,
    "in": lambda value, other: value in other,
}


def passes(row: Row, predicates: Sequence[Predicate]) -> bool:
    """Whether all of them are true for a row, done the slow way."""
    for predicate in predicates:
        value, op = row[SCHEMA.by_id[predicate.column_id].name], predicate.op
        if op in ("is_null", "is_not_null"):
            if (value is None) != (op == "is_null"):
                return False
        elif value is None or not COMPARE[op](value, predicate.value):
            return False
    return True


@st.composite
def predicates_on(draw: Any, rows: Sequence[Row]) -> tuple[Predicate, ...]:
    """What some of these rows have, or nearly have. So versions that were replaced are looked for, too."""
    found = []
    for name in draw(st.lists(st.sampled_from("nvwwdd"), min_size=1, max_size=2)):
        op = draw(st.sampled_from([*COMPARE, "is_null", "is_not_null"]))
        value: Any = None
        if op in COMPARE:
            values = [row[name] for row in rows if row[name] is not None] or [{"v": "v"}.get(name, 1)]
            value = draw(st.lists(st.sampled_from(values), max_size=2)) if op == "in" else None
            value = tuple(value) if op == "in" else draw(st.sampled_from(values))
        found.append(Predicate(int(SCHEMA.by_name[name].id), op, value))
    return tuple(found)


class SkippingMachine(StoreMachine):
    """All that a store does, in groups of two rows, and scans with predicates at any of its times."""

    @initialize(history_us=st.sampled_from([6, 1 << 50, 1 << 50]))
    def begin(self, history_us: int) -> None:
        super().begin(history_us)
        self.before = colwriter.GROUP_ROWS, order.GROUP_ROWS
        colwriter.GROUP_ROWS = order.GROUP_ROWS = 2

    def teardown(self) -> None:
        colwriter.GROUP_ROWS, order.GROUP_ROWS = self.before
        super().teardown()

    @rule(many=st.lists(blocks(), min_size=2, max_size=4))
    def files(self, many: list[tuple[list[Row], Any]]) -> None:
        """Files that overlap."""
        for block in many:
            self.write(block)
            self.flush_whole()

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), free=st.booleans(), limit=st.sampled_from([None, None, 0, 1, 3]))
    def scan_for_some(self, data: Any, free: bool, limit: int | None) -> None:
        every = [row for versions in self.twin.versions.values() for _, row in versions if row is not None]
        asked = data.draw(predicates_on(every))
        now = data.draw(st.booleans())
        snapshot = self.store.last_timestamp if now else data.draw(st.sampled_from(self.snapshots))
        view = self.view(snapshot)
        if view is None:
            return
        wanted = [row for row in self.twin.at(snapshot) if passes(row, asked)]
        with view:
            if free:
                found = rows_of(view.scan(ScanSpec(predicates=asked)))
                assert sorted(found, key=lambda r: (r["k"].encode(), r["n"])) == wanted, asked
                return
            assert rows_of(view.scan(ScanSpec(predicates=asked, ordered=True, limit=limit))) == wanted[:limit]
            lower = keys.encode_tuple(("a", 1), OF_KEY)
            above = [row for row in wanted if (row["k"].encode(), row["n"]) > (b"a", 1)]
            assert rows_of(view.scan(ScanSpec((3,), asked, resume_after=lower))) == [
                {"w": row["w"]} for row in above
            ]


SkippingMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSkippingMachine = SkippingMachine.TestCase


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of three rows."""
    monkeypatch.setattr(colwriter, "GROUP_ROWS", 3)
    monkeypatch.setattr(order, "GROUP_ROWS", 3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small_groups")
def test_all_types_in_several_files_give_what_a_filter_gives(tmp_path: Path, seed: int) -> None:
    """Nulls, NaN and both zeros among them, with updates and deletes, at each time, before and after a merge."""
    rng = random.Random(seed)
    store = new_store(tmp_path / "t", FOREVER, SCHEMA_2)
    times = []
    for index in range(1, 7):
        start = rng.randrange(0, 120)
        numbers = range(start, start + 60) if index % 2 else rng.sample(range(180), 40)
        op = RowOp.DELETE_IGNORE if index in (3, 6) else RowOp.UPSERT
        body = block_2(numbers, op)
        if op is RowOp.UPSERT:  # another version of each row
            shifted = [
                {**row_2(n), **{c: row_2(n + index)[c] for c in OTHER}, "ratio": _ratio(n + index)}
                for n in numbers
            ]
            batch = pa.RecordBatch.from_pylist(shifted, schema=SCHEMA_2.to_arrow())
            body = encode_block(op, list(SCHEMA_2.column_ids), batch, SCHEMA_2.version)
        entry = write_entry(index, body)
        store.apply(entry)
        times.append(entry.timestamp)
        if index != 6:
            flush(store)
    values = [row_2(n) | {"ratio": _ratio(n)} for n in range(0, ROWS_2, 7)]
    for merged in (False, True):
        if merged:
            flush(store)
            compact(store)
        for time in (*rng.sample(times[:-1], 2), times[-1]):
            with store.view(HybridTime(time)) as view:
                every = pa.Table.from_batches(list(view.scan(ScanSpec(ordered=True))), SCHEMA_2.to_arrow())
                (batch,) = every.combine_chunks().to_batches()
                for _ in range(10):
                    asked = tuple(_drawn(rng, values) for _ in range(rng.choice([1, 1, 2])))
                    mask = Filter(asked, SCHEMA_2).mask(batch)
                    wanted = batch.column("id").filter(mask).to_pylist()
                    for spec in (ScanSpec((0,), asked), ScanSpec((0,), asked, ordered=True)):
                        found = [row["id"] for row in rows_of(view.scan(spec))]
                        assert sorted(found) == wanted, (asked, spec.ordered, merged)
    store.close()


OTHER = ("year", "carrier", "city", "delay", "price", "day", "code", "line", "letters", "ok")


def _ratio(n: int) -> float:
    return float("nan") if n % 5 == 0 else (-0.0, 0.0, n / 7)[n % 3]


def _drawn(rng: random.Random, rows: Sequence[Row]) -> Predicate:
    column = rng.choice(SCHEMA_2.columns)
    op = rng.choice([*COMPARE, "is_null", "is_not_null"])
    if op in ("is_null", "is_not_null"):
        return Predicate(int(column.id), op)
    several = [row[column.name] for row in rng.sample(rows, 9) if row[column.name] is not None]
    return Predicate(int(column.id), op, tuple(several[:3]) if op == "in" else several[0])


# --- what is read


def row(n: int, w: int, v: str | None = "v") -> Row:
    return {"k": "k", "n": n, "v": v, "w": w, "d": n / 2}


def put(store: TabletStore, index: int, rows: Sequence[Row], op: RowOp = RowOp.UPSERT) -> None:
    store.apply(write_entry(index, block_of(rows, op)))


def parts_read(file: ColumnFile) -> dict[int, set[str]]:
    """By group, what was read of it: its checksum was compared."""
    names = {PART_KEYS: "keys", PART_TIMES: "times", PART_DELETED: "deletes"}
    found: dict[int, set[str]] = {}
    for part, group in file._verified:
        if part not in (PART_BLOOM, PART_BOUNDS):
            found.setdefault(group, set()).add(names.get(part, "columns"))
    return found


def scanned(
    store: TabletStore, spec: ScanSpec, at: int | None = None
) -> tuple[list[int], list[dict[int, set[str]]]]:
    """The numbers of the rows that a scan gives, and what it read of each file, newest first."""
    files = store._contents.state.files
    for file in files:
        file._verified.clear()
        file._arrays.clear()
    with store.view(None if at is None else HybridTime(at)) as view:
        numbers = sorted(found["n"] for found in rows_of(view.scan(spec)))
    return numbers, [parts_read(file) for file in files]


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(
    ("predicates", "numbers", "groups"),
    [
        ([Predicate(W, ">=", 1_040), Predicate(W, "<", 1_044)], range(40, 44), {13, 14}),
        ([Predicate(W, "=", 1_030)], [30], {10}),
        ([Predicate(W, "=", 7)], [], set()),
        ([Predicate(W, "in", (1_000, 1_045, 5_000))], [0, 45], {0, 15}),
        ([Predicate(W, "in", ())], [], set()),
        ([Predicate(V, "is_null")], [60, 61, 62], {20}),
        (
            [Predicate(V, "is_not_null"), Predicate(W, ">", 1_057)],
            [58, 59, *range(63, 90)],
            {19, *range(21, 30)},
        ),
        ([Predicate(V, "<", "a")], [], set()),
        ([Predicate(D, ">", 44.0)], [89], {29}),
        ([Predicate(D, "<=", float("nan"))], [], set()),
        ([Predicate(N, ">=", 84)], range(84, 90), {28, 29}),
        ([Predicate(W, ">", 1_080), Predicate(D, "<", 41.0)], [81], {27}),
    ],
)
def test_only_groups_that_can_hold_a_row_are_read(
    tmp_path: Path, predicates: list[Predicate], numbers: Sequence[int], groups: set[int]
) -> None:
    """A predicate on a column that is not of the key read every group."""
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, 1_000 + n, None if 60 <= n < 63 else f"v{n}") for n in range(90)])
    flush(store)
    for ordered in (False, True):
        found, (read,) = scanned(store, ScanSpec(predicates=tuple(predicates), ordered=ordered))
        assert (found, set(read)) == (list(numbers), groups)
    store.close()


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize("late", [False, True], ids=["now", "before"])
@pytest.mark.parametrize("gone", [False, True], ids=["updated", "deleted"])
def test_a_group_without_a_wanted_row_still_hides_older_rows(
    tmp_path: Path, gone: bool, late: bool, ordered: bool
) -> None:
    """The older version of a row is what the predicate asks for, and the newer one is not."""
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, n) for n in range(12)])
    flush(store)
    if gone:
        put(store, 2, [{"k": "k", "n": n} for n in range(3, 9)], RowOp.DELETE)
    else:
        put(store, 2, [row(n, 500) for n in range(3, 9)])
    flush(store)
    then = store.last_timestamp
    if late:
        put(store, 3, [row(n, n) for n in range(12)])
        flush(store)
    spec = ScanSpec(predicates=(Predicate(W, ">=", 2), Predicate(W, "<", 10)), ordered=ordered)
    assert scanned(store, spec, then)[0] == [2, 9]
    if late:
        assert scanned(store, spec)[0] == list(range(2, 10))
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_of_a_group_that_only_hides_no_column_is_read(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, n) for n in range(12)])
    flush(store)
    put(store, 2, [row(n, 500 + n) for n in range(0, 12, 2)])
    flush(store)
    found, (newer, older) = scanned(store, ScanSpec(predicates=(Predicate(W, "<", 2),), ordered=True))
    assert found == [1]
    assert newer == {0: {"keys", "times"}, 1: {"keys", "times"}}
    assert older == {0: {"keys", "times", "columns"}}
    found, (newer, older) = scanned(store, ScanSpec(predicates=(Predicate(W, ">=", 508),), ordered=True))
    assert found == [8, 10]
    assert set(newer) == {1} and older == {}, "what is older hides nothing"
    assert scanned(store, ScanSpec(predicates=(Predicate(W, "=", 99),), ordered=True)) == ([], [{}, {}])
    found, (newer, older) = scanned(store, ScanSpec(predicates=(Predicate(W, "=", 99),)))
    assert (found, newer, older) == ([], {}, {}), "and no masks are made for nothing"
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_masks_are_made_where_they_last(tmp_path: Path) -> None:
    """Those of files serve other scans, too. With rows in memory the next write would make them anew: a merge reads less."""
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, n) for n in range(30)])
    flush(store)
    put(store, 2, [row(n, 500 + n) for n in range(0, 30, 2)])
    flush(store)
    spec = ScanSpec(predicates=(Predicate(W, "<", 2),))
    found, (newer, older) = scanned(store, spec)
    assert found == [1]
    assert all(parts == {"keys"} for parts in newer.values()) and len(newer) == 5
    assert older.pop(0) == {"keys", "columns"} and all(parts == {"keys"} for parts in older.values())
    assert scanned(store, spec) == ([1], [{}, {0: {"columns"}}]), "the masks are kept"
    put(store, 3, [row(3, 1)])
    found, (newer, older) = scanned(store, spec)
    assert found == [1, 3]
    assert set(newer) <= {0, 1, 2} and set(older) == {0}
    assert scanned(store, ScanSpec())[0] == list(range(30)), "this one makes masks"
    assert scanned(store, spec) == ([1, 3], [{}, {0: {"columns"}}])
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_rows_in_memory_are_always_looked_at(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, n) for n in range(12)])
    flush(store)
    put(store, 2, [row(1, 900), row(7, 3), row(20, 901)])
    for ordered in (False, True):
        for wanted, numbers in ((Predicate(W, ">=", 900), [1, 20]), (Predicate(W, "=", 3), [3, 7])):
            assert scanned(store, ScanSpec(predicates=(wanted,), ordered=ordered))[0] == numbers
        assert scanned(store, ScanSpec(predicates=(Predicate(W, "=", 1),), ordered=ordered))[0] == []
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_files_of_either_format_hide_and_show_alike(tmp_path: Path) -> None:
    """A file of format 1 says nothing of its groups."""
    version = [1]
    store = new_store(tmp_path / "t", StoreOptions(history_us=1 << 50, file_version=lambda: version[0]))
    for index in range(1, 5):
        version[0] = 1 + index % 2
        put(store, index, [row(n, 100 * index + n) for n in range(index, 12, index)])
        flush(store)
    every = {n: next(index for index in (4, 3, 2, 1) if n % index == 0) * 100 + n for n in range(1, 12)}
    for bound in range(90, 420, 7):
        for ordered in (False, True):
            found, _ = scanned(store, ScanSpec(predicates=(Predicate(W, "<", bound),), ordered=ordered))
            assert found == [n for n, w in every.items() if w < bound]
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_files_without_a_column_are_passed_over_by_its_default(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, n) for n in range(12)])
    flush(store)
    later = altered(store.schema, [AddColumn("c", "int32", False, "7"), AddColumn("e", "string", True, None)])
    store.apply(alter_entry(2, later))
    c, e = (int(later.by_name[name].id) for name in "ce")
    for wanted, numbers in ((Predicate(c, "=", 7), range(12)), (Predicate(e, "is_null"), range(12))):
        assert scanned(store, ScanSpec((N,), (wanted,)))[0] == list(numbers)
    for wanted in (Predicate(c, ">", 7), Predicate(e, "is_not_null"), Predicate(e, "!=", "x")):
        assert scanned(store, ScanSpec((N,), (wanted,))) == ([], [{}])
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_a_limit_ends_the_scan(tmp_path: Path) -> None:
    """No group behind the last wanted row is read, in one file or in several that overlap."""
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, n % 2) for n in range(90)])
    flush(store)
    for ordered in (False, True):
        for wanted in ((), (Predicate(W, "=", 1),)):
            _, (read,) = scanned(store, ScanSpec(predicates=wanted, limit=3, ordered=ordered))
            assert set(read) <= {0, 1}
        assert scanned(store, ScanSpec(limit=0, ordered=ordered)) == ([], [{}])
    put(store, 2, [row(n, 5) for n in range(0, 90, 10)])
    flush(store)
    found, (newer, older) = scanned(store, ScanSpec(limit=3, ordered=True))
    assert found == [0, 1, 2] and len(newer) <= 1 and len(older) <= 5
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_changes_are_not_passed_over(tmp_path: Path) -> None:
    """They take no predicates, so nothing is ruled out."""
    store = new_store(tmp_path / "t")
    put(store, 1, [row(n, n) for n in range(6)])
    flush(store)
    put(store, 2, [row(n, 100) for n in range(3)])
    flush(store)
    with store.view() as view:
        found = rows_of(view.scan(ScanSpec((W,), changes=Changes(START_US << 12, every=True))))
    assert [r["w"] for r in found] == [0, 100, 1, 100, 2, 100, 3, 4, 5]
    store.close()
