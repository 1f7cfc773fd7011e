"""The receiving side's transfer of files: several chunks at a time, checked, resumed, rate limited. No tablets here.

Bytes arrive and are written on threads of the fetch's own; the event loop only deals out chunks. Invariant: a file that
`Fetcher.fetch` has returned for is whole, has the checksum its source stated, and is synced; and once it has returned
or raised, no thread of it touches the directory any more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, Protocol

import google_crc32c
import pyarrow as pa

from stele.consensus.copy_source import CopyFile, SessionInfo, sum_file
from stele.consensus.files import sync_directory
from stele.model.errors import Code, Corrupt, Retryable, SteleError
from stele.model.ids import OpId, ReplicaId, TabletId
from stele.tablet.files import translate

CHUNK_BYTES = 32 << 20
CHUNKS_AT_ONCE = 4
_PIECE_BYTES = 8 << 20
"""So much of a chunk is synced at a time, while more of it arrives."""
_SUM_BYTES = 256 << 10
_ATTEMPTS = 40
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 2.0


class CopyFrames(Iterable[tuple[int, Any, int]], Protocol):
    """(offset, bytes, CRC-32C of them) in order, as they arrive. Iterated once, in one thread; raises SteleError."""

    def cancel(self) -> None:
        """End a read that waits for a frame. Any thread; once `stop` was set."""


class CopySource(Protocol):
    """The giving node, as its receiver calls it: over the network, or in one process in tests."""

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        """Open a session."""

    def fetch(self, session_id: str, name: str, offset: int, length: int, stop: Event) -> CopyFrames:
        """A part of a file of the session begun last. Nothing happens before it is iterated; nobody waits in it long
        after `stop` was set.
        """

    async def keep_alive(self, session_id: str) -> int:
        """Renew the lease."""

    async def end(self, session_id: str, success: bool, damage: str) -> None:
        """Close the session. `damage`: what is wrong with the files it gave, "" for nothing; the source looks at its own."""


InThread = Callable[..., Awaitable[Any]]


class RateLimit:
    """Lets `bytes_per_second` through on average; 0 lets everything through."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def at_once(self, most: int) -> int:
        """How many bytes to ask for at a time, so that they come evenly: what a second lets through, at most `most`."""
        return min(most, self._rate) if self._rate else most

    async def take(self, size: int) -> None:
        """Wait until `size` more bytes are due."""
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        wait = self._free_at - now
        self._free_at = max(now, self._free_at) + size / self._rate
        if wait > 0:
            await asyncio.sleep(wait)


