"""Sessions: rows that are given and flushed later, none of which is lost without a word."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from stele.client import AsyncClient, Client, Closed, RowErrors
from stele.model.block import decode_block
from stele.model.errors import Code, Rejected, Retryable
from tests.client.small import EIGHT, ONE, SCHEMA, one_tablet, small_cluster


async def test_a_session_keeps_the_order_of_its_rows(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        async with table.new_session(flush_interval_s=0) as session:
            for i in range(100):
                await session.insert({"id": i, "name": "first"})
            await session.delete({"id": 7})
            await session.insert({"id": 7, "name": "second"})
            await session.update({"id": 8, "n": 8})
            await session.upsert({"id": 9, "name": "third"})
        assert await table.get({"id": 7}) == {"id": 7, "name": "second", "n": None}
        assert await table.get({"id": 8}) == {"id": 8, "name": "first", "n": 8}
        assert await table.get({"id": 9}, ["name"]) == {"name": "third"}


async def test_updates_of_different_columns_are_all_done_in_their_order(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        async with table.new_session(flush_interval_s=0) as session:
            await session.insert({"id": 1})
            await session.update({"id": 1, "n": 1})
            await session.update({"id": 1, "name": "second"})
            await session.update({"id": 1, "n": 3})
        assert await table.get({"id": 1}) == {"id": 1, "name": "second", "n": 3}


async def test_a_session_tells_which_rows_were_refused_and_flushes_by_itself(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        session = table.new_session(flush_interval_s=0.02)
        await session.insert({"id": 1})
        await session.insert({"id": "x"})
        await session.insert({"id": 1})
        async with asyncio.timeout(60):
            while not tablet.attempts:
                await asyncio.sleep(0.01)
        with pytest.raises(RowErrors) as caught:
            await session.flush()
        assert [(e.row, e.code) for e in caught.value.errors] == [
            (1, Code.INVALID_ARGUMENT),
            (2, Code.ALREADY_PRESENT),
        ]
        assert (await session.flush()).rows_written == 0


async def test_a_session_names_the_rows_that_a_failure_left_unwritten(tmp_path: Path) -> None:
    """Those of the block that failed, and those behind it, which were not sent; positions begin anew with each flush."""
    async with one_tablet(tmp_path) as (_, table, tablet):
        session = table.new_session(flush_interval_s=0)
        tablet.before.append(lambda: Rejected("no", code=Code.PERMISSION_DENIED))
        await session.insert({"id": "x"})  # a fault of its own
        await session.insert({"id": 0})  # fails
        for number in (1, 2, 3):
            await session.delete({"id": number})  # not sent any more
        with pytest.raises(
            RowErrors, match=r"5 of 5 rows were refused.*PERMISSION_DENIED id=0: no"
        ) as caught:
            await session.flush()
        refused = [Code.INVALID_ARGUMENT, *[Code.PERMISSION_DENIED] * 4]
        assert [(e.row, e.code) for e in caught.value.errors] == list(enumerate(refused))
        assert "id=3: not sent" in caught.value.errors[4].message
        await session.insert({"id": 4})
        await session.insert({"id": 4})
        with pytest.raises(RowErrors) as caught:
            await session.flush()
        assert [(e.row, e.code) for e in caught.value.errors] == [(1, Code.ALREADY_PRESENT)]
        await session.insert({"id": 4})
        with pytest.raises(RowErrors) as caught:
            await session.flush()
        assert [e.row for e in caught.value.errors] == [0]
        tablet.before.extend([lambda: None, lambda: Rejected("no", code=Code.PERMISSION_DENIED)])
        await session.upsert({"id": 5})
        await session.delete({"id": 5})
        with pytest.raises(RowErrors) as caught:
            await session.flush()
        assert caught.value.result.timestamp > 0  # what was written is seen at it


async def test_no_row_of_a_session_is_lost_without_a_word(tmp_path: Path) -> None:
    """A flush in the background failed, the call that was told of it did its row again, and nobody told of the others."""
    async with one_tablet(tmp_path) as (_, table, tablet):
        tablet.leader = -1
        refused = []
        with pytest.raises(RowErrors, match="6 of 10 rows were not acknowledged") as caught:
            async with table.new_session(flush_interval_s=0, timeout_s=3.0) as session:
                for number in range(10):
                    if number == 6:
                        session._on_timer()
                        while session._flushes:
                            await asyncio.sleep(0.01)
                        tablet.leader = 0
                    while True:
                        try:
                            await session.upsert({"id": number})
                            break
                        except Retryable as exc:
                            refused.append((number, exc.code, str(exc)))
        ((number, code, told),) = refused
        assert (number, code) == (6, Code.NO_QUORUM)
        assert "this row was not queued" in told
        assert [(e.row, e.code) for e in caught.value.errors] == [(n, Code.NO_QUORUM) for n in range(6)]
        assert sorted((await table.scan(["id"]).to_table())["id"].to_pylist()) == [6, 7, 8, 9]


async def test_a_call_that_fills_a_session_has_given_its_row(tmp_path: Path) -> None:
    """It waits for a flush that fails, and the next call is told: whoever is told does the row of that call again."""
    async with one_tablet(tmp_path) as (_, table, tablet):
        session = table.new_session(flush_interval_s=0, buffer_bytes=1)
        tablet.before.append(lambda: Rejected("no", code=Code.PERMISSION_DENIED))
        await session.upsert({"id": 0})
        with pytest.raises(Rejected, match="not queued"):
            await session.upsert({"id": 1})
        await session.upsert({"id": 1})
        with pytest.raises(RowErrors) as caught:
            await session.flush()
        assert [(e.row, e.code) for e in caught.value.errors] == [(0, Code.PERMISSION_DENIED)]
        assert caught.value.result.rows_written == 1


async def test_of_rows_beside_a_failure_a_session_tells_what_is_known_of_each(tmp_path: Path) -> None:
    """Acknowledged by another tablet, perhaps done, or held back."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        lost = cluster.tablets_of("t")[0]
        session = table.new_session(flush_interval_s=0, timeout_s=4.0)
        lost.after.extend([lambda: Retryable("lost", code=Code.UNKNOWN_OUTCOME)] * 10_000)
        for number in range(100):
            await session.insert({"id": number})
        await session.delete({"id": 1})
        with pytest.raises(RowErrors, match="not acknowledged") as caught:
            await session.flush()
        lost.after.clear()
        there = set((await table.scan(["id"]).to_table())["id"].to_pylist())
        assert there == set(range(100))  # the answer alone was lost
        *unknown, held_back = caught.value.errors
        assert {e.code for e in unknown} == {Code.UNKNOWN_OUTCOME}
        assert (held_back.row, held_back.code) == (100, Code.NO_QUORUM)
        assert caught.value.result.rows_written + len(unknown) == 100
        assert caught.value.result.timestamp > 0
        lost.after.append(lambda: Retryable("lost", code=Code.UNAVAILABLE))
        lost.before.extend([lambda: None, lambda: Rejected("too old", code=Code.TOO_OLD)])
        for number in range(100):
            await session.upsert({"id": number})
        await session.delete({"id": 1})
        with pytest.raises(RowErrors, match="TOO_OLD") as caught:
            await session.flush()
        assert [(e.row, e.code) for e in caught.value.errors][-1] == (100, Code.NO_QUORUM)


