"""A bounded share of `make power`, and what the model of a disk may lose."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stele.model.ids import ClusterId, TabletId
from tests.power.__main__ import run
from tests.power.disk import ROOT, Disk, Names, Operation, Order, Sync, Tree, Write
from tests.power.recorder import unavailable
from tests.power.story import NEVER_S, Deed, Sent, Story, possible

FILE, OTHER = 2, 3
MADE = [Names(0.0, (((ROOT, "file"), FILE),), FILE), Write(0.0, FILE, 0, b"x" * 1024)]
RENAMED = [
    Names(0.0, (((ROOT, "new"), OTHER),), OTHER),
    Names(0.0, (((ROOT, "new"), None), ((ROOT, "file"), OTHER))),
]


def states(operations: list[Operation], order: Order) -> set[tuple[tuple[str, int, bytes], ...]]:
    """All that is seen in some hundred crashes: names, the inodes and bytes they have."""
    disk = Disk(Tree.empty())
    for operation in operations:
        disk.step(operation)
    found = set()
    for seed in range(300):
        tree = disk.crash(random.Random(seed), order)
        names = sorted(tree.names[ROOT].items())
        found.add(tuple((name, inode, bytes(tree.files[inode])) for name, inode in names))
    return found


@pytest.mark.parametrize("order", Order)
def test_what_is_not_synced_may_be_lost_and_what_is_stays(order: Order) -> None:
    sector, whole = b"x" * 512, b"x" * 1024
    unsynced = {state[0][2] if state else None for state in states(MADE, order)}
    assert unsynced == {None, b"", sector, whole, bytes(1024), sector + bytes(512), bytes(512) + sector}
    assert states([*MADE, Sync(0.0, FILE)], order) == {(), (("file", FILE, whole),)}
    assert states([*MADE, Sync(0.0, FILE), Sync(0.0, ROOT)], order) == {(("file", FILE, whole),)}


@pytest.mark.parametrize("order", Order)
def test_a_rename_is_there_or_not(order: Order) -> None:
    durable = [*MADE, Sync(0.0, FILE), Sync(0.0, ROOT)]
    before = (("file", FILE, b"x" * 1024),)
    seen = states([*durable, *RENAMED], order)
    assert seen == {before, (*before, ("new", OTHER, b"")), (("file", OTHER, b""),)}
    assert states([*durable, *RENAMED, Sync(0.0, ROOT)], order) == {(("file", OTHER, b""),)}


@pytest.mark.parametrize("order", Order)
def test_names_are_kept_in_the_order_that_is_drawn(order: Order) -> None:
    made: list[Operation] = [Names(0.0, (((ROOT, str(n)), n),), n) for n in (2, 3)]
    seen = {tuple(name for name, *_ in state) for state in states(made, order)}
    assert (("3",) in seen) == (order is Order.NONE)
    assert {(), ("2",), ("2", "3")} <= seen


def test_what_had_not_ended_when_the_power_went_has_no_end() -> None:
    tablet, deeds = TabletId("t"), [Deed(1.0, 10, 2.0), Deed(3.0, 11, 6.0), Deed(7.0, 12, 8.0)]
    sent = [
        Sent(begun_s, "one", tablet, b"client", 0, at, b"", begun_s + 3.0, 5)
        for at, begun_s in enumerate((1, 3, 6), 1)
    ]
    story = Story(ClusterId("c"), "127.0.0", {}, rows={("one", 1): deeds}, sent=sent)
    cut = story.until(5.0)
    assert possible(cut.rows["one", 1]) == {10, 11} and possible(story.rows["one", 1]) == {12}
    assert [s.sequence for s in cut.unanswered()[tablet, b"client"]] == [2] and not story.unanswered()
    assert [(s.ended_s, s.timestamp) for s in cut.sent] == [(4.0, 5), (NEVER_S, 0)]


@pytest.mark.power
@pytest.mark.skipif(bool(why := unavailable()), reason=why)
def test_after_a_power_cut_at_any_call_all_that_was_told_is_there(tmp_path: Path) -> None:
    # A node is stopped, its replicas are copied, it is back. In the starts on two states the power goes again; on the last one,
    # if there is time for it, the cluster starts.
    print(run(tmp_path, seed=4, seconds=6.0, states=24, whole=24, again=12, judged_s=20.0))
