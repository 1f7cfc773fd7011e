"""`python -m bench.steps [--only STEP,...]`: measures what the faster way of a step gains, for steps that
exist twice.

Each step runs alone, in this process, without a cluster: first the fast way, then the general way, by turns.
The figures are processor time (user and system) of one operation. Other work on the machine changes it less
than elapsed time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvloop

from bench import rows
from stele.client.dealing import Dealer
from stele.client.streams import NodeStream, Streams
from stele.client.waiting_rows import Item, groups_of
from stele.model import writeop
from stele.model.block import RowOp, encode_block
from stele.model.config import Configuration, Peer
from stele.model.entry import Entry, EntryKind
from stele.model.ids import OPID_NONE, ClusterId, NodeId, ReplicaId, StreamKey, TabletId, new_id
from stele.model.layout import Layout
from stele.model.rows import batch_from_rows
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.client_stream import ClientStreams, Sink
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import tserver_pb2 as pb
from stele.rpc.proto.tserver_pb2_grpc import (
    TabletServerServiceServicer,
    add_TabletServerServiceServicer_to_server,
)
from stele.rpc.server import bind, make_server
from stele.tablet.store import TabletStore
from stele.wal import Log, LogOptions
from stele.wal.aio import kernel_sync

Run = Callable[[int], Awaitable[None]]
"""Does this many operations."""
Ways = tuple[Run, Run]
"""The fast way, the general way."""
_NODE = NodeId("a" * 32)
_PEERS = Configuration(
    -1, tuple(Peer(NodeId(f"{n:032x}"), ReplicaId(n), f"10.0.0.{n}:7050") for n in (1, 2, 3))
)


# --- rows to blocks


@contextmanager
def dealing(count: int) -> Iterator[Ways]:
    """Rounds of `count` rows, from dicts to the blocks of eight tablets; an operation is a row."""
    loop = asyncio.get_running_loop()
    ahead: list[Item] = [(RowOp.UPSERT, rows.row(n), loop.create_future(), 0) for n in range(count)]

    def way(plain: bool) -> Run:
        dealer = Dealer(rows.SCHEMA, rows.PARTITIONING, plain=plain)

        async def run(times: int) -> None:
            for _ in range(times // count):
                for group in groups_of(ahead):
                    for _, part in dealer.deal(group)[0]:
                        dealer.block(part)

        return run

    yield way(True), way(False)


# --- a request and its answer


class _Answers:
    """A node whose replica needs a moment for each request."""

    def begin_write(self, request: pb.WriteRequest) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_later(0.001, future.set_result, 1)
        return future

    def end_write(self, outcome: int) -> pb.WriteResponse:
        return pb.WriteResponse(timestamp=outcome)

    async def answer(self, request: pb.ClientRequest) -> pb.ClientResponse:
        await asyncio.wait((self.begin_write(pb.WriteRequest()),), timeout=2.0)
        return pb.ClientResponse(kv=pb.KvResponse())

    async def watch(self, request: pb.KvWatchRequest, sink: Sink) -> pb.KvWatchResponse:
        return pb.KvWatchResponse(number=request.number)


class _Service(TabletServerServiceServicer):
    def __init__(self, streams: ClientStreams) -> None:
        self._streams = streams

    async def OpenClientStream(self, request: Any, context: Any) -> Any:
        return self._streams.introduce(request)


class _Stream:
    """A client's stream to such a node, over TCP."""

    async def __aenter__(self) -> _Stream:
        self._listener = StreamListener()
        await self._listener.listen("127.0.0.1", 0)
        identity = Identity(ClusterId(new_id()), _NODE, 1)
        streams = ClientStreams(identity, PeerBook(), ByteBudget(), self._listener, _Answers())
        self._server = make_server(identity, PeerBook(), ByteBudget())
        add_TabletServerServiceServicer_to_server(_Service(streams), self._server)
        port = await bind(self._server, "127.0.0.1:0")
        await self._server.start()
        self.pool = ChannelPool(Identity())
        self._streams = Streams(self.pool)
        self.address = f"127.0.0.1:{port}"
        self.stream: NodeStream = self._streams.to(_NODE, self.address)
        await self.stream.ask(_request(), timeout_s=60)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._streams.close()
        await self.pool.close()
        await self._listener.close()
        await self._server.stop(0)


