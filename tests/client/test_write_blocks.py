"""How rows share blocks: when a block leaves, how large it may be, and what becomes of one that is too large."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client.batcher import GATE_S
from stele.client.bulk import BLOCK_ROWS
from stele.client.dealing import Dealer
from stele.client.waiting_rows import Item, Part
from stele.model.block import RowError, RowOp
from stele.model.errors import Code, Rejected
from stele.model.keys import encode_tuple
from stele.model.partition import PartitionSchema, RangePartition
from stele.model.schema import Schema
from tests.client.small import EIGHT, ONE, SCHEMA, one_tablet, small_cluster


async def test_concurrent_puts_share_blocks_and_are_all_there(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        await asyncio.gather(*(table.put({"id": i, "name": f"row {i}"}) for i in range(640)))
        blocks = sum(len(tablet.attempts) for tablet in cluster.tablets.values())
        assert blocks == 8
        assert await table.get({"id": 17}) == {"id": 17, "name": "row 17", "n": None}
        assert await table.get({"id": 17}, ["name"]) == {"name": "row 17"}
        assert await table.get({"id": 1_000}) is None
        assert await table.scan().count() == 640


async def test_a_row_that_waits_for_its_block_does_not_hold_its_batch(tmp_path: Path) -> None:
    """A tablet that gets a row now and then sends none for long, while gigabytes go to another."""
    parts = PartitionSchema(range=RangePartition((0,), (encode_tuple([0], [pa.int64()]),)))
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, parts)
        before, highest = pa.total_allocated_bytes(), 0
        writer = table.arrow_writer(buffer_bytes=1 << 20)
        for number in range(40):
            ids = np.arange(2_000) + number * 2_000
            ids[0] = -1 - number
            await writer.feed(pa.record_batch({"id": ids, "name": ["x" * 500] * 2_000}))
            highest = max(highest, pa.total_allocated_bytes() - before)
        assert (await writer.finish()).rows_written == 80_000 == await table.scan().count()
        assert highest < 20 << 20, highest


@pytest.mark.parametrize("one_batch", [True, False])
async def test_blocks_are_bounded_by_what_their_rows_really_take(tmp_path: Path, one_batch: bool) -> None:
    """A few large rows among many small ones: by the average a block of them would be refused as too large."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        large, small = 24, 20_000
        names = ["x" * (1 << 20)] * large + ["y"] * small
        data = pa.table({"id": np.arange(large + small), "name": names})
        batches = data.to_batches(None if one_batch else large)
        result = await table.write_arrow(batches)
        assert result.rows_written == large + small
        (tablet,) = cluster.tablets.values()
        assert max(len(attempt.block) for attempt in tablet.attempts) <= 5 << 20
        assert await table.scan().count() == large + small


async def test_blocks_that_defaults_make_too_large_are_sent_in_parts(tmp_path: Path) -> None:
    """3,500 rows of 8 bytes, which are 140 MB once they have what they did not give."""
    default = '"' + "d" * 4_000 + '"'
    columns = [("id", "int64"), *((f"c{n}", "string", False, default) for n in range(10))]
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", Schema.make(columns, ["id"]), PartitionSchema())
        data = pa.table({"id": np.arange(3_500) % 2_000})
        result = await table.write_arrow(data, "insert_ignore")
        assert result.rows_written == 3_500 and not result.row_errors
        (tablet,) = cluster.tablets.values()
        assert len(tablet.attempts) == 3  # one is refused
        assert await table.scan().count() == 2_000


