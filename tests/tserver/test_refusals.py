"""What a node refuses before it is proposed: broken blocks, and client ids that are too new or forgotten."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncTable
from stele.client.sequencer import Sequencer
from stele.client.streams import Streams
from stele.model.block import HEADER, RowOp, encode_block
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.kvop import KeyOp, KeyOperation, decode_operations, encode_operations
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.tablet.pairs import PAIR_BYTES
from stele.tserver.reads import KEYS_MAX, stream_of
from stele.tserver.tablet_service import _KV_OPS
from stele.tserver.threads import READS_AT_ONCE
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster, count, fill, machines_of

ROW = pa.RecordBatch.from_arrays([pa.array([1]), pa.array(["flood"])], schema=SCHEMA.to_arrow())


async def test_a_block_with_broken_insides_is_refused_before_it_is_proposed(cluster: LocalCluster) -> None:
    """String offsets that point far outside of the message: applied unseen they would end every replica."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        batch = pa.RecordBatch.from_arrays(
            [pa.array([1]), pa.array(["a name of 21 letters!"])], schema=SCHEMA.to_arrow()
        )
        good = encode_block(RowOp.UPSERT, SCHEMA.column_ids, batch, SCHEMA.version)
        end = struct.pack("<ii", 0, 21)
        at = good.rindex(end)
        for block in (
            good[:at] + struct.pack("<ii", 0, 1 << 30) + good[at + 8 :],
            good[:-8],
            b"",
            b"x" * 100,
        ):
            with pytest.raises(Rejected):
                await table.tablet(0).write(block, timeout_s=60)
        await table.put({"id": 2, "name": "after"})
        assert await count(client) == 1


async def test_a_write_is_answered_the_same_again_or_refused_with_its_code(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "first"})
        replicas = [
            r for node in cluster.running.values() for r in node.replicas if r.superblock.kind == "table"
        ]
        leader = next(r for r in replicas if r.is_leader)
        node = next(n for n in cluster.running.values() if n.node_id == leader.host.node_id)
        batch = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array(["x", "y"])], schema=SCHEMA.to_arrow())
        block = encode_block(RowOp.INSERT, SCHEMA.column_ids, batch, SCHEMA.version)
        good = tserver_pb2.WriteRequest(
            tablet_id=leader.raw_tablet_id,
            client_id=b"c" * 16,
            sequence=1,
            lowest_unfinished=1,
            first_attempt_us=time.time_ns() // 1_000,
            block=block,
        )
        streams = Streams(node.pool)

        async def answer(**changed: Any) -> Any:
            """What a write is answered, or the code of its error."""
            request = tserver_pb2.WriteRequest.FromString(good.SerializeToString())
            for name, value in changed.items():
                setattr(request, name, value)
            asked = tserver_pb2.ClientRequest(write=request)
            try:
                return (await streams.to(node.node_id, node.address).ask(asked, timeout_s=60)).write
            except SteleError as exc:
                return exc.code

        written, again = await answer(), await answer()
        assert written == again and [e.row for e in written.row_errors] == [0]
        for changed, code in (
            ({"tablet_id": b"t" * 16}, Code.NOT_FOUND),
            ({"tablet_id": b"short"}, Code.INVALID_ARGUMENT),
            ({"tablet_incarnation": 99}, Code.STALE_INCARNATION),
            ({"client_id": b"short"}, Code.INVALID_ARGUMENT),
            ({"digest": 1}, Code.DIGEST_MISMATCH),
            ({"block": b"x" * 100}, Code.UNSUPPORTED_VERSION),
            ({"client_id": b"n" * 16, "first_attempt_us": 1 << 60}, Code.CLOCK_AHEAD),
        ):
            assert await answer(**changed) is code
        await streams.close()


