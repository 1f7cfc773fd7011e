"""A watch on keys of a key space: each change once, in order. Made by `AsyncKeySpace.watch`.

The leader pushes changes, and marks that say how far it is. When it is gone, the watch goes on at the next
leader, after the last change or mark that came. If the caller takes too few changes, the node is told to
stop, and the watch begins again later. So its memory is bounded.

Invariant: a change is given once. `revision` rises only once everything up to it was given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from stele.client import reprs
from stele.client.tablet import TabletClient
from stele.model.errors import Closed, Code, Rejected, Retryable, SteleError, let_go
from stele.rpc.errors import error_from_pb
from stele.rpc.proto import tserver_pb2

VERSION_NEEDED = 2
"""The cluster version from which all nodes push changes, and know leases."""
_WAITING_BYTES_MAX = 8 << 20
_SILENT_S = 10.0
"""A node sends a mark every 2 s. If it sends nothing for this long, the watch asks again."""
_PAUSE_S = 0.05
_revision = attrgetter("revision")


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A change of one key. `value`: None if the key was removed. `revision`: the revision of the write.

    Example:
        >>> stele.KeyChange(b"colour", b"blue", revision=7).value
        b'blue'
    """

    key: bytes
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class KeyWrite:
    """The watched changes of one write. `changes`: a `KeyChange` for each key.

    Example:
        >>> with space.watch(prefix="c") as watch:
        ...     revision = space.write({"colour": "blue", "count": "2", "owner": "me"})
        ...     write = next(watch)
        >>> [change.key for change in write.changes], write.revision == revision
        ([b'colour', b'count'], True)
    """

    revision: int
    changes: tuple[KeyChange, ...]


