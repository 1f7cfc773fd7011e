"""Promises that one line of a node keeps, each asked for by itself: orders that come too late, replicas that must not serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stele.consensus.bootstrap import start_replica
from stele.consensus.recovering import SoleVoter, check_order, make_sole_voter
from stele.consensus.superblock import DataState, Superblock
from stele.model.config import Configuration
from stele.model.entry import Entry
from stele.model.errors import Code, Rejected
from stele.model.ids import (
    OPID_NONE,
    ClusterId,
    NodeId,
    OpId,
    ReplicaId,
    StreamKey,
    TableId,
    TabletId,
    new_id,
)
from stele.model.incarnation import raised
from stele.tserver.fences import Fences
from stele.tserver.manager import _tombstone_of
from stele.tserver.node_record import NodeRecord
from stele.tserver.volume import format_volume, lock_directory

TABLET = TabletId("a" * 32)
NODE = NodeId("1" * 32)


# Orders that come too late


class Kept:
    """A volume that keeps what it is told, and what it was told."""

    def __init__(self) -> None:
        self.record = NodeRecord(ClusterId("c" * 32), NODE, "node", "f", catalog=OpId(3, 0), driver_epoch=5)
        self.told: list[OpId] = []

    def raise_fences(self, catalog: OpId, driver_epoch: int) -> None:
        self.told.append(catalog)


async def at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def fences(volume: Kept | None = None) -> Fences:
    return Fences(volume or Kept(), at_once)  # type: ignore[arg-type]


def test_a_heartbeat_of_an_earlier_leader_takes_nothing_back() -> None:
    one = fences()
    one.learned(term=2, epoch=4)
    for stale in (lambda: one.of_driver(4), lambda: one.of_catalog(TABLET, OpId(2, 9))):
        with pytest.raises(Rejected) as refused:
            stale()
        assert refused.value.code is Code.STALE_EPOCH


def test_an_order_whose_caller_went_away_is_carried_out_and_counts() -> None:
    one = fences()
    with pytest.raises(asyncio.CancelledError), one.of_driver(9):
        raise asyncio.CancelledError
    with pytest.raises(Rejected):
        one.of_driver(8)
    with one.of_driver(9):
        pass


async def test_the_number_of_an_order_that_erases_is_on_the_volume_before() -> None:
    """Else an older one could make again, after a restart, what this one erased."""
    volume = Kept()
    with fences(volume).of_catalog(TABLET, OpId(3, 7)) as order:
        await order.erases()
        assert volume.told == [OpId(3, 7)]


def test_what_the_volume_keeps_of_orders_never_falls(tmp_path: Path) -> None:
    here = tmp_path / "data"
    volume = format_volume(here, lock_directory(here), ClusterId(new_id()), NodeId(new_id()), "node")
    volume.raise_fences(OpId(5, 2), 7)
    volume.raise_fences(OpId(4, 9), 6)
    assert (volume.record.catalog, volume.record.driver_epoch) == (OpId(5, 2), 7)
    volume.close()


# Replicas that must not serve


def superblock(state: DataState = DataState.READY) -> Superblock:
    return Superblock(TABLET, ReplicaId(1), TableId("b" * 32), "t", "table", state)


async def test_a_replica_whose_log_is_damaged_is_failed() -> None:
    told: list[str] = []

    def stream(key: StreamKey) -> None:
        raise AssertionError("nobody may read it")

    node_log = SimpleNamespace(
        recovery=SimpleNamespace(failed={superblock().key: "a group is gone"}), stream=stream
    )
    replica = SimpleNamespace(fail=told.append, superblock=superblock())
    await start_replica(superblock(), Path("none"), node_log, None, replica=replica)  # type: ignore[arg-type]
    assert told == ["its log is damaged: a group is gone"]


@pytest.mark.parametrize("state", [DataState.TOMBSTONED, DataState.COPYING])
def test_who_has_no_rows_is_not_made_the_only_voter(state: DataState) -> None:
    order = SoleVoter(superblock().key, raised(0), 7)
    check_order(superblock(), OPID_NONE, order)
    with pytest.raises(Rejected, match="no rows of its own"):
        check_order(superblock(state), OPID_NONE, order)


@pytest.mark.parametrize(
    ("ordered", "own", "last", "term"), [(7, 3, 3, 7), (7, 9, 3, 10), (7, 3, 8, 9), (1, 0, 0, 1)]
)
def test_the_term_of_the_only_voter_is_above_all_that_it_knows(
    ordered: int, own: int, last: int, term: int
) -> None:
    told: list[Any] = []

    def append_entries(entries: tuple[Entry, ...], done: Callable[[], None]) -> None:
        told.append(entries[0].term)

    stream = SimpleNamespace(
        key=superblock().key,
        last_opid=OpId(last, 20),
        hard_state=SimpleNamespace(term=own),
        append_promote=lambda of, replica: told.append((of, replica)),
        append_entries=append_entries,
    )
    order = SoleVoter(superblock().key, raised(0), ordered)
    made = make_sole_voter(stream, NODE, "a:1", order, lambda: None)  # type: ignore[arg-type]
    assert told == [(term, 1), term]
    assert made.opid_index == 21 and [p.node_id for p in made.peers] == [NODE]


def test_a_tombstone_knows_the_last_term_and_entry() -> None:
    replica = SimpleNamespace(
        superblock=superblock(),
        core=SimpleNamespace(status=lambda: SimpleNamespace(term=9, last_logged=OpId(8, 20))),
        committed_config=Configuration(12, ()),
    )
    block = _tombstone_of(replica)  # type: ignore[arg-type]
    assert block.data_state is DataState.TOMBSTONED
    assert (block.last_term, block.last_opid, block.last_config_index) == (9, OpId(8, 20), 12)
