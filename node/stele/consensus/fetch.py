"""The receiving side's transfer of files: several chunks at a time, checked, resumed, rate limited. No tablets here.

Invariant: a file that `Fetcher.fetch` has returned for is whole, has the checksum its source stated, and is synced.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import google_crc32c

from stele.consensus.copy_source import CopyFile, SessionInfo, sum_file
from stele.consensus.files import sync_directory, sync_file
from stele.model.errors import Code, Corrupt, Retryable, SteleError
from stele.model.ids import OpId, ReplicaId, TabletId

CHUNK_BYTES = 8 << 20
CHUNKS_AT_ONCE = 4
_ATTEMPTS = 40
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 2.0


class CopySource(Protocol):
    """The giving node, as its receiver calls it: over gRPC, or in one process in tests."""

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        """Open a session."""

    def fetch(
        self, session_id: str, name: str, offset: int, length: int
    ) -> AsyncIterator[tuple[int, bytes, int]]:
        """(offset, bytes, CRC-32C) frames in order."""

    async def keep_alive(self, session_id: str) -> int:
        """Renew the lease."""

    async def end(self, session_id: str, success: bool) -> None:
        """Close the session."""


InThread = Callable[..., Awaitable[Any]]


class RateLimit:
    """Lets `bytes_per_second` through on average; 0 lets everything through."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until `size` more bytes are due."""
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        wait = self._free_at - now
        self._free_at = max(now, self._free_at) + size / self._rate
        if wait > 0:
            await asyncio.sleep(wait)


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: CopyFile
    offset: int
    length: int


class Fetcher:
    """Brings the files of one session into `directory`. `progress(n)` is told of bytes as they are written."""

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

    async def fetch(self, session: SessionInfo) -> None:
        """Fetch what is missing. A file that is here already, whole and right, is kept.

        Raises:
            Rejected: NOT_FOUND, the session has ended at its source.
            Retryable: the source cannot be reached.
            Corrupt: a file arrived with another checksum than its source stated.
        """
        wanted = {f.name for f in session.files}
        for stray in [p for p in self._directory.iterdir() if p.name not in wanted]:
            stray.unlink()
        chunks: asyncio.Queue[_Chunk] = asyncio.Queue()
        for file in session.files:
            if not await self._in_thread(self._have, file):
                await self._in_thread(self._make_room, file)
                for offset in range(0, file.size, CHUNK_BYTES):
                    chunks.put_nowait(_Chunk(file, offset, min(CHUNK_BYTES, file.size - offset)))
        async with asyncio.TaskGroup() as group:
            for _ in range(CHUNKS_AT_ONCE):
                group.create_task(self._work(session.session_id, chunks))
        for file in session.files:
            await self._in_thread(self._verify, file)
        await self._in_thread(sync_directory, self._directory)

    def _have(self, file: CopyFile) -> bool:
        path = self._directory / file.name
        if not path.exists() or path.stat().st_size != file.size or sum_file(path) != file.crc32c:
            return False
        self._progress(file.size)
        return True

    def _make_room(self, file: CopyFile) -> None:
        with (self._directory / file.name).open("wb") as f:
            f.truncate(file.size)

    def _verify(self, file: CopyFile) -> None:
        path = self._directory / file.name
        sync_file(path)
        if sum_file(path) != file.crc32c:
            path.unlink()
            raise Corrupt(f"{file.name}: {file.size} bytes arrived with another checksum than their source's")

    async def _work(self, session_id: str, chunks: asyncio.Queue[_Chunk]) -> None:
        while not chunks.empty():
            chunk = chunks.get_nowait()
            await self._fetch_chunk(session_id, chunk)

    async def _fetch_chunk(self, session_id: str, chunk: _Chunk) -> None:
        """One chunk, resumed where it broke."""
        path = self._directory / chunk.file.name
        at, end = chunk.offset, chunk.offset + chunk.length
        delay_s, attempts = _RETRY_FIRST_S, 0
        fd = os.open(path, os.O_WRONLY)
        try:
            while at < end:
                try:
                    async for offset, data, crc in self._source.fetch(
                        session_id, chunk.file.name, at, end - at
                    ):
                        if offset != at or google_crc32c.value(data) != crc:
                            raise Retryable(f"{chunk.file.name}: a frame at {offset} arrived damaged")
                        await self._rate.take(len(data))
                        await self._in_thread(os.pwrite, fd, data, at)
                        at += len(data)
                        self._progress(len(data))
                        attempts, delay_s = 0, _RETRY_FIRST_S
                except Retryable:
                    attempts += 1
                    if attempts >= _ATTEMPTS:
                        raise
                    await asyncio.sleep(delay_s)
                    delay_s = min(delay_s * 2, _RETRY_MAX_S)
            # Synced chunk by chunk, while others arrive: one sync at the end would take as long as the transfer.
            await self._in_thread(os.fdatasync, fd)
        finally:
            os.close(fd)


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