def _request() -> pb.ClientRequest:
    return pb.ClientRequest(write=pb.WriteRequest(tablet_id=bytes(16), block=bytes(1_000), deadline_ms=2_000))


def _other() -> pb.ClientRequest:
    return pb.ClientRequest(kv=pb.KvRequest(tablet_id=bytes(16), key=bytes(1_000), deadline_ms=2_000))


_AT_ONCE = 8
"""Requests in one frame: the blocks of a round."""


def by_callback(stream: NodeStream, made: Callable[[], pb.ClientRequest]) -> Run:
    """Requests that end with a callback, as the first attempt of `Asking` does."""

    async def run(times: int) -> None:
        for _ in range(times // _AT_ONCE):
            left, over = _AT_ONCE, asyncio.get_running_loop().create_future()

            def ended(_: object, over: asyncio.Future[None] = over) -> None:
                nonlocal left
                left -= 1
                if not left:
                    over.set_result(None)

            for _ in range(_AT_ONCE):
                stream.start(made(), 2.0, ended)
            await over

    return run


def by_task(ask: Callable[[], Awaitable[object]]) -> Run:
    async def run(times: int) -> None:
        for _ in range(times // _AT_ONCE):
            await asyncio.gather(*(asyncio.ensure_future(ask()) for _ in range(_AT_ONCE)))

    return run


# --- a batch of the log


class _OneLog:
    """A log that the loop's thread writes, with real syncs."""

    def __init__(self, directory: Path, *, aio: bool) -> None:
        loop = asyncio.get_running_loop()
        self.log = Log.open(
            directory,
            LogOptions(segment_bytes=4 << 20),
            _NODE,
            lambda dones: loop.call_soon_threadsafe(lambda: [done() for done in dones]),
        )
        # A clock that stands still. So small batches stay with the loop, however slow the disk is.
        self.log.attach(loop, kernel_sync(directory) if aio else None, clock=lambda: 0.0)
        key = StreamKey(TabletId("1" * 32), ReplicaId(1))
        self._stream = self.log.create_stream(key, OPID_NONE, _PEERS)
        self._index = 0

    async def run(self, times: int) -> None:
        """Write batches. An operation is a batch of eight entries, one of 1,000 bytes for each tablet."""
        loop = asyncio.get_running_loop()
        for _ in range(times):
            over = loop.create_future()
            for n in range(8):
                self._index += 1
                entry = Entry(1, self._index, EntryKind.WRITE, self._index, bytes(1_000))
                self._stream.append_entries((entry,), partial(over.set_result, None) if n == 7 else None)
            await over

    @property
    def by_loop(self) -> int:
        """How many batches the loop has written."""
        return self.log.stats.loop_batches


# --- a block in the store


def _blocks(count: int) -> list[bytes]:
    """Blocks of eight rows each."""
    found = []
    for n in range(count):
        batch, ids, _, _ = batch_from_rows([rows.row(8 * n + k) for k in range(8)], rows.SCHEMA, RowOp.UPSERT)
        found.append(encode_block(RowOp.UPSERT, ids, batch, rows.SCHEMA.version))
    return found


def applying(directory: Path, blocks: Sequence[bytes], *, plain: bool) -> Run:
    """Apply blocks. An operation is a block of eight rows."""
    store = TabletStore.create(directory, rows.SCHEMA)
    index = 0

    async def run(times: int) -> None:
        nonlocal index
        for n in range(times):
            index += 1
            header = writeop.WriteHeader(bytes(16), index, index, 0, 0, rows.SCHEMA.version, plain=plain)
            payload = writeop.encode(header, blocks[n % len(blocks)])
            store.begin(Entry(1, index, EntryKind.WRITE, index << 12, payload))
        store.view().close()

    return run


def checking(directory: Path, blocks: Sequence[bytes], *, glance: bool) -> Run:
    store = TabletStore.create(directory, rows.SCHEMA)
    if not glance:
        store._contents.state.active.layout = None

    async def run(times: int) -> None:
        for n in range(times):
            assert store.check_block(blocks[n % len(blocks)])

    return run


def apart(run: Run) -> Run:
    """Run with waiting blocks decoded one by one, instead of several together."""

    async def forced(times: int) -> None:
        found = Layout.rows_of
        Layout.rows_of = lambda *_: None  # type: ignore[method-assign]
        try:
            await run(times)
        finally:
            Layout.rows_of = found  # type: ignore[method-assign]

    return forced


# --- all


async def by_turns(name: str, ways: Ways, times: int, rounds: int) -> None:
    """Print the processor time of one operation in both ways."""
    found: tuple[list[float], list[float]] = ([], [])
    for way in ways:
        await way(max(8, times // 4))
    for _ in range(rounds):
        for way, each in zip(ways, found):
            begin = time.process_time()
            await way(times)
            each.append((time.process_time() - begin) / times * 1e6)
    fast, general = (statistics.median(each) for each in found)
    spread = "  ".join(f"{a:.1f}/{b:.1f}" for a, b in zip(*found))
    print(
        f"{name:12} {fast:8.1f} us   general {general:8.1f} us   x{general / fast:.2f}   {spread}", flush=True
    )


async def run(directory: Path, only: Sequence[str], rounds: int, scale: float) -> None:
    async def measure(name: str, ways: Ways, times: int) -> None:
        if name in only:
            await by_turns(name, ways, max(64, int(times * scale) // 64 * 64), rounds)

    with dealing(64) as ways:
        await measure("deal-64", ways, 640)
    with dealing(1) as ways:
        await measure("deal-1", ways, 256)
    if {"callback", "server"} & set(only):
        async with _Stream() as one:
            stream = one.stream
            fast = by_callback(stream, _request)
            await measure("callback", (fast, by_task(lambda: stream.ask(_request(), timeout_s=2.0))), 256)
            await measure("server", (fast, by_callback(stream, _other)), 256)
    blocks = _blocks(64)
    await measure(
        "append",
        (
            applying(directory / "plain", blocks, plain=True),
            applying(directory / "whole", blocks, plain=False),
        ),
        384,
    )
    plain = applying(directory / "joined", blocks, plain=True)
    await measure("joined", (plain, apart(plain)), 384)
    await measure(
        "glance",
        (
            checking(directory / "glance", blocks, glance=True),
            checking(directory / "read", blocks, glance=False),
        ),
        384,
    )
    if "aio" in only:
        (directory / "a").mkdir()
        (directory / "t").mkdir()
        loop, thread = _OneLog(directory / "a", aio=True), _OneLog(directory / "t", aio=False)
        await measure("aio", (loop.run, thread.run), 128)
        print(
            f"{'':12} {loop.by_loop} batches by the loop; with a thread beside it {thread.by_loop}",
            flush=True,
        )
        loop.log.close()
        thread.log.close()


STEPS = ("deal-64", "deal-1", "callback", "server", "append", "joined", "glance", "aio")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__)
    parser.add_argument("--only", default=",".join(STEPS), metavar="STEP,...", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiply the operations of each run by this"
    )
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    gc.set_threshold(50_000, 50, 100)
    directory = Path(tempfile.mkdtemp(prefix="stele-steps-"))
    try:
        uvloop.run(run(directory, arguments.only.split(","), arguments.rounds, arguments.scale))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
