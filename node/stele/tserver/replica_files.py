"""The replicas on the volume: their directories tablets/<tablet_id>/<replica_id>, and their streams in the node's log.

Called by the tablet manager, which runs one order per tablet at a time. Knows nothing of running
replicas.

Invariant: a tombstone, once written, never votes. The next start recognises what a crash left half-made or
half-removed: its superblock says COPYING, or is gone with its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stele.consensus.bootstrap import create_machine
from stele.consensus.files import make_directory, remove_if_empty, remove_tree
from stele.consensus.ports import Host
from stele.consensus.recovering import SoleVoter, make_sole_voter, with_incarnation
from stele.consensus.superblock import SUPERBLOCK, DataState, Superblock, read_superblock, write_superblock
from stele.model.config import Configuration
from stele.model.errors import Code, Corrupt, Rejected, SteleError, of_later_program
from stele.model.ids import OPID_NONE, OpId, ReplicaId, StreamKey, TableId, TabletId, is_id
from stele.tablet.files import NO_MEANS
from stele.wal.log import Log

_LOG_LOOK_S = 0.5
"""How often a wait for the log checks whether the log has failed."""


@dataclass(frozen=True, slots=True)
class Found:
    """A replica found on the volume. `superblock` None: it cannot be read, and `error` says why."""

    key: StreamKey
    superblock: Superblock | None
    error: str


class ReplicaFiles:
    """The replicas' files on one node. `directory`: holds all tablets."""

    def __init__(self, directory: Path, node_log: Log, host: Host) -> None:
        self.directory = directory
        self._log = node_log
        self._host = host

    def replica_directory(self, key: StreamKey) -> Path:
        """Where a replica lives."""
        return self.directory / key.tablet_id / str(key.replica_id)

    def room_bytes(self) -> int:
        """How many bytes the disk can take without the reserve that is kept for the log. Blocks."""
        return int(self._log.room_bytes())

    async def scan(self) -> list[Found]:
        """List all replicas on the volume, tombstones too. Removes directories in which no replica was ever
        completed.

        Raises:
            Rejected: UNSUPPORTED_VERSION, a later release wrote a superblock.
            OSError: the system lacks the descriptors or memory to list them.
        """
        return await self._host.in_thread(self._scan)

    def _scan(self) -> list[Found]:
        make_directory(self.directory)
        found: list[Found] = []
        for tablet in sorted(self.directory.iterdir()):
            if not is_id(tablet.name):
                continue
            for directory in sorted(tablet.iterdir()):
                if directory.name.isdigit():
                    key = StreamKey(TabletId(tablet.name), ReplicaId(int(directory.name)))
                    found += self._look_at(key, directory)
            remove_if_empty(tablet)
        return found

    def _look_at(self, key: StreamKey, directory: Path) -> list[Found]:
        try:
            return [Found(key, read_superblock(directory), "")]
        except FileNotFoundError as exc:
            if key in self._log.recovery.streams:
                # The superblock is made before the stream and removed after it. So this is no debris: the
                # replica may have voted.
                return [Found(key, None, f"{exc.filename} is missing: the superblock was lost")]
            remove_tree(directory)
            return []
        except (SteleError, OSError) as exc:
            if of_later_program(exc) or (isinstance(exc, OSError) and exc.errno in NO_MEANS):
                raise
            return [Found(key, None, str(exc))]

    async def make(self, superblock: Superblock, config: Configuration) -> Superblock:
        """Make a new replica with an empty store and a stream that begins with `config`. Returns its
        superblock, which is READY.

        Raises:
            Corrupt: IO_ERROR, the log has failed.
        """
        key = superblock.key
        directory = self.replica_directory(key)

        def make() -> None:
            remove_tree(directory)
            make_directory(directory)
            write_superblock(directory, superblock.with_state(DataState.COPYING))
            create_machine(superblock, directory).close()

        await self._host.in_thread(make)
        await self.create_stream(key, OPID_NONE, config)
        ready = superblock.with_state(DataState.READY)
        await self._host.in_thread(write_superblock, directory, ready)
        return ready

    async def create_stream(self, key: StreamKey, start: OpId, config: Configuration) -> None:
        """Make a replica's stream in the log; on return it survives power loss."""
        await self._log_done(lambda done: self._log.create_stream(key, start, config, done))

    async def make_sole_voter(self, superblock: Superblock, address: str, order: SoleVoter) -> None:
        """Make a replica that has stopped the only voter of its tablet; on return it survives power loss.

        Raises:
            SteleError: as the log's appends. Corrupt: IO_ERROR, the log has failed.
        """
        block = with_incarnation(superblock, order)
        await self._host.in_thread(write_superblock, self.replica_directory(order.key), block)
        stream = self._log.stream(order.key)
        node_id = self._host.node_id
        await self._log_done(lambda done: make_sole_voter(stream, node_id, address, order, done))

    async def superblock(self, key: StreamKey) -> Superblock:
        """Read the superblock of a replica on the volume. Raises the errors of `read_superblock`."""
        return await self._host.in_thread(read_superblock, self.replica_directory(key))

    async def tombstone(self, superblock: Superblock) -> None:
        """Remove all of a replica except its vote and its superblock, which becomes this tombstone."""
        await self._host.in_thread(write_superblock, self.replica_directory(superblock.key), superblock)
        await self.bury(superblock.key)

    async def bury(self, key: StreamKey) -> None:
        """Remove the rows of a replica whose superblock is a tombstone, and its entries in the log."""
        directory = self.replica_directory(key)

        def remove() -> None:
            for child in directory.iterdir():
                if child.is_dir():
                    remove_tree(child)

        await self._host.in_thread(remove)
        with contextlib.suppress(Rejected):  # a replica whose superblock was damaged may have had no stream
            if not self._log.stream(key).tombstoned:
                await self._log_done(lambda done: self._log.tombstone(key, done))

    async def erase(self, key: StreamKey) -> None:
        """Remove a replica for good, and all that is left of it."""
        directory = self.replica_directory(key)
        debris = Superblock(key.tablet_id, key.replica_id, TableId(""), "", "", DataState.COPYING)

        def mark() -> None:
            if (directory / SUPERBLOCK).exists():
                write_superblock(directory, debris)

        # After a crash the next start completes this. If the disk is full, where tables are dropped to make
        # room, the mark cannot be written. Then a replica that a crash leaves half-removed is FAILED until
        # its removal is ordered again.
        with contextlib.suppress(OSError):
            await self._host.in_thread(mark)
        with contextlib.suppress(Rejected):  # it may never have had a stream
            await self._log_done(lambda done: self._log.forget(key, done))
        await self._host.in_thread(remove_tree, directory)
        await self._host.in_thread(remove_if_empty, directory.parent)

    async def _log_done(self, ask: Callable[[Callable[[], None]], object]) -> None:
        """Submit something to the log, and wait for its callback."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not future.done():
                future.set_result(None)

        ask(done)
        while not future.done():
            await asyncio.wait((future,), timeout=_LOG_LOOK_S)
            failed = self._log.failed
            if failed is not None and not future.done():
                raise Corrupt(f"the node's log has failed: {failed}", code=Code.IO_ERROR) from failed
