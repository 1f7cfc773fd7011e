"""What stands in front of every servicer: identity, budget, limits, errors; and garbage on the ports."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog

from stele.model.errors import Code, NotLeader, Rejected, Retryable, StartRefused, SteleError
from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc import connection
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import KEEPALIVE_TIME_MS, ChannelPool
from stele.rpc.errors import error_from_json, error_from_pb, error_to_json, error_to_pb, status_of
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.logging import SOURCES_MAX, OncePer
from stele.rpc.proto import master_pb2, tserver_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceServicer, MasterServiceStub
from stele.rpc.proto.master_pb2_grpc import add_MasterServiceServicer_to_server as add_service
from stele.rpc.server import bind, make_server

CLUSTER = ClusterId(new_id())


class Service(MasterServiceServicer):
    """Raises what it is told to, or answers."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.requests: list[Any] = []
        self.wait = asyncio.Event()
        self.wait.set()

    async def GetTable(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        await self.wait.wait()
        if self.error is not None:
            raise self.error
        return master_pb2.GetTableResponse(table=master_pb2.TableInfoPB(name=request.name))


@asynccontextmanager
async def served(
    budget: ByteBudget | None = None, fork_id: str | None = None
) -> AsyncIterator[tuple[Service, str, Identity]]:
    identity = Identity(CLUSTER, NodeId(new_id()), 5, fork_id)
    service = Service()
    server = make_server(identity, PeerBook(), budget or ByteBudget())
    add_service(service, server)
    port = await bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}", identity
    finally:
        await server.stop(0)


async def ask(
    pool: ChannelPool, address: str, name: str = "t", *, timeout_s: float = 60, **kwargs: Any
) -> Any:
    request = master_pb2.GetTableRequest(name=name)
    return await pool.unary(address, MasterServiceStub, "GetTable", request, timeout_s=timeout_s, **kwargs)


@asynccontextmanager
async def pool_of(identity: Identity) -> AsyncIterator[ChannelPool]:
    pool = ChannelPool(identity)
    try:
        yield pool
    finally:
        await pool.close()


async def test_a_client_learns_the_cluster_and_names_it_from_then_on() -> None:
    async with served() as (_, address, _), pool_of(Identity()) as pool:
        assert (await ask(pool, address)).table.name == "t"
        assert pool.identity.cluster_id == CLUSTER


async def test_a_client_learns_which_copy_it_speaks_to_and_is_refused_by_another() -> None:
    async with (
        served(fork_id=new_id()) as (_, address, identity),
        served(fork_id=new_id()) as (other, elsewhere, _),
        pool_of(Identity()) as pool,
    ):
        await ask(pool, address)
        assert pool.identity.fork_id == identity.fork_id
        await ask(pool, address)
        with pytest.raises(Rejected, match="two copies of a cluster"):
            await ask(pool, elsewhere)
        assert not other.requests


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
async def test_every_code_comes_through(code: Code) -> None:
    async with served() as (service, address, _), pool_of(Identity()) as pool:
        service.error = SteleError(f"because of {code.name}", code=code)
        with pytest.raises(SteleError) as caught:
            await ask(pool, address)
        assert caught.value.code is code
        assert caught.value.args[0] == f"because of {code.name}"


async def test_the_leader_hint_comes_through() -> None:
    async with served() as (service, address, _), pool_of(Identity()) as pool:
        hint = new_id()
        service.error = NotLeader("elsewhere", leader_hint=hint)
        with pytest.raises(NotLeader) as caught:
            await ask(pool, address)
        assert caught.value.leader_hint == hint


@pytest.mark.parametrize("code", [Code.STALE_INCARNATION, Code.VOLUME_OLD])
async def test_which_master_refuses_a_start_comes_through(code: Code) -> None:
    """Lost on the way, one master that is reached at two addresses counted as two, and its word was never taken back."""
    async with served() as (service, address, _), pool_of(Identity()) as pool:
        master = new_id()
        service.error = StartRefused("older", code=code, master=master, masters=3, newest=7)
        with pytest.raises(StartRefused) as caught:
            await ask(pool, address)
        assert (caught.value.code, caught.value.args[0]) == (code, "older")
        assert (caught.value.master, caught.value.masters, caught.value.newest) == (master, 3, 7)


