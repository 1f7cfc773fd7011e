"""A node that refuses requests for want of room is asked again by turns, when it said, and not by each caller for itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

from stele import metrics
from stele.client import brake as brakes
from stele.client.brake import Brake
from stele.model.block import RowOp, encode_block
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.budget import ByteBudget
from tests.client.small import SCHEMA, one_tablet


def throttled(retry_after_ms: int = 0) -> Retryable:
    return Retryable("no room", code=Code.THROTTLED, retry_after_ms=retry_after_ms)


async def test_requests_leave_in_their_order_and_some_bytes_at_once() -> None:
    brake, order = Brake(), list[int]()
    brake.refused(throttled(50))
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def send(number: int, size: int) -> None:
        await brake.begin(size)
        order.append(number)

    sending = [
        asyncio.ensure_future(send(n, size)) for n, size in enumerate((8 << 20, 600_000, 300_000, 400_000))
    ]
    await sending[0]
    assert loop.time() - began_s >= 0.05 and order == [0]
    await asyncio.sleep(0)
    assert order == [0]
    brake.end(8 << 20, Code.OK)
    await asyncio.gather(*sending[1:3])
    assert order == [0, 1, 2] and not sending[3].done()
    brake.end(600_000, Code.OK)
    await sending[3]
    assert brake.on
    brake.end(300_000, Code.OK)
    brake.end(400_000, Code.OK)
    assert not brake.on


async def test_who_is_refused_again_waits_longer_and_so_do_those_behind_it() -> None:
    brake = Brake()
    brake.refused(throttled(10))
    await brake.begin(100)
    waiting = asyncio.ensure_future(brake.begin(100))
    brake.refused(throttled(10))
    brake.end(100, Code.THROTTLED)
    assert brake.on and brake._pause_s == 2 * brakes.PAUSE_FIRST_S
    await waiting
    brake.end(100, Code.OK)
    assert not brake.on


async def test_a_node_that_is_gone_holds_nobody_up() -> None:
    brake = Brake()
    brake.refused(throttled(10))
    await brake.begin(8 << 20)
    waiting = [asyncio.ensure_future(brake.begin(8 << 20)) for _ in range(8)]
    await asyncio.sleep(0)
    brake.end(8 << 20, Code.TIMED_OUT)
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)


async def test_who_is_cancelled_keeps_no_turn() -> None:
    brake = Brake()
    brake.refused(throttled(1))
    await brake.begin(8 << 20)
    left, next_one = (asyncio.ensure_future(brake.begin(8 << 20)) for _ in range(2))
    await asyncio.sleep(0)
    brake.end(8 << 20, Code.OK)  # it is the turn of the one that leaves
    left.cancel()
    async with asyncio.timeout(60):
        await next_one
    brake.end(8 << 20, Code.OK)
    assert not brake.on and not brake._under_way and not brake._under_way_bytes


def test_a_budget_says_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("stele.rpc.budget.time.monotonic", lambda: now_s)
    budget = ByteBudget(10_000, 2_000)
    budget.take(8_000)

    def hint_ms(size: int) -> int:
        with pytest.raises(Retryable) as caught:
            budget.take(size)
        return caught.value.retry_after_ms

    assert hint_ms(1_000) == 50  # nothing is known yet
    budget.give_back(4_000)
    now_s += 0.2
    budget.take(4_000)
    assert hint_ms(2_000) == 100  # 20,000 bytes a second
    budget.give_back(8_000)
    budget.take(8_000)
    assert (hint_ms(1), hint_ms(1_000_000)) == (10, 500)


async def test_blocks_that_a_node_has_no_room_for_are_not_sent_again_and_again(tmp_path: Path) -> None:
    """16 of 1 MiB: each caller sent its own again, 100 times a second in all."""
    async with one_tablet(tmp_path, nodes=1, timeout_s=60) as (cluster, table, _):
        node = cluster.nodes[0]
        node.clients._budget = ByteBudget(4 << 20, 1)
        node.delay_s = 0.2
        rows = pa.table({"id": [1], "name": ["x" * (1 << 20)], "n": pa.array([1], pa.int32())})
        (batch,) = rows.cast(SCHEMA.to_arrow()).to_batches()
        block = encode_block(RowOp.UPSERT, SCHEMA.column_ids, batch, SCHEMA.version)
        refused = metrics.budget_refused._value.get()
        await asyncio.gather(*(table.tablet(0).write(block, timeout_s=60) for _ in range(16)))
        assert metrics.budget_refused._value.get() - refused <= 32


async def test_a_first_attempt_that_is_refused_is_not_sent_again_before_the_node_said(tmp_path: Path) -> None:
    """The hint of a first answer was not taken: every refused request was sent twice at once."""
    async with one_tablet(tmp_path, timeout_s=60) as (_, table, tablet):
        tablet.before.append(lambda: throttled(200))
        began_s = asyncio.get_running_loop().time()
        await table.put({"id": 1})
        assert asyncio.get_running_loop().time() - began_s >= 0.2


async def test_two_rows_that_do_not_fit_into_one_block_are_not_sent_in_one(tmp_path: Path) -> None:
    """Of 6 MB each. With one answer lost, the block of both ended as UNKNOWN_OUTCOME, though no leader ever takes it."""
    async with one_tablet(tmp_path, timeout_s=60) as (_, table, tablet):

        def limit() -> Rejected | None:
            large = len(tablet.attempts[-1].block) > 8 << 20
            return Rejected("too large", code=Code.TOO_LARGE) if large else None

        tablet.before.extend([lambda: Retryable("lost", code=Code.TIMED_OUT), *[limit] * 10])
        await asyncio.gather(*(table.put({"id": n, "name": "x" * (6 << 20)}) for n in range(2)))
        assert max(len(attempt.block) for attempt in tablet.attempts) < 7 << 20


async def test_a_row_that_no_leader_takes_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with one_tablet(tmp_path, timeout_s=60) as (_, table, tablet):
        tablet.before.append(lambda: Retryable("lost", code=Code.TIMED_OUT))
        with pytest.raises(Rejected, match="id=1: the write has 9") as caught:
            await table.put({"id": 1, "name": "x" * (9 << 20)})
        assert caught.value.code is Code.TOO_LARGE and not tablet.attempts


async def test_a_write_that_ends_early_says_how_long_it_waited(tmp_path: Path) -> None:
    """After 0.1 s it was told that there was no answer within 60 s."""
    async with one_tablet(tmp_path, timeout_s=60) as (_, table, tablet):
        tablet.before.extend([lambda: Retryable("a fault", code=Code.INTERNAL)] * 3)
        with pytest.raises(Retryable, match=r"no answer within [0-9]\.[0-9] s") as caught:
            await table.put({"id": 1})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