class _Landing:
    """A file that is being written. Bytes that are synced are read back, summed in order, and let go of by the cache."""

    def __init__(self, file: CopyFile, path: Path) -> None:
        self.file = file
        self.path = path
        self._synced: dict[int, int] = {}
        self._summed = 0
        self._crc = 0
        self._summing = False
        self._lock = Lock()

    def settle(self, begin: int, end: int) -> None:
        """Bytes are written: sync them, and sum what is synced from the file's beginning on, unless a thread does."""
        try:
            with self.path.open("rb", buffering=0) as f:
                os.fdatasync(f.fileno())
                with self._lock:
                    self._synced[begin] = end
                    if self._summing:
                        return
                    self._summing = True
                while True:
                    with self._lock:
                        end = self._synced.pop(self._summed, 0)
                        if not end:
                            self._summing = False
                            return
                    self._sum_to(f.fileno(), end)
        except OSError as exc:
            raise translate(exc, f"syncing {self.file.name}") from exc

    def _sum_to(self, fd: int, end: int) -> None:
        buffer = pa.py_buffer(bytearray(_SUM_BYTES))
        view, begin = memoryview(buffer), self._summed
        while self._summed < end:
            size = os.preadv(fd, [view[: end - self._summed]], self._summed)
            if not size:
                raise Corrupt(f"{self.file.name}: ends at {self._summed} bytes; expected {end}")
            self._crc = google_crc32c.extend(self._crc, buffer.slice(0, size))
            self._summed += size
        # The next bytes get these pages. Fresh ones for a whole tablet would push out what the node works with, and
        # where a hypervisor has to find memory for each of them they cost more than the transfer.
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Sync what the file system notes of the file, and compare.

        Raises:
            Corrupt: another checksum than its source's; the file is removed.
        """
        with self.path.open("rb") as f:
            os.fsync(f.fileno())
        if self._summed != self.file.size or self._crc != self.file.crc32c:
            self.path.unlink()
            raise Corrupt(
                f"{self.file.name}: {self.file.size} bytes arrived with another checksum than their source's"
            )


@dataclass(slots=True)
class _Chunk:
    """From `settled` to `at` is written and not yet on its way to be synced; from `at` to `end` has to arrive."""

    landing: _Landing
    settled: int
    at: int
    end: int
    settling: Future[None] | None = None


class Fetcher:
    """Brings the files of one session into `directory`, once. `progress(n)` is told of bytes as they are written."""

    def __init__(
        self,
        source: CopySource,
        directory: Path,
        in_thread: InThread,
        rate: RateLimit,
        progress: Callable[[int], None],
    ) -> None:
        self._source = source
        self._directory = directory
        self._in_thread = in_thread
        self._rate = rate
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._stop = Event()
        self._under_way: set[CopyFrames] = set()
        self._threads = ThreadPoolExecutor(2 * CHUNKS_AT_ONCE, "stele-copy")

    async def fetch(self, session: SessionInfo) -> None:
        """Fetch what is missing. A file that is here already, whole and right, is kept.

        Raises:
            Rejected: NOT_FOUND, the session has ended at its source.
            Retryable: the source cannot be reached; DISK_FULL.
            Corrupt: a file arrived with another checksum than its source stated, or a disk failed.
        """
        wanted = {f.name for f in session.files}
        for stray in [p for p in self._directory.iterdir() if p.name not in wanted]:
            stray.unlink()
        landings, chunks = [], asyncio.Queue[_Chunk]()
        size = self._rate.at_once(CHUNK_BYTES)
        for file in session.files:
            if not await self._in_thread(self._have, file):
                landing = _Landing(file, self._directory / file.name)
                await self._in_thread(self._make_room, landing)
                landings.append(landing)
                for offset in range(0, file.size, size):
                    chunks.put_nowait(_Chunk(landing, offset, offset, min(offset + size, file.size)))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(CHUNKS_AT_ONCE):
                    group.create_task(self._work(session.session_id, chunks))
        finally:
            self._stop.set()
            for frames in list(self._under_way):
                frames.cancel()
            await until_done(asyncio.ensure_future(self._loop.run_in_executor(None, self._threads.shutdown)))
        for landing in landings:
            await self._in_thread(landing.finish)
        await self._in_thread(sync_directory, self._directory)

    def _have(self, file: CopyFile) -> bool:
        path = self._directory / file.name
        if not path.exists() or path.stat().st_size != file.size or sum_file(path) != file.crc32c:
            return False
        with path.open("rb") as f:
            os.fsync(f.fileno())
        self._progress(file.size)
        return True

    def _make_room(self, landing: _Landing) -> None:
        """Blocks for the whole file, so that a disk too small for it is met before its bytes travel."""
        try:
            with landing.path.open("wb") as f:
                if landing.file.size:
                    os.posix_fallocate(f.fileno(), 0, landing.file.size)
        except OSError as exc:
            landing.path.unlink(missing_ok=True)
            raise translate(exc, f"making room for {landing.file.name}") from exc

    async def _work(self, session_id: str, chunks: asyncio.Queue[_Chunk]) -> None:
        settling: Future[None] | None = None
        while not chunks.empty():
            chunk = chunks.get_nowait()
            chunk.settling = settling
            await self._rate.take(chunk.end - chunk.at)
            await self._fetch_chunk(session_id, chunk)
            settling = chunk.settling
        if settling is not None:
            await asyncio.wrap_future(settling)

    async def _fetch_chunk(self, session_id: str, chunk: _Chunk) -> None:
        """One chunk, written; resumed where it broke."""
        delay_s, attempts = _RETRY_FIRST_S, 0
        while True:
            begun_at = chunk.at
            try:
                await self._loop.run_in_executor(self._threads, self._bring, session_id, chunk)
                return
            except Retryable as exc:
                if exc.code is Code.DISK_FULL:
                    raise
                if chunk.at > begun_at:
                    delay_s, attempts = _RETRY_FIRST_S, 0
                attempts += 1
                if attempts >= _ATTEMPTS:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _RETRY_MAX_S)
            await self._ask_for(session_id)

    async def _ask_for(self, session_id: str) -> None:
        """A source that has restarted knows no session and may listen for Flight elsewhere: raises NOT_FOUND."""
        try:
            await self._source.keep_alive(session_id)
        except Retryable:
            return

    def _bring(self, session_id: str, chunk: _Chunk) -> None:
        """The rest of a chunk, written. Blocks."""
        try:
            with chunk.landing.path.open("r+b", buffering=0) as f:
                self._receive(session_id, chunk, f.fileno())
        except OSError as exc:
            raise translate(exc, f"writing {chunk.landing.file.name}") from exc

    def _receive(self, session_id: str, chunk: _Chunk, fd: int) -> None:
        name = chunk.landing.file.name
        frames = self._source.fetch(session_id, name, chunk.at, chunk.end - chunk.at, self._stop)
        self._under_way.add(frames)
        try:
            for offset, data, crc in frames:
                if self._stop.is_set():
                    raise Retryable("the copy was stopped")
                size = len(data)
                if offset != chunk.at or size > chunk.end - offset or google_crc32c.value(data) != crc:
                    raise Retryable(f"{name}: a frame at {offset} arrived damaged")
                view = memoryview(data)
                while view:
                    written = os.pwrite(fd, view, chunk.at)
                    chunk.at += written
                    view = view[written:]
                if chunk.at - chunk.settled >= _PIECE_BYTES or chunk.at == chunk.end:
                    self._settle(chunk)
                self._loop.call_soon_threadsafe(self._progress, size)
        finally:
            self._under_way.discard(frames)
        if chunk.at < chunk.end:
            raise Retryable(f"{name}: the source ended at {chunk.at} of {chunk.end} bytes")

    def _settle(self, chunk: _Chunk) -> None:
        """Have what was written synced by another thread, once that is through with what came before."""
        if chunk.settling is not None:
            chunk.settling.result()
        chunk.settling = self._threads.submit(chunk.landing.settle, chunk.settled, chunk.at)
        chunk.settled = chunk.at


async def until_done(future: asyncio.Future[Any]) -> None:
    """What runs in a thread has ended, however often whoever waits is cancelled meanwhile."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            cancelled = True
    if not future.cancelled():
        future.exception()  # for who asks
    if cancelled:
        raise asyncio.CancelledError


def first_stele_error(group: BaseException) -> SteleError | None:
    """The SteleError inside an exception group, if there is one."""
    if isinstance(group, SteleError):
        return group
    if isinstance(group, BaseExceptionGroup):
        for inner in group.exceptions:
            found = first_stele_error(inner)
            if found is not None:
                return found
    return None


def session_lost(error: SteleError | None) -> bool:
    """Whether a new session has to be begun."""
    return error is not None and error.code is Code.NOT_FOUND
