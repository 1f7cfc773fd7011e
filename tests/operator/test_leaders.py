"""Leaders that move, as the operator tells of it: two events and one entry of the status, whatever their number."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from stele.driver.copy_checks import CopyCheck
from stele.driver.executor import Executor
from stele.driver.leader_trials import BEGINS_MS
from stele.driver.policy import Policy
from stele_operator import heal
from stele_operator.heal import Healer
from stele_operator.masters import MasterLink
from stele_operator.plan.cluster_plan import BUSY_S, QUIET_S
from stele_operator.plan.status import healing_status
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, node_name
from tests.driver.served import serve
from tests.driver.test_executor import driver
from tests.operator.test_quiet import at_rest

SPREADS = replace(POLICY, balance_leaders=True)
NAMES = {node_name(n)[:8]: "" for n in range(1, 4)}


@dataclass
class Link:
    """What the operator has of the masters."""

    driver: Executor

    def copies_compared(self) -> list[CopyCheck]:
        return []

    async def rest(self, may_drive: bool) -> bool:
        await self.driver.release()
        return False


@dataclass
class Passes:
    """Passes of the operator over a cluster."""

    cluster: Cluster
    healer: Healer
    link: Link
    statuses: list[dict[str, Any]]

    async def one(self, policy: Policy | None = SPREADS) -> list[tuple[str, str]]:
        """One pass; its news. Each round's status is kept."""

        async def on_round() -> None:
            self.cluster.advance()
            self.statuses.append(healing_status(self.healer.progress))

        view = self.cluster.view()
        resting = self.healer.rests(view, policy)
        link = cast(MasterLink, self.link)
        assert await self.healer.run(link, None if resting else view, policy, NAMES, on_round) == ""
        return [(n.reason, n.message) for n in self.healer.news()]


@asynccontextmanager
async def at_work(cluster: Cluster, healer: Healer) -> AsyncIterator[Passes]:
    """Passes of an operator whose first one is over: it took the claim, and moved no leader yet."""
    now_ms = 0
    async with serve(cluster) as served, driver(served, now_ms=lambda: now_ms) as executor:
        passes = Passes(cluster, healer, Link(executor), [])
        assert await passes.one() == []
        assert passes.healer.more, "the next pass comes soon"
        now_ms += BEGINS_MS
        passes.statuses.clear()
        yield passes


def piled_up(tablets: int) -> Cluster:
    cluster = Cluster(3, 1, tablets, 3)
    for t in cluster.tablets.values():
        t.leader = node_name(1)
    return cluster


async def test_a_hundred_leaders_are_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "_PAUSE_S", 0)
    monkeypatch.setitem(NAMES, node_name(1)[:8], "flights-node-0")
    cluster = piled_up(120)
    async with at_work(cluster, Healer(lambda: 4.0)) as passes:
        told = await passes.one()
        assert passes.healer.more, "the next pass comes soon"
        told += await passes.one()
        told += await passes.one()
        assert not passes.healer.more
    assert [reason for reason, _ in told] == ["LeadersMoving", "LeadersMoved"]
    assert "leads 120 tablets, but its share is 40" in told[0][1]
    assert told[1][1].startswith("80 leaders in 0 s: 40 from ")
    assert "leaders/" in told[1][1]
    assert {len(s["active"]) for s in passes.statuses} == {0, 2}
    first = passes.statuses[0]["active"][0]
    assert first["step"] == "MovingLeader" and "tablet" not in first
    assert max(cluster.leader_moves.values()) == 1


async def test_the_next_pass_comes_soon_while_leaders_move() -> None:
    """A pass moves a few hundred at most. At rest the next one comes after half a minute."""
    task = await at_rest(1)
    assert await task.run_pass() == QUIET_S
    task._healer.more = True
    assert await task.run_pass() == BUSY_S


async def test_the_next_pass_comes_soon_while_leaders_that_moved_rest() -> None:
    """One fell back to its old node: it moves again after a quarter of a minute, not half a minute later."""
    cluster = piled_up(3)
    async with at_work(cluster, Healer()) as passes:
        await passes.one()
        moved = {t.tablet_id for t in cluster.tablets.values() if t.leader != node_name(1)}
        for t in cluster.tablets.values():
            t.leader = node_name(1)
        for _ in range(3):
            await passes.one()
        assert passes.healer.more, "the next pass comes soon"
        now = {t.tablet_id for t in cluster.tablets.values() if t.leader != node_name(1)}
        assert moved and not now & moved


async def test_what_is_spread_costs_nothing() -> None:
    cluster = Cluster(3, 1, 12, 3)
    async with serve(cluster) as served, driver(served) as executor:
        passes = Passes(cluster, Healer(), Link(executor), [])
        for _ in range(3):
            assert await passes.one() == []
        assert served.calls == [] and passes.statuses == []


async def test_moves_that_are_all_refused_are_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "_PAUSE_S", 0)
    cluster = piled_up(4)
    for t in cluster.tablets.values():
        t.behind = {node_name(2), node_name(3)}
    async with at_work(cluster, Healer()) as passes:
        assert await passes.one() == []
        assert any("not done: " in h["reason"] for s in passes.statuses for h in s["active"])
        assert not passes.healer.more, "nothing is left that was not refused"


async def test_the_end_is_told_where_a_heal_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "_PAUSE_S", 0)
    cluster = piled_up(120)
    async with at_work(cluster, Healer()) as passes:
        told = [reason for reason, _ in await passes.one()]
        cluster.nodes[node_name(3)].alive = False
        cluster.advance()
        told += [reason for reason, _ in await passes.one(None)]
    assert told == ["LeadersMoving", "LeadersMoved"]
