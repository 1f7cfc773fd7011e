"""A bounded share of `make power`, and what the model of a disk may lose."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.power.__main__ import run
from tests.power.disk import ROOT, Disk, Names, Operation, Order, Sync, Write
from tests.power.recorder import unavailable

FILE, OTHER = 2, 3
MADE = [Names(0.0, (((ROOT, "file"), FILE),), FILE), Write(0.0, FILE, 0, b"x" * 1024)]
RENAMED = [
    Names(0.0, (((ROOT, "new"), OTHER),), OTHER),
    Names(0.0, (((ROOT, "new"), None), ((ROOT, "file"), OTHER))),
]


def states(operations: list[Operation], order: Order) -> set[tuple[tuple[str, int, bytes], ...]]:
    """All that is seen in some hundred crashes: names, the inodes and bytes they have."""
    disk = Disk()
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


@pytest.mark.power
@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(why := unavailable()), reason=why)
def test_after_a_power_cut_at_any_call_all_that_was_told_is_there(tmp_path: Path) -> None:
    # A node is stopped, its replicas are copied, it is back; on the last state, if there is time for it, the cluster starts.
    print(run(tmp_path, seed=4, seconds=6.0, states=24, whole=24, judged_s=15.0))
