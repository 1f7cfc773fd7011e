"""Fetches a copy's files: several chunks at a time, checked, resumed, with a bounded rate. Knows no tablets.

Its own threads receive and write the bytes; the event loop only assigns chunks.

Invariants: a file gets its name only once all its bytes have arrived unchanged, are synced, and match the
checksums inside the file. Once `Fetcher.fetch` has returned or raised, none of its threads touches the
directory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import google_crc32c

from stele.consensus.copy_source import CopyFile, SessionInfo
from stele.consensus.files import sync_directory
from stele.consensus.ports import InThread
from stele.consensus.shielded import together, until_done, until_finished
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import OpId, ReplicaId, TabletId
from stele.tablet.checksums import RangeSums, SumsInside
from stele.tablet.files import sum_at, translate

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
CHUNK_BYTES = 32 << 20
CHUNK_BYTES_MIN = 64 << 10
"""Smallest chunk, also for a slow copy, because each chunk costs some memory and several messages."""
CHUNKS_AT_ONCE = 4
PART = ".part"
_PIECE_BYTES = 8 << 20
"""A chunk is synced in pieces of this size while more of it arrives."""
SILENT_MAX_S = 30.0
"""A source that sends nothing for this long is given up. Another source may be available."""
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 2.0


Piece: TypeAlias = "bytes | pa.Buffer"
"""The bytes of a file in one frame. They are not copied on their way to the disk."""


class CopyFrames(Iterable[tuple[int, Piece, int]], Protocol):
    """The frames (offset, bytes, CRC-32C of the bytes) of a read, in order, as they arrive.

    Iterated once, in one thread; raises SteleError.
    """

    def cancel(self) -> None:
        """End a read that waits for a frame. Called from any thread, after `stop` was set."""


class CopySource(Protocol):
    """The source of a copy, as its receiver calls it: over the network, or in the same process in tests."""

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        """Open a session."""

    def fetch(self, session_id: str, name: str, offset: int, length: int, stop: Event) -> CopyFrames:
        """Read a part of a file of the session begun last.

        Nothing happens before the first iteration. An iteration ends soon after `stop` was set.
        """

    async def keep_alive(self, session_id: str) -> int:
        """Renew the lease."""

    async def end(self, session_id: str, success: bool, damage: str) -> None:
        """Close the session.

        `damage`: what is wrong with its files, "" for nothing. The source then checks its own.
        """


class RateLimit:
    """Lets `bytes_per_second` through on average; 0 lets everything through."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._waiting: set[asyncio.Future[None]] = set()

    def change(self, bytes_per_second: int) -> None:
        """Change the rate. Callers that wait because of the old rate continue at once."""
        if bytes_per_second == self._rate:
            return
        self._rate, self._free_at = bytes_per_second, 0.0
        for waiting in self._waiting:
            waiting.cancel()

    def at_once(self, most: int) -> int:
        """Return how many bytes to ask for at a time, so that they come evenly: those of one second, at most
        `most`.

        It is at least CHUNK_BYTES_MIN. At a lower rate, `take` makes the next chunk wait longer.
        """
        return min(most, max(self._rate, CHUNK_BYTES_MIN)) if self._rate else most

    async def take(self, size: int) -> None:
        """Wait until `size` more bytes are due."""
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        wait = self._free_at - now
        self._free_at = max(now, self._free_at) + size / self._rate
        if wait > 0:
            await self._wait(wait)

    async def _wait(self, seconds: float) -> None:
        waiting = asyncio.ensure_future(asyncio.sleep(seconds))
        self._waiting.add(waiting)
        try:
            await asyncio.wait((waiting,))
        finally:
            waiting.cancel()
            self._waiting.discard(waiting)


