"""Starts replicas that are on the volume, and tries again where the system lacks a resource for the moment.

A replica for which the system has no descriptor or memory is not damaged: it is started again, with growing
pauses. While it does not run, its tablet has one replica less. Nobody heals the tablet, since the node
answers heartbeats. So after LACKING_MS the node ends, and its tablets are healed like those of a silent node.

Invariant: a replica is known to `Replicas` before it is started, and listeners hear of it once it has
started.
"""

from __future__ import annotations

import asyncio

import structlog

from stele.consensus.bootstrap import STORE, open_machine, start_replica
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import DataState, Superblock
from stele.model.errors import Retryable
from stele.model.ids import StreamKey, TableId
from stele.tserver.replica_files import ReplicaFiles
from stele.tserver.replicas import Replicas
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver")

LACKING_MS = 60_000
"""How long a replica may wait for resources of the system."""
_AGAIN_S = (0.5, 15.0)
"""The first pause before a replica is started again, and the longest one."""
_OPEN_AT_ONCE = 8


class ReplicaStarter:
    """Starts the replicas of one node."""

    def __init__(
        self, replicas: Replicas, files: ReplicaFiles, node_log: Log, host: Host, options: ReplicaOptions
    ) -> None:
        self._replicas = replicas
        self._files = files
        self._log = node_log
        self._host = host
        self._options = options
        self._waiting: set[asyncio.Task[None]] = set()
        self.at_once = asyncio.Semaphore(_OPEN_AT_ONCE)
        """Held while one of many replicas is opened."""

    @property
    def waiting(self) -> int:
        """How many replicas wait to be started again."""
        return len(self._waiting)

    async def close(self) -> None:
        """Start nothing more."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    def add_failed(self, key: StreamKey, error: str) -> None:
        """Register a replica whose superblock cannot be read as FAILED. It may have voted. A driver replaces
        it.
        """
        self._add(Superblock(key.tablet_id, key.replica_id, TableId(""), "", "", DataState.READY)).fail(error)

    async def start(self, superblock: Superblock) -> None:
        """Start a replica in its data state. If the system lacks a resource, return, and start the replica
        later.
        """
        replica = self._add(superblock)
        try:
            await self._start(replica)
        except Retryable as exc:
            task = asyncio.get_running_loop().create_task(self._start_later(replica, exc))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    async def rows_arrived(self, replica: Replica, superblock: Superblock) -> None:
        """Open the store that a running witness has received, and tell the listeners."""
        directory = self._files.replica_directory(superblock.key)
        machine = await self._host.in_thread(
            open_machine, superblock, directory, STORE, self._host.cluster_version
        )
        try:
            await replica.rows_arrived(superblock, machine)
        except BaseException:  # a repeated order copies again what is not in use
            await self._host.in_thread(machine.close)
            raise
        self._replicas.started(replica)

    def _add(self, superblock: Superblock) -> Replica:
        directory = self._files.replica_directory(superblock.key)
        replica = Replica(superblock, directory, self._host, self._options)
        self._replicas.add(replica)
        return replica

    async def _start(self, replica: Replica) -> None:
        await start_replica(
            replica.superblock,
            replica.directory,
            self._log,
            self._host,
            self._options,
            replica=replica,
        )
        self._replicas.started(replica)

    async def _start_later(self, replica: Replica, error: Retryable) -> None:
        begun_ms, (pause_s, longest_s) = self._host.now_ms(), _AGAIN_S
        key = replica.superblock.key
        while self._host.now_ms() - begun_ms < LACKING_MS:
            log.warning(
                "a replica was not started; the start is tried again", replica=str(key), error=str(error)
            )
            replica.start_waits(str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, longest_s)
            try:
                async with self.at_once:
                    if replica.state is not ReplicaState.BOOTSTRAPPING:
                        return  # removed meanwhile
                    replica.start_waits("")
                    await self._start(replica)
                    return
            except Retryable as exc:
                error = exc
            except Exception as exc:  # noqa: BLE001 - told to whoever runs the node, as at its start
                self._host.fail(exc)
                return
        self._host.fail(
            Retryable(f"replica {key} could not be started for {LACKING_MS // 1000} s: {error.args[0]}")
        )
