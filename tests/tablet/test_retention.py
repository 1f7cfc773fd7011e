"""How long a table keeps old versions: the schema says it, an alteration changes it, and what is gone stays gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stele.model import writeop
from stele.model.alter import altered
from stele.model.block import RowOp
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from stele.model.steps import SetHistory
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.test_alter import BASE, block, entry_of
from tests.tablet.twin import START_US, compact, flush, new_store

MINUTE_US = 60_000_000
FIRST = HybridTime((START_US + 1) << 12)
"""When the first version was written."""


class Clock:
    """What a store asks for the time that has passed."""

    def __init__(self) -> None:
        self.us = 0

    def options(self) -> StoreOptions:
        return StoreOptions(steady_us=lambda: self.us)


def filled(directory: Path, clock: Clock, history_ms: int = 0) -> TabletStore:
    """A store with two versions of one row."""
    schema = replace(BASE, history_ms=history_ms)
    store = new_store(directory, clock.options(), schema)
    for index in (1, 2):
        rows = [{0: 1, 1: f"version {index}", 2: index}]
        store.apply(entry_of(index, block(rows, RowOp.UPSERT, schema, [0, 1, 2]), schema))
    return store


def keep(store: TabletStore, clock: Clock, index: int, history_ms: int) -> None:
    """Another retention, as an entry of its log makes it at this moment."""
    change = writeop.schema_change(altered(store.schema, [SetHistory(history_ms)]))
    store.apply(Entry(1, index, EntryKind.WRITE, (START_US + clock.us + index) << 12, change))


def at_first(store: TabletStore) -> list[str]:
    """The values at the first version's time."""
    view = store.view(FIRST)
    try:
        return [value for batch in view.scan() for value in batch.column("a").to_pylist()]
    finally:
        view.close()


def too_old(store: TabletStore) -> str:
    """The message that refuses the first version's time."""
    with pytest.raises(Rejected) as caught:
        store.view(FIRST)
    assert caught.value.code is Code.SNAPSHOT_TOO_OLD
    return str(caught.value)


@pytest.mark.parametrize(
    ("history_ms", "kept_min", "told"),
    [
        (0, 15, "15 min"),
        (60_000, 1, "1 min"),
        (90 * 60_000, 90, "1 h 30 min"),
        (7 * 86_400_000, 7 * 1_440, "7 d"),
        (36 * 3_600_000, 36 * 60, "1 d 12 h"),
    ],
)
def test_a_table_keeps_old_versions_as_long_as_it_says(
    tmp_path: Path, history_ms: int, kept_min: int, told: str
) -> None:
    clock = Clock()
    store = filled(tmp_path / "t", clock, history_ms)
    clock.us = kept_min * MINUTE_US - 1_000
    flush(store)
    compact(store)
    assert at_first(store) == ["version 1"]
    clock.us = kept_min * MINUTE_US + 1_000
    assert f"old versions of rows are kept for {told}" in too_old(store)
    store.close()


def test_a_longer_retention_counts_for_what_is_still_there(tmp_path: Path) -> None:
    """Versions that no merge has dropped yet are read again; dropped ones do not come back."""
    clock = Clock()
    store = filled(tmp_path / "t", clock)
    clock.us = 20 * MINUTE_US
    too_old(store)
    keep(store, clock, 3, 3_600_000)
    assert at_first(store) == ["version 1"]
    flush(store)
    compact(store)
    store.close()
    store = TabletStore.open(tmp_path / "t", clock.options())
    assert store.history_us == 60 * MINUTE_US, "the manifest keeps it"
    assert at_first(store) == ["version 1"]
    clock.us = 61 * MINUTE_US
    too_old(store)
    flush(store)
    keep(store, clock, 4, 7 * 86_400_000)
    assert at_first(store) == ["version 1"], "nothing has dropped it"
    keep(store, clock, 5, 0)
    flush(store)
    keep(store, clock, 6, 7 * 86_400_000)
    too_old(store)
    store.close()


def test_a_shorter_retention_ends_history_at_once(tmp_path: Path) -> None:
    clock = Clock()
    store = filled(tmp_path / "t", clock, 7 * 86_400_000)
    clock.us = 5 * MINUTE_US
    flush(store)
    compact(store)
    assert at_first(store) == ["version 1"]
    keep(store, clock, 3, 60_000)
    assert "kept for 1 min" in too_old(store)
    flush(store)
    compact(store)
    keep(store, clock, 4, 7 * 86_400_000)
    too_old(store)
    store.close()


def test_a_view_that_is_open_stays_whole_when_the_retention_falls(tmp_path: Path) -> None:
    clock = Clock()
    store = filled(tmp_path / "t", clock, 3_600_000)
    clock.us = 30 * MINUTE_US
    view = store.view(FIRST)
    keep(store, clock, 3, 60_000)
    flush(store)
    compact(store)
    assert [value for batch in view.scan() for value in batch.column("a").to_pylist()] == ["version 1"]
    view.close()
    store.close()


def test_rows_that_were_written_in_the_future_end_no_history(tmp_path: Path) -> None:
    """A leader's clock was an hour ahead. Else the present would be too old to read."""
    options = StoreOptions(steady_us=lambda: 0, wall_us=lambda: START_US + 10)
    store = new_store(tmp_path / "t", options, BASE)
    for index, at_us in ((1, 1), (2, 60 * MINUTE_US)):
        rows = [{0: 1, 1: f"version {index}", 2: index}]
        made = entry_of(index, block(rows, RowOp.UPSERT, BASE, [0, 1, 2]), BASE)
        store.apply(replace(made, timestamp=HybridTime((START_US + at_us) << 12)))
    assert at_first(store) == ["version 1"]
    store.close()


def test_a_change_of_the_schema_that_came_before_does_nothing(tmp_path: Path) -> None:
    """Whoever sends it again is told that it is done."""
    store = filled(tmp_path / "t", Clock())
    change = writeop.schema_change(altered(store.schema, [SetHistory(60_000)]))
    for index in (3, 4):
        outcome = store.apply(Entry(1, index, EntryKind.WRITE, (START_US + index) << 12, change))
        assert outcome.code is Code.OK and store.schema.version == 2
    store.close()