async def test_what_only_a_later_program_reads_is_refused_before_it_is_proposed(
    cluster: LocalCluster,
) -> None:
    """Committed it would end every node of this program."""

    def changed(block: bytes, at: int, value: int) -> bytes:
        return block[:at] + bytes([value]) + block[at + 1 :]

    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        kv = await client.create_keyspace("k")
        batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array(["x"])], schema=SCHEMA.to_arrow())
        one_op = encode_block(RowOp.UPSERT, SCHEMA.column_ids, batch, SCHEMA.version)
        op_each = encode_block(np.array([3], np.uint8), SCHEMA.column_ids, batch, SCHEMA.version)
        for block, code in (
            (changed(one_op, 0, 2), Code.UNSUPPORTED_VERSION),
            (changed(one_op, 1, 4), Code.UNSUPPORTED_VERSION),
            (changed(one_op, 3, 1), Code.UNSUPPORTED_VERSION),
            (changed(one_op, HEADER.size - 2, 1), Code.UNSUPPORTED_VERSION),
            (changed(one_op, 2, 9), Code.INVALID_ARGUMENT),
            (changed(op_each, HEADER.size + 4 * len(SCHEMA.columns), 9), Code.INVALID_ARGUMENT),
        ):
            with pytest.raises(Rejected) as caught:
                await table.tablet(0).write(block, timeout_s=60)
            assert caught.value.code is code
        request = tserver_pb2.KvRequest(key=b"a", value=b"1")
        request.op = 77  # type: ignore[assignment]
        with pytest.raises(Rejected, match="operation 77"):
            await kv._tablet.kv(request, timeout_s=60)
        await table.put({"id": 2, "name": "after"})
        await kv.replace("a", b"after")
        assert await count(client) == 1 and await kv.read("a") == b"after"
        assert not any(node.failed.done() for node in cluster.running.values())


@pytest.mark.parametrize("op", [KeyOp.REPLACE, KeyOp.INSERT, KeyOp.DELETE])
def test_what_a_client_asks_of_a_key_space_can_be_applied(op: KeyOp) -> None:
    """It names an operation, and the leader makes the batch: no flag and no reserved byte comes from a client."""
    assert set(_KV_OPS.values()) == {KeyOp.REPLACE, KeyOp.INSERT, KeyOp.DELETE}
    asked = [KeyOperation(op, b"a", b"1")]
    assert decode_operations(encode_operations(asked)) == asked


async def test_keys_with_broken_insides_are_refused(cluster: LocalCluster) -> None:
    """One string offset in the middle that points elsewhere: read unseen it ended the leader, and then the next one."""
    async with cluster.client() as client:
        schema = Schema.make([("name", "string"), ("n", "int64", True)], ["name"])
        table = await client.create_table("t", schema, PartitionSchema())
        await table.put({"name": "abcd", "n": 1})
        for at in (84, 0, -4, 1 << 30):  # a little behind the values, falling, before them, far away
            offsets = np.arange(21, dtype=np.int32) * 4
            offsets[5] = at
            names = pa.StringArray.from_buffers(20, pa.py_buffer(offsets), pa.py_buffer(b"abcd" * 20))
            assert "offset" in await refused_read(table, keys_of(schema, names))
        assert "UTF8" in await refused_read(table, keys_of(schema, pa.array([b"\xff\xff"]).view(pa.string())))
        assert "expected an Arrow record batch message of columns name" in await refused_read(table, b"junk")
        assert await table.get("abcd") == {"name": "abcd", "n": 1}


