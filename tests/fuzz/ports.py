"""Strangers at every port of a running cluster: one that speaks our protocols nearly right.

Owns the connections it opens. Attacks tables named "prey"; the bystander's table, its tablets and replicas are in no pool of
likely values. Invariant: each attack ends within seconds, whatever the other end does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.flight as fl

from stele.model.ids import ClusterId, NodeId
from stele.rpc.channels import CHANNEL_OPTIONS
from stele.rpc.convert import id_to_pb
from stele.rpc.frames import frame
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2, tserver_pb2
from stele.rpc.ticket import CopyTicket, ScanCommand, Ticket
from tests.fuzz.draw import Draw
from tests.harness.processes import FLIGHT_PORT, HTTP_PORT, STREAM_PORT, Member

PREY = "prey"
_CALL_S = 5.0
_HOLD_S = 3.0
_WRONG = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
_SERVICES = [
    service
    for module in (consensus_pb2, master_pb2, tserver_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
_DELETE = ("DeleteTable", "DeleteTablet")
"""Well formed they do what they are told, and there would be nothing left to attack."""
_METHODS = [(service, method) for service in _SERVICES for method in service.methods]


class Wrong(Exception):
    """A call was answered as if we were wrong."""


@dataclass
class Ground:
    """Where and whom to attack."""

    cluster_id: ClusterId
    masters: Sequence[Member]
    nodes: Sequence[Member]
    pool: dict[str, Sequence[Any]]
    done: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def members(self) -> list[Member]:
        """All processes."""
        return [*self.masters, *self.nodes]


class Attacks:
    """Each attack takes one step; `step` draws which."""

    def __init__(self, draw: Draw, ground: Ground) -> None:
        self._draw = draw
        self._rng = draw.rng
        self._ground = ground
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._attacks: list[Callable[[], Awaitable[None]]] = [
            *[self.unary] * 6,
            *[self.client_frames] * 3,
            *[self.peer_frames] * 3,
            *[self.flight] * 2,
            self.garbage,
            self.http,
            self.stall,
        ]

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()

    async def step(self) -> None:
        """One attack, to its end.

        Raises:
            Wrong: a call was answered with INTERNAL or UNKNOWN.
        """
        attack = self._rng.choice(self._attacks)
        self._ground.done[attack.__name__] += 1
        with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_CALL_S + _HOLD_S):
                await attack()

    # --- unary calls

    async def unary(self) -> None:
        """Any method of any service, with its fields drawn; sometimes with spoiled bytes or metadata."""
        service, method = self._rng.choice(_METHODS)
        to = self._rng.choice(
            self._ground.masters if service.name == "MasterService" else self._ground.members
        )
        raw = self._draw.message(
            method.input_type, hostile=self._rng.choice((0.05, 0.2, 0.5))
        ).SerializeToString()
        if self._rng.random() < 0.15:
            raw = self._draw.spoil(raw)
        await self._call(to, f"/stele.v1.{service.name}/{method.name}", raw, self._metadata(to))

    def _metadata(self, to: Member) -> tuple[tuple[str, str], ...]:
        identity = Identity(self._ground.cluster_id)
        if self._rng.random() < 0.4:
            names = [m.node_id for m in self._ground.members] + [self._draw.rng.randbytes(16).hex()]
            name = NodeId(self._rng.choice(names))
            identity = replace(
                identity,
                node_id=name,
                incarnation=self._rng.choice((0, 1, 7, 1 << 41, 2**63, 2**64 - 1)),
            )
        pairs = list(identity.metadata(to.node_id if self._rng.random() < 0.3 else ""))
        if self._rng.random() < 0.15:
            at = self._rng.randrange(len(pairs))
            value = self._rng.choice(("", "9" * 3_000, "-1", "x", "1" * 25, "+1", " 1"))
            pairs[at] = (pairs[at][0], value)
        return tuple(pairs)

    async def _call(
        self, to: Member, path: str, raw: bytes, metadata: tuple[tuple[str, str], ...]
    ) -> bytes | None:
        call: Any = self._channel(to.address).unary_unary(path)
        try:
            answer: bytes = await call(raw, timeout=_CALL_S, metadata=metadata)
        except grpc.aio.AioRpcError as exc:
            self._ground.answers[exc.code().name] += 1
            if exc.code() in _WRONG:
                raise Wrong(
                    f"{to.name} {path}: {exc.code().name} {exc.details()}; request {raw!r}, metadata {metadata}"
                ) from None
            return None
        except (ValueError, TypeError):  # gRPC's own client will not send such metadata
            return None
        self._ground.answers["OK"] += 1
        return answer

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return channel

    # --- streams

    async def client_frames(self) -> None:
        """A client's stream, opened as is right; then requests that are drawn, spoiled, cut, or end in the middle."""
        to = self._rng.choice(self._ground.members)
        hello = Identity(self._ground.cluster_id).hello(to.node_id)
        await self._stream(
            to, "TabletServerService/OpenClientStream", hello, tserver_pb2.ClientRequest.DESCRIPTOR
        )

    async def peer_frames(self) -> None:
        """A peer's stream in the name of a node that is none, or seldom of one that is; then messages between replicas."""
        to = self._rng.choice(self._ground.nodes)
        names = [m.node_id for m in self._ground.nodes if m is not to]
        name = self._rng.choice(names) if self._rng.random() < 0.05 else self._rng.randbytes(16).hex()
        identity = Identity(self._ground.cluster_id, NodeId(name), self._rng.choice((1, 1 << 41, 2**64 - 1)))
        channel = self._rng.choice(("control", "bulk", "", "x"))
        hello = identity.hello(to.node_id, channel=channel, address="127.0.0.1:1")
        await self._stream(to, "ConsensusService/OpenPeerStream", hello, consensus_pb2.PeerFrame.DESCRIPTOR)

    async def _stream(self, to: Member, method: str, hello: common_pb2.Hello, kind: Any) -> None:
        request = common_pb2.OpenStreamRequest(hello=hello)
        metadata = Identity(self._ground.cluster_id).metadata()
        answer = await self._call(to, f"/stele.v1.{method}", request.SerializeToString(), metadata)
        if answer is None:
            return
        opened = common_pb2.OpenStreamResponse.FromString(answer)
        reader, writer = await asyncio.open_connection(to.host, opened.port)
        try:
            writer.write(frame(opened.key))
            for _ in range(self._rng.randrange(1, 6)):
                writer.write(self._frame(self._draw.message(kind, hostile=0.1).SerializeToString()))
                await writer.drain()
            async with asyncio.timeout(self._rng.choice((0.01, 0.2, 1.0))):
                await reader.read(1 << 16)
        finally:
            writer.close()

    def _frame(self, raw: bytes) -> bytes:
        match self._rng.randrange(8):
            case 0:
                return frame(self._draw.spoil(raw))
            case 1:
                return frame(raw)[: self._rng.randrange(4 + len(raw))]
            case 2:
                return self._rng.choice((2**31, 2**32 - 3, 16 << 20)).to_bytes(4, "big") + raw
            case _:
                return frame(raw)

    # --- Flight

    async def flight(self) -> None:
        """Tickets and commands that are spoiled; calls that are not offered; a put of rows that nobody asked for."""
        to = self._rng.choice(self._ground.nodes)
        await asyncio.to_thread(self._flight, f"grpc+tcp://{to.host}:{FLIGHT_PORT}", self._rng.randrange(6))

    def _flight(self, location: str, kind: int) -> None:
        tablet = self._rng.choice(self._ground.pool["tablet_id"]).hex()
        cluster = self._ground.cluster_id
        node = self._rng.choice(self._ground.nodes).node_id
        options = fl.FlightCallOptions(timeout=_CALL_S)
        scan = '{"columns":[],"predicates":[],"lower":"","upper":"","limit":null,"ordered":false,"resume_after":"","batch_rows":10}'
        ticket = Ticket(cluster, tablet, 0, 1, scan, 100).encode()
        if kind == 0:
            ticket = CopyTicket(cluster, "s", "data-00000001", 0, 9, node, 1, node, 1).encode()
        client = fl.connect(location)
        try:
            if kind <= 2:
                client.do_get(fl.Ticket(self._spoiled_json(ticket)), options).read_all()
            elif kind == 3:
                command = self._spoiled_json(ScanCommand(PREY).encode())
                client.get_flight_info(fl.FlightDescriptor.for_command(command), options)
            elif kind == 4:
                list(client.do_action(fl.Action(self._draw.text() or "x", self._draw.blob()), options))
            else:
                batch = pa.record_batch([pa.array([self._draw.blob()])], ["x"])
                descriptor = fl.FlightDescriptor.for_command(self._draw.blob())
                writer, _ = client.do_put(descriptor, batch.schema, options)
                writer.write_batch(batch)
                writer.close()
        except pa.ArrowException as exc:
            if "Traceback" in str(exc) or "the server failed to answer" in str(exc):
                raise Wrong(f"Flight {location}: {exc}; ticket {ticket!r}") from None
        finally:
            client.close()

    def _spoiled_json(self, raw: bytes) -> bytes:
        if self._rng.random() < 0.6:
            return raw[:1] + json.dumps(self._draw.json_tree(json.loads(raw[1:]))).encode()
        return self._draw.spoil(raw)

    # --- plain sockets

    async def garbage(self) -> None:
        """Bytes that belong to no protocol, or to another one, at any port."""
        to = self._rng.choice(self._ground.members)
        port = self._rng.choice((int(to.address.rpartition(":")[2]), FLIGHT_PORT, STREAM_PORT, HTTP_PORT))
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        say = self._rng.choice((b"", preface, frame(self._rng.randbytes(16)), b"GET / HTTP/1.1\r\n"))
        await self._say(to.host, port, say + self._draw.spoil(self._draw.blob()), 0.05)

    async def http(self) -> None:
        """Requests that are nearly HTTP."""
        to = self._rng.choice(self._ground.members)
        path = self._rng.choice(("/livez", "/readyz", "/identity", "/metrics", "/" + "x" * 9_000))
        request = (
            f"GET {path} HTTP/1.1\r\nHost: x\r\nA: {'y' * self._rng.choice((1, 10_000))}\r\n\r\n".encode()
        )
        await self._say(to.host, HTTP_PORT, self._draw.spoil(request), 0.1)

    async def stall(self) -> None:
        """Connections that begin something and then say nothing for some seconds."""
        to = self._rng.choice(self._ground.members)
        port = self._rng.choice((FLIGHT_PORT, STREAM_PORT, HTTP_PORT))
        starts = (b"", b"G", (15 << 20).to_bytes(4, "big") + bytes(1 << 16), b"PRI * HTTP/2.0\r\n")
        say = [self._rng.choice(starts) for _ in range(self._rng.randrange(1, 30))]
        await asyncio.gather(*(self._say(to.host, port, one, _HOLD_S) for one in say), return_exceptions=True)

    async def _say(self, host: str, port: int, data: bytes, hold_s: float) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            async with asyncio.timeout(hold_s):
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.close()


def pool_of(
    members: Sequence[Member], tables: Sequence[bytes], tablets: Sequence[bytes]
) -> dict[str, Sequence[Any]]:
    """Likely values by field name."""
    nodes = [id_to_pb(m.node_id) for m in members]
    return {
        "tablet_id": tablets,
        "tablet_ids": tablets,
        "table_id": tables,
        "node_id": nodes,
        "source_node": nodes,
        "target_node": nodes,
        "from_node": nodes,
        "to_node": nodes,
        "candidate_node": nodes,
        "requestor_node": nodes,
        "leader_hint": nodes,
        "name": [PREY, "another"],
        "table_name": [PREY],
        "table": [PREY],
        "deadline_ms": [50, 500],
        "kind": [0, 1, 2, 3],
    }
