"""Carries out orders about the replicas on this node: opens them at start, creates, deletes and copies them.

Decides no membership, and obeys only orders that pass its checks. The files are replica_files.py, starting is
replica_starter.py.

Invariant: at most one replica of a tablet lives here. Orders for one tablet run one at a time. Each is
carried out completely, even if its caller is cancelled. The next start removes what a crash left half-made or
half-removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import structlog

from stele.consensus.copy_order import CopyOrder, refuse_over_live
from stele.consensus.copy_target import TabletCopy
from stele.consensus.fetch import CopySource
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.recovering import SoleVoter, check_order, is_done, with_incarnation
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.shielded import ShieldedTasks
from stele.consensus.superblock import DataState, Superblock
from stele.model.config import Configuration
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OPID_NONE, StreamKey, TabletId
from stele.model.incarnation import is_newer, shown
from stele.tserver.copy_home import NodeCopyHome
from stele.tserver.replica_files import Found, ReplicaFiles
from stele.tserver.replica_starter import ReplicaStarter
from stele.tserver.replicas import Replicas
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver")

T = TypeVar("T")
_CLOSE_S = 2.0
"""How long an order under way may take to end when the node stops. The next start removes what it left."""


class TabletManager:
    """Manages the replicas of one node.

    `hold(superblock)`: whether the start of a replica must wait. `changed(key)`: called when the replica
    under this key has changed.
    """

    def __init__(
        self,
        replicas: Replicas,
        directory: Path,
        node_log: Log,
        host: Host,
        options: ReplicaOptions,
        *,
        hold: Callable[[Superblock], bool] = lambda superblock: False,
        changed: Callable[[StreamKey], None] = lambda key: None,
    ) -> None:
        self._here = replicas
        self._host = host
        self._hold = hold
        self._changed = changed
        self._files = ReplicaFiles(directory, node_log, host)
        self._starter = ReplicaStarter(replicas, self._files, node_log, host, options)
        self._copy_home = NodeCopyHome(replicas, self._files, self._starter)
        self._changing: WeakValueDictionary[TabletId, asyncio.Lock] = WeakValueDictionary()
        self._orders = ShieldedTasks()

    # --- start and stop

    async def open_all(self) -> None:
        """Open the replicas on the volume, several at once. A damaged replica becomes FAILED; the others go
        on.

        Raises:
            Rejected: UNSUPPORTED_VERSION, a later release wrote the files of a replica.
            OSError: the system lacks the descriptors or memory to list the replicas.
        """

        async def open_one(found: Found) -> None:
            async with self._starter.at_once:
                await self._open(found)

        await asyncio.gather(*(open_one(found) for found in await self._files.scan()))
        self._here.all_known()
        log.info("replicas opened", running=len(self._here), tombstones=len(self._here.tombstones))

    async def _open(self, found: Found) -> None:
        key, superblock = found.key, found.superblock
        if superblock is None:
            self._starter.add_failed(key, found.error)
        elif superblock.data_state is DataState.TOMBSTONED:
            self._here.bury(superblock)
            await self._clear(
                self._files.bury, key
            )  # a crash may have come between its superblock and the rest
        elif superblock.data_state is DataState.READY or superblock.young_witness:
            await self._start_or_hold(superblock)
        else:
            log.warning("removing what a crash left half-made", tablet=key.tablet_id, replica=key.replica_id)
            await self._clear(self._files.erase, key)

    async def _start_or_hold(self, superblock: Superblock) -> None:
        if self._hold(superblock):
            self._here.hold(superblock)
        else:
            await self._starter.start(superblock)

    async def _clear(self, remove: Callable[[StreamKey], Awaitable[None]], key: StreamKey) -> None:
        """Remove what is left of a replica. If a failing disk refuses, the other replicas start all the
        same."""
        try:
            async with self._lock(key.tablet_id):
                await remove(key)
        except OSError as exc:
            log.error(
                "leftover files of a replica were not removed; the next start tries again",
                replica=str(key),
                error=str(exc),
            )

    async def release_held(self) -> None:
        """Start the replicas that were held back. Idempotent."""
        for superblock in self._take_held():
            await self._starter.start(superblock)

    async def drop_held(self) -> None:
        """Remove the replicas that were held back. They have never voted and never will. Idempotent."""
        for superblock in self._take_held():
            await self._files.erase(superblock.key)

    def _take_held(self) -> Iterator[Superblock]:
        """Each replica that is held back, once, even if others start or remove some meanwhile."""
        while held := next(iter(self._here.held.values()), None):
            self._here.release(held.key)
            yield held

    async def close(self) -> None:
        """Stop orders, copies and replicas."""
        await self._orders.end(_CLOSE_S)
        await self._starter.close()
        for copy in list(self._here.copies.values()):
            await copy.cancel()
        await asyncio.gather(*(replica.stop() for replica in self._here))

    # --- orders

    def replica_directory(self, key: StreamKey) -> Path:
        """Where a replica lives."""
        return self._files.replica_directory(key)

    @property
    def waiting_to_start(self) -> int:
        """How many replicas wait for resources of the system. They are started later."""
        return self._starter.waiting

    async def whole(self, operation: Coroutine[Any, Any, T]) -> T:
        """Carry out `operation` completely, like an order, even if its caller is cancelled."""
        return await self._orders.run(operation)

    def carry_out(self, operation: Coroutine[Any, Any, None]) -> None:
        """As `whole`, but nobody waits for it."""
        self._orders.start(operation)

    def _lock(self, tablet_id: TabletId) -> asyncio.Lock:
        return self._changing.setdefault(tablet_id, asyncio.Lock())

    async def create(self, superblock: Superblock, config: Configuration) -> bool:
        """Make a new replica of a new tablet and start it. Returns False if this replica was here already.

        Raises:
            Rejected: ALREADY_PRESENT, another replica of the tablet is here, or was.
            Retryable: NOT_READY, DISK_FULL.
        """
        return await self._orders.run(self._create(superblock, config))

    async def _create(self, superblock: Superblock, config: Configuration) -> bool:
        key = superblock.key
        async with self._lock(key.tablet_id):
            self._here.refuse_unless_open()
            if self._here.by_key(key) is not None or key in self._here.held:
                return False
            others = [k for k in (*self._here.keys(), *self._here.tombstones) if k.tablet_id == key.tablet_id]
            if others:
                raise Rejected(
                    f"replica {others[0].replica_id} of tablet {key.tablet_id[:8]} is or was here; copy to this "
                    "node under a new replica_id instead",
                    code=Code.ALREADY_PRESENT,
                )
            if self._host.low_space():
                raise Retryable(
                    "the disk of this node is nearly full; free or add space", code=Code.DISK_FULL
                )
            await self._start_or_hold(await self._files.make(superblock, config))
            return True

    async def delete(
        self,
        tablet_id: TabletId,
        replica_id: int,
        target: DataState,
        cas_config_index: int,
        reason: str,
        *,
        incarnation: int = 0,
        erases: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Tombstone or remove a replica. Returns False if it was gone already.

        `replica_id` 0: the replica that is here. `cas_config_index`, `incarnation`: those of the newest
        configuration that the order is based on. `erases` is awaited before anything is removed for good.

        Raises:
            Rejected: CAS_FAILED, the replica has a newer committed configuration than the order.
                INVALID_ARGUMENT.
            Retryable: NOT_READY while replicas are being opened and this one is not known yet.
        """
        if target not in (DataState.TOMBSTONED, DataState.DELETED):
            raise Rejected("data state of a delete: expected TOMBSTONED or DELETED")
        return await self._orders.run(
            self._delete(tablet_id, replica_id, target, (incarnation, cas_config_index), reason, erases)
        )

    async def _delete(
        self,
        tablet_id: TabletId,
        replica_id: int,
        target: DataState,
        cas: tuple[int, int],
        reason: str,
        erases: Callable[[], Awaitable[None]] | None,
    ) -> bool:
        async with self._lock(tablet_id):
            keys = [*self._here.keys(), *self._here.copies, *self._here.held]
            if target is DataState.DELETED:
                keys += list(self._here.tombstones)
            wanted = [
                k for k in dict.fromkeys(keys) if k.tablet_id == tablet_id and replica_id in (0, k.replica_id)
            ]
            if not (wanted and replica_id):  # it may still be on the volume
                self._here.refuse_unless_open()
            if wanted and target is DataState.DELETED and erases is not None:
                await erases()
            for key in wanted:
                await self._delete_one(key, target, cas, reason)
            return bool(wanted)

    async def _delete_one(self, key: StreamKey, target: DataState, cas: tuple[int, int], reason: str) -> None:
        replica = self._here.by_key(key)
        if target is DataState.TOMBSTONED and replica is not None:
            config = replica.committed_config
            if is_newer(config.version, cas):
                raise Rejected(
                    f"replica {key} has committed configuration {config.opid_index} of incarnation "
                    f"{shown(config.incarnation)}, but this order was made at {cas[1]} of incarnation "
                    f"{shown(cas[0])}; read the configuration again",
                    code=Code.CAS_FAILED,
                )
        log.info("deleting replica", replica=str(key), target=target.name, reason=reason)
        copy = self._here.copies.get(key)
        if copy is not None:
            await copy.cancel()
            replica = self._here.by_key(key)
        if replica is not None:
            await replica.stop()
        self._here.release(key)
        # The replica stays known until it is gone for good. An order that a full disk cut short is sent
        # again. If the answer were that nothing is here, its rows would stay, and the log that they pin.
        tombstone: Superblock | None = None
        if replica is not None and target is DataState.TOMBSTONED:
            tombstone = _tombstone_of(replica)
            await self._files.tombstone(tombstone)
        else:
            await self._files.erase(key)
        self._here.gone(key, tombstone)
        self._changed(key)

    async def make_sole_voter(self, order: SoleVoter) -> tuple[Configuration, bool]:
        """Make the replica here the only voter of its tablet, after a lost majority. Returns the last
        configuration of its log, and whether there was anything to do.

        Raises:
            Rejected: NOT_FOUND, there is no such replica. INVALID_ARGUMENT, it has FAILED or bootstraps.
                Other codes as `check_order`.
            Retryable: NOT_READY, DISK_FULL.
            OSError: the disk refused the write. The replica runs on, and the same order may come again.
        """
        return await self._orders.run(self._make_sole_voter(order))

    async def _make_sole_voter(self, order: SoleVoter) -> tuple[Configuration, bool]:
        key = order.key
        async with self._lock(key.tablet_id):
            self._here.refuse_unless_open()
            replica = self._here.by_key(key)
            if replica is None:
                raise Rejected(f"replica {key} is not here", code=Code.NOT_FOUND)
            core = replica.core
            if core is None or not replica.running:
                raise Rejected(f"replica {key} is {replica.state.name}: {replica.error or 'it does not run'}")
            check_order(replica.superblock, core.status().last_logged, order)
            if is_done(replica.config, order):
                return replica.config, False
            log.warning(
                "making a replica the only voter, because the tablet's majority is lost and given up",
                replica=str(key),
                order=order,
                reason=order.reason,
            )
            mine = replica.config.peer(key.replica_id)
            await replica.stop()
            address = mine.address if mine is not None else ""
            try:
                await self._files.make_sole_voter(replica.superblock, address, order)
            except Exception:
                # Were it left stopped, the order could not come again before the node's next start.
                await self._starter.start(await self._files.superblock(key))
                raise
            await self._starter.start(with_incarnation(replica.superblock, order))
            self._changed(key)
            made = self._here.by_key(key)
            return made.config if made is not None else replica.config, True

    async def start_copy(self, order: CopyOrder, source: CopySource) -> TabletCopy | None:
        """Begin a copy. Returns it, or the copy of this replica that runs or is done. None: the replica is
        here and complete.

        A copy that still fetches continues at the order's rate. It begins again if the order names another
        source; a witness keeps what has arrived. A log-only copy fetches nothing until an order without
        `log_only` comes.

        Raises:
            Rejected: ALREADY_PRESENT, a live replica of the tablet is here, or this replica_id is a
                tombstone.
        """
        return await self._orders.run(self._start_copy(order, source))

    async def _start_copy(self, order: CopyOrder, source: CopySource) -> TabletCopy | None:
        key = StreamKey(order.tablet_id, order.replica_id)
        async with self._lock(order.tablet_id):
            self._here.refuse_unless_open()
            running = await self._going_on(key, order)
            if running is not None:
                return running
            live = self._live(key)
            refuse_over_live(order, live.replica_id if live is not None else None)
            resumed: Superblock | None = None
            if live is not None:
                if not live.superblock.young_witness:
                    return None
                resumed = live.superblock
            else:
                await self._files.erase(key)
            copy = TabletCopy(order, source, self._copy_home, self._host.in_thread, resumed=resumed)
            copy.when_over(lambda: self._changed(key))
            self._here.copying(key, copy)
            return copy

    async def _going_on(self, key: StreamKey, order: CopyOrder) -> TabletCopy | None:
        """The copy under this key, if this order continues it. None: there is none, or it was cancelled to
        begin again.
        """
        running = self._here.copies.get(key)
        if running is None:
            return None
        if running.waits and not order.log_only:
            await running.cancel()  # it has prepared the witness, or is about to; now fetch its rows
            return None
        if running.failed:
            return None
        if order.log_only or running.progress.state not in ("Starting", "Fetching"):
            return running
        if running.order.source_node == order.source_node:
            running.pace(order.bytes_per_second)
            return running
        log.info("the copy begins again", replica=str(key), source=order.source_node)
        await running.cancel()
        return None

    def _live(self, key: StreamKey) -> Replica | None:
        """The replica of the tablet that is here and has not FAILED, or None.

        Raises:
            Rejected: ALREADY_PRESENT, nothing can be copied under this key any more.
        """
        if key in self._here.tombstones:
            raise Rejected(
                f"replica {key} is a tombstone, and a replica_id is never used again; choose a new "
                f"replica_id",
                code=Code.ALREADY_PRESENT,
            )
        here = self._here.by_key(key)
        if here is not None and here.state is ReplicaState.FAILED:
            raise Rejected(
                f"replica {key} has FAILED ({here.error}); copy under a new replica_id",
                code=Code.ALREADY_PRESENT,
            )
        live = self._here.current(key.tablet_id)
        if live is not None and live.state is ReplicaState.FAILED and live.replica_id != key.replica_id:
            return None
        return live


def _tombstone_of(replica: Replica) -> Superblock:
    """The tombstone of a replica: its last term and OpId, and the last committed configuration that it knew."""
    status = replica.core.status() if replica.core is not None else None
    return replace(
        replica.superblock,
        data_state=DataState.TOMBSTONED,
        witness_start=OPID_NONE,
        last_term=status.term if status is not None else 0,
        last_opid=status.last_logged if status is not None else OPID_NONE,
        last_config_index=replica.committed_config.opid_index,
    )