async def test_a_flush_that_nobody_waits_for_any_more_goes_on(tmp_path: Path) -> None:
    """Cancelled, it ends the waiting only: no row is lost, and none comes behind a later one of its key."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        cluster.nodes[0].delay_s = 0.1
        session = table.new_session(flush_interval_s=0)
        await session.insert({"id": 1, "n": 1})
        await session.update({"id": 1, "n": 2})
        await session.upsert({"id": 2, "n": 2})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.flush(), 0.05)
        await session.update({"id": 1, "n": 3})
        result = await session.flush()
        assert result.rows_written == 4
        assert await table.get({"id": 1}, ["n"]) == {"n": 3}
        assert await table.get({"id": 2}, ["n"]) == {"n": 2}


async def test_what_became_of_a_flush_that_nobody_waited_for_is_told_by_the_next_call(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        cluster.nodes[0].delay_s = 0.1
        tablet.before.append(lambda: Rejected("no", code=Code.PERMISSION_DENIED))
        session = table.new_session(flush_interval_s=0)
        await session.insert({"id": 1})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.flush(), 0.05)
        with pytest.raises(Rejected) as caught:
            await session.flush()
        assert caught.value.code is Code.PERMISSION_DENIED


async def test_a_call_that_is_cancelled_while_it_waits_for_room_has_not_taken_its_row_in(
    tmp_path: Path,
) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        cluster.nodes[0].speaks.clear()
        session = table.new_session(flush_interval_s=0, buffer_bytes=1)
        await session.insert({"id": 0})  # fills it
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.insert({"id": 1}), 0.1)
        cluster.nodes[0].speaks.set()
        await session.insert({"id": 1})
        assert (await session.flush()).rows_written == 2


@pytest.mark.parametrize("rows_max", [3, 1_000], ids=["rows", "bytes"])
async def test_rows_under_way_take_room_until_they_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_max: int
) -> None:
    monkeypatch.setattr("stele.client.session.ROWS_MAX", rows_max)
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        cluster.nodes[0].speaks.clear()
        session = table.new_session(flush_interval_s=0, buffer_bytes=192 if rows_max > 3 else 1_000_000)
        await session.upsert({"id": 0})
        session._on_timer()
        while not session._leaving_rows:
            await asyncio.sleep(0)
        for number in (1, 2):
            assert not session._full
            await session.upsert({"id": number})
        assert session._full
        cluster.nodes[0].speaks.set()
        assert (await session.flush()).rows_written == 3


async def test_callers_that_wait_for_room_keep_their_order(tmp_path: Path) -> None:
    """Also before one that comes when there is room, and they are about to take it."""
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        cluster.nodes[0].delay_s = 0.02
        session = table.new_session(flush_interval_s=0, buffer_bytes=200)

        async def give(number: int) -> None:
            await session.upsert({"id": 1, "n": number})

        calls = []
        for number in range(60):
            calls.append(asyncio.create_task(give(number)))
            await asyncio.sleep(0.001 * (number % 3))
        await asyncio.gather(*calls)
        assert (await session.flush()).rows_written == 60
        given = [n for request in tablet.attempts for n in _numbers(request.block, tablet.schema)]
        assert given == list(range(60))
        assert max(len(_numbers(request.block, tablet.schema)) for request in tablet.attempts) <= 4


def _numbers(block: bytes, schema: Any) -> list[int]:
    return list(decode_block(block, schema).batch["n"].to_pylist())


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "forgotten"])
async def test_a_client_that_is_closed_writes_what_its_sessions_hold(tmp_path: Path, kept: bool) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", SCHEMA, ONE)
        async with AsyncClient([cluster.master_address]) as other:
            sessions = []
            for first in (0, 10):
                session = (await other.open_table("t")).new_session(flush_interval_s=0)
                for number in range(first, first + 10):
                    await session.upsert({"id": number})
                if kept:
                    sessions.append(session)
            del session
            gc.collect()
        assert await (await client.open_table("t")).scan().count() == 20


async def test_a_client_that_is_closed_tells_of_rows_that_were_not_written(tmp_path: Path) -> None:
    """Also of a flush in the background that nobody asked about; of all that a session has told it says nothing."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        session = table.new_session(flush_interval_s=0.01)
        failing, left, told = table.new_session(), table.new_session(), table.new_session()
        tablet.before.append(lambda: Rejected("no", code=Code.PERMISSION_DENIED))
        await session.upsert({"id": 1})
        while not tablet.attempts:
            await asyncio.sleep(0.01)
        await failing.upsert({"id": "x"})
        await told.upsert({"id": "y"})
        with pytest.raises(RowErrors):
            await told.flush()
        with pytest.raises(ZeroDivisionError):
            async with left:
                await left.upsert({"id": 3})
                raise ZeroDivisionError
        with pytest.raises(RowErrors) as caught:
            await client.close()
        found = sorted(
            [str(caught.value), *caught.value.__notes__], key=lambda text: "PERMISSION_DENIED" in text
        )
        assert ["1 of 1 row was refused" in text for text in found] == [True, True]
        assert "INVALID_ARGUMENT" in found[0] and "PERMISSION_DENIED id=1: no" in found[1]
        await client.close()
        with pytest.raises(Closed):
            await table.put({"id": 4})


