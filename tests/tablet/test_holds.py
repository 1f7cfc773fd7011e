"""Holds on a store's history: what they keep, on every replica alike, and how they end."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from stele.model import holds, writeop
from stele.model.block import RowOp
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.holds import Action, Held, Hold, HoldOrder
from stele.model.ids import HybridTime
from stele.model.predicate import Changes, ScanSpec
from stele.tablet import manifest
from stele.tablet.machine import Outcome
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import START_US, block_of, compact, flush, new_store, write_entry

HISTORY_US = 60_000_000
FIRST = HybridTime((START_US + 1) << 12)


class Tablet:
    """Entries of one log, and a store that applies them. `us`: the time that has passed since the start, by the clock of
    whoever makes entries, and by the store's own one as long as that does not stand still."""

    def __init__(self, directory: Path) -> None:
        self.us = 0
        self.options = StoreOptions(history_us=HISTORY_US, steady_us=lambda: self.us)
        self.store = new_store(directory / "t", self.options)
        self.entries: list[Entry] = []

    def _apply(self, entry: Entry) -> Outcome:
        self.entries.append(entry)
        return self.store.apply(entry)

    def put(self, text: str, key: str = "a") -> int:
        """Write a version of a row. Returns its hybrid time."""
        self.us += 1
        rows = [{"k": key, "n": 1, "v": text}]
        entry = write_entry(len(self.entries) + 1, block_of(rows, RowOp.UPSERT), at_us=START_US + self.us)
        assert self._apply(entry).error() is None
        return entry.timestamp

    def order(
        self, action: Action, name: str = "h", *, since: int = 0, s: float = 100_000, **more: object
    ) -> Outcome:
        self.us += 1
        order = HoldOrder(action, name, since, round(s * 1000), **{"bytes_max": 1 << 30, **more})  # type: ignore[arg-type]
        index = len(self.entries) + 1
        return self._apply(Entry(1, index, EntryKind.WRITE, (START_US + self.us) << 12, order.encoded()))

    def pass_s(self, seconds: float) -> None:
        self.us += round(seconds * 1e6)

    def settle(self, store: TabletStore | None = None) -> None:
        """Drop all that may be dropped."""
        flush(store or self.store)
        compact(store or self.store)

    def reopen(self) -> None:
        self.store.close()
        self.store = TabletStore.open(self.store.directory, self.options)
        for entry in self.entries[self.store.applied.index :]:
            self.store.apply(entry)


@pytest.fixture
def tablet(tmp_path: Path) -> Tablet:
    return Tablet(tmp_path)


def at(store: TabletStore, time: int) -> list[str]:
    """The values at a time."""
    with store.view(HybridTime(time)) as view:
        return [
            value for batch in view.scan(ScanSpec(ordered=True)) for value in batch.column("v").to_pylist()
        ]


def versions(store: TabletStore) -> int:
    """How many versions of rows the store still has."""
    with store.view() as view:
        return sum(m.rows for m in view._memory) + sum(f.rows for f in view._files)


def test_a_hold_keeps_what_its_time_shows_and_what_changed_since(tablet: Tablet) -> None:
    first = tablet.put("one")
    assert tablet.order(Action.TAKE, since=first).error() is None
    for turn in range(20):
        tablet.put(f"turn {turn}")
        tablet.pass_s(20)
        tablet.settle()
    assert tablet.store.history_mark == first and tablet.store.free_mark > first
    assert at(tablet.store, first) == ["one"]
    with tablet.store.view() as view:
        changed = [b for b in view.scan(ScanSpec(ordered=True, changes=Changes(first, every=True)))]
    assert [v for b in changed for v in b.column("v").to_pylist()] == [f"turn {n}" for n in range(20)]
    assert tablet.order(Action.RELEASE).error() is None
    with pytest.raises(Rejected) as caught:
        at(tablet.store, first)
    assert caught.value.code is Code.SNAPSHOT_TOO_OLD
    tablet.put("last")
    tablet.pass_s(100)
    tablet.put("after")
    tablet.settle()
    assert versions(tablet.store) == 2


