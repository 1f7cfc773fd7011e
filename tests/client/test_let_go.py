"""What a request that fails leaves behind: nothing, once it is answered, for nodes let the collector run seldom."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from stele.client.streams import Streams
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.rpc.frames import frame
from stele.rpc.proto import tserver_pb2
from tests.consensus.cluster import wait_until
from tests.rpc.serving import NODE, asking, serving
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

NODES = 1


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Block:
    """What a request holds while it is worked on."""


def left_in_circles() -> list[str]:
    """Requests, and errors that hold frames, that only the collector would have freed since it last ran."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [
        repr(each)[:200]
        for each in gc.garbage
        if isinstance(each, tserver_pb2.ClientRequest | tserver_pb2.WriteRequest)
        or (isinstance(each, SteleError) and each.__traceback__ is not None)
    ]
    gc.garbage.clear()
    return found


@pytest.mark.parametrize("how", ["raised", "waited for", "of a cause", "not ours"])
async def test_a_request_that_was_refused_is_gone_with_its_answer(no_collector: None, how: str) -> None:
    """The answering coroutine kept its error, the error the coroutine: 4 MiB for each write to a full disk."""
    blocks: list[weakref.ref[Block]] = []

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        block = Block()
        blocks.append(weakref.ref(block))
        error = Retryable("the disk is full", code=Code.DISK_FULL)
        if how == "waited for":
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_exception(error)
            await future
        if how == "of a cause":
            try:
                raise error
            except Retryable as exc:
                raise Rejected("it is not taken") from exc
        raise ValueError("a fault of ours") if how == "not ours" else error

    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        for _ in range(3):
            with pytest.raises(SteleError):
                await stream.ask(asking(b"key"), timeout_s=60)
        assert len(blocks) == 3 and [block() for block in blocks] == [None] * 3
        await streams.close()


async def fails(asked: Any) -> weakref.ref[BaseException]:
    try:
        await asked
    except SteleError as exc:
        error = weakref.ref(exc)
    else:
        raise AssertionError("it did not fail")
    await asyncio.sleep(0)  # until then the loop holds what woke this task
    return error


async def test_what_was_asked_in_vain_is_gone(no_collector: None) -> None:
    """Answered with an error, without an answer in time, and when the stream broke."""

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        if request.kv.key == b"refused":
            raise Rejected("no")
        await asyncio.sleep(3600)
        raise AssertionError

    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        assert (await fails(stream.ask(asking(b"refused"), timeout_s=60)))() is None
        assert (await fails(stream.ask(asking(b"slow"), timeout_s=0.01)))() is None
        nobody = streams.to(NODE, "127.0.0.1:1")
        assert (await fails(nobody.ask(asking(b"slow"), timeout_s=60)))() is None
        waiting = [asyncio.ensure_future(fails(stream.ask(asking(b"slow"), timeout_s=60))) for _ in range(2)]
        await wait_until(lambda: len(stream._waiting) == 2 and not stream._queue)
        assert stream._connection is not None
        stream._connection.close()
        broken = await asyncio.gather(*waiting)
        del waiting
        await wait_until(lambda: stream._task is None or stream._task.done())
        assert [error() for error in broken] == [None, None]
        await streams.close()


async def test_what_ended_a_stream_is_gone_with_it(no_collector: None) -> None:
    """A frame that could not be read stayed with the connection that it ended."""

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        raise AssertionError

    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        connection = await streams.to(NODE, address)._dial()
        left_in_circles()
        connection.send(frame(b"no request"))
        await asyncio.wait_for(asyncio.shield(connection.lost), 60)
        await asyncio.sleep(0.1)  # the server's half has ended by now, or the test sees less
        assert left_in_circles() == []
        connection.close()
        await streams.close()


async def full(write: Awaitable[Any]) -> bool:
    """Whether it was refused so; where the machine stands still it may have had no answer in its time."""
    try:
        await write
    except Retryable as exc:
        return "DISK_FULL" in str(exc)
    raise AssertionError("it was written")


async def test_a_write_that_is_refused_until_its_end_leaves_nothing(cluster: LocalCluster) -> None:
    """On the client and on the node: attempts with the whole block, each refused, then the last word."""
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED, replication_factor=1)
        await table.put({"id": 1, "name": "n"})
        rows = pa.table({"id": range(100), "name": ["n" * 1000] * 100})
        table._rows._batcher._timeout_s = 0.3
        node.host.low_space = lambda: True  # type: ignore[method-assign]
        gc.collect()
        gc.disable()
        try:
            for write in 2 * (
                lambda: table.write_arrow(rows, timeout_s=0.3),
                lambda: table.put({"id": 2, "name": "n"}),
            ):
                while not await full(write()):
                    pass
            await asyncio.sleep(0)
            assert left_in_circles() == []
        finally:
            gc.enable()
        del node.host.low_space
