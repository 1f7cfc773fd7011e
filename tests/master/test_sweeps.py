"""Which tablets the leader's background looks at in a sweep: those about which something is due, and a share of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stele.master.background import ROUND_SWEEPS, TABLETS_AT_ONCE, Background
from stele.master.master import _look
from stele.master.orders import Orders
from stele.master.records import INTENT_PREFIX
from tests.master.harness import OPTIONS, create_request, made, ready, world

QUIET = replace(OPTIONS, sweep_ms=3_600_000, tablets_per_node_max=100_000, alive_ms=3_600_000)
"""The world's own background does not sweep."""


async def test_each_tablet_is_looked_at_in_a_round_and_few_in_a_sweep(tmp_path: Path) -> None:
    async with world(tmp_path, QUIET) as w:
        await ready(w)
        await made(w, buckets=300)
        background = Background(w.lead, Orders(w.lead, w.pool))
        assert set(w.catalog.current) <= set(background._to_sweep())  # of a new leader
        looked: set[str] = set()
        for _ in range(-(-301 // TABLETS_AT_ONCE)):
            chosen = background._to_sweep()
            assert len(chosen) <= TABLETS_AT_ONCE + 1
            looked |= set(chosen)
        assert looked == set(w.catalog.current)
        assert ROUND_SWEEPS * TABLETS_AT_ONCE >= 4_096  # up to here a sweep has no more than at once


async def test_what_is_not_done_yet_is_looked_at_in_each_sweep(tmp_path: Path) -> None:
    """Nodes that do not answer are asked again, and tablets that nobody leads get other nodes in the end."""
    async with world(tmp_path, QUIET) as w:
        await ready(w)
        await made(w, "done", buckets=200)
        background = Background(w.lead, Orders(w.lead, w.pool))
        background._to_sweep()
        await background._look_at(list(w.catalog.current))
        assert not background._open
        answer = await w.leader.CreateTable(create_request("new", buckets=2), None)
        young = [t for t, row in w.catalog.tablets.items() if row.table_id == answer.table_id.hex()]
        await background._look_at(young)
        await background._place_line()
        assert set(background._open) == set(young)
        for _ in range(5):
            assert set(young) <= set(background._to_sweep())
        await w.beat_until(lambda: all(w.catalog.tablets[t].state == "RUNNING" for t in young))
        await background._look_at(young)
        assert not background._open


async def test_the_end_of_an_intent_is_looked_at(tmp_path: Path) -> None:
    """From then on a replica that no configuration names is to be removed."""
    async with world(tmp_path, QUIET) as w:
        await ready(w)
        _look(w.lead, INTENT_PREFIX + b"a" * 32)
        assert "a" * 32 in w.lead.dirty