async def test_rows_of_several_operations_that_share_blocks_are_each_done_as_meant(tmp_path: Path) -> None:
    """Given in one turn, to several tablets, with one between them that is refused before it is sent."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.write_arrow(pa.table({"id": np.arange(90), "name": ["old"] * 90}))
        ops = [RowOp.INSERT, RowOp.UPSERT, RowOp.INSERT_IGNORE]
        blocks = sum(len(tablet.attempts) for tablet in cluster.tablets.values())
        bad, *ends = await asyncio.gather(
            table.upsert({"id": "x"}),
            *(table.apply(ops[id % 3], {"id": id, "name": f"new {id}"}) for id in range(90)),
            return_exceptions=True,
        )
        assert sum(len(tablet.attempts) for tablet in cluster.tablets.values()) <= blocks + 8
        assert isinstance(bad, Rejected) and bad.code is Code.INVALID_ARGUMENT
        for id, end in enumerate(ends):
            if id % 3:
                assert isinstance(end, int), (id, end)
            else:
                assert isinstance(end, Rejected) and f"id={id}:" in str(end)
                assert end.code is Code.ALREADY_PRESENT
        found = (await table.scan(["id", "name"], ordered=True).to_table())["name"].to_pylist()
        assert found == [f"new {id}" if id % 3 == 1 else "old" for id in range(90)]


async def test_rows_of_one_turn_carry_what_their_operations_need(tmp_path: Path) -> None:
    """A delete its key alone, whatever is given beside it, and an update the columns that it changes."""
    async with one_tablet(tmp_path) as (_, table, _):
        await table.write_arrow(
            pa.table({"id": np.arange(3), "name": ["old"] * 3, "n": np.ones(3, np.int32)})
        )
        for deleted in (1, 4):
            await asyncio.gather(
                table.apply("delete_ignore", {"id": deleted}),
                table.put({"id": 3, "name": "new", "n": 3}),
                table.apply("delete_ignore", {"id": deleted + 10}),
                table.update({"id": 2, "n": 2}),
            )
            found = await table.scan(ordered=True).to_table()
            assert found.to_pylist() == [
                {"id": 0, "name": "old", "n": 1},
                {"id": 2, "name": "old", "n": 2},
                {"id": 3, "name": "new", "n": 3},
            ]


async def test_a_tablet_that_is_silent_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=600) as (cluster, client), asyncio.timeout(60):
        table = await client.create_table("t", SCHEMA, EIGHT)
        silent = cluster.tablets_of("t")[0]
        silent.leader = 1
        table.locations.tablets[0].leader = 1
        node = cluster.nodes[1]
        assert all(await asyncio.gather(*(table.put({"id": number}) for number in range(40))))
        node.came.clear()
        node.speaks.clear()
        rows = [asyncio.ensure_future(table.put({"id": number})) for number in range(40)]
        try:
            await node.came.wait()
            rows += [asyncio.ensure_future(table.put({"id": number})) for number in range(40, 80)]
            while sum(row.done() for row in rows) < 60:
                await asyncio.sleep(0.01)
            assert not all(row.done() for row in rows)
        finally:
            node.speaks.set()
        assert all(await asyncio.gather(*rows))


async def test_rows_that_waited_behind_a_block_are_each_done_as_meant(tmp_path: Path) -> None:
    """They came one after another, of one operation each, and leave in one block."""
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        await table.put({"id": 3, "name": "old"})
        cluster.nodes[0].came.clear()
        cluster.nodes[0].speaks.clear()
        ahead = asyncio.ensure_future(table.put({"id": 1}))
        await cluster.nodes[0].came.wait()
        behind = []
        for op, id in ((RowOp.UPSERT, 2), (RowOp.INSERT, 3)):
            behind.append(asyncio.ensure_future(table.apply(op, {"id": id, "name": "new"})))
            await asyncio.sleep(3 * GATE_S)  # it is routed by itself
        cluster.nodes[0].speaks.set()
        _, upserted, inserted = await asyncio.gather(ahead, *behind, return_exceptions=True)
        assert len(tablet.attempts) == 3
        assert isinstance(upserted, int)
        assert isinstance(inserted, Rejected) and inserted.code is Code.ALREADY_PRESENT
        assert await table.get(3, ["name"]) == {"name": "old"}


async def test_rows_of_a_block_that_was_too_large_are_each_done_as_meant(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        await table.write_arrow(pa.table({"id": np.arange(4), "name": ["old"] * 4}))
        tablet.before.append(lambda: Rejected("too large", code=Code.TOO_LARGE))
        ops = [RowOp.INSERT_IGNORE, RowOp.INSERT, RowOp.UPSERT, RowOp.UPSERT]
        ends = await asyncio.gather(
            *(table.apply(op, {"id": id, "name": "new"}) for id, op in enumerate(ops)), return_exceptions=True
        )
        assert [isinstance(end, int) for end in ends] == [True, False, True, True], ends
        found = (await table.scan(["name"], ordered=True).to_table())["name"].to_pylist()
        assert found == ["old", "old", "new", "new"]


async def test_rows_of_plain_values_and_others_share_blocks_in_their_order(tmp_path: Path) -> None:
    """More than are written without Arrow at once, too; and each is told of as itself."""
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        node = cluster.nodes[0]
        await table.put({"id": 1_000, "name": "old", "n": 0})
        node.came.clear()
        node.speaks.clear()
        ahead = asyncio.ensure_future(table.put({"id": -1}))
        await node.came.wait()
        turns = [
            [(RowOp.UPSERT, {"id": id, "name": "first", "n": id}) for id in range(100)],
            [(RowOp.UPSERT, {"id": id, "name": None, "n": -id}) for id in range(3)],
            [(RowOp.INSERT, {"id": id, "name": "second", "n": id}) for id in (1_000, 1_001)],
            [(RowOp.UPSERT, {"id": 2, "name": "third", "n": 2})],
        ]
        tasks = []
        for turn in turns:
            tasks += [asyncio.ensure_future(table.apply(op, row)) for op, row in turn]
            while sum(map(len, table._rows._batcher._waiting.values())) < 1 + turns.index(turn):
                await asyncio.sleep(0.01)
        tablet.before.extend([lambda: None, lambda: Rejected("too large", code=Code.TOO_LARGE)])
        node.speaks.set()
        _, *ends = await asyncio.gather(ahead, *tasks, return_exceptions=True)
        refused = [end for end in ends if not isinstance(end, int)]
        assert [str(end.args[0]) for end in refused if isinstance(end, Rejected)] == [
            "table t: id=1000: the key is present; use upsert to overwrite it"
        ]
        assert len(refused) == 1
        found = (await table.scan(["id", "name", "n"], ordered=True).to_table()).to_pydict()
        assert found["id"] == [-1, *range(100), 1_000, 1_001]
        assert found["name"] == [None, None, None, "third", *["first"] * 97, "old", "second"]
        assert found["n"][1:5] == [0, -1, 2, 3]


async def test_rows_of_one_turn_are_dealt_out_together(tmp_path: Path) -> None:
    """One by one they would be written all the same, at many times the cost."""
    sizes: list[int] = []

    class Counting(Dealer):
        def deal(self, group: Sequence[Item]) -> tuple[list[tuple[int, Part]], list[RowError]]:
            sizes.append(len(group))
            return super().deal(group)

    async with one_tablet(tmp_path) as (_, table, _):
        table._rows._batcher._dealer = Counting(SCHEMA, PartitionSchema())
        await asyncio.gather(*(table.put({"id": n, "name": "row", "n": n}) for n in range(10)))
    assert sizes == [10]


async def test_a_row_given_in_the_turn_of_a_round_that_sends_nothing_is_written(tmp_path: Path) -> None:
    """The round finds a bad row alone, and the only tablet busy: nothing that ends later would begin the next one."""
    async with one_tablet(tmp_path) as (cluster, table, _), asyncio.timeout(60):
        node, batcher = cluster.nodes[0], table._rows._batcher
        await table.put({"id": 0})
        node.came.clear()
        node.speaks.clear()
        ahead = table._rows.put(RowOp.UPSERT, {"id": 1})
        await node.came.wait()
        while batcher._gate is not None:  # the next round, which finds nothing, has begun
            await asyncio.sleep(GATE_S / 10)
        bad = table._rows.put(RowOp.UPSERT, {"id": "bad"})
        assert batcher._gate is not None
        batcher._gate.cancel()
        batcher._begin_round()
        late = table._rows.put(RowOp.UPSERT, {"id": 2})
        node.speaks.set()
        assert await ahead < await late
        with pytest.raises(Rejected, match="bad"):
            await bad


async def test_rows_that_cannot_be_joined_fail_and_those_behind_them_are_written(tmp_path: Path) -> None:
    """As more text than an array of Arrow's holds cannot; here their types differ."""
    async with one_tablet(tmp_path) as (_, table, _), asyncio.timeout(60):
        await table.put({"id": 0})
        batcher, loop = table._rows._batcher, asyncio.get_running_loop()
        rows: list[asyncio.Future[int]] = [loop.create_future() for _ in range(2)]
        parts = [
            Part(batcher._dealer, RowOp.UPSERT, SCHEMA.column_ids, pa.record_batch({"id": [value]}), [row])
            for value, row in zip((1, "one"), rows)
        ]
        batcher._waiting[0] = deque(parts)
        behind = table._rows.put(RowOp.UPDATE, {"id": 0, "n": 1})
        ends = await asyncio.gather(*rows, return_exceptions=True)
        assert [type(end) for end in ends] == [pa.ArrowInvalid] * 2
        assert await behind > 0


