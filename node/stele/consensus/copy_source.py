"""The giving side of a tablet copy: sessions on checkpoints, each with a lease. Served by stele.tserver.

A session has a directory of hard links to a flushed state, and an anchor that keeps the log from there on.
Its receiver renews the session's lease. When the session ends, or its lease runs out, its directory and its
anchor are removed.

Invariant: while a session lives, its files do not change, and the log after its checkpoint is kept. A replica
whose files cannot be read becomes FAILED. Otherwise it would be asked for a copy again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import structlog

from stele.consensus.files import make_directory, remove_tree
from stele.consensus.ports import Host
from stele.consensus.replica import Replica
from stele.consensus.shielded import ShieldedTasks
from stele.consensus.superblock import Superblock
from stele.model.config import Configuration
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from stele.model.ids import OPID_NONE, OpId, new_id
from stele.tablet.files import translate

log = structlog.get_logger("stele.consensus.copy")

LEASE_MS = 60_000
FRAME_BYTES = 1 << 20
SESSIONS_MAX = 16
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class CopyFile:
    """A file of a checkpoint: its name and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What a receiver needs to know of a session. The files hold everything up to `checkpoint`; `config` was
    in force there.

    `superblock` is the source's own. The source does not read the files before it answers, as that takes
    minutes for a large tablet. Frames carry checksums of the bytes as the source reads them. The files carry
    checksums of the bytes as they were once written; the receiver compares these.
    """

    session_id: str
    lease_ms: int
    files: tuple[CopyFile, ...]
    checkpoint: OpId
    config: Configuration
    term: int
    superblock: Superblock
    max_ceiling: int


@dataclass(slots=True)
class _Session:
    info: SessionInfo
    replica: Replica
    directory: Path
    expires_ms: int


class CopySessions:
    """All sessions of a node.

    `root` is a directory of their own; files of an earlier run there are debris.
    """

    def __init__(self, root: Path, host: Host) -> None:
        self._root = root
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, _Session] = {}
        self._making = 0
        self._orders = ShieldedTasks()
        self._looking = asyncio.Lock()
        self._looked_at: set[Replica] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._sessions)

    async def clear_debris(self) -> None:
        """Remove the files of an earlier run's sessions."""
        await self._host.in_thread(remove_tree, self._root)

    async def begin(self, replica: Replica, at_least: OpId = OPID_NONE) -> SessionInfo:
        """Open a session on a checkpoint of `replica` that holds `at_least`. If the caller is cancelled, the
        session ends.

        Raises:
            Retryable: NOT_READY (the replica has no rows, or has not applied `at_least`), THROTTLED,
                DISK_FULL.
            Corrupt: the replica's files cannot be read; it has become FAILED.
        """
        beginning = self._orders.start(self._begin(replica, at_least))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._end_unwanted)
            raise

    def _end_unwanted(self, begun: asyncio.Future[SessionInfo]) -> None:
        if not begun.cancelled() and begun.exception() is None:
            self._orders.start(self._end(begun.result().session_id))

    async def _begin(self, replica: Replica, at_least: OpId) -> SessionInfo:
        if len(self._sessions) + self._making >= SESSIONS_MAX:
            raise Retryable(
                f"{SESSIONS_MAX} copies are being read from this node, which is the limit; try again later",
                code=Code.THROTTLED,
            )
        if replica.machine is None or not replica.running:
            raise Retryable("this replica holds no rows to copy; choose another source", code=Code.NOT_READY)
        if replica.applied_index < at_least.index:
            raise Retryable(
                f"this replica has applied up to {replica.applied_index}, but {at_least} is needed; try "
                f"again",
                code=Code.NOT_READY,
            )
        session_id = new_id()
        directory = self._root / session_id
        anchor = f"copy-{session_id}"
        replica.storage.stream.anchor(anchor, replica.machine.flushed.index + 1)
        self._making += 1
        try:
            info = await self._make(replica, session_id, directory)
        except BaseException as exc:
            if isinstance(exc, Corrupt):
                replica.fail(f"copy: {exc}")
            replica.storage.stream.release(anchor)
            await self._host.in_thread(remove_tree, directory)
            raise
        finally:
            self._making -= 1
        replica.storage.stream.anchor(anchor, info.checkpoint.index + 1)
        self._sessions[session_id] = _Session(info, replica, directory, self._host.now_ms() + LEASE_MS)
        log.info(
            "copy session",
            tablet=replica.tablet_id,
            session=session_id,
            checkpoint=str(info.checkpoint),
            files=len(info.files),
        )
        return info

    async def _make(self, replica: Replica, session_id: str, directory: Path) -> SessionInfo:
        await replica.storage.flush()
        machine = replica.machine
        if machine is None:
            raise Retryable("this replica was stopped meanwhile; choose another source", code=Code.NOT_READY)

        def link() -> tuple[OpId, tuple[CopyFile, ...]]:
            try:
                make_directory(directory.parent)
                checkpoint = machine.checkpoint(directory)
                files = tuple(CopyFile(name, (directory / name).stat().st_size) for name in checkpoint.files)
            except OSError as exc:
                raise translate(exc, "making a checkpoint") from exc
            return checkpoint.opid, files

        opid, files = await self._host.in_thread(link)
        return SessionInfo(
            session_id=session_id,
            lease_ms=LEASE_MS,
            files=files,
            checkpoint=opid,
            config=replica.members.config_at(opid.index),
            term=replica.term,
            superblock=replica.superblock,
            max_ceiling=machine.max_ceiling,
        )

    def fetch(self, session_id: str, name: str, offset: int, length: int) -> Iterator[tuple[int, bytes, int]]:
        """Read `length` bytes of a file from `offset` on, as frames (offset, bytes, CRC-32C of them) of at
        most 1 MiB.

        Any thread may iterate; reads block. The iteration raises SteleError if the disk does not give the
        bytes.

        Raises:
            Rejected: NOT_FOUND, the session has ended, or has no file of this name.
        """
        session = self._get(session_id)
        size = next((f.size for f in session.info.files if f.name == name), None)
        if size is None:
            raise Rejected(
                f"session {session_id} has no file {name!r}; begin a new session", code=Code.NOT_FOUND
            )
        return self._read(session, _frames(session.directory / name, offset, min(size, offset + length)))

    def _read(
        self, session: _Session, frames: Iterator[tuple[int, bytes, int]]
    ) -> Iterator[tuple[int, bytes, int]]:
        try:
            yield from frames
        except Corrupt as exc:
            self._loop.call_soon_threadsafe(session.replica.fail, f"copy: {exc}")
            raise Corrupt(f"the source's replica is damaged: {exc.args[0]}", code=exc.code) from exc

    def keep_alive(self, session_id: str) -> int:
        """Renew a lease. Returns how many ms it lasts.

        Raises:
            Rejected: NOT_FOUND, the session has ended.
        """
        self._get(session_id).expires_ms = self._host.now_ms() + LEASE_MS
        return LEASE_MS

    async def end(self, session_id: str, damage: str = "") -> None:
        """End a session, if it has not ended.

        `damage`: what its receiver found wrong with the files, "" for nothing.
        """
        session = self._sessions.get(session_id)
        if session is not None and damage and session.replica not in self._looked_at:
            self._orders.start(self._look(session.replica, damage))
        await self._orders.run(self._end(session_id))

    async def _look(self, replica: Replica, damage: str) -> None:
        """Verify the files that a receiver found damaged.

        If this replica's files are damaged on its own disk, it becomes FAILED.
        """
        machine = replica.machine
        if machine is None:
            return
        self._looked_at.add(replica)

        def going_on(size: int) -> None:
            if self._closed or not replica.running:
                raise Retryable("the replica or this node stops, so the check was given up")

        try:
            async with self._looking:  # one at a time: it may take minutes, and takes a thread
                await self._host.in_thread(machine.verify, going_on)
            log.warning(
                "a copy's receiver reported damage, but the files here are whole",
                tablet=replica.tablet_id,
                damage=damage,
            )
        except Corrupt as exc:
            replica.fail(f"copy: {exc}")
        except SteleError as exc:
            log.warning(
                "cannot check the files that a copy's receiver found damaged",
                tablet=replica.tablet_id,
                damage=damage,
                error=str(exc),
            )
        finally:
            self._looked_at.discard(replica)

    async def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.replica.storage.stream.release(f"copy-{session_id}")
            await self._host.in_thread(remove_tree, session.directory)

    async def expire(self) -> None:
        """End the sessions whose lease ran out, and those whose replica does not run any more."""
        now = self._host.now_ms()
        for session_id, session in list(self._sessions.items()):
            if session.expires_ms < now or not session.replica.running:
                log.warning(
                    "copy session ended by this node", session=session_id, tablet=session.replica.tablet_id
                )
                await self.end(session_id)

    async def close(self) -> None:
        """End all sessions."""
        self._closed = True
        await self._orders.end(_CLOSE_S)
        for session_id in list(self._sessions):
            await self.end(session_id)

    def _get(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise Rejected(f"no copy session {session_id} here; begin a new one", code=Code.NOT_FOUND)
        return session


def _frames(path: Path, offset: int, end: int) -> Iterator[tuple[int, bytes, int]]:
    try:
        with path.open("rb", buffering=0) as f:
            f.seek(offset)
            while offset < end:
                data = f.read(min(FRAME_BYTES, end - offset))
                if not data:
                    raise Corrupt(f"{path.name}: ends at {offset} bytes; expected {end} at least")
                yield offset, data, google_crc32c.value(data)
                offset += len(data)
    except FileNotFoundError:  # the session ended meanwhile
        raise Rejected(f"no {path.name} here; begin a new session", code=Code.NOT_FOUND) from None
    except OSError as exc:
        raise translate(exc, f"reading {path.name}") from exc