async def test_more_keys_or_columns_than_a_point_read_may_have_are_refused(cluster: LocalCluster) -> None:
    """Each key costs some 70 us of a thread: 8 MiB of them held one, and the interpreter by turns, for more than a minute."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await fill(client, 2_000)
        schema = SCHEMA.to_arrow(SCHEMA.key_column_ids)

        async def read(keys: int, columns: int, *column_ids: int) -> list[dict[str, Any]]:
            batch = pa.RecordBatch.from_arrays([pa.array(range(keys), pa.int64())], schema=schema)
            request = tserver_pb2.ReadRequest(
                keys=batch.serialize().to_pybytes(),
                column_ids=column_ids or range(1, columns + 1),
                schema_version=1,
            )
            answer = await table.tablet(0).read(request, timeout_s=60)
            found: list[dict[str, Any]] = pa.ipc.open_stream(answer.rows).read_all().to_pylist()
            return found

        assert len(await read(KEYS_MAX, 1)) == KEYS_MAX
        for keys, columns, told in (
            (KEYS_MAX + 1, 1, "1025 keys in one read"),
            (1, 1_001, "1001 columns"),
            (KEYS_MAX, 65, "1024 keys and 65 columns"),
        ):
            with pytest.raises(Rejected, match=told) as caught:
                await read(keys, columns)
            assert caught.value.code is Code.TOO_LARGE
        with pytest.raises(Rejected, match="a column is named twice"):
            await read(1, 2, 1, 1)


async def test_rows_that_no_answer_has_room_for_are_refused_before_they_are_put_together(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        for number in range(3):
            await table.put({"id": number, "name": "x" * (6 << 20)})
        keys = keys_of(SCHEMA, pa.array(range(3), pa.int64()))
        assert "the rows of one read take 188" in await refused_read(table, keys)


async def test_reads_have_threads_of_their_own_and_wait_for_one_no_longer_than_their_callers(
    cluster: LocalCluster,
) -> None:
    """Reads that nobody waited for any more held the threads that flushes and replicas that open need."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "one"})
        (leader,) = [
            node
            for node in cluster.running.values()
            if any(r.is_leader and r.superblock.kind == "table" for r in node.replicas)
        ]
        go_on = Event()
        try:
            busy = [asyncio.ensure_future(leader.threads.in_thread(go_on.wait)) for _ in range(8)]
            assert await table.get(1) == {"id": 1, "name": "one"}
            go_on.set()
            await asyncio.gather(*busy)
            go_on.clear()
            busy = [
                asyncio.ensure_future(leader.threads.in_read_thread(go_on.wait)) for _ in range(READS_AT_ONCE)
            ]
            assert await table.get(1) == {"id": 1, "name": "one"}, "a few rows in memory need no thread"
            wanted = pa.array([1] * 40)
            keys = pa.RecordBatch.from_arrays([wanted], schema=SCHEMA.to_arrow(SCHEMA.key_column_ids))
            request = tserver_pb2.ReadRequest(keys=keys.serialize().to_pybytes(), schema_version=1)
            (replica,) = [r for r in leader.replicas if r.superblock.kind == "table"]
            request.tablet_id, request.deadline_ms = id_to_pb(replica.tablet_id), 1_000
            streams = Streams(leader.pool)
            with pytest.raises(Retryable) as refused:
                await streams.to(leader.node_id, leader.address).ask(
                    tserver_pb2.ClientRequest(read=request), timeout_s=60
                )
            await streams.close()
            assert refused.value.code is Code.TIMED_OUT
            assert await leader.threads.in_thread(lambda: "at once") == "at once"
        finally:
            go_on.set()
        await asyncio.gather(*busy)
        assert await table.get(1) == {"id": 1, "name": "one"}


def test_an_answer_is_the_stream_that_arrow_writes() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    for rows in ([], [{"id": 1, "name": "ä"}, {"id": 2, "name": None}]):
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(batch)
        assert stream_of(batch) == sink.getvalue().to_pybytes()


def keys_of(schema: Schema, names: pa.Array) -> bytes:
    batch = pa.RecordBatch.from_arrays([names], schema=schema.to_arrow(schema.key_column_ids))
    return bytes(batch.serialize().to_pybytes())


async def refused_read(table: AsyncTable, keys: bytes) -> str:
    request = tserver_pb2.ReadRequest(keys=keys, schema_version=table.schema.version)
    with pytest.raises(Rejected) as caught:
        await table.tablet(0).read(request, timeout_s=60)
    return str(caught.value)