class AsyncWatch:
    """Changes of keys as they are committed: `async for write in await space.watch(prefix="app/")`.

    Iterating gives a `KeyWrite` for each write. It waits for the next one, and goes on by itself at a new leader. Use it in
    `async with`, or call `close`.

    Example:
        >>> async def first_change(client):
        ...     space = await client.create_keyspace("limits")
        ...     async with await space.watch("rows") as watch:
        ...         await space.insert("rows", "10")
        ...         async for write in watch:
        ...             return write.changes[0].value
        >>> client.run(first_change(client.asynchronous))
        b'10'
    """

    def __init__(
        self,
        name: str,
        tablet: TabletClient,
        key: bytes,
        *,
        prefix: bool,
        after: int | None,
        timeout_s: float,
        cluster_id: str,
    ) -> None:
        self._name = name
        self._tablet = tablet
        self._key = key
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._cluster_id = cluster_id
        self._revision = 0 if after is None else after
        self._received = after  # everything up to it has come
        self._incarnation: int | None = None
        self._asked = tablet.add_watch(self)  # the number of the last attempt
        self._begins = False  # an attempt waits for its answer
        self._runs = 0  # the attempt that pushes; 0: none
        self._early: list[tserver_pb2.KvPushPB] = []  # came before the answer
        self._broke: dict[int, SteleError] = {}  # attempts that ended before their answer was seen
        self._ready: deque[tuple[KeyWrite | int, int]] = deque()  # (a write or a mark, bytes that it frees)
        self._ready_bytes = 0
        self._error: SteleError | None = None  # why the last attempt ended
        self._stalled_by = ""
        self._came = asyncio.Event()
        self._turn = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return reprs.shown_as(self, self._name, self._cluster_id)

    @property
    def revision(self) -> int:
        """All changes up to this revision were given. Another watch may begin after it.

        Example:
            >>> with space.watch() as watch:
            ...     watch.revision == space.snapshot().revision
            True
        """
        return self._revision

    @property
    def stalled_by(self) -> str:
        """Why no change can come at the moment; empty while a leader pushes. The watch goes on by itself.

        Example:
            >>> with space.watch() as watch:
            ...     watch.stalled_by
            ''
        """
        return self._stalled_by

    async def begin(self) -> None:
        """Begin, at the leader. Called by `AsyncKeySpace.watch`."""
        self._tablet.ensure_open()
        request = tserver_pb2.KvWatchRequest(
            number=self._asked,
            key=self._key,
            prefix=self._prefix,
            after=self._received or 0,
            from_now=self._received is None,
        )
        self._begins = True
        try:
            answer = await self._tablet.watch(request, timeout_s=self._timeout_s)
        finally:
            self._asked, self._begins = request.number, False
            early, self._early = self._early, []
            broke, self._broke = self._broke, {}
        if self._incarnation not in (None, answer.tablet_incarnation):
            raise Rejected(
                f"key space {self._name} was recovered from one replica, so changes may have been lost: read all keys, and "
                "watch from that read's revision",
                code=Code.COMPACTED,
            )
        self._incarnation, self._runs, self._stalled_by = answer.tablet_incarnation, answer.number, ""
        if self._received is None:
            self._received = self._revision = answer.revision
        for push in early:
            self.pushed(push)
        if (error := broke.get(answer.number)) is not None:
            self.broken(answer.number, error)

    # --- Watching

    def pushed(self, push: tserver_pb2.KvPushPB) -> bool:
        """Take what a node has pushed. Returns whether this watch wants more from this attempt."""
        if self._begins:
            self._early.append(push)
            return True
        if push.number != self._runs:
            return False
        if push.HasField("error"):
            self.broken(push.number, error_from_pb(push.error))
            return True
        items: list[KeyWrite | int] = [
            KeyWrite(
                revision,
                tuple(KeyChange(c.key, None if c.deleted else c.value, revision) for c in changes),
            )
            for revision, changes in groupby(push.changes, _revision)
        ]
        size = push.ByteSize()
        self._ready_bytes += size
        self._ready.extend((item, 0) for item in items)
        self._ready.append((push.revision, size))
        self._received = push.revision
        if self._ready_bytes > _WAITING_BYTES_MAX:
            self._runs = 0  # begins again here once these are taken
        self._came.set()
        return self._runs != 0

    def broken(self, number: int, error: SteleError) -> None:
        """Note that the stream of this attempt has ended."""
        if self._begins:
            self._broke[number] = error
        elif number == self._runs:
            self._runs, self._error, self._stalled_by = 0, error, str(error.args[0])
            self._came.set()

    # --- for the caller

    def __aiter__(self) -> AsyncIterator[KeyWrite]:
        return self

    async def __anext__(self) -> KeyWrite:
        async with self._turn:
            while not self._closed:
                if (write := self._take()) is not None:
                    return write
                if self._runs:
                    await self._wait()
                else:
                    await self._go_on()
            raise StopAsyncIteration

    def _take(self) -> KeyWrite | None:
        """Take the next write that has come; None if there is none."""
        while self._ready:
            item, size = self._ready.popleft()
            self._ready_bytes -= size
            if isinstance(item, KeyWrite):
                self._revision = item.revision
                return item
            self._revision = item
        return None

    async def _wait(self) -> None:
        self._came.clear()
        try:
            async with asyncio.timeout(_SILENT_S):
                await self._came.wait()
        except TimeoutError:
            self._runs, self._stalled_by = 0, f"its node has sent nothing for {_SILENT_S:g} s"

    async def _go_on(self) -> None:
        """Begin again where it was, at whoever leads now.

        Raises:
            Rejected: no node can go on: COMPACTED, NOT_FOUND, Closed.
        """
        error, self._error = self._error, None
        if error is not None and not isinstance(error, Retryable) and error.code not in _ELSEWHERE:
            self._error = error
            raise error
        try:
            await self.begin()
        except Retryable as exc:
            self._stalled_by = str(exc.args[0])
            let_go(exc)
            await asyncio.sleep(_PAUSE_S)
        except Rejected as exc:
            if not isinstance(exc, Closed):
                self._error = exc
            raise

    async def close(self) -> None:
        """End the watch. Whoever waits for a change gets none.

        Example:
            >>> watch = space.watch("colour")
            >>> watch.close()
        """
        if not self._closed:
            self._closed = True
            self._came.set()
            self._tablet.remove_watch(self._asked)

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


_ELSEWHERE = (Code.TABLET_DELETED, Code.NOT_FOUND, Code.WRONG_NODE, Code.STALE_INCARNATION)
"""Codes of a node that refuses the tablet. The masters know where the tablet is now, or that it is gone."""
