"""A lease of a key space: keys that live as long as their holder is heard. Made by `AsyncKeySpace.lease`.

The lease is kept alive in the background. The holder counts its time from when it sent the last sign that was confirmed. It calls
the lease lost a tenth of its time early. The leader counts from when it confirmed that sign, which is later. So the holder
knows that the lease is lost before its keys are gone, whatever happens in between.

All times are by `now_s`, which goes on while the machine sleeps. While a virtual machine is paused it may stand still: see
docs/keyspaces.md.

Invariant: a lease that was called lost is never called alive again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from stele.client import arguments, reprs
from stele.client.tablet import TabletClient
from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go
from stele.model.kvop import TTL_MAX_MS, TTL_MIN_MS
from stele.rpc.proto import tserver_pb2

_KEPT = 0.9
"""The part of its time for which a lease is called alive. The rest is a margin: clocks differ in speed, and programs need
time to notice."""
_SIGNS = 3
"""How many signs are sent in a lease's time."""
_PAUSE_S = 0.05
_UNCONFIRMED = "no leader confirmed it in time"
_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def now_s() -> float:
    """The holder's clock, in seconds. It goes on while the machine sleeps, because the leader's clock goes on meanwhile.

    Where the platform has no such clock, it is the monotonic one.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class KeyLease:
    """A lease as the leader sees it. `left_s`: how many more seconds it lives at least. `keys`: the keys that
    end with the lease.

    Example:
        >>> with space.lease(10) as lease:
        ...     revision = space.insert("owner", "me", lease=lease)
        ...     [each.keys for each in space.leases()]
        [(b'owner',)]
    """

    id: int
    ttl_s: float
    left_s: float
    keys: tuple[bytes, ...]


class AsyncLease:
    """A lease of a key space, kept alive in the background until `revoke` or `close`, or until the client is closed.

    `async with` revokes it at its end.

    Example:
        >>> async def work(client):
        ...     space = await client.create_keyspace("limits")
        ...     async with await space.lease(10) as lease:
        ...         await space.insert("owner", "me", lease=lease)
        ...         alive = lease.alive
        ...     return alive, await space.read("owner")
        >>> client.run(work(client.asynchronous))
        (True, None)
    """

    def __init__(
        self, name: str, tablet: TabletClient, lease: int, ttl_s: float, timeout_s: float, cluster_id: str
    ) -> None:
        self.id = lease
        self.ttl_s = ttl_s
        self._name = name
        self._tablet = tablet
        self._timeout_s = timeout_s
        self._cluster_id = cluster_id
        self._until = 0.0  # alive until then, by `now_s`; 0: not granted yet
        self._lost = asyncio.Event()
        self._lost_by = ""
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return reprs.shown_as(self, f"{self._name}, {self.id:016x}", self._cluster_id)

    @property
    def alive(self) -> bool:
        """Whether the lease is alive: nobody else can have what it holds. Check this right before each step that needs it.

        Example:
            >>> with space.lease(10) as lease:
            ...     lease.alive
            True
        """
        return not self._lost.is_set() and now_s() < self._until

    @property
    def left_s(self) -> float:
        """How many more seconds the lease is alive at least; 0 if it is lost.

        Example:
            >>> with space.lease(10) as lease:
            ...     0 < lease.left_s <= 9
            True
        """
        return max(0.0, self._until - now_s()) if self.alive else 0.0

    @property
    def lost_by(self) -> str:
        """Why the lease is lost; "" while it is alive.

        Example:
            >>> lease = space.lease(10)
            >>> lease.revoke()
            >>> lease.lost_by
            'it was ended here'
        """
        return self._lost_by

    async def grant(self) -> None:
        """Ask the leader for the lease, and keep it alive from now on. Called by `AsyncKeySpace.lease`."""
        self._tablet.ensure_open()
        sent = now_s()
        request = tserver_pb2.KvRequest(
            op=tserver_pb2.KV_LEASE_GRANT, lease=self.id, ttl_ms=round(self.ttl_s * 1000)
        )
        await self._tablet.kv(request, timeout_s=self._timeout_s)
        self._until = sent + _KEPT * self.ttl_s
        self._task = self._tablet.in_background(self._keep_alive())

    def adopt(self) -> None:
        """Keep a lease alive that another program was granted. Call `keep` first."""
        self._task = self._tablet.in_background(self._keep_alive())

    async def keep(self) -> None:
        """Send a sign of life now, and wait until it is confirmed. The lease also sends signs in the
        background.

        Raises:
            Rejected: LEASE_LOST.
            Retryable: no leader confirmed it in time. It may be alive still.
        """
        if self._lost.is_set():
            raise Rejected(f"lease {self.id:016x} is lost; take another", code=Code.LEASE_LOST)
        self._tablet.ensure_open()
        await self._sign(self._timeout_s)

    async def _sign(self, timeout_s: float) -> None:
        sent = now_s()
        request = tserver_pb2.KvRequest(op=tserver_pb2.KV_LEASE_KEEP, lease=self.id)
        try:
            answer = await self._tablet.kv(request, timeout_s=timeout_s)
        except Rejected as exc:
            if exc.code is Code.LEASE_LOST:
                self._end("it has expired, or was revoked")
            raise
        if self._until and now_s() >= self._until:
            self._end(_UNCONFIRMED)
        if self._lost.is_set():
            raise Rejected(f"lease {self.id:016x} is lost: {self._lost_by}", code=Code.LEASE_LOST)
        (told,) = answer.leases
        self.ttl_s = told.ttl_ms / 1000
        self._until = max(self._until, sent + _KEPT * self.ttl_s)

    async def _keep_alive(self) -> None:
        """Send signs until it is lost."""
        pause_s, why = self.ttl_s / _SIGNS, _UNCONFIRMED
        try:
            while not self._lost.is_set():
                await asyncio.sleep(min(pause_s, max(0.0, self._until - now_s())))
                left_s = self._until - now_s()
                if left_s <= 0:
                    return
                try:
                    async with asyncio.timeout(left_s):
                        await self._sign(left_s)
                    pause_s, why = self.ttl_s / _SIGNS, _UNCONFIRMED
                except (Retryable, TimeoutError) as exc:
                    if isinstance(exc, SteleError):
                        why = f"{_UNCONFIRMED}: {exc.args[0]}"
                        let_go(exc)
                    pause_s = _PAUSE_S
        except Rejected as exc:  # LEASE_LOST, or the key space is gone
            why = str(exc.args[0])
            let_go(exc)
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        self._lost_by = self._lost_by or why
        self._lost.set()

    async def lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the lease is lost: nobody confirmed it in time, or it was revoked or closed. Others may soon
        have what it holds.

        Returns False if it was not lost within `timeout_s`.
        """
        within = None if timeout_s is None else arguments.seconds(timeout_s, "timeout_s", zero=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._lost.wait()
        return self._lost.is_set()

    async def revoke(self) -> None:
        """End the lease: remove its keys. It counts as lost from now on, even if no leader answers. Raises
        what `replace` raises."""
        await self.close()
        request = tserver_pb2.KvRequest(op=tserver_pb2.KV_LEASE_REVOKE, lease=self.id)
        await self._tablet.kv(request, timeout_s=self._timeout_s)

    async def close(self) -> None:
        """Send no more signs of life. The lease counts as lost from now on. Its keys are removed once its
        time has passed."""
        self._end("it was ended here")
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.revoke()
            return
        with contextlib.suppress(SteleError):  # the error of the block says more
            await self.revoke()


def ttl_s(given: object) -> float:
    """Check how long a lease is to live without a sign of its holder, in seconds."""
    found = arguments.seconds(given, "ttl_s")
    if not TTL_MIN_MS <= round(found * 1000) <= TTL_MAX_MS:
        raise arguments.refusal("ttl_s", given, f"{TTL_MIN_MS // 1000} to {TTL_MAX_MS // 1000} seconds")
    return found