@pytest.mark.parametrize("ahead_us", [3_600_000_000, (1 << 63) - (1 << 62)])
async def test_a_client_id_from_the_future_is_refused_before_it_is_proposed(
    cluster: LocalCluster, ahead_us: int
) -> None:
    """Once forgotten it would make all ids older than itself TOO_OLD, those of all new clients, until that time comes."""
    made_us = time.time_ns() // 1_000 + ahead_us
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        kv = await client.create_keyspace("k")
        for tablet in (table.tablet(0), kv._tablet):
            tablet._latest.begin()
            tablet._latest.made_us = made_us
        with pytest.raises(Rejected) as caught:
            await table.put({"id": 1, "name": "early"})
        assert caught.value.code is Code.CLOCK_AHEAD
        refusing = str(caught.value).partition(" of the clock of node ")[2].partition(",")[0]
        assert refusing in {node_id[:8] for node_id in cluster.ids.values()}  # as ksck names it
        with pytest.raises(Rejected) as caught:
            await kv.replace("a", "early")
        assert caught.value.code is Code.CLOCK_AHEAD
        assert await count(client) == 0


async def test_a_clock_that_is_ahead_by_little_costs_its_program_that_time_alone(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        kv = await client.create_keyspace("k")
        for tablet, write in (
            (table.tablet(0), lambda: table.put({"id": 1, "name": "early"})),
            (kv._tablet, lambda: kv.replace("a", "early")),
        ):
            tablet._latest.begin()
            tablet._latest.made_us = time.time_ns() // 1_000 + 800_000
            await write()
            assert time.time_ns() // 1_000 >= tablet._latest.made_us - 500_000
        assert await count(client) == 1


async def test_a_flood_of_client_ids_made_ahead_turns_nobody_away(cluster: LocalCluster) -> None:
    """24,000 of them, 290 s ahead: for minutes each other client was TOO_OLD, those with right clocks and new ones too."""
    async with cluster.client() as client, cluster.client() as other:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        others = await other.open_table("t")
        tablet = table.tablet(0)
        for machine in await machines_of(cluster, tablet.place.tablet_id):
            machine._once._clients_max = 16

        async def flood() -> None:
            for number in range(64):
                tablet._latest = Sequencer()
                tablet._latest.begin()
                tablet._latest.finish(1)
                tablet._latest.made_us = time.time_ns() // 1_000 + (290_000_000 if number % 2 else 450_000)
                with suppress(SteleError):
                    block = encode_block(RowOp.UPSERT, SCHEMA.column_ids, ROW, SCHEMA.version)
                    await tablet.write(block, timeout_s=0.3)

        await others.put({"id": 2, "name": "before"})
        flooding = asyncio.ensure_future(flood())
        while not flooding.done():
            await others.put({"id": 2, "name": "during"})
        await flooding
        async with cluster.client() as late:
            await (await late.open_table("t")).put({"id": 3, "name": "new"})


async def test_a_flood_of_client_ids_at_once_pushes_out_nobody_who_has_just_written(
    cluster: LocalCluster,
) -> None:
    """All of it was admitted, since none of it was applied yet."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        place = table.tablet(0).place
        for machine in await machines_of(cluster, place.tablet_id):
            machine._once._clients_max = 16
        await table.put({"id": 2, "name": "before"})
        leader, replica = next(
            (node, replica)
            for node in cluster.running.values()
            for replica in node.replicas
            if replica.tablet_id == place.tablet_id and replica.is_leader
        )
        replica.options = replace(replica.options, clock_error_max_ms=60_000)  # all of this is just now
        streams = Streams(leader.pool)
        to_leader = streams.to(leader.node_id, leader.address)

        async def write(number: int) -> Code:
            request = tserver_pb2.WriteRequest(
                tablet_id=id_to_pb(place.tablet_id),
                client_id=number.to_bytes(16, "big"),
                sequence=1,
                lowest_unfinished=1,
                first_attempt_us=time.time_ns() // 1_000,
                block=encode_block(RowOp.UPSERT, SCHEMA.column_ids, ROW, SCHEMA.version),
            )
            try:
                await to_leader.ask(tserver_pb2.ClientRequest(write=request), timeout_s=60)
            except Retryable as exc:
                return exc.code
            return Code.OK

        told = await asyncio.gather(*(write(number) for number in range(1, 65)))
        await streams.close()
        assert Counter(told) == {Code.OK: 15, Code.THROTTLED: 49}
        await table.put({"id": 2, "name": "after"})


async def test_a_client_whose_clock_is_behind_is_told_so(cluster: LocalCluster) -> None:
    """It was told NO_QUORUM for ever: each id that it made was older than those that the tablet had forgotten."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        kv = await client.create_keyspace("k")
        mark_us = time.time_ns() // 1_000 + 1_200_000_000  # as if this clock were 20 minutes behind
        for tablet in (table.tablet(0), kv._tablet):
            for machine in await machines_of(cluster, tablet.place.tablet_id):
                machine._once._mark_us = mark_us
        for _ in range(2):
            for write in (lambda: table.put({"id": 1, "name": "late"}), lambda: kv.replace("a", b"late")):
                with pytest.raises(
                    Rejected, match=r"this machine's clock is behind: .*set the clock"
                ) as caught:
                    await write()
                assert caught.value.code is Code.CLOCK_BEHIND
        assert await count(client) == 0


async def test_a_client_id_that_was_forgotten_is_replaced(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "first"})
        for machine in await machines_of(cluster, table.tablet(0).place.tablet_id):
            await wait_until(lambda machine=machine: machine._once.clients == 1)
            machine._once._forget_oldest()
        with pytest.raises(Retryable, match="has forgotten this client id"):
            await table.put({"id": 2, "name": "again"})
        await table.put({"id": 2, "name": "again"})
        assert await count(client) == 2


