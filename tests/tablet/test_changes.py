"""Changes between two times: the store against a dictionary of versions, through flushes, merges and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from stele.model import keys
from stele.model.alter import altered
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from stele.model.predicate import CHANGE_FIELDS, Changes, ScanSpec
from stele.model.steps import AddColumn
from stele.tablet.colfile import ColumnFile
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.test_alter import BASE, alter_entry, block, entry_of
from tests.tablet.test_store_twin import StoreMachine
from tests.tablet.twin import (
    FOREVER,
    START_US,
    Row,
    Twin,
    block_of,
    compact,
    flush,
    new_store,
    rows_of,
    write_entry,
)

NAMES = ("k", "n", "v", "w", "d")
OF_KEY = (pa.string(), pa.int32())


def wanted(twin: Twin, after: int, upto: int, *, every: bool, told: Sequence[Row] | None = None) -> list[Row]:
    """What a difference scan must give, done the slow way. Of deletes that found no row it may give any: `told`, else all."""
    kept = {((row["k"], row["n"]), row["_ts"]) for row in told or () if row["_op"] == "delete"}
    idle = twin.idle if told is None else twin.idle & kept
    versions = {key: list(rows) for key, rows in twin.versions.items()}
    for key, at in idle:
        if at not in dict(versions.setdefault(key, [])):
            versions[key].append((at, None))
    found: list[Row] = []
    for k, n in sorted(versions, key=lambda key: (key[0].encode(), key[1])):
        ascending = sorted(versions[k, n], key=lambda version: version[0])  # in one entry as they were
        last = {at: row for at, row in ascending if after < at <= upto}  # of one entry the last one counts
        for at in list(last) if every else list(last)[-1:]:
            row = last[at]
            values = {name: None if row is None else row[name] for name in NAMES}
            values |= {"k": k, "n": n, "_op": "delete" if row is None else "upsert", "_ts": at}
            found.append(values)
    return found


def changes(store: TabletStore, spec: ScanSpec, upto: int) -> list[Row]:
    """The changes that a store gives."""
    with store.view(HybridTime(upto)) as view:
        batches = list(view.scan(spec))
    assert all(batch.schema.equals(spec.arrow_schema(store.schema)) for batch in batches)
    assert all(batch.num_rows <= spec.batch_rows for batch in batches)
    return rows_of(batches)


def behind(row: Row, spec: ScanSpec) -> ScanSpec:
    """The scan that goes on behind this row."""
    key = keys.encode_tuple((row["k"], row["n"]), OF_KEY)
    asked = spec.changes
    assert asked is not None
    if asked.every:
        return ScanSpec(lower_key=key, changes=Changes(asked.after, True, row["_ts"]))
    return ScanSpec(lower_key=key + b"\x00", changes=asked)


class ChangeMachine(StoreMachine):
    """All that a store does, and changes between any two of its times."""

    @initialize(history_us=st.sampled_from([6, 1 << 50, 1 << 50]))
    def begin(self, history_us: int) -> None:
        super().begin(history_us)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), every=st.booleans(), batch_rows=st.integers(1, 40))
    def what_changed(self, data: Any, every: bool, batch_rows: int) -> None:
        times = [self.snapshots[0] - 1, *self.snapshots]
        place = st.integers(0, len(times) - 1)
        after, upto = sorted((times[data.draw(place)], times[-1 - data.draw(place)]))
        spec = ScanSpec(changes=Changes(after, every), batch_rows=batch_rows)
        mark = self.store.history_mark
        try:
            found = changes(self.store, spec, upto)
        except Rejected as exc:
            assert exc.code is (Code.SNAPSHOT_TOO_OLD if upto < mark else Code.CURSOR_LOST)
            assert after < mark
            return
        assert after >= mark
        assert found == wanted(self.twin, after, upto, every=every, told=found)
        if found:
            at = data.draw(st.integers(0, len(found) - 1))
            assert changes(self.store, behind(found[at], spec), upto) == found[at + 1 :]

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), low=st.integers(-3, 4), high=st.integers(-3, 4))
    def of_some_keys(self, data: Any, low: int, high: int) -> None:
        lower, upper = (keys.encode_tuple(("a", n), OF_KEY) for n in (low, high))
        times = [self.snapshots[0] - 1, *self.snapshots]
        after = max(self.store.history_mark, data.draw(st.sampled_from(times)))
        spec = ScanSpec((3, 0, 1), lower_key=lower, upper_key=upper, changes=Changes(after, True))
        upto = max(after, self.store.last_timestamp)
        found = changes(self.store, spec, upto)
        every = wanted(self.twin, after, upto, every=True, told=found)
        assert found == [
            {name: row[name] for name in ("w", "k", "n", "_op", "_ts")}
            for row in every
            if row["k"] == "a" and low <= row["n"] < high
        ]


ChangeMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestChangeMachine = ChangeMachine.TestCase


def put(store: TabletStore, index: int, numbers: range, op: RowOp = RowOp.UPSERT) -> None:
    """Write these keys in one entry."""
    rows = [{"k": "a", "n": n, "v": f"{index}", "w": index, "d": 0.5} for n in numbers]
    store.apply(write_entry(index, block_of(rows, op)))


def at(index: int) -> int:
    """The time of an entry."""
    return (START_US + index) << 12


def test_what_did_not_change_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file whose rows are all older, nor the groups of a merged file that have no change."""
    store = new_store(tmp_path / "t")
    put(store, 1, range(40_000))
    flush(store)
    put(store, 2, range(35_000, 35_010))
    flush(store)
    read: list[tuple[str, int]] = []
    keys_of = ColumnFile.keys
    monkeypatch.setattr(
        ColumnFile,
        "keys",
        lambda file, group, **how: read.append((file.name, group)) or keys_of(file, group, **how),
    )
    spec = ScanSpec(changes=Changes(at(1)))
    assert len(changes(store, spec, at(2))) == 10
    assert {name for name, _ in read} == {store.files[0]}
    compact(store)
    (merged,) = store.files
    read.clear()
    assert len(changes(store, spec, at(2))) == 10
    assert {name for name, _ in read} == {merged} and len({group for _, group in read}) == 1
    assert changes(store, ScanSpec(changes=Changes(at(2))), at(2)) == []
    store.close()