class _Landing:
    """A file that is being written. Its name ends with PART until it is complete."""

    def __init__(self, file: CopyFile, directory: Path) -> None:
        self.file = file
        self.path = directory / (file.name + PART)
        self.sums: RangeSums | None = None
        self._left = file.size
        self._lock = Lock()

    def make_room(self) -> None:
        """Allocate disk blocks for the whole file.

        This finds a disk that is too small before bytes are sent.
        """
        try:
            with self.path.open("wb") as f:
                if self.file.size:
                    os.posix_fallocate(f.fileno(), 0, self.file.size)
        except OSError as exc:
            self.path.unlink(missing_ok=True)
            raise translate(exc, f"making room for {self.file.name}") from exc
        if not self.file.size:
            self.settle(0, 0)

    def settle(self, begin: int, end: int) -> None:
        """Sync a part of the file that was written, and compare its bytes in the kernel with the file's
        checksums.

        After the last part the file is renamed to its final name.
        """
        try:
            with self.path.open("rb", buffering=0) as f:
                os.fdatasync(f.fileno())
                if self.sums is not None:
                    self.sums.compare(begin, end, lambda offset, length: sum_at(f.fileno(), offset, length))
                # The next bytes can use these pages. A whole tablet in the page cache would push out the
                # node's working set. Where a hypervisor must find memory for each page, that would cost more
                # than the transfer.
                os.posix_fadvise(f.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
                with self._lock:
                    self._left -= end - begin
                    if self._left:
                        return
                os.fsync(f.fileno())
            os.rename(self.path, self.path.with_name(self.file.name))
        except OSError as exc:
            raise translate(exc, f"syncing {self.file.name}") from exc


@dataclass(slots=True)
class _Chunk:
    """A range of a file that is fetched. It ends at the offset `end`. Bytes up to `at` are written; a sync
    has begun up to `settled`.
    """

    landing: _Landing
    settled: int
    at: int
    end: int
    settling: Future[None] | None = None


def _chunks_of(landings: Iterable[_Landing], rate: RateLimit) -> Iterator[_Chunk]:
    """Yield all chunks of these files. They are made one by one: there may be many, and the rate may change."""
    for landing in landings:
        offset, size = 0, landing.file.size
        while offset < size:
            end = min(offset + rate.at_once(CHUNK_BYTES), size)
            yield _Chunk(landing, offset, offset, end)
            offset = end


class Fetcher:
    """Fetches the files of one session into `directory`, once. `progress(n)` is called as n bytes are
    written.

    `directory` holds the files of one source only: a file there is taken for the source's file of the same
    name.
    """

    def __init__(
        self,
        source: CopySource,
        directory: Path,
        in_thread: InThread,
        rate: RateLimit,
        progress: Callable[[int], None],
        sums: SumsInside,
    ) -> None:
        self._source = source
        self._directory = directory
        self._in_thread = in_thread
        self._rate = rate
        self._progress = progress
        self._sums = sums
        self._loop = asyncio.get_running_loop()
        self._stop = Event()
        self._under_way: set[CopyFrames] = set()
        self._moved_at = self._loop.time()
        self._unsettled = False
        self._threads = ThreadPoolExecutor(2 * CHUNKS_AT_ONCE, "stele-copy")

    async def fetch(self, session: SessionInfo) -> frozenset[str]:
        """Fetch the files that are missing. The last file of the session is always fetched (see Checkpoint).

        Returns the names of files whose own checksums were compared as they arrived.

        Raises:
            Rejected: NOT_FOUND, the session has ended at its source.
            Retryable: nothing came from the source for SILENT_MAX_S; DISK_FULL.
            Corrupt: a disk failed, or the source's bytes do not match the checksums inside the file.
        """
        wanted = {f.name for f in session.files}
        for stray in [p for p in self._directory.iterdir() if p.name not in wanted]:
            stray.unlink()
        landings = list[_Landing]()
        for file in session.files:
            if file is session.files[-1] or not await self._in_thread(self._have, file):
                landing = _Landing(file, self._directory)
                await until_finished(self._in_thread(landing.make_room))
                landings.append(landing)
        self._moved_at = self._loop.time()
        try:
            left = iter(landings)
            await together(self._know_sums(session.session_id, left) for _ in range(CHUNKS_AT_ONCE))
            self._moved_at = self._loop.time()
            chunks = _chunks_of(landings, self._rate)
            await together(self._work(session.session_id, chunks) for _ in range(CHUNKS_AT_ONCE))
        finally:
            self._stop.set()
            for frames in list(self._under_way):
                frames.cancel()
            await until_done(asyncio.ensure_future(self._loop.run_in_executor(None, self._threads.shutdown)))
        await self._in_thread(sync_directory, self._directory)
        return frozenset(
            landing.file.name for landing in landings if landing.sums is not None and not landing.sums.left
        )

    def _have(self, file: CopyFile) -> bool:
        path = self._directory / file.name
        if not path.exists() or path.stat().st_size != file.size:
            return False
        self._progress(file.size)
        return True

    async def _know_sums(self, session_id: str, landings: Iterator[_Landing]) -> None:
        """Ask for the checksums that each file carries."""
        for landing in landings:
            arrived = [0]
            ask = partial(self._ask_for_sums, session_id, landing.file, arrived)
            position = partial(arrived.__getitem__, 0)
            landing.sums = await self._retried(session_id, landing.file.name, ask, position)
            await self._rate.take(arrived[0])

    def _ask_for_sums(self, session_id: str, file: CopyFile, arrived: list[int]) -> RangeSums | None:
        def read(offset: int, length: int) -> bytes:
            pieces = []
            with closing(self._frames(session_id, file.name, offset, offset + length)) as frames:
                for data in frames:
                    pieces.append(data)
                    arrived[0] += len(data)
                    self._loop.call_soon_threadsafe(self._moved, 0)
            return b"".join(pieces)

        return self._sums(file.name, file.size, read)

    async def _work(self, session_id: str, chunks: Iterator[_Chunk]) -> None:
        settling: Future[None] | None = None
        for chunk in chunks:
            chunk.settling = settling
            await self._rate.take(chunk.end - chunk.at)
            self._moved_at = self._loop.time()  # while this waited, nothing was requested from the source
            await self._fetch_chunk(session_id, chunk)
            settling = chunk.settling
        if settling is not None:
            await asyncio.wrap_future(settling)

    async def _fetch_chunk(self, session_id: str, chunk: _Chunk) -> None:
        """Fetch and write one chunk. After a broken connection, continue where it broke."""
        name, bring = chunk.landing.file.name, partial(self._bring, session_id, chunk)
        await self._retried(session_id, name, bring, lambda: chunk.at)

    async def _retried(
        self, session_id: str, name: str, call: Callable[[], T], position: Callable[[], int]
    ) -> T:
        """Run `call` in a thread. Repeat it after Retryable errors, as long as some file makes progress.

        The pauses between attempts grow. They begin short again if `position` has moved.
        """
        delay_s = _RETRY_FIRST_S
        while True:
            begun_at = position()
            try:
                return await self._loop.run_in_executor(self._threads, call)
            except Retryable as exc:
                if exc.code is Code.DISK_FULL or self._unsettled:
                    raise
                if position() > begun_at:
                    delay_s = _RETRY_FIRST_S
                silent_s = self._loop.time() - self._moved_at
                if silent_s >= SILENT_MAX_S:
                    raise Retryable(
                        f"no byte of {name} for {silent_s:.0f} s: {exc.args[0]}", code=exc.code
                    ) from exc
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _RETRY_MAX_S)
            await self._ask_for(session_id)

    def _moved(self, size: int) -> None:
        self._moved_at = self._loop.time()
        self._progress(size)

    async def _ask_for(self, session_id: str) -> None:
        """Ask the source whether it knows the session.

        Raises:
            Rejected: NOT_FOUND, the source does not know it, as after a restart.
        """
        try:
            await self._source.keep_alive(session_id)
        except Retryable:
            return

    def _bring(self, session_id: str, chunk: _Chunk) -> None:
        """Fetch and write the rest of a chunk. Blocks."""
        try:
            with chunk.landing.path.open("r+b", buffering=0) as f:
                self._receive(session_id, chunk, f.fileno())
        except OSError as exc:
            raise translate(exc, f"writing {chunk.landing.file.name}") from exc

    def _receive(self, session_id: str, chunk: _Chunk, fd: int) -> None:
        with closing(self._frames(session_id, chunk.landing.file.name, chunk.at, chunk.end)) as frames:
            for data in frames:
                view = memoryview(data)
                while view:
                    written = os.pwrite(fd, view, chunk.at)
                    chunk.at += written
                    view = view[written:]
                if chunk.at - chunk.settled >= _PIECE_BYTES or chunk.at == chunk.end:
                    self._settle(chunk)
                self._loop.call_soon_threadsafe(self._moved, len(data))

    def _frames(self, session_id: str, name: str, begin: int, end: int) -> Generator[Piece, None, None]:
        """The bytes of a file from `begin` to `end` as they arrive; each frame is compared with its checksum.

        Blocks.
        """
        frames, at = self._source.fetch(session_id, name, begin, end - begin, self._stop), begin
        self._under_way.add(frames)
        try:
            for offset, data, crc in frames:
                if self._stop.is_set():
                    raise Retryable("the copy was stopped")
                if offset != at or len(data) > end - offset or google_crc32c.value(data) != crc:
                    raise Retryable(f"{name}: a frame at {offset} arrived damaged")
                at += len(data)
                yield data
        finally:
            self._under_way.discard(frames)
        if at < end:
            raise Retryable(f"{name}: the source ended at {at} of {end} bytes")

    def _settle(self, chunk: _Chunk) -> None:
        """Have another thread sync what was written, after the previous sync of this chunk has ended."""
        if chunk.settling is not None:
            chunk.settling.result()
        chunk.settling = self._threads.submit(self._settle_piece, chunk.landing, chunk.settled, chunk.at)
        chunk.settled = chunk.at

    def _settle_piece(self, landing: _Landing, begin: int, end: int) -> None:
        try:
            landing.settle(begin, end)
        except SteleError:
            self._unsettled = True  # the connection is not at fault, so fetching again would not help
            raise


def session_lost(error: SteleError) -> bool:
    """Whether the error means that a new session must be begun."""
    return error.code is Code.NOT_FOUND
