"""Predicates on key columns: a scan reads the groups that can hold wanted rows, and gives what a filter gives."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from stele.model.block import RowOp
from stele.model.key_bounds import KeyRange
from stele.model.predicate import Predicate, ScanSpec
from stele.tablet import colwriter, order
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import PART_BLOOM, PART_BOUNDS
from stele.tablet.sources import mostly, reads
from stele.tablet.store import TabletStore
from tests.tablet.twin import SCHEMA, Row, block_of, flush, new_store, rows_of, write_entry

K, N, V, W = (int(SCHEMA.by_name[name].id) for name in "knvw")
TEXTS = ("", "a", "a\x00", "b")
NUMBERS = range(-3, 12)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of three rows."""
    monkeypatch.setattr(colwriter, "GROUP_ROWS", 3)
    monkeypatch.setattr(order, "GROUP_ROWS", 3)


def _row(k: str, n: int, w: int) -> Row:
    return {"k": k, "n": n, "v": None if n % 2 else k, "w": w, "d": None}


def _put(store: TabletStore, rows: list[Row], op: RowOp = RowOp.UPSERT) -> None:
    store.apply(write_entry(store.applied.index + 1, block_of(rows, op)))


def _layered(home: Path, seed: int) -> TabletStore:
    """Files that overlap in some places and not in others, rows in memory, deletes among them."""
    rng = random.Random(seed)
    store = new_store(home)
    keys = list(itertools.product(TEXTS, NUMBERS))
    for layer in range(4):
        few = rng.sample(keys, 25) if layer else keys
        _put(store, [_row(k, n, layer) for k, n in few])
        gone = [{"k": k, "n": n} for k, n in rng.sample(keys, 6)]
        _put(store, gone, RowOp.DELETE_IGNORE)
        if layer != 3:
            flush(store)
    return store


def _passes(row: Row, predicate: Predicate) -> bool:
    value: Any = row[SCHEMA.by_id[predicate.column_id].name]
    other: Any = predicate.value
    match predicate.op:
        case "is_null":
            return value is None
        case "in":
            return value in other
    tests = {"=": value == other, "!=": value != other, "<": value < other, "<=": value <= other}
    return bool({**tests, ">": value > other, ">=": value >= other}[predicate.op])


def _drawn(rng: random.Random) -> list[Predicate]:
    found = []
    for _ in range(rng.randrange(1, 4)):
        column, values = rng.choice([(K, TEXTS), (N, NUMBERS), (N, NUMBERS)])
        op = rng.choice(["=", "in", "in", "<", "<=", ">", ">=", "!="])
        value: Any = rng.choice(values)
        found.append(Predicate(column, op, tuple(rng.sample(values, 3)) if op == "in" else value))
    if rng.random() < 0.2:
        found.append(Predicate(V, "is_null"))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small_groups")
def test_scans_give_what_a_filter_gives(tmp_path: Path, seed: int) -> None:
    store, rng = _layered(tmp_path / "t", seed), random.Random(seed)
    with store.view() as view, store.view(store.view().snapshot - (3 << 12)) as earlier:
        for at in (view, earlier):
            every = rows_of(at.scan(ScanSpec(ordered=True)))
            for _ in range(60):
                predicates = tuple(_drawn(rng))
                wanted = [row for row in every if all(_passes(row, p) for p in predicates)]
                found = rows_of(at.scan(ScanSpec(predicates=predicates, ordered=True)))
                assert found == wanted, predicates
                free = rows_of(at.scan(ScanSpec(predicates=predicates)))
                assert sorted(free, key=lambda r: (r["k"].encode(), r["n"])) == wanted, predicates
                only = rows_of(
                    at.scan(ScanSpec(column_ids=(W,), predicates=predicates, limit=2, ordered=True))
                )
                assert only == [{"w": row["w"]} for row in wanted[:2]]
    store.close()


@pytest.mark.usefixtures("small_groups")
def test_predicates_and_bounds_together_are_both_kept(tmp_path: Path) -> None:
    store = _layered(tmp_path / "t", 7)
    lists = (Predicate(K, "in", ("a", "b")), Predicate(N, "in", (0, 1, 5, 9)))
    with store.view() as view:
        every = rows_of(view.scan(ScanSpec(ordered=True)))
        lower, upper = b"a\0\0\x80\0\0\x01", b"b\0\0\x80\0\0\x09"
        found = rows_of(view.scan(ScanSpec(predicates=lists, lower_key=lower, upper_key=upper)))
        inside = [r for r in every if ("a", 1) <= (r["k"], r["n"]) < ("b", 9)]
        wanted = [r for r in inside if all(_passes(r, p) for p in lists)]
        assert wanted and sorted(found, key=lambda r: (r["k"], r["n"])) == wanted
        again = rows_of(view.scan(ScanSpec(predicates=lists, resume_after=lower)))
        assert again == [
            r for r in every if all(_passes(r, p) for p in lists) and (r["k"], r["n"]) > ("a", 1)
        ]
    store.close()


def _groups_read(file: ColumnFile) -> set[int]:
    """The groups of which the keys or a column were read: their checksums were compared."""
    return {group for part, group in file._verified if part not in (PART_BLOOM, PART_BOUNDS)}


@pytest.mark.usefixtures("small_groups")
def test_only_groups_that_can_hold_a_row_are_read(tmp_path: Path) -> None:
    """`id >= 5 AND id < 7` read the whole table."""
    store = new_store(tmp_path / "t")
    _put(store, [_row("k", n, 0) for n in range(90)])
    flush(store)
    (file,) = store._contents.state.files
    one = (Predicate(K, "=", "k"), Predicate(N, ">=", 4), Predicate(N, "<", 8))
    with store.view() as view:
        for predicates, groups in [
            ((Predicate(N, "is_null"),), set()),
            ((Predicate(K, "=", "nothing of that name"),), set()),
            (one, {1, 2}),
            ((Predicate(K, "=", "k"), Predicate(N, "in", (0, 45, 46, 89))), {0, 15, 29}),
        ]:
            file._verified.clear()
            found = rows_of(view.scan(ScanSpec(predicates=predicates)))
            assert [r["n"] for r in found] == [
                n
                for n in range(90)
                if all(_passes(_row("k", n, 0), p) for p in predicates if p.op != "is_null") and groups
            ]
            assert _groups_read(file) == groups, predicates
    store.close()


class _Source:
    """Groups that begin at these keys."""

    def __init__(self, *first_keys: bytes) -> None:
        self.first_keys = self.groups = first_keys

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        return ColumnFile.groups_between(self, lower, upper)  # type: ignore[arg-type]

    last_key = b"z"


def test_ranges_within_one_group_are_read_once() -> None:
    file, memory = _Source(b"a", b"c", b"e", b"g", b"i"), _Source(b"a")
    ranges: list[KeyRange] = [(b"a1", b"a2"), (b"a3", b"a4"), (b"d", b"d1"), (b"h", b"h1"), (b"h2", b"")]
    assert reads([file], ranges) == [(b"a1", b"d1"), (b"h", b"")]  # type: ignore[list-item]
    assert reads([file, memory], ranges[2:4]) == [(b"d", b"h1")], "one group more, one fewer"  # type: ignore[list-item]
    assert reads([file], [(b"zz", b"")]) == []  # type: ignore[list-item]
    for wanted, found in ((b"f", True), (b"d", False)):
        assert mostly([file], [(b"a", wanted)], lambda source, group: True) == found  # type: ignore[list-item]
    assert not mostly([file], [(b"a", b"f")], lambda source, group: group != 1)  # type: ignore[list-item]