async def test_a_client_id_that_was_forgotten_is_replaced_though_many_write_under_it(
    cluster: LocalCluster,
) -> None:
    """A new one was made only while no write was under way: of callers who tried again at once none ever came through."""
    async with cluster.client() as client:
        kv = await client.create_keyspace("k")
        await kv.replace("a", "first")
        for machine in await machines_of(cluster, kv._tablet.place.tablet_id):
            await wait_until(lambda machine=machine: machine._once.clients == 1)
            machine._once._forget_oldest()

        async def write(number: int) -> int:
            for refused in range(20):
                try:
                    await kv.replace(f"key {number}", "again")
                    return refused
                except Retryable as exc:
                    assert "has forgotten this client id" in str(exc)
            return 20

        assert max(await asyncio.gather(*(write(number) for number in range(8)))) == 1
        assert len(await kv.list("key")) == 8


async def test_a_key_space_takes_no_more_than_its_bound(cluster: LocalCluster) -> None:
    """Not of many writes at once, either. Room is made by deletes, which are always taken."""
    async with cluster.client() as client:
        kv = await client.create_keyspace("k")
        await kv.replace("first", b"v" * 95)
        for machine in await machines_of(cluster, kv._tablet.place.tablet_id):
            machine.bytes_max = 5 * (PAIR_BYTES + 100)
        puts = [kv.replace(f"key {number}", b"v" * 95) for number in range(4)]
        inserts = [kv.insert(f"new {number}", b"v" * 95) for number in range(4)]
        told = await asyncio.gather(*puts, *inserts, return_exceptions=True)
        refused = [exc for exc in told if isinstance(exc, Rejected)]
        assert [exc.code for exc in refused] == [Code.TOO_LARGE] * 4 and len(told) == 8
        assert len(await kv.list()) == 5
        with pytest.raises(Rejected, match="delete keys, or use another key space"):
            await kv.replace("first", b"v" * 96)
        await kv.replace("first", b"w" * 95)
        await kv.delete("first")
        await kv.insert("last", b"v" * 96)


async def test_the_catalog_takes_writes_from_masters_alone(cluster: LocalCluster) -> None:
    """They have locks and rules that no other writer would keep to."""
    request = tserver_pb2.KvRequest(tablet_id=id_to_pb(CATALOG_TABLET_ID), key=b"driver", value=b"{}")
    request.op = tserver_pb2.KV_REPLACE
    streams = Streams(next(iter(cluster.running.values())).pool)
    try:
        stream = streams.to(cluster.ids["master"], cluster.master_address)
        with pytest.raises(Rejected, match="by the masters alone") as caught:
            await stream.ask(tserver_pb2.ClientRequest(kv=request), timeout_s=60)
    finally:
        await streams.close()
    assert caught.value.code is Code.PERMISSION_DENIED