async def test_what_nobody_expected_is_internal_and_says_nothing_of_us() -> None:
    async with served() as (service, address, _), pool_of(Identity()) as pool:
        service.error = KeyError("the secret inside")
        with structlog.testing.capture_logs() as logs, pytest.raises(SteleError) as caught:
            await ask(pool, address)
        assert caught.value.code is Code.INTERNAL
        assert "secret" not in str(caught.value)
        assert [log["exc_info"] for log in logs if "exc_info" in log] == [service.error]


@pytest.mark.parametrize(
    ("caller", "to_node", "code"),
    [
        (Identity(ClusterId(new_id())), "", Code.WRONG_CLUSTER),
        (Identity(node_id=NodeId(new_id()), incarnation=1), "", Code.WRONG_CLUSTER),
        (Identity(CLUSTER), new_id(), Code.WRONG_NODE),
    ],
    ids=["of another cluster", "of no cluster", "to another node"],
)
async def test_strangers_are_refused_before_their_request_is_looked_at(
    caller: Identity, to_node: str, code: Code
) -> None:
    async with served() as (service, address, _), pool_of(caller) as pool:
        with pytest.raises(Rejected) as caught:
            await ask(pool, address, to_node=to_node)
        assert caught.value.code is code
        assert not service.requests


async def test_an_older_start_of_a_node_is_refused() -> None:
    node = NodeId(new_id())
    async with served() as (_, address, identity):
        for incarnation, code in ((2, None), (3, None), (2, Code.STALE_INCARNATION)):
            async with pool_of(Identity(CLUSTER, node, incarnation)) as pool:
                if code is None:
                    await ask(pool, address, to_node=identity.node_id, to_incarnation=5)
                    continue
                with pytest.raises(Rejected) as caught:
                    await ask(pool, address)
                assert caught.value.code is code
        async with pool_of(Identity(CLUSTER, node, 3)) as pool:
            with pytest.raises(Rejected, match="older copy of its volume"):
                await ask(pool, address, to_incarnation=6)


async def test_a_call_without_a_protocol_version_is_told_what_to_add() -> None:
    async with served() as (_, address, _), grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="stele-protocol: 1"):
            await MasterServiceStub(channel).GetTable(master_pb2.GetTableRequest())  # type: ignore[misc]


async def test_bytes_that_are_no_request_are_refused_and_logged_once() -> None:
    async with served() as (_, address, _), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/stele.v1.MasterService/GetTable")
        with structlog.testing.capture_logs() as logs:
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"\xff" * 40, metadata=Identity().metadata())
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len([log for log in logs if log["event"] == "request refused"]) == 1


def test_a_budget_gives_what_it_has_and_gets_it_back_once() -> None:
    budget = ByteBudget(100, 20)
    alone = budget.charge(1_000)  # no message starves
    with pytest.raises(Retryable):
        budget.charge(1, control=True)
    alone.release()
    alone.release()
    charge = budget.charge(80)
    with pytest.raises(Retryable):
        budget.take(1)
    control = budget.charge(20, control=True)
    with pytest.raises(Retryable):
        budget.charge(1, control=True)
    for each in (charge, control):
        each.release()
    assert budget.used_bytes == 0


async def test_past_the_budget_clients_are_throttled_and_peers_are_not() -> None:
    budget = ByteBudget(6_000, 2_000)
    peer = Identity(CLUSTER, NodeId(new_id()), 1)
    async with served(budget) as (service, address, _), pool_of(Identity()) as pool, pool_of(peer) as peers:
        service.wait.clear()
        first = asyncio.ensure_future(ask(pool, address, "x" * 1_900))
        while not budget.used_bytes:
            await asyncio.sleep(0.005)
        with pytest.raises(Retryable) as caught:
            await ask(pool, address, "x" * 500)
        assert caught.value.code is Code.THROTTLED
        second = asyncio.ensure_future(ask(peers, address, "x" * 500))
        while len(service.requests) < 2:
            await asyncio.sleep(0.005)
        service.wait.set()
        await asyncio.gather(first, second)
        assert budget.used_bytes == 0


async def test_a_message_above_the_limit_is_too_large() -> None:
    async with served() as (service, address, _), pool_of(Identity()) as pool:
        with pytest.raises(Rejected) as caught:
            await ask(pool, address, "x" * (17 << 20))
        assert caught.value.code is Code.TOO_LARGE
        assert not service.requests
        assert (await ask(pool, address)).table.name == "t"


async def test_garbage_on_the_grpc_port_harms_nothing() -> None:
    async with served() as (_, address, _), pool_of(Identity()) as pool:
        host, _, port = address.partition(":")
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4_096),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 99,
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            writer.close()
        assert (await ask(pool, address)).table.name == "t"