def test_one_that_is_not_renewed_ends_by_the_time_of_an_entry_and_by_no_clock(tablet: Tablet) -> None:
    first = tablet.put("one")
    tablet.order(Action.TAKE, since=first, s=100)
    tablet.put("two")
    tablet.pass_s(5_000)  # this replica hears nothing for long, and then what others wrote long ago
    tablet.settle()
    assert at(tablet.store, first) == ["one"], "no entry has said that it is over"
    earlier = Entry(
        1,
        4,
        EntryKind.WRITE,
        (START_US + 90_000_000) << 12,
        HoldOrder(Action.RENEW, "h", 0, 200_000).encoded(),
    )
    assert tablet._apply(earlier).error() is None, "it was renewed in time"
    tablet.settle()
    assert at(tablet.store, first) == ["one"]
    assert tablet.order(Action.EXPIRE, "").error() is None
    assert tablet.store.held == Held()
    with pytest.raises(Rejected, match="below the history mark"):
        at(tablet.store, first)
    late = tablet.order(Action.RENEW)
    assert late.code is Code.CURSOR_LOST and "there is no hold h any more" in late.message


@pytest.mark.parametrize("kind", ["write", "ceiling", "schema"])
def test_any_entry_with_a_time_ends_it(tablet: Tablet, kind: str) -> None:
    tablet.order(Action.TAKE, s=1)
    tablet.pass_s(1)
    time = (START_US + tablet.us + 2) << 12
    match kind:
        case "write":
            tablet.put("x")
        case "ceiling":
            tablet._apply(Entry(1, 2, EntryKind.CEILING, time, (time + 1).to_bytes(8, "little")))
        case "schema":
            tablet._apply(Entry(1, 2, EntryKind.WRITE, time, writeop.schema_change(tablet.store.schema)))
    assert tablet.store.held == Held()


def test_a_broken_one_keeps_nothing_and_says_what_to_do(tablet: Tablet) -> None:
    first = tablet.put("one")
    tablet.order(Action.TAKE, since=first)
    second = tablet.put("two")
    tablet.order(Action.RENEW, since=second)
    tablet.order(Action.BREAK, since=first, why="it kept too much")
    assert tablet.store.held.since == second, "it was judged by what it no longer keeps"
    tablet.order(Action.BREAK, since=second, why="it kept too much")
    assert tablet.store.held.since is None
    tablet.put("three")
    tablet.pass_s(100)
    tablet.put("four")
    with pytest.raises(Rejected, match=r"hold h on the history .* is broken: it kept too much; begin again"):
        at(tablet.store, second)
    with tablet.store.view() as view, pytest.raises(Rejected, match="is broken: it kept too much") as caught:
        view.scan(ScanSpec(ordered=True, changes=Changes(second)))
    assert caught.value.code is Code.CURSOR_LOST
    renewed = tablet.order(Action.RENEW)
    assert renewed.code is Code.CURSOR_LOST and "is broken: it kept too much; begin again" in renewed.message
    assert tablet.order(Action.TAKE).error() is None, "it may be taken anew"
    assert tablet.store.held.since == tablet.entries[-1].timestamp


def test_holds_survive_restarts_and_are_in_copies(tablet: Tablet, tmp_path: Path) -> None:
    first = tablet.put("one")
    tablet.order(Action.TAKE, since=first)
    tablet.order(Action.TAKE, "other", since=first)
    tablet.put("two")
    flush(tablet.store)
    tablet.order(Action.RELEASE, "other")
    tablet.order(Action.TAKE, "third")
    before = tablet.store.held
    tablet.reopen()
    assert tablet.store.held == before and [hold.name for hold in before.holds] == ["h", "third"]
    tablet.pass_s(1_000)
    tablet.settle()
    tablet.reopen()
    assert tablet.store.held == before and at(tablet.store, first) == ["one"]
    tablet.store.checkpoint(tmp_path / "copy")
    copy = TabletStore.open(tmp_path / "copy", tablet.options)
    assert copy.held == before
    tablet.put("three", "b")
    copy.apply(tablet.entries[-1])
    tablet.pass_s(1_000)
    tablet.settle(copy)
    assert at(copy, first) == ["one"]