async def test_two_rows_that_are_too_large_together_are_both_written_and_one_alone_is_told(
    tmp_path: Path,
) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        too_large = Rejected("too large", code=Code.TOO_LARGE)
        tablet.before.append(lambda: too_large)
        assert (await table.write_arrow(pa.table({"id": [1, 2]}))).rows_written == 2
        assert await table.scan().count() == 2
        tablet.before.append(lambda: too_large)
        assert all(await asyncio.gather(*(table.put({"id": number}) for number in (4, 5))))
        tablet.before.append(lambda: too_large)
        result = await table.write_arrow(pa.table({"id": [3]}), raise_row_errors=False)
        assert result.rows_written == 0
        assert [(e.row, e.code) for e in result.row_errors] == [(0, Code.TOO_LARGE)]


async def test_rows_that_are_left_when_the_last_full_block_was_answered_are_written(tmp_path: Path) -> None:
    """They are too few to leave, and `finish` is called in the moment before their sender ends."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        ends: list[asyncio.Task[int]] = []

        async def finish() -> int:
            return (await writer.finish()).rows_written

        def answered(_: int) -> None:
            if not ends:
                ends.append(asyncio.ensure_future(finish()))

        writer = table.arrow_writer(on_rows=answered)
        await writer.feed(pa.record_batch({"id": np.arange(BLOCK_ROWS + 10)}))
        async with asyncio.timeout(60):
            while not ends:
                await asyncio.sleep(0.01)
            assert await ends[0] == BLOCK_ROWS + 10 == await table.scan().count()


async def test_small_blocks_that_fill_the_buffer_leave_by_themselves(tmp_path: Path) -> None:
    """Rows of many tablets, few for each, then a large one of one tablet."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        writer = table.arrow_writer(buffer_bytes=8_000)
        async with asyncio.timeout(60):
            await writer.feed(pa.record_batch({"id": np.arange(100), "name": [""] * 100}))
            await writer.feed(pa.record_batch({"id": [100], "name": ["x" * 5_000]}))
            assert (await writer.finish()).rows_written == 101 == await table.scan().count()
