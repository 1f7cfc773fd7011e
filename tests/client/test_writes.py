"""Writes: applied once whatever happens on the way, and told honestly when it is not known."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncClient, RowErrors
from stele.client.batcher import GATE_S
from stele.client.bulk import BLOCK_ROWS
from stele.model.block import RowOp
from stele.model.clock import HybridClock
from stele.model.errors import Code, Corrupt, NotLeader, Rejected, Retryable, SteleError
from stele.model.ids import ClusterId, new_id
from stele.model.keys import encode_tuple
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema
from stele.rpc.proto import tserver_pb2
from tests.client.small import EIGHT, ONE, SCHEMA, small_cluster


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


async def test_an_answer_to_a_read_with_broken_insides_is_an_error(tmp_path: Path) -> None:
    """Its offsets point out of it: Arrow follows them, and ends the program that reads them."""
    async with small_cluster(tmp_path, nodes=1) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        offsets = np.array([0, 4, 1 << 30, 12], np.int32)
        names = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(b"abcd" * 3))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("name", pa.string())])) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([names], names=["name"]))
        for bad in (sink.getvalue().to_pybytes(), sink.getvalue().to_pybytes()[:-50], b"junk"):
            answer = tserver_pb2.ClientResponse(read=tserver_pb2.ReadResponse(rows=bad))
            cluster.nodes[0]._read = lambda request, answer=answer: answer  # type: ignore[method-assign]
            with pytest.raises(Corrupt, match="table t: a node answered a read with no Arrow stream of rows"):
                await table.get(1)


async def test_what_is_given_later_is_not_written_first(tmp_path: Path) -> None:
    """Puts, deletes and updates of one key, each begun a turn later while the blocks before it are under way."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        begun: list[asyncio.Task[int]] = []
        for number in range(60):
            row = {"id": 1, "n": number}
            for write in (table.put, table.update, lambda row: table.delete({"id": row["id"]})):
                begun.append(asyncio.ensure_future(write(row)))
                await asyncio.sleep(0)
        times = await asyncio.gather(*begun)
        assert times == sorted(times)
        assert await table.scan().count() == 0