@pytest.mark.parametrize("seed", range(3))
def test_replicas_with_other_clocks_and_other_flushes_keep_the_same(tmp_path: Path, seed: int) -> None:
    """Each replica flushes and merges when it likes, restarts, and hears entries late. All serve what a hold keeps."""
    rng = random.Random(seed)
    leader = Tablet(tmp_path / "leader")
    others = [Tablet(tmp_path / f"follower {n}") for n in range(2)]
    for each in others:
        each.entries = leader.entries
    shown: dict[int, list[str]] = {}
    kept = 0
    for _ in range(60):
        match rng.randrange(8):
            case 0:
                # Not before the last write: what is older may be gone from some replica already.
                since = 0 if rng.random() < 0.5 else leader.store.last_timestamp
                leader.order(Action.TAKE, rng.choice("xyz"), since=since, s=rng.choice([1, 100, 1_000]))
            case 1:
                leader.order(rng.choice([Action.RENEW, Action.RELEASE, Action.EXPIRE]), rng.choice("xyz"))
            case _:
                time = leader.put(str(rng.random()), rng.choice("ab"))
                shown[time] = at(leader.store, time)
        leader.pass_s(rng.choice([0, 0, 1, 30, 90]))
        for replica in (leader, *others):
            replica.us = max(replica.us, leader.us - rng.choice([0, 1_000_000, 50_000_000]))
            if replica is leader or rng.random() < 0.5:
                upto = len(leader.entries) if rng.random() < 0.8 else replica.store.applied.index + 1
                for entry in leader.entries[replica.store.applied.index : upto]:
                    replica.store.apply(entry)
            if rng.random() < 0.3:
                replica.settle()
            if rng.random() < 0.1:
                replica.reopen()
        for replica in others:
            if replica.store.applied == leader.store.applied:
                assert replica.store.held == leader.store.held
        since = leader.store.held.since
        kept += leader.store.history_mark < leader.store.free_mark
        for replica in (leader, *others):
            behind = replica.store.applied != leader.store.applied
            if since is None or behind:
                continue
            for time, values in shown.items():
                if time >= since:
                    assert at(replica.store, time) == values
    assert kept > 5, "holds have kept what would be gone"


def test_what_a_hold_costs_is_what_would_be_gone_without_it(tablet: Tablet) -> None:
    text = "x" * 1_000
    first = tablet.put("one")
    tablet.order(Action.TAKE, "old", since=first)
    for turn in range(300):
        tablet.put(f"{text}{turn}")
    middle = tablet.put("middle")
    tablet.order(Action.TAKE, "young", since=middle)
    tablet.store.measure_holds()
    assert tablet.store.hold_costs == {("old", first): 0, ("young", middle): 0}, "all of it is young"
    tablet.pass_s(100)
    tablet.put("last", "b")
    tablet.settle()
    tablet.store.measure_holds()
    (size,) = [f.size for f in tablet.store._contents.state.files]
    costs = tablet.store.hold_costs
    assert costs["young", middle] == 0 and 0.9 * size < costs["old", first] <= size
    tablet.order(Action.BREAK, "old", since=first, why="costs")
    tablet.store.measure_holds()
    assert tablet.store.hold_costs == {("young", middle): 0}


