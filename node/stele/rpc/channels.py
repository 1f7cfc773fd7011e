"""Unary calls to other processes: one channel per address, made at the first call.

Used by masters, nodes, drivers, clients and the command line. Owns the channels. It resolves names itself at
each dial, and dials again after a connection failed. An address is dialled once at a time. A name lookup
cannot be cancelled, so the next caller waits for the same one. A hanging resolver keeps only one thread per
name. Invariant: every call carries this process's identity, and every failure is raised as a `SteleError`.
After `close` nothing is dialled.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc

from stele.model.errors import Closed, Code, Rejected, Retryable
from stele.model.ids import ClusterId
from stele.rpc import forks
from stele.rpc.errors import from_rpc_error, was_answered
from stele.rpc.identity import CLUSTER_KEY, FORK_KEY, Identity
from stele.rpc.resolve import resolve_one

MESSAGE_BYTES_MAX = 16 << 20
KEEPALIVE_TIME_MS = 1_000
KEEPALIVE_TIMEOUT_MS = 1_500
"""A dead peer is noticed after KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS, give or take a second."""
UNUSED_MS = 30_000
"""A channel without calls is disconnected after this time, and connects again at its next call. Otherwise its
server would ping it every second, though the channel that opened a stream to a peer is rarely used again.
A channel of gRPC 1.85 is disconnected so only once."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # While a call is open, this one counts (seen in grpcio 1.85; the default is a minute).
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.client_idle_timeout_ms", UNUSED_MS),
    # Its own connection, so that a control stream never waits behind another channel's bulk.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)

_CLOSE_GRACE_S = 1.0


async def dial(address: str) -> grpc.aio.Channel:
    """A channel to `address`, which is resolved now. It connects with the first call.

    Raises:
        Rejected: `address` is not HOST:PORT.
        Retryable: UNAVAILABLE: the name does not resolve.
    """
    return grpc.aio.insecure_channel(await resolve_one(address), options=CHANNEL_OPTIONS)


class ChannelPool:
    """Channels by address. One per process and event loop; it belongs to the loop that first uses it.

    Raises:
        Rejected: this process was forked from one that has used gRPC.
    """

    def __init__(self, identity: Identity) -> None:
        forks.use()
        self.identity = identity  # a client's is renewed once a server has told the cluster
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[str, type], Any] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def stub(self, address: str, stub_class: type) -> Any:
        """A generated stub on the channel to `address`. Prefer `unary`, which maps errors and adds identity.

        Raises:
            Closed: the pool was closed, before or during the call.
        """
        self._ensure_open()
        key = (address, stub_class)
        while (stub := self._stubs.get(key)) is None:
            channel = self._channels.get(address)
            if channel is not None:
                stub = self._stubs[key] = stub_class(channel)
            else:
                await self._dialled(address)
                self._ensure_open()
        return stub

    async def _dialled(self, address: str) -> None:
        """Dial if there is no channel. On return, another task may have dropped the channel again."""
        dialling = self._dialling.get(address)
        if dialling is None:
            dialling = asyncio.get_running_loop().create_task(self._dial(address))
            self._dialling[address] = dialling
            dialling.add_done_callback(lambda task: self._dial_ended(address, task))
        try:
            await asyncio.shield(dialling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self._ensure_open()
            raise

    async def _dial(self, address: str) -> None:
        self._channels[address] = await dial(address)

    def _dial_ended(self, address: str, task: asyncio.Task[None]) -> None:
        del self._dialling[address]
        if not task.cancelled():
            task.exception()  # read it, because the caller may have gone

    async def unary(
        self,
        address: str,
        stub_class: type,
        method: str,
        request: Any,
        *,
        timeout_s: float = 5.0,
        to_node: str = "",
        to_incarnation: int = 0,
    ) -> Any:
        """Call `stub_class.method` at `address`, once. `to_node`: the node that is to answer; any other node
        refuses the call.

        Raises:
            SteleError: what the server raised; UNAVAILABLE without a connection; TIMED_OUT after `timeout_s`,
                which includes the lookup of the name.
            Closed: the pool was closed. If that ended the call, the server may have done what it was asked.
            Rejected: see `ensure_loop`.
        """
        self.ensure_loop()
        stub = self._stubs.get((address, stub_class))
        if stub is None or self.closed:
            began = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(timeout_s):
                    stub = await self.stub(address, stub_class)
            except TimeoutError:
                raise Retryable(
                    f"{address}: the name lookup did not end within {timeout_s:.1f} s; check this machine's DNS",
                    code=Code.TIMED_OUT,
                ) from None
            timeout_s = max(0.0, timeout_s - (asyncio.get_running_loop().time() - began))
        channel = self._channels.get(address)
        metadata = self.identity.metadata(to_node, to_incarnation)
        call = getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)
        try:
            response = await call
            if not self.identity.cluster_id or self.identity.fork_id is None:
                await self._learn_cluster(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._ensure_open()
            # Nobody cancelled this call: another call failed, and the channel was closed under it.
            raise Retryable(
                f"{address}: the connection was dropped; send the request again", code=Code.UNAVAILABLE
            ) from None
        except grpc.RpcError as exc:
            self._ensure_open()
            raise self._failed(address, channel, exc) from exc
        return response

    def drop(self, address: str) -> None:
        """Close the channel to `address`. The next call resolves and dials again."""
        channel = self._channels.pop(address, None)
        self._stubs = {key: stub for key, stub in self._stubs.items() if key[0] != address}
        if channel is not None:
            task = asyncio.get_running_loop().create_task(channel.close(_CLOSE_GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels for good. Calls in progress fail."""
        self.closed = True
        dialling = list(self._dialling.values())
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        channels, self._channels, self._stubs = list(self._channels.values()), {}, {}
        for channel in channels:
            await channel.close()
        await asyncio.gather(*self._closing)

    def ensure_loop(self) -> None:
        """Check that the running event loop is the one that these channels belong to.

        Raises:
            Rejected: they belong to another loop.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise Rejected(
                "this client belongs to another event loop, the one that used it first; "
                "create one client per asyncio.run"
            )

    def _ensure_open(self) -> None:
        if self.closed:
            raise Closed()

    async def _learn_cluster(self, call: Any) -> None:
        said = {key: value for key, value in await call.trailing_metadata()}
        if CLUSTER_KEY not in said:
            return
        if not self.identity.cluster_id:
            self.identity = replace(self.identity, cluster_id=ClusterId(said[CLUSTER_KEY]))
        if self.identity.fork_id is None:  # a server of a release without fork ids belongs to the original
            self.identity = replace(self.identity, fork_id=str(said.get(FORK_KEY, "")))

    def _failed(self, address: str, channel: grpc.aio.Channel | None, exc: BaseException) -> Exception:
        error = from_rpc_error(exc, where=address)
        error.__cause__ = exc
        lost = error.code in (Code.UNAVAILABLE, Code.TIMED_OUT) and not was_answered(error)
        if lost and self._channels.get(address) is channel:  # otherwise it was dialled again meanwhile
            self.drop(address)
        return error