async def test_nobody_there_is_unavailable_and_a_late_start_is_found() -> None:
    async with pool_of(Identity()) as pool:
        with pytest.raises(Retryable) as caught:
            await ask(pool, "127.0.0.1:1")
        assert caught.value.code is Code.UNAVAILABLE
        with pytest.raises(Retryable, match="does not resolve"):
            await ask(pool, "no-such-host.invalid:7051")
        with pytest.raises(Rejected, match="HOST:PORT"):
            await ask(pool, "nothing")


_SERVER = """
import asyncio, sys
from stele.model.ids import ClusterId, NodeId
from stele.rpc.budget import ByteBudget
from stele.rpc.client_stream import ClientStreams
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import tserver_pb2_grpc
from stele.rpc.server import bind, make_server

class Answers:
    async def answer(self, request):
        await asyncio.sleep(600)

class Introductions(tserver_pb2_grpc.TabletServerServiceServicer):
    async def OpenClientStream(self, request, context):
        return self.streams.introduce(request)

async def main():
    identity = Identity(ClusterId("c" * 32), NodeId("a" * 32), 1)
    listener = StreamListener()
    await listener.listen("127.0.0.1", 0)
    introductions = Introductions()
    introductions.streams = ClientStreams(identity, PeerBook(), ByteBudget(), listener, Answers())
    server = make_server(identity, PeerBook(), ByteBudget())
    tserver_pb2_grpc.add_TabletServerServiceServicer_to_server(introductions, server)
    print(await bind(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def _start_server() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE)


async def test_a_peer_that_is_switched_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from stele.client.streams import Streams

    monkeypatch.setattr(connection, "KEEPALIVE_TIME_MS", KEEPALIVE_TIME_MS)
    process = _start_server()
    pool = ChannelPool(Identity())
    streams = Streams(pool)
    try:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        stream = streams.to("a" * 32, f"127.0.0.1:{port}")
        request = tserver_pb2.ClientRequest(kv=tserver_pb2.KvRequest(key=b"k"))
        waiting = asyncio.ensure_future(stream.ask(request, timeout_s=100))
        while stream._connection is None or stream._queue:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGSTOP)  # its kernel still answers for it; pings are not answered
        with pytest.raises(Retryable) as caught:
            await waiting
        assert caught.value.code is Code.UNAVAILABLE  # noticed, long before its time was over
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        await streams.close()
        await pool.close()


def test_errors_on_streams_and_in_flight() -> None:
    hint = new_id()
    for error in (NotLeader("there", leader_hint=hint), Rejected("no", code=Code.CAS_FAILED)):
        for back in (error_from_pb(error_to_pb(error)), error_from_json(error_to_json(error))):
            assert back is not None
            assert (type(back), back.code, back.args) == (type(error), error.code, error.args)
    assert error_from_json(b"something else") is None
    assert status_of(Code.STALE_EPOCH) is grpc.StatusCode.FAILED_PRECONDITION


def test_a_source_is_logged_once_a_minute() -> None:
    now = 0.0
    once, lines = OncePer(60, clock=lambda: now), list[dict[str, Any]]()

    def log(event: str, **fields: Any) -> None:
        lines.append(fields)

    def tell(source: str, fault: str) -> bool:
        return once.tell(log, "refused", source, fault, source=source)

    assert tell("a", "x")
    assert tell("b", "x")
    assert not tell("a", "x") and tell("a", "y")
    assert not tell("a", "x")
    now = 61
    assert tell("a", "x") and tell("b", "x")
    assert lines[-2:] == [{"source": "a", "left_out": 2}, {"source": "b"}]
    assert sum(tell(f"source {n}", "x") for n in range(5_000)) < 1_100
    now = 121.5
    assert tell("one more", "x") and "left_out" not in lines[-1]


def test_many_sources_share_a_line_and_its_count() -> None:
    """Where each call came from another address, all but 1,024 were left out without a word."""
    now = 0.0
    once, lines = OncePer(60, clock=lambda: now), list[dict[str, Any]]()
    for n in range(SOURCES_MAX + 500):
        once.tell(lambda event, **fields: lines.append(fields), "refused", f"source {n}", "x", n=n)
    assert len(lines) == SOURCES_MAX + 1 and once._seen["", "x"][1] == 499
    assert len(once._seen) == SOURCES_MAX + 1