def test_what_is_being_dropped_now_cannot_be_held(tablet: Tablet) -> None:
    first = tablet.put("one")
    tablet.put("two")
    tablet.pass_s(100)
    job = tablet.store.begin_flush()
    assert job is not None and job.mark > first
    assert tablet.order(Action.TAKE, since=first).error() is None
    assert tablet.store.history_mark == first < tablet.store.kept_from, "whoever took it is told"
    job.write()
    tablet.store.finish_flush(job)
    assert tablet.store.history_mark == job.mark == tablet.store.kept_from
    tablet.put("three")
    flush(tablet.store)
    tablet.order(Action.RELEASE)
    tablet.pass_s(100)
    merge = tablet.store.plan_compaction(full=True)
    assert merge is not None and tablet.store.kept_from == merge.history_mark > job.mark
    tablet.order(Action.TAKE, since=job.mark)
    assert tablet.store.kept_from == merge.history_mark > tablet.store.history_mark
    tablet.store.abandon_compaction(merge)
    assert tablet.store.kept_from == tablet.store.history_mark


def test_their_number_is_bounded(tablet: Tablet) -> None:
    for number in range(holds.HOLDS_MAX):
        assert tablet.order(Action.TAKE, f"h{number}").error() is None
    refused = tablet.order(Action.TAKE, "one-more")
    assert refused.code is Code.TOO_LARGE and "which is the most; release one of h0, h1" in refused.message
    assert tablet.order(Action.TAKE, "h3").error() is None
    assert tablet.order(Action.RELEASE, "nobody").error() is None
    tablet.order(Action.RELEASE, "h3")
    assert tablet.order(Action.TAKE, "one-more").error() is None


def test_orders_are_read_back_and_those_of_later_programs_are_told_from_damage(tablet: Tablet) -> None:
    order = HoldOrder(Action.TAKE, "a.b-c_1", FIRST, 1_000, 1 << 20, "why")
    header, body = writeop.decode(order.encoded())
    assert HoldOrder.decoded(body) == order and header.kind is writeop.BodyKind.HOLD
    later = json.dumps(["share", "h", 0, 0, 0, "", "more"]).encode()
    whole = replace(header, digest=writeop.digest(later))
    with pytest.raises(Rejected) as caught:
        tablet.store.apply(Entry(1, 1, EntryKind.WRITE, FIRST, writeop.encode(whole, later)))
    assert caught.value.code is Code.UNSUPPORTED_VERSION
    with pytest.raises(Corrupt):
        new_store(tablet.store.directory.parent / "u").apply(
            Entry(1, 1, EntryKind.WRITE, FIRST, writeop.encode(header, b'["take",'))
        )


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        (HoldOrder(Action.TAKE, "", 0, 1_000, 1 << 20), "name of a hold ''"),
        (HoldOrder(Action.RELEASE, "x" * 65), "expected 1 to 64 letters"),
        (HoldOrder(Action.RENEW, "a b", 0, 1_000), "name of a hold 'a b'"),
        (HoldOrder(Action.RENEW, "a\n", 0, 1_000), "name of a hold"),
        (HoldOrder(Action.TAKE, "h", 0, 999, 1 << 20), "expected 1 s to 366 days"),
        (HoldOrder(Action.RENEW, "h", 0, 1 << 50), "expected 1 s to 366 days"),
        (HoldOrder(Action.TAKE, "h", 0, 1_000, 5), "expected 1 MiB to"),
        (HoldOrder(Action.TAKE, "h", 0, 1_000, 1 << 61), "expected 1 MiB to"),
    ],
)
def test_wrong_orders_are_told_before_they_are_proposed(order: HoldOrder, fault: str) -> None:
    (found,) = holds.faults_of(order)
    assert fault in found
    assert holds.faults_of(HoldOrder(Action.TAKE, "h", 0, 1_000, 1 << 20)) == []


def test_a_manifest_without_holds_is_as_it_was_and_a_damaged_hold_is_damage(tablet: Tablet) -> None:
    tablet.put("one")
    flush(tablet.store)
    path = tablet.store.directory / manifest.NAME
    assert b"holds" not in path.read_bytes(), "the release before reads it"
    found = manifest.read(tablet.store.directory)
    manifest.write(
        tablet.options.files, tablet.store.directory, replace(found, held=Held((Hold("a b", 1, 2, 3),)))
    )
    with pytest.raises(Corrupt, match="name of a hold 'a b'"):
        manifest.read(tablet.store.directory)
