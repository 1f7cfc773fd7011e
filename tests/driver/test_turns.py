"""What a pass of the driver does in one step, or one turn, of the event loop: the operator's Lease and probes live there."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from types import FrameType

import pytest

from stele.driver.asking import ask
from stele.rpc.channels import ChannelPool
from tests.driver.model_parts import POLICY
from tests.driver.served import serve
from tests.driver.test_executor import driver, killed
from tests.operator.test_large import Steps


class Begun:
    """How many calls begin in one turn of this thread's event loop, at most; and how many in all."""

    def __init__(self) -> None:
        self.most = 0
        self.calls: dict[int, FrameType] = {}
        self._in_turn = 0

    def __enter__(self) -> Begun:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is asyncio.BaseEventLoop._run_once.__code__:  # type: ignore[attr-defined]
            self._in_turn = 0
        elif frame.f_code is ChannelPool.unary.__code__ and id(frame) not in self.calls:
            self.calls[id(frame)] = frame
            self._in_turn += 1
            self.most = max(self.most, self._in_turn)


@pytest.mark.parametrize("what", ["orders", "questions"])
async def test_few_calls_begin_in_one_turn_of_the_loop(what: str) -> None:
    """Sixteen did: to begin one takes half a ms, in which nothing else in the loop goes on."""
    cluster = killed(60)
    async with serve(cluster) as served, driver(served) as executor:
        await executor.ensure_claim()
        view = await executor.observe(POLICY)
        with Begun() as begun:
            if what == "orders":
                await executor.run_once(replace(POLICY, max_copies=60), view)
            else:
                asked = {n: list(cluster.tablets)[:60] * 4 for n, node in cluster.nodes.items() if node.alive}
                await ask(executor._pool, view, asked)
    assert len(begun.calls) > 30 and begun.most <= 2, (len(begun.calls), begun.most)


async def test_no_step_of_the_loop_grows_with_the_orders_of_a_pass() -> None:
    """Of a lost node there are thousands, and a task for each was made at once: the Lease and probes had to wait."""

    async def largest(tablets: int) -> tuple[int, int]:
        cluster = killed(tablets)
        async with serve(cluster) as served, driver(served) as executor:
            await executor.ensure_claim()
            view = cluster.view()
            with Steps() as steps:
                report = await executor.run_once(POLICY, replace(view, claim=executor.claim))
        return len(report.outcomes), steps.largest

    (few, small), (many, large) = await largest(20), await largest(80)
    assert many > few + 20
    assert large < small + (many - few) * 100