async def test_columns_that_change_within_a_write_are_told_with_the_table(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("readings", SCHEMA, ONE)
        batches = [pa.record_batch({"id": [1], "n": [1]}), pa.record_batch({"id": [2]})]
        with pytest.raises(Rejected, match=r"table readings: .*id, n.*then id"):
            await table.write_arrow(batches)


async def test_a_row_that_is_no_mapping_is_told_and_harms_no_other(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        with pytest.raises((TypeError, SteleError)):
            await table.put(5)  # type: ignore[arg-type]
        await table.put({"id": 1})


async def test_a_lost_answer_is_asked_for_again_under_the_same_sequence(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        for code in (Code.UNKNOWN_OUTCOME, Code.TIMED_OUT, Code.INTERNAL):
            tablet.after.append(lambda code=code: Retryable("lost", code=code))
        await table.insert({"id": 1, "name": "once"})
        assert len(tablet.attempts) == 4
        assert len({(a.client_id, a.sequence, a.digest) for a in tablet.attempts}) == 1
        with pytest.raises(Rejected) as caught:
            await table.insert({"id": 1, "name": "twice"})
        assert caught.value.code is Code.ALREADY_PRESENT
        assert tablet.attempts[-1].lowest_unfinished == 2


async def test_the_leader_is_found_by_hint_and_without(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        tablet.leader = 2
        await table.put({"id": 1})
        assert cluster.nodes[1].requests == 0  # the hint led straight to node 2
        tablet.leader = -1
        put = asyncio.ensure_future(table.put({"id": 2}))
        await asyncio.sleep(0.1)
        tablet.leader = 1
        await put
        assert await table.scan().count() == 2


async def test_a_leader_that_listens_elsewhere_now_is_found(tmp_path: Path) -> None:
    """The followers name the leader, but its address is an old one: only the masters know better."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        await table.put({"id": 1})
        await cluster.nodes[1].move()
        tablet.leader = 1
        await table.put({"id": 2})
        assert await table.get({"id": 2}) == {"id": 2, "name": None, "n": None}


async def test_an_address_that_another_cluster_has_by_now_is_passed_over(tmp_path: Path) -> None:
    """As a pod's may be, once its pod is gone: the other replicas are well."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        cluster.nodes[0].identity.cluster_id = ClusterId(new_id())
        tablet.leader = 1
        await table.put({"id": 1})
        assert await table.get(1, ["id"]) == {"id": 1}


async def test_another_cluster_says_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=0.5) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        stranger = Rejected("this is another cluster", code=Code.WRONG_CLUSTER)
        tablet.after.append(lambda: Retryable("lost", code=Code.UNKNOWN_OUTCOME))
        tablet.before.extend([lambda: None, *[lambda: stranger] * 100])
        with pytest.raises(Retryable) as caught:
            await table.insert({"id": 1})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        with pytest.raises(Retryable, match="another cluster; nothing was done") as caught:
            await table.insert({"id": 2})
        assert caught.value.code is Code.NO_QUORUM


async def test_a_node_that_dies_with_the_answer_costs_nothing_but_time(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        stopping: list[asyncio.Task[None]] = []

        def die() -> SteleError | None:
            tablet.leader = 1
            stopping.append(asyncio.ensure_future(cluster.nodes[0].die()))
            return Retryable("gone", code=Code.UNAVAILABLE)

        tablet.after.append(die)
        await table.insert({"id": 1})
        await asyncio.gather(*stopping)
        assert len(tablet.attempts) == 2
        assert await table.scan().count() == 1


async def test_without_a_leader_the_end_is_no_quorum_or_unknown(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=0.5) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        tablet.leader = -1
        with pytest.raises(Retryable) as caught:
            await table.put({"id": 1})
        assert caught.value.code is Code.NO_QUORUM
        tablet.leader = 0

        def lose() -> SteleError:
            tablet.leader = -1
            return Retryable("lost", code=Code.UNKNOWN_OUTCOME)

        tablet.after.append(lose)
        with pytest.raises(Retryable) as caught:
            await table.put({"id": 2})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        tablet.leader = 0
        await table.put({"id": 3})
        assert tablet.attempts[-1].lowest_unfinished == 3


async def test_rows_fail_for_reasons_of_their_own(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        results = await asyncio.gather(
            table.put({"id": 1}),
            table.put({"id": "one"}),
            table.put({"id": None}),
            table.put({"id": 2, "colour": "red"}),
            table.update({"id": 3, "n": 1}),
            table.delete({"id": 4}),
            return_exceptions=True,
        )
        codes = [r.code if isinstance(r, SteleError) else None for r in results]
        assert codes == [None, *[Code.INVALID_ARGUMENT] * 3, Code.NOT_FOUND, Code.NOT_FOUND]
        assert [r.args[0] for r in results if isinstance(r, SteleError)] == [
            "table t: id='one': column id: 'one' is no int64 (it is of type str; expected an int)",
            "table t: column id is null; expected an int64",
            "table t: id=2: column colour is unknown; expected id, name, n",
            "table t: id=3: the key is absent",
            "table t: id=4: the key is absent",
        ]


async def test_a_datetime_without_a_zone_is_utc_wherever_it_is_given(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", Schema.make([("at", "timestamp")], ["at"]))
        naive, aware = datetime(2013, 1, 1, 5), datetime(2013, 1, 1, 5, tzinfo=UTC)
        await table.put({"at": naive})
        assert await table.get(naive) == await table.get(aware) == {"at": aware}
        for predicates in (("at", "=", naive), ("at", "=", aware), "at = '2013-01-01T05:00:00'"):
            assert await table.scan(predicates=predicates).count() == 1
        assert await table.scan(lower=naive, upper=naive.replace(minute=1)).count() == 1


async def test_a_refused_row_is_named_by_its_table_and_key(tmp_path: Path) -> None:
    schema = Schema.make([("at", "timestamp"), ("b", "string"), ("n", "int32", True)], ["at", "b"])
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("two", schema)
        row = {"at": datetime(2013, 1, 1, 5, tzinfo=UTC), "b": "x", "n": 1}
        key = "at=2013-01-01 05:00:00+00:00, b='x'"
        await table.put(row)
        with pytest.raises(Rejected, match="ALREADY_PRESENT") as caught:
            await table.insert(row)
        assert caught.value.args[0] == f"table two: {key}: the key is present; use upsert to overwrite it"
        with pytest.raises(RowErrors, match="ALREADY_PRESENT") as caught:
            await table.write_arrow(pa.Table.from_pylist([row], schema=table.arrow_schema), "insert")
        told = f"table two: 1 of 1 rows were refused, the others are written: row 0: ALREADY_PRESENT {key}: the key"
        assert caught.value.args[0].startswith(told)
        with pytest.raises(RowErrors) as caught:
            async with table.new_session(flush_interval_s=0) as session:
                await session.insert({**row, "b": "y"})
                await session.update({**row, "b": "z"})
                await session.insert({"at": 5.5})
        assert [(e.row, e.message.partition(": ")[0]) for e in caught.value.errors] == [
            (1, "at=2013-01-01 05:00:00+00:00, b='z'"),
            (2, "column at"),
        ]


async def test_arrow_data_is_written_in_blocks_and_the_later_row_wins(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        rows = 150_000
        data = pa.table({"id": np.arange(rows) % 100_000, "name": [str(i) for i in range(rows)]})
        seen: list[int] = []
        result = await table.write_arrow(data, on_rows=seen.append)
        assert result.rows_written == rows == sum(seen)
        assert result.timestamp > 0
        blocks = [len(tablet.attempts) for tablet in cluster.tablets.values()]
        assert sum(blocks) <= rows / 8_192 + 8
        found = (await table.scan(["id", "name"]).to_table()).to_pydict()
        wanted = {i: str(i + 100_000 if i < 50_000 else i) for i in range(100_000)}
        assert dict(zip(found["id"], found["name"])) == wanted


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


async def test_row_errors_of_arrow_data_point_into_the_input(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.put({"id": 70_001})
        ids = [None if i == 5 else i for i in range(80_000)]
        with pytest.raises(RowErrors) as caught:
            await table.write_arrow(pa.table({"id": pa.array(ids, pa.int32())}), "insert")
        assert [(e.row, e.code) for e in caught.value.errors] == [
            (5, Code.INVALID_ARGUMENT),
            (70_001, Code.ALREADY_PRESENT),
        ]
        assert caught.value.result.rows_written == 79_998
        assert await table.scan().count() == 79_999


def as_text(values: list[bytes | None]) -> pa.Array:
    """An array that says it is of strings, whatever stands in it: as files, other programs and a cast in Spark leave them."""
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize("key", ["id", "s"])
async def test_a_string_that_is_not_utf8_is_refused_by_its_row(tmp_path: Path, key: str) -> None:
    """Its neighbours are written; it is told by its position, its key and its column, as a null is."""
    schema = Schema.make([("id", "int64", key != "id"), ("s", "string", key != "s"), ("n", "int64")], [key])
    text: list[bytes | None] = [b"row %d" % n for n in range(100)]
    text[50], text[60], text[70] = b"\xffA", b"\xffB", None
    n = [None if row == 60 else row for row in range(100)]
    async with small_cluster(tmp_path) as (_, client):
        eight = PartitionSchema((HashPartition((["id", "s"].index(key),), 8),))
        table = await client.create_table("t", schema, eight)
        rows = pa.record_batch({"id": list(range(100)), "s": as_text(text), "n": n})
        result = await table.write_arrow(rows, raise_row_errors=False)
        refused = {error.row: error.message for error in result.row_errors}
        assert {error.code for error in result.row_errors} == {Code.INVALID_ARGUMENT}
        places = {"id": ("id=50", "id=60"), "s": (r"s=b'\xffA'", r"s=b'\xffB'")}[key]
        assert refused.pop(50) == rf"{places[0]}: column s: b'\xffA' is no string (not UTF-8)"
        assert refused.pop(60) == (
            rf"{places[1]}: column s: b'\xffB' is no string (not UTF-8); column n is null; expected an int64"
        )
        assert list(refused) == ([] if key == "id" else [70])  # a key is never null
        assert result.rows_written == 98 - len(refused) == await table.scan().count()


async def test_columns_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        data = pa.table({"colour": ["red"], "n": ["many"]})
        with pytest.raises(Rejected, match=r"^INVALID_ARGUMENT: table t: .*colour.*id is missing.*column n"):
            await table.write_arrow(data)


async def test_a_block_that_fails_as_a_whole_is_told(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        victim = next(iter(cluster.tablets.values()))
        victim.before.append(lambda: Rejected("disk on strike", code=Code.PERMISSION_DENIED))
        with pytest.raises(Rejected, match="strike"):
            await table.write_arrow(pa.table({"id": np.arange(10_000)}))


async def test_what_is_no_whole_number_is_not_made_one(tmp_path: Path) -> None:
    """Arrow by itself makes 1 of 1.5, and another row would be written or read."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 1, "n": 2.0})
        for row in ({"id": 1.5}, {"id": 2, "n": 1.5}, {"id": 2, "n": np.float32(0.5)}):
            with pytest.raises(Rejected, match="it is not whole"):
                await table.put(row)
        with pytest.raises(Rejected, match="it is not whole"):
            await table.get({"id": 1.5})
        with pytest.raises(Rejected, match="it is not whole"):
            await table.scan(lower=[0.5]).count()
        with pytest.raises((Rejected, RowErrors)):
            await table.write_arrow(pa.table({"id": [1.5, 2.0]}))
        assert (await table.scan(["id", "n"]).to_table()).to_pylist() == [{"id": 1, "n": 2}]


async def test_a_write_that_was_left_stops_sending(tmp_path: Path) -> None:
    """Whoever is cancelled may begin anew at once: what the first writer still held must not come after that."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        cluster.nodes[0].delay_s = 0.2
        rows = pa.table({"id": np.arange(100_000), "n": np.zeros(100_000, np.int32)})
        writing = asyncio.ensure_future(table.write_arrow(rows))
        await asyncio.wait_for(cluster.nodes[0].came.wait(), 5)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        cluster.nodes[0].delay_s = 0.0
        await asyncio.sleep(0.5)
        assert len(tablet.attempts) <= 1


FAR_US = 253_402_329_599_000_000
"""9999-12-31 23:59:59 in Los Angeles, which is 10000-01-01 in UTC: to Spark a timestamp as any other, to Python none."""


async def test_a_time_that_python_has_no_value_for_is_its_number(tmp_path: Path) -> None:
    """The caller whose row with such a key was refused was never told; one who read it got an OverflowError."""
    schema = Schema.make([("at", "timestamp"), ("day", "date"), ("n", "int64", True)], ["at", "day"])
    row = {"at": FAR_US, "day": 2**31 - 1, "n": 1}
    async with small_cluster(tmp_path) as (_, client), asyncio.timeout(10):
        table = await client.create_table("t", schema, PartitionSchema((HashPartition((0,), 2),)))
        await table.insert(row)
        with pytest.raises(Rejected, match=f"at={FAR_US}, day={2**31 - 1}: the key is present"):
            await table.insert(row)
        session = table.new_session()
        await session.insert(row)
        with pytest.raises(RowErrors, match=f"at={FAR_US}"):
            await session.flush()
        assert await table.get((FAR_US, 2**31 - 1)) == row
        await table.insert({"at": datetime(2026, 1, 1), "day": 2**31 - 1})
        assert await table.get((datetime(2026, 1, 1), 2**31 - 1)) == {
            "at": datetime(2026, 1, 1, tzinfo=UTC),
            "day": 2**31 - 1,
            "n": None,
        }
        for predicate in (("at", "=", FAR_US), ("at", ">=", FAR_US), ("at", "in", [FAR_US, 5])):
            assert await table.scan(predicates=[predicate]).count() == 1
        assert await table.scan(predicates=[("day", "<", 2**31 - 1)]).count() == 0
        assert await table.scan(lower=(FAR_US,)).count() == 1
        batches = [batch async for batch in table.scan(ordered=True).batches()]
        assert sum(batch.num_rows for batch in batches) == 2


async def test_a_write_that_may_have_been_done_is_not_called_too_large(tmp_path: Path) -> None:
    """Another program's leader may have done it. Called too large it was sent again in halves, under other numbers."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        tablet.after.append(lambda: Retryable("the answer is lost", code=Code.UNAVAILABLE))
        tablet.before.extend([lambda: None, *[lambda: Rejected("too large", code=Code.TOO_LARGE)] * 5])
        with pytest.raises(Retryable) as caught:
            await table.put({"id": 1, "name": "one"})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        assert len({a.sequence for a in tablet.attempts}) == 1


async def test_of_two_rows_with_one_key_the_later_wins_also_where_a_block_was_too_large(
    tmp_path: Path,
) -> None:
    """Its halves leave before what waits behind it."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        tablet.before.append(lambda: Rejected("too large", code=Code.TOO_LARGE))
        ids = pa.array([7, *range(100, 100 + BLOCK_ROWS), 7])
        names = pa.array(["first", *["x"] * BLOCK_ROWS, "second"])
        await table.write_arrow(pa.table({"id": ids, "name": names}))
        assert await table.get(7, ["name"]) == {"name": "second"}


async def test_rows_behind_one_that_cannot_be_sent_keep_their_places(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 3})
        rows = pa.table({"id": pa.array([None, 2, 3, None, 3], pa.int64())})
        result = await table.write_arrow(rows, "insert", raise_row_errors=False)
        invalid, there = Code.INVALID_ARGUMENT, Code.ALREADY_PRESENT
        assert [(e.row, e.code) for e in result.row_errors] == [
            (0, invalid),
            (2, there),
            (3, invalid),
            (4, there),
        ]
        assert result.rows_written == 1


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


async def test_rows_that_waited_behind_a_block_are_each_done_as_meant(tmp_path: Path) -> None:
    """They came one after another, of one operation each, and leave in one block."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
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
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        await table.write_arrow(pa.table({"id": np.arange(4), "name": ["old"] * 4}))
        tablet.before.append(lambda: Rejected("too large", code=Code.TOO_LARGE))
        ops = [RowOp.INSERT_IGNORE, RowOp.INSERT, RowOp.UPSERT, RowOp.UPSERT]
        ends = await asyncio.gather(
            *(table.apply(op, {"id": id, "name": "new"}) for id, op in enumerate(ops)), return_exceptions=True
        )
        assert [isinstance(end, int) for end in ends] == [True, False, True, True], ends
        found = (await table.scan(["name"], ordered=True).to_table())["name"].to_pylist()
        assert found == ["old", "old", "new", "new"]


async def test_two_rows_that_are_too_large_together_are_both_written_and_one_alone_is_told(
    tmp_path: Path,
) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        too_large = Rejected("too large", code=Code.TOO_LARGE)
        tablet.before.append(lambda: too_large)
        assert (await table.write_arrow(pa.table({"id": [1, 2]}))).rows_written == 2
        assert await table.scan().count() == 2
        tablet.before.append(lambda: too_large)
        result = await table.write_arrow(pa.table({"id": [3]}), raise_row_errors=False)
        assert result.rows_written == 0
        assert [(e.row, e.code) for e in result.row_errors] == [(0, Code.TOO_LARGE)]


async def test_what_is_left_of_a_batch_leaves_before_the_next_one(tmp_path: Path) -> None:
    """Its rows are in the places that they had, too."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        rows = 2 * BLOCK_ROWS + 100
        first = pa.record_batch({"id": [*range(1, rows), 0], "name": ["first"] * rows})
        second = pa.record_batch({"id": np.arange(BLOCK_ROWS), "name": ["second"] * BLOCK_ROWS})
        cluster.nodes[0].speaks.clear()
        writer = table.arrow_writer()
        for batch in (first, second):
            await writer.feed(batch)
        cluster.nodes[0].speaks.set()
        await writer.finish()
        assert await table.get(0, ["name"]) == {"name": "second"}
        await table.delete({"id": 1})
        await table.delete({"id": BLOCK_ROWS + 5})
        result = await table.write_arrow(pa.Table.from_batches([first]), "delete", raise_row_errors=False)
        assert [error.row for error in result.row_errors] == [0, BLOCK_ROWS + 4]


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
        async with asyncio.timeout(10):
            while not ends:
                await asyncio.sleep(0.01)
            assert await ends[0] == BLOCK_ROWS + 10 == await table.scan().count()


async def test_of_rows_of_a_batch_with_one_key_the_last_wins(tmp_path: Path) -> None:
    """Among those of eight tablets, which are gathered first."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        number = np.arange(60_000)
        await table.write_arrow(pa.table({"id": number % 500, "n": number.astype(np.int32)}))
        found = (await table.scan(["n"], ordered=True).to_table())["n"].to_pylist()
        assert found == list(range(59_500, 60_000))


@pytest.mark.parametrize(
    "code",
    [Code.UNAVAILABLE, Code.TIMED_OUT, Code.UNKNOWN_OUTCOME, Code.INTERNAL, Code.IO_ERROR],
    ids=lambda code: code.name,
)
async def test_a_write_whose_one_answer_was_a_failure_may_have_been_done(tmp_path: Path, code: Code) -> None:
    """Whatever is said afterwards: here that nobody leads."""
    async with small_cluster(tmp_path, timeout_s=0.5) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()

        def fail() -> SteleError:
            tablet.leader = -1
            return Retryable("a fault", code=code)

        tablet.after.append(fail)
        with pytest.raises(Retryable, match="may have been done") as caught:
            await table.put({"id": 1})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        tablet.leader = 0
        assert await table.get(1, ["id"]) == {"id": 1}


@pytest.mark.parametrize("code", [Code.CLOCK_AHEAD, Code.TOO_OLD], ids=lambda code: code.name)
async def test_a_refusal_says_nothing_of_the_attempt_before(tmp_path: Path, code: Code) -> None:
    """As of another leader; TOO_OLD by itself says that it may have been done."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        await table.put({"id": 0})
        tablet.after.append(lambda: Retryable("the answer is lost", code=Code.UNAVAILABLE))
        tablet.before.extend([lambda: None, lambda: Rejected("refused", code=code)])
        with pytest.raises(SteleError) as caught:
            await table.put({"id": 1})
        assert caught.value.code is (Code.TOO_OLD if code is Code.TOO_OLD else Code.UNKNOWN_OUTCOME)
        assert "nothing was done" not in str(caught.value)


async def test_a_write_that_no_node_was_sent_was_not_done(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=1.0) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        for node in cluster.nodes:
            await node.stop()
        with pytest.raises(Retryable, match="nothing was done") as caught:
            await table.put({"id": 1})
        assert caught.value.code is Code.NO_QUORUM


async def test_a_request_that_fails_within_nodes_is_not_sent_for_ever(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        tablet.before.extend([lambda: Retryable("a fault", code=Code.INTERNAL)] * 1_000)
        async with asyncio.timeout(30):
            with pytest.raises(SteleError):
                await table.put({"id": 1})
        assert len(tablet.attempts) == 3


async def test_a_read_that_takes_longer_than_an_attempt_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stele.client.tablet.ATTEMPT_TIMEOUT_S", 0.2)
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 1})
        cluster.nodes[0].delay_s = 1.0
        async with asyncio.timeout(30):
            assert await table.get(1, ["id"]) == {"id": 1}


async def test_a_client_id_lasts_while_writes_under_it_are_under_way_and_not_for_long_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers under two ids at once would tell the node that an unfinished one is finished; an old id it forgets."""
    monkeypatch.setattr("stele.client.tablet.CLIENT_ID_IDLE_S", 0.0)
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        cluster.nodes[0].delay_s = 0.1
        first = asyncio.ensure_future(table.write_arrow(pa.table({"id": [1]})))
        await cluster.nodes[0].came.wait()
        await table.put({"id": 2})
        await first
        assert [(a.sequence, a.lowest_unfinished) for a in tablet.attempts] == [(1, 1), (2, 1)]
        assert len({a.client_id for a in tablet.attempts}) == 1
        await asyncio.sleep(0.01)
        await table.put({"id": 3})
        assert (tablet.attempts[-1].sequence, len({a.client_id for a in tablet.attempts})) == (1, 2)


async def test_what_a_client_has_written_or_read_its_next_scan_sees(tmp_path: Path) -> None:
    """Also where the leader's clock is ahead of this machine's."""
    async with small_cluster(tmp_path) as (cluster, client), AsyncClient([cluster.master_address]) as other:
        cluster.clock = HybridClock(lambda: time.time_ns() // 1_000 + 1_500_000)
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.put({"id": 1})
        assert await table.scan().count() == 1
        await table.write_arrow(pa.table({"id": [2]}))
        assert await table.scan().count() == 2
        again = await other.open_table("t")
        assert await again.get(2, ["id"]) == {"id": 2}
        assert await again.scan().count() == 2


async def test_a_block_that_waited_for_a_connection_is_not_sent_once_it_was_given_up(tmp_path: Path) -> None:
    """Its writer was told that nothing was done, and may have written something else since."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        cluster.nodes[0].speaks.clear()  # it does not even open a stream
        with pytest.raises(Retryable, match="nothing was done") as caught:
            await table.write_arrow(pa.table({"id": [1]}), timeout_s=0.2)
        assert caught.value.code is Code.NO_QUORUM
        later = asyncio.ensure_future(table.write_arrow(pa.table({"id": [2]}), timeout_s=30))
        await asyncio.sleep(0)
        cluster.nodes[0].speaks.set()
        await later
        assert len({request.sequence for request in tablet.attempts}) == 1
        assert (await table.scan(["id"]).to_table())["id"].to_pylist() == [2]


async def test_the_time_of_a_write_sees_all_of_it_in_whatever_order_the_answers_come(tmp_path: Path) -> None:
    """The block that was written first is answered last, once it was asked for again."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        first = cluster.tablets_of("t")[0]
        first.after.extend([lambda: Retryable("the answer is lost", code=Code.UNAVAILABLE)] * 4)
        result = await table.write_arrow(pa.table({"id": np.arange(100)}))
        assert await table.scan(snapshot=result.timestamp).count() == 100


async def test_a_node_that_names_itself_and_does_not_lead_is_not_asked_without_rest(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=0.5) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        itself = NotLeader("not yet", leader_hint=cluster.nodes[0].identity.node_id)
        tablet.before.extend([lambda: itself] * 100_000)
        with pytest.raises(Retryable, match="no leader found"):
            await table.put({"id": 1})
        assert len(tablet.attempts) < 100


async def test_a_client_id_that_a_tablet_has_forgotten_is_not_used_again(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        await table.put({"id": 1})
        tablet.before.append(lambda: Rejected("forgotten", code=Code.TOO_OLD))
        with pytest.raises(Retryable, match="forgotten this client id") as caught:
            await table.put({"id": 2})
        assert caught.value.code is Code.NO_QUORUM
        await table.put({"id": 2})
        before, _, after = tablet.attempts
        assert after.client_id != before.client_id and after.sequence == 1


async def test_small_blocks_that_fill_the_buffer_leave_by_themselves(tmp_path: Path) -> None:
    """Rows of many tablets, few for each, then a large one of one tablet."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        writer = table.arrow_writer(buffer_bytes=8_000)
        async with asyncio.timeout(20):
            await writer.feed(pa.record_batch({"id": np.arange(100), "name": [""] * 100}))
            await writer.feed(pa.record_batch({"id": [100], "name": ["x" * 5_000]}))
            assert (await writer.finish()).rows_written == 101 == await table.scan().count()


async def test_an_update_of_arrow_data_leaves_out_columns_that_an_insert_needs(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        schema = Schema.make([("id", "int64"), ("a", "int64"), ("b", "int64")], ["id"])
        table = await client.create_table("t", schema, ONE)
        await table.put({"id": 1, "a": 2, "b": 3})
        await table.write_arrow(pa.table({"id": [1], "b": [4]}), "update")
        assert await table.get(1) == {"id": 1, "a": 2, "b": 4}
        for op in ("insert", "upsert"):
            with pytest.raises(Rejected, match="column a is missing"):
                await table.write_arrow(pa.table({"id": [1], "b": [4]}), op)
