"""How long requests take, as /metrics tells it: each counts once, under its kind and outcome, in the bucket of its time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from stele.client.streams import Streams
from stele.metrics import BOUNDS_S, REGISTRY, Durations
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from stele.rpc.proto import tserver_pb2 as pb
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from tests.harness import histograms
from tests.rpc.serving import NODE, Answering, serving, writing

OF_CLIENTS = "stele_client_request_seconds"
OF_CALLS = "stele_rpc_request_seconds"
Counted = dict[tuple[str, ...], histograms.Durations]


@contextmanager
def counting(name: str) -> Iterator[Counted]:
    """What is counted within, by labels; filled at the end."""

    def shown() -> Counted:
        return histograms.histograms(generate_latest(REGISTRY).decode(), name)

    before, found = shown(), Counted()
    yield found
    for labels, now in shown().items():
        rest = now.since(before.get(labels, histograms.NONE))
        if rest.count:
            found[labels] = rest


def of_keys(op: pb.KvOpPB) -> pb.ClientRequest:
    return pb.ClientRequest(kv=pb.KvRequest(op=op, key=b"k"))


async def unanswerable(request: pb.ClientRequest) -> pb.ClientResponse:
    raise AssertionError(request)


@pytest.mark.parametrize("bound_s", BOUNDS_S)
def test_a_bucket_holds_what_took_as_long_as_its_bound_and_no_longer(bound_s: float) -> None:
    times = Durations()
    times.add(bound_s)
    times.add(bound_s * 1.001)
    at = BOUNDS_S.index(bound_s)
    assert times.counts[at : at + 2] == [1, 1] and sum(times.counts) == 2


async def test_each_request_counts_once_under_its_kind() -> None:
    async def answer(request: pb.ClientRequest) -> pb.ClientResponse:
        if request.WhichOneof("body") == "read":
            return pb.ClientResponse(read=pb.ReadResponse())
        return pb.ClientResponse(kv=pb.KvResponse())

    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        with counting(OF_CLIENTS) as counted:
            for op in pb.KvOpPB.values():
                await stream.ask(of_keys(op), timeout_s=60)
            for _ in range(3):
                await stream.ask(pb.ClientRequest(read=pb.ReadRequest()), timeout_s=60)
            with pytest.raises(Rejected):
                await stream.ask(pb.ClientRequest(watch=pb.KvWatchRequest()), timeout_s=60)
        await streams.close()
    assert {labels: each.count for labels, each in counted.items()} == {
        ("kv_read", "ok"): 2,
        ("kv_lease", "ok"): 2,
        ("kv_write", "ok"): len(pb.KvOpPB.values()) - 4,
        ("read", "ok"): 3,
        ("watch", "rejected"): 1,
    }


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Retryable("later", code=Code.THROTTLED), "retry"),
        (Rejected("no"), "rejected"),
        (Corrupt("the disk", code=Code.IO_ERROR), "failed"),
        (ZeroDivisionError(), "failed"),
    ],
    ids=["retry", "rejected", "corrupt", "bug"],
)
async def test_an_error_counts_under_its_outcome(error: Exception, outcome: str) -> None:
    async def answer(request: pb.ClientRequest) -> pb.ClientResponse:
        raise error

    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        with counting(OF_CLIENTS) as counted, pytest.raises(SteleError):
            await streams.to(NODE, address).ask(of_keys(pb.KV_READ), timeout_s=60)
        await streams.close()
    assert {labels: each.count for labels, each in counted.items()} == {("kv_read", outcome): 1}


async def test_a_write_counts_until_its_outcome_or_its_deadline() -> None:
    """One is answered, one has no outcome in time, one is refused at once, and one at its end."""
    answers = Answering(unanswerable)

    async with serving(answers) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        with counting(OF_CLIENTS) as counted:
            waiting = [asyncio.ensure_future(stream.ask(writing(n), timeout_s=60)) for n in (1, 2)]
            with pytest.raises(Retryable) as late:
                await stream.ask(writing(3, deadline_ms=300), timeout_s=60)
            assert late.value.code is Code.UNKNOWN_OUTCOME
            for number, timestamp in ((1, 7), (2, 0)):  # they came with the third, or before it
                answers.writes[number].set_result(timestamp)
            assert (await waiting[0]).write.timestamp == 7
            with pytest.raises(Rejected, match="it was refused"):
                await waiting[1]
            with pytest.raises(Rejected, match="no"):
                await stream.ask(writing(4, b"bad"), timeout_s=60)
        await streams.close()
    assert {labels: each.count for labels, each in counted.items()} == {
        ("write", "ok"): 1,
        ("write", "retry"): 1,
        ("write", "rejected"): 2,
    }
    for outcome, slow in (("ok", 1), ("retry", 1), ("rejected", 1)):
        times = counted["write", outcome]
        assert times.over(0.25) == slow, outcome
        assert slow * 0.3 <= times.sum_s < 60 * times.count


async def test_a_unary_call_counts_under_its_method_however_it_ends() -> None:
    async def answer(request: pb.ClientRequest) -> pb.ClientResponse:
        return pb.ClientResponse(kv=pb.KvResponse())

    service = "/stele.v1.TabletServerService/"
    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        with counting(OF_CALLS) as counted:
            await streams.to(NODE, address).ask(of_keys(pb.KV_READ), timeout_s=60)  # opens a stream
            for method in ("ListTablets", "NoSuchMethod"):
                with pytest.raises(SteleError):
                    await pool.unary(address, _Stub, method, pb.ListTabletsRequest(), timeout_s=60)
        await streams.close()
    assert {labels: each.count for labels, each in counted.items()} == {
        (f"{service}OpenClientStream", "ok"): 1,
        (f"{service}ListTablets", "failed"): 1,
        ("unknown", "rejected"): 1,
    }


class _Stub(TabletServerServiceStub):
    """With a method that no server knows."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self.NoSuchMethod = channel.unary_unary(
            "/stele.v1.TabletServerService/NoSuchMethod",
            request_serializer=pb.ListTabletsRequest.SerializeToString,
            response_deserializer=pb.ListTabletsResponse.FromString,
        )