async def test_what_ends_a_client_is_not_hidden_by_rows_that_were_not_written(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", SCHEMA, ONE)

        async def use() -> None:
            async with AsyncClient([cluster.master_address]) as other:
                await (await other.open_table("t")).new_session().upsert({"id": "x"})
                raise ZeroDivisionError

        def use_blocking() -> None:
            with Client([cluster.master_address]) as other:
                other.open_table("t").new_session().upsert({"id": "x"})
                raise ZeroDivisionError

        for using in (use(), asyncio.to_thread(use_blocking)):
            with pytest.raises(ZeroDivisionError) as caught:
                await using
            (note,) = caught.value.__notes__
            assert "1 of 1 row was refused" in note


async def test_a_row_may_be_used_again_once_it_was_given(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        row: dict[str, object] = {}
        async with table.new_session(flush_interval_s=0) as session:
            for number in range(50):
                row["id"], row["name"] = number, f"n{number}"
                await session.upsert(row)
        found = await table.scan(["id", "name"], ordered=True).to_table()
        assert found.to_pylist() == [{"id": n, "name": f"n{n}"} for n in range(50)]


async def test_a_flush_that_another_overlaps_counts_rows_from_where_it_ended(tmp_path: Path) -> None:
    """The other one takes rows up before the first has told: its rows are not those of the first."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 7, "name": "there"})
        async with table.new_session(flush_interval_s=0) as session:
            for number in range(3):
                await session.insert({"id": number, "name": "new"})
            first = asyncio.create_task(session.flush())
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # its rows have left
            await session.insert({"id": 3, "name": "new"})
            await session.insert({"id": 7, "name": "again"})
            session._on_timer()
            assert (await first).rows_written == 3
            with pytest.raises(RowErrors) as caught:
                await session.flush()
            assert [(e.row, e.code) for e in caught.value.errors] == [(1, Code.ALREADY_PRESENT)]


async def test_of_many_rows_behind_a_block_that_failed_each_is_told(tmp_path: Path) -> None:
    """More than one block of them, of which one was sent."""
    async with one_tablet(tmp_path) as (_, table, tablet):
        tablet.before.append(lambda: Rejected("no", code=Code.PERMISSION_DENIED))
        session = table.new_session(flush_interval_s=0)
        for number in range(20_000):
            await session.upsert({"id": number})
        with pytest.raises(RowErrors) as caught:
            await session.flush()
        assert [error.row for error in caught.value.errors] == list(range(20_000))
        assert ["not sent, because" in e.message for e in caught.value.errors] == [
            n >= 8_192 for n in range(20_000)
        ]
        assert await table.scan().count() == 0


async def test_a_client_that_is_closed_waits_for_rows_that_left_after_a_flush(tmp_path: Path) -> None:
    """That flush has told of its own rows; of those under way nobody has."""
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", SCHEMA, ONE)
        async with AsyncClient([cluster.master_address]) as other:
            session = (await other.open_table("t")).new_session(flush_interval_s=0)
            cluster.nodes[0].delay_s = 0.1
            cluster.nodes[0].came.clear()
            await session.insert({"id": 1})
            first = asyncio.create_task(session.flush())
            await cluster.nodes[0].came.wait()  # its row has left
            await session.insert({"id": 2})
            session._on_timer()
            assert (await first).rows_written == 1
        assert await (await client.open_table("t")).scan().count() == 2


async def test_rows_of_long_strings_leave_once_they_fill_the_buffer(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        session = table.new_session(flush_interval_s=0, buffer_bytes=10_000)
        for number in range(8):
            await session.upsert({"id": number, "name": "x" * 4_000})
        assert (await session.flush()).rows_written == 8
        assert max(len(request.block) for request in tablet.attempts) < 14_000


async def test_one_that_comes_when_there_is_room_does_not_pass_one_that_waited_for_it(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        session = table.new_session(flush_interval_s=0, buffer_bytes=1)
        cluster.nodes[0].speaks.clear()
        await session.upsert({"id": 1, "n": 0})  # fills it
        waiting = asyncio.ensure_future(session.upsert({"id": 1, "n": 1}))
        await asyncio.sleep(0.05)
        cluster.nodes[0].speaks.set()
        while session._full:
            await asyncio.sleep(0)
        await session.upsert({"id": 1, "n": 2})
        await waiting
        await session.flush()
        assert await table.get(1, ["n"]) == {"n": 2}


async def test_a_client_that_is_closed_tells_of_rows_that_were_refused_in_the_background(
    tmp_path: Path,
) -> None:
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        await table.put({"id": 1})
        other = AsyncClient([cluster.master_address])
        session = (await other.open_table("t")).new_session(flush_interval_s=0.01)
        await session.insert({"id": 1})
        async with asyncio.timeout(60):
            while len(tablet.attempts) < 2 or session._flushes:
                await asyncio.sleep(0.01)
        with pytest.raises(RowErrors, match="ALREADY_PRESENT id=1"):
            await other.close()


async def test_rows_of_a_session_that_an_exception_left_are_not_written(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", SCHEMA, ONE)
        async with AsyncClient([cluster.master_address]) as other:
            with pytest.raises(ZeroDivisionError):
                async with (await other.open_table("t")).new_session(flush_interval_s=0.05) as session:
                    await session.upsert({"id": 1})
                    raise ZeroDivisionError
        assert await (await client.open_table("t")).scan().count() == 0