def test_deletes_are_rows_and_show_their_key_alone(tmp_path: Path) -> None:
    """Also in a file that is older than a column with a default."""
    store = new_store(tmp_path / "t", FOREVER, BASE)
    store.apply(
        entry_of(1, block([{0: 1, 1: "x", 2: 1}, {0: 2, 1: "y", 2: 2}], RowOp.UPSERT, BASE, [0, 1, 2]), BASE)
    )
    store.apply(entry_of(2, block([{0: 1}], RowOp.DELETE, BASE, [0]), BASE))
    newer = altered(store.schema, [AddColumn("c", "int32", False, "7")])
    store.apply(alter_entry(3, newer))
    for step in (flush, compact, lambda s: None):
        assert changes(store, ScanSpec(changes=Changes(at(0))), at(3)) == [
            {"k": 1, "a": None, "b": None, "c": None, "_op": "delete", "_ts": at(2)},
            {"k": 2, "a": "y", "b": 2, "c": 7, "_op": "upsert", "_ts": at(1)},
        ]
        step(store)
    arrow = ScanSpec(changes=Changes(at(0))).arrow_schema(newer)
    assert [field.nullable for field in arrow] == [False, True, True, True, False, False]
    store.close()


def test_a_delete_that_finds_no_row_is_told_where_nobody_looked_for_the_row(tmp_path: Path) -> None:
    """A block of nothing but `delete_ignore` is written without a look at what is there."""
    store = new_store(tmp_path / "t", FOREVER)
    put(store, 1, range(2))
    put(store, 2, range(1, 3), RowOp.DELETE_IGNORE)
    for step in (flush, compact, lambda s: None):
        assert [
            (row["n"], row["_op"], row["_ts"])
            for row in changes(store, ScanSpec(changes=Changes(at(0))), at(2))
        ] == [
            (0, "upsert", at(1)),
            (1, "delete", at(2)),
            (2, "delete", at(2)),
        ]
        step(store)
    store.close()


def test_changes_older_than_history_are_refused_with_their_own_code(tmp_path: Path) -> None:
    clock = [0]
    options = StoreOptions(history_us=60_000_000, steady_us=lambda: clock[0])
    store = new_store(tmp_path / "t", options)
    put(store, 1, range(3))
    clock[0] = 120_000_000
    put_late = write_entry(2, block_of([{"k": "b", "n": 1}], RowOp.UPSERT), at_us=START_US + 120_000_000)
    store.apply(put_late)
    upto = put_late.timestamp
    with pytest.raises(Rejected, match="begin again with a scan at a snapshot") as caught:
        changes(store, ScanSpec(changes=Changes(at(1))), upto)
    assert caught.value.code is Code.CURSOR_LOST
    mark = store.history_mark
    assert [row["k"] for row in changes(store, ScanSpec(changes=Changes(mark)), upto)] == ["b"]
    store.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[-1,0,0]", "number -1"),
        ("[1,2,0]", "expected 0 to 1"),
        ("[1,0]", "not enough values"),
        ('{"after":1}', "not enough values"),
        ("null", "not a scan"),
        ("[1,0,1e30]", "number 1"),
        ('["x",0,0]', "invalid literal"),
    ],
)
def test_changes_that_are_none_are_refused(text: str, why: str) -> None:
    good = ScanSpec(changes=Changes(5, True, 6)).to_json(BASE)
    assert ScanSpec.from_json(good, BASE).changes == Changes(5, True, 6)
    with pytest.raises(Rejected, match=why):
        ScanSpec.from_json(good.replace("[5,1,6]", text), BASE)


def test_no_column_may_have_the_name_of_one_that_changes_add() -> None:
    for field in CHANGE_FIELDS:
        schema = altered(BASE, [AddColumn(field.name, "int32", True, None)])
        with pytest.raises(Rejected, match="leave it out"):
            ScanSpec(changes=Changes(1)).arrow_schema(schema)
        ScanSpec((0, 1), changes=Changes(1)).arrow_schema(schema)
