"""Clients that write, read, watch and lock a key space of their own, while faults happen. Used by __main__ and tests/client.

All share one event loop, so one monotonic clock times them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from stele.client import AsyncClient, AsyncKeySpace, AsyncWatch
from stele.model.errors import Code, Rejected, Retryable, SteleError
from tests.linear import held, watched
from tests.linear.held import Hold
from tests.linear.watched import Pairs, Read, Write

END = b"end"
"""The key of the last write."""
KEYSPACE, NAME = "watched", "the-one"
_TTL_S = 1.0
_REFUSED = (
    Code.CHANGE_IN_PROGRESS,
    Code.UNKNOWN_OUTCOME,
    Code.NO_QUORUM,
    Code.NOT_READY,  # a node that was killed opens its replicas for longer than the client waits
    Code.DISK_FULL,
    Code.THROTTLED,
)


class History:
    """What clients wrote, read, and held, until told to stop."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.holds: list[Hold] = []
        self.stop = asyncio.Event()

    async def write(self, space: AsyncKeySpace, name: str) -> None:
        """Write some of a few keys at a time, each time other values."""
        rng, count = random.Random(name), 0
        while not self.stop.is_set():
            count += 1
            keys = rng.sample([b"k0", b"k1", b"k2", name.encode()], rng.randint(1, 3))
            values: dict[bytes, bytes | None] = {key: f"{name}-{count}".encode() for key in keys}
            await self.one(space, values)
            await asyncio.sleep(rng.uniform(0.0, 0.01))

    async def one(self, space: AsyncKeySpace, values: dict[bytes, bytes | None]) -> bool:
        """One write. Returns whether it was acknowledged."""
        begun = time.monotonic()
        try:
            revision = await space.write(values)
        except SteleError as exc:
            assert exc.code in _REFUSED, exc
            if exc.code is Code.UNKNOWN_OUTCOME:
                self.writes.append(Write(values, begun))
            return False
        self.writes.append(Write(values, begun, time.monotonic(), revision))
        return True

    async def read(self, space: AsyncKeySpace) -> None:
        """Read all keys again and again."""
        while not self.stop.is_set():
            begun = time.monotonic()
            with contextlib.suppress(Retryable):
                state = await space.snapshot()
                values = {each.key: each.value for each in state.keys}
                self.reads.append(Read(values, state.revision, begun, time.monotonic()))
            await asyncio.sleep(0.05)

    async def hold(self, space: AsyncKeySpace, me: str) -> None:
        """Take the name, hold it while the lease lives, and let go: in order, or as a program that is gone."""
        rng = random.Random(me)
        while not self.stop.is_set():
            try:
                lease = await space.lease(_TTL_S)
                won = await space.elect(NAME, me, lease=lease) == me
            except SteleError:
                await asyncio.sleep(0.05)
                continue
            begun = last = time.monotonic()
            until, seen = begun + rng.uniform(0.1, 2.5), 0
            while won and lease.alive and last < until and not self.stop.is_set():
                now = time.monotonic()
                if lease.alive:
                    last, seen = now, seen + 1
                await asyncio.sleep(0.005)
            if won and seen:
                self.holds.append(Hold(me, begun, last))
            if rng.random() < 0.5:
                await lease.close()  # as if it had crashed
            else:
                with contextlib.suppress(SteleError):
                    await lease.revoke()
            await asyncio.sleep(rng.uniform(0.0, 0.2))


async def given(watch: AsyncWatch, found: list[tuple[int, Pairs]]) -> None:
    """Note all writes that a watch gives, up to the last one."""
    async for write in watch:
        found.append((write.revision, {change.key: change.value for change in write.changes}))
        if END in found[-1][1]:
            return


class KeyWork:
    """Writers, readers, a watcher and holders: `prepare`, `run` while faults happen, `settle`, `faults`, `close`."""

    def __init__(self, masters: list[str]) -> None:
        self._clients = [AsyncClient(masters, timeout_s=timeout_s) for timeout_s in (2.0, 6.0, 30.0)]
        self._spaces: list[AsyncKeySpace] = []
        self._history = History()
        self._found: list[tuple[int, Pairs]] = []
        self._compacted_at: int | None = None
        self._watching: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Make two key spaces: one is watched, the other has the locks. Begin to watch."""
        patient = self._clients[-1]
        await patient.create_keyspace(KEYSPACE)
        await patient.create_keyspace(f"{KEYSPACE}-locks")
        for client in self._clients:
            self._spaces += [await client.keyspace(KEYSPACE), await client.keyspace(f"{KEYSPACE}-locks")]
        self._watching = asyncio.create_task(self._watch(await self._spaces[-2].watch(after=0)))

    async def _watch(self, watch: AsyncWatch) -> None:
        try:
            await given(watch, self._found)
        except Rejected as exc:
            # All nodes have started anew behind a flush. What came before must be right all the same.
            if exc.code is not Code.COMPACTED:
                raise
            self._compacted_at = watch.revision

    async def run(self, seconds: float) -> None:
        """Work for so long; then wait for what is under way."""
        work = [
            *(self._history.write(space, f"w{n}") for n, space in enumerate(self._spaces[0:4:2])),
            self._history.read(self._spaces[4]),
            *(self._history.hold(space, f"h{n}") for n, space in enumerate(self._spaces[1::2])),
        ]
        tasks = [asyncio.create_task(each) for each in work]
        await asyncio.sleep(seconds)
        self._history.stop.set()
        await asyncio.gather(*tasks)

    async def settle(self) -> None:
        """Write once more, and wait until the watch has given all."""
        assert self._watching is not None
        while not await self._history.one(self._spaces[-2], {END: b""}):
            await asyncio.sleep(0.1)
        await self._watching

    def faults(self) -> list[str]:
        """What is wrong with what was watched, read and held."""
        writes, reads, upto = self._history.writes, self._history.reads, self._compacted_at
        if upto is not None:
            writes = [write for write in writes if write.revision <= upto]
            reads = [read for read in reads if read.revision <= upto]
        return watched.faults_of(writes, reads, self._found) + held.faults_of(self._history.holds)

    def __str__(self) -> str:
        history = self._history
        return f"{len(history.writes)} writes watched, {len(history.holds)} holds"

    async def close(self) -> None:
        """End all clients."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))
