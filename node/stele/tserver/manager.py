"""Changes which replicas are on this node: opened at start, created, copied, deleted.

Owns the directories tablets/<tablet_id>/<replica_id>. Decides no membership; obeys orders that pass its checks.

A replica for which the system has no descriptor or memory just now is no damaged one: it is started again, with growing
pauses. But one that does not run on a node that answers heartbeats takes the fault tolerance of its tablet, and nobody heals
it: if the node lacks something for LACKING_MS it ends, and is healed as a silent node is.

Invariant: at most one replica of a tablet lives here; a tombstone, once written, never votes; what a crash left
half-made or half-removed is removed at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import structlog

from stele.consensus.bootstrap import create_machine, open_machine, start_replica
from stele.consensus.copy_order import CopyOrder, refuse_over_live
from stele.consensus.copy_target import TabletCopy
from stele.consensus.fetch import CopySource
from stele.consensus.files import make_directory, remove_if_empty, remove_tree
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.shielded import ShieldedTasks
from stele.consensus.superblock import SUPERBLOCK, DataState, Superblock, read_superblock, write_superblock
from stele.model.config import Configuration
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError, of_later_program
from stele.model.ids import OPID_NONE, OpId, ReplicaId, StreamKey, TableId, TabletId, is_id
from stele.tablet.files import NO_MEANS
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")

T = TypeVar("T")
_OPEN_AT_ONCE = 8
_LOG_LOOK_S = 0.5
LACKING_MS = 60_000
"""How long a replica may wait for what the system does not give."""
_AGAIN_S = (0.5, 15.0)
"""The first pause before it is started again, and the longest."""
_CLOSE_S = 2.0
"""How long an order under way may take to end when the node stops; the next start removes what it left."""


class TabletManager:
    """`hold(superblock)`: do not start it yet. `changed(key)`: what is here under it differs from before. `give_up(error)`:
    this node cannot go on.
    """

    def __init__(
        self,
        replicas: Replicas,
        directory: Path,
        node_log: Any,
        host: Host,
        options: ReplicaOptions,
        *,
        hold: Callable[[Superblock], bool] = lambda superblock: False,
        changed: Callable[[StreamKey], None] = lambda key: None,
    ) -> None:
        self._here = replicas
        self._directory = directory
        self._node_log = node_log
        self._host = host
        self._options = options
        self._hold = hold
        self._changed = changed
        self._opening = asyncio.Semaphore(_OPEN_AT_ONCE)
        self._waiting: set[asyncio.Task[None]] = set()
        self._changing: WeakValueDictionary[TabletId, asyncio.Lock] = WeakValueDictionary()
        self._orders = ShieldedTasks()

    # --- start and stop

    async def open_all(self) -> None:
        """Open what is on the volume, several at once. A damaged replica becomes FAILED; the others go on.

        Raises:
            Rejected: UNSUPPORTED_VERSION, a later program wrote the files of one.
            OSError: the system has no descriptor or memory, not even to see what is there.
        """
        found = await self._host.in_thread(self._scan)

        async def open_one(key: StreamKey, superblock: Superblock | None, error: str) -> None:
            async with self._opening:
                await self._open(key, superblock, error)

        await asyncio.gather(*(open_one(*one) for one in found))
        self._here.opened = True
        log.info("replicas opened", running=len(self._here), tombstones=len(self._here.tombstones))

    def _scan(self) -> list[tuple[StreamKey, Superblock | None, str]]:
        make_directory(self._directory)
        found: list[tuple[StreamKey, Superblock | None, str]] = []
        for tablet in sorted(self._directory.iterdir()):
            if not is_id(tablet.name):
                continue
            for directory in sorted(tablet.iterdir()):
                if not directory.name.isdigit():
                    continue
                key = StreamKey(TabletId(tablet.name), ReplicaId(int(directory.name)))
                try:
                    found.append((key, read_superblock(directory), ""))
                except FileNotFoundError as exc:
                    if key in self._node_log.recovery.streams:
                        # It comes before the stream and goes after it, so this is no debris: it may have voted.
                        found.append((key, None, f"{exc.filename} is missing: the superblock was lost"))
                    else:
                        remove_tree(directory)
                except (SteleError, OSError) as exc:
                    if of_later_program(exc) or (isinstance(exc, OSError) and exc.errno in NO_MEANS):
                        raise
                    found.append((key, None, str(exc)))
            remove_if_empty(tablet)
        return found

    async def _open(self, key: StreamKey, superblock: Superblock | None, error: str) -> None:
        if superblock is None:
            unknown = Superblock(key.tablet_id, key.replica_id, TableId(""), "", "", DataState.READY)
            replica = self._add(unknown)
            replica.fail(error)
        elif superblock.data_state is DataState.TOMBSTONED:
            self._here.tombstones[key] = superblock
            await self._clear(self._bury, key)  # a crash may have come between its superblock and the rest
        elif superblock.data_state is DataState.READY or superblock.young_witness:
            if self._hold(superblock):
                self._here.held[key] = superblock
                return
            await self.start_replica(superblock)
        else:
            log.warning("removing what a crash left half-made", tablet=key.tablet_id, replica=key.replica_id)
            await self._clear(self._erase, key)

    async def _clear(self, remove: Callable[[StreamKey], Awaitable[None]], key: StreamKey) -> None:
        """Files that a sick disk does not let go are no reason to keep the other replicas from starting."""
        try:
            async with self._lock(key.tablet_id):
                await remove(key)
        except OSError as exc:
            log.error("not removed, the next start tries again", replica=str(key), error=str(exc))

    async def start_replica(self, superblock: Superblock) -> None:
        """Start a replica in its data state; one for which something is lacking just now is started later."""
        replica = self._add(superblock)
        try:
            await self._start(replica)
        except Retryable as exc:
            task = asyncio.get_running_loop().create_task(self._start_later(replica, exc))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    async def _start(self, replica: Replica) -> None:
        await start_replica(
            replica.superblock,
            replica.directory,
            self._node_log,
            self._host,
            self._options,
            replica=replica,
        )
        self._here.started(replica)

    async def _start_later(self, replica: Replica, error: Retryable) -> None:
        begun_ms, (pause_s, longest_s) = self._host.now_ms(), _AGAIN_S
        key = replica.superblock.key
        while self._host.now_ms() - begun_ms < LACKING_MS:
            log.warning("replica not started yet, it is tried again", replica=str(key), error=str(error))
            replica.start_waits(str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, longest_s)
            try:
                async with self._opening:
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

    async def release_held(self) -> None:
        """Start the replicas that were held back. Idempotent."""
        while self._here.held:
            _, superblock = self._here.held.popitem()
            await self.start_replica(superblock)

    async def drop_held(self) -> None:
        """Remove the replicas that were held back: they have never voted and never will. Idempotent."""
        while self._here.held:
            key, _ = self._here.held.popitem()
            await self._erase(key)

    async def whole(self, operation: Coroutine[Any, Any, T]) -> T:
        """Carry `operation` out to its end like an order, whoever asked for it."""
        return await self._orders.run(operation)

    def carry_out(self, operation: Coroutine[Any, Any, None]) -> None:
        """As `whole`, where nobody waits for it."""
        self._orders.start(operation)

    def _add(self, superblock: Superblock) -> Replica:
        replica = Replica(superblock, self.replica_directory(superblock.key), self._host, self._options)
        self._here.add(replica)
        return replica

    async def close(self) -> None:
        """Stop orders, copies and replicas."""
        await self._orders.end(_CLOSE_S)
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        for copy in list(self._here.copies.values()):
            await copy.cancel()
        await asyncio.gather(*(replica.stop() for replica in self._here))

    # --- orders

    def replica_directory(self, key: StreamKey) -> Path:
        """Where a replica lives."""
        return self._directory / key.tablet_id / str(key.replica_id)

    async def create(self, superblock: Superblock, config: Configuration) -> bool:
        """Make a new replica of a new tablet and start it; whether there was anything to do: it may be there.

        Raises:
            Rejected: ALREADY_PRESENT, another replica of the tablet is, or was, here.
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
                    f"replica {others[0].replica_id} of tablet {key.tablet_id} is or was here; copy to this "
                    "node under a new replica_id instead",
                    code=Code.ALREADY_PRESENT,
                )
            if self._host.low_space():
                raise Retryable("the disk of this node is nearly full", code=Code.DISK_FULL)
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
            if self._hold(ready):
                self._here.held[key] = ready
            else:
                await self.start_replica(ready)
            return True

    async def create_stream(self, key: StreamKey, start: OpId, config: Configuration) -> None:
        """Make a replica's stream in the log; on return it survives power loss."""
        await self._log_done(self._node_log.create_stream, key, start, config)

    async def delete(
        self,
        tablet_id: TabletId,
        replica_id: int,
        target: DataState,
        cas_config_index: int,
        reason: str,
        *,
        erases: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Tombstone or remove a replica (0: whichever is here); whether there was one: it may be gone already. `erases` is
        awaited before anything is removed for good.

        Raises:
            Rejected: CAS_FAILED, it knows a newer committed configuration than the order; INVALID_ARGUMENT.
            Retryable: NOT_READY while replicas are being opened and the one that is meant is not known yet.
        """
        if target not in (DataState.TOMBSTONED, DataState.DELETED):
            raise Rejected("a replica is deleted to TOMBSTONED or DELETED")
        return await self._orders.run(
            self._delete(tablet_id, replica_id, target, cas_config_index, reason, erases)
        )

    async def _delete(
        self,
        tablet_id: TabletId,
        replica_id: int,
        target: DataState,
        cas_config_index: int,
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
            if not (wanted and replica_id):  # it may be on the volume all the same
                self._here.refuse_unless_open()
            if wanted and target is DataState.DELETED and erases is not None:
                await erases()
            for key in wanted:
                await self._delete_one(key, target, cas_config_index, reason)
            return bool(wanted)

    async def _delete_one(self, key: StreamKey, target: DataState, cas: int, reason: str) -> None:
        replica = self._here.by_key(key)
        if target is DataState.TOMBSTONED and replica is not None:
            index = replica.committed_config.opid_index
            if index > cas:
                raise Rejected(
                    f"replica {key} knows committed configuration {index}, the order says at most {cas}; "
                    "look again",
                    code=Code.CAS_FAILED,
                )
        log.info("deleting replica", replica=str(key), target=target.name, reason=reason)
        copy = self._here.copies.get(key)
        if copy is not None:
            await copy.cancel()
            replica = self._here.by_key(key)
        if replica is not None:
            await replica.stop()
        self._here.held.pop(key, None)
        # It stays known until it is gone for good: an order that a full disk cut short is given again, and were it told
        # that nothing is here, the rows would stay, and what they hold of the log.
        if replica is not None and target is DataState.TOMBSTONED:
            self._here.tombstones[key] = await self._tombstone(key, replica)
        else:
            await self._erase(key)
            self._here.tombstones.pop(key, None)
        self._here.copies.pop(key, None)
        self._here.drop(key)
        self._changed(key)

    async def _tombstone(self, key: StreamKey, replica: Replica) -> Superblock:
        status = replica.core.status() if replica.core is not None else None
        superblock = replace(
            replica.superblock,
            data_state=DataState.TOMBSTONED,
            witness_start=OPID_NONE,
            last_term=status.term if status is not None else 0,
            last_opid=status.last_logged if status is not None else OPID_NONE,
            last_config_index=replica.committed_config.opid_index,
        )
        await self._host.in_thread(write_superblock, self.replica_directory(key), superblock)
        await self._bury(key)
        return superblock

    async def _bury(self, key: StreamKey) -> None:
        """Of a replica whose superblock is a tombstone its rows go, and its entries in the log."""
        directory = self.replica_directory(key)

        def remove() -> None:
            for child in directory.iterdir():
                if child.is_dir():
                    remove_tree(child)

        await self._host.in_thread(remove)
        with contextlib.suppress(Rejected):  # a replica whose superblock was damaged may have had no stream
            if not self._node_log.stream(key).tombstoned:
                await self._log_done(self._node_log.tombstone, key)

    async def _erase(self, key: StreamKey) -> None:
        directory = self.replica_directory(key)
        debris = Superblock(key.tablet_id, key.replica_id, TableId(""), "", "", DataState.COPYING)

        def mark() -> None:
            if (directory / SUPERBLOCK).exists():
                write_superblock(directory, debris)

        # After a crash the next start goes on with it. On a full disk, where tables are dropped to make room, it goes without:
        # then one that a crash cuts short here is FAILED, until its removal is ordered again.
        with contextlib.suppress(OSError):
            await self._host.in_thread(mark)
        with contextlib.suppress(Rejected):  # it may never have had a stream
            await self._log_done(self._node_log.forget, key)
        await self._host.in_thread(remove_tree, directory)
        await self._host.in_thread(remove_if_empty, directory.parent)

    async def _log_done(self, call: Callable[..., Any], *arguments: Any) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not future.done():
                future.set_result(None)

        call(*arguments, done)
        while not future.done():
            await asyncio.wait((future,), timeout=_LOG_LOOK_S)
            failed = self._node_log.failed
            if failed is not None and not future.done():
                raise Corrupt(f"the node's log has failed: {failed}", code=Code.IO_ERROR) from failed

    def _lock(self, tablet_id: TabletId) -> asyncio.Lock:
        return self._changing.setdefault(tablet_id, asyncio.Lock())

    # --- copies (CopyHome)

    async def start_copy(self, order: CopyOrder, source: CopySource) -> TabletCopy | None:
        """Begin a copy, or give the one that runs or is done; None: the replica is here and complete. One that still
        fetches goes on at the order's rate, and is begun anew where the order names another source; a witness keeps what has
        arrived. One that is to log only fetches nothing; ordered again without that, it does.

        Raises:
            Rejected: ALREADY_PRESENT, a live replica of the tablet is here, or this replica_id is a tombstone.
        """
        return await self._orders.run(self._start_copy(order, source))

    async def _start_copy(self, order: CopyOrder, source: CopySource) -> TabletCopy | None:
        key = StreamKey(order.tablet_id, order.replica_id)
        async with self._lock(order.tablet_id):
            self._here.refuse_unless_open()
            running = self._here.copies.get(key)
            if running is not None and running.waits and not order.log_only:
                await running.cancel()  # it has prepared the witness, or is about to: now its rows are wanted
            elif running is not None and not running.failed:
                if order.log_only or running.progress.state not in ("Starting", "Fetching"):
                    return running
                if running.order.source_node == order.source_node:
                    running.pace(order.bytes_per_second)
                    return running
                log.info("the copy is begun anew", replica=str(key), source=order.source_node)
                await running.cancel()
            if key in self._here.tombstones:
                raise Rejected(
                    f"replica {key} is a tombstone; an id is never used again", code=Code.ALREADY_PRESENT
                )
            here = self._here.by_key(key)
            if here is not None and here.state is ReplicaState.FAILED:
                raise Rejected(
                    f"replica {key} has FAILED ({here.error}); copy under a new replica_id",
                    code=Code.ALREADY_PRESENT,
                )
            live = self._here.current(order.tablet_id)
            if live is not None and live.state is ReplicaState.FAILED and live.replica_id != order.replica_id:
                live = None
            refuse_over_live(order, live.replica_id if live is not None else None)
            resumed: Superblock | None = None
            if live is not None:
                if not live.superblock.young_witness:
                    return None
                resumed = live.superblock
            else:
                await self._erase(key)
            copy = TabletCopy(order, source, self, self._host.in_thread, resumed=resumed)
            copy.when_over(lambda: self._changed(key))
            self._here.copies[key] = copy
            return copy

    def room_bytes(self) -> int:
        """See CopyHome."""
        node_log = self._node_log
        free = int(node_log.files.free_bytes(node_log.directory))
        return max(0, free - int(node_log.options.low_space_bytes))

    def log_reaches(self, key: StreamKey, opid: OpId) -> bool:
        """Whether the log of a running witness holds `opid` durably."""
        replica = self._here.by_key(key)
        if replica is None:
            raise Retryable("the witness was removed meanwhile")
        return replica.storage.log_reaches(opid)

    async def rows_arrived(self, superblock: Superblock) -> None:
        """The store of a running witness is in place."""
        replica = self._here.by_key(superblock.key)
        if replica is None:
            raise Retryable("the witness was removed meanwhile")
        machine = await self._host.in_thread(open_machine, superblock, self.replica_directory(superblock.key))
        try:
            # A repeated order copies again what did not come into use.
            await replica.rows_arrived(superblock, machine)
        except BaseException:
            await self._host.in_thread(machine.close)
            raise
        self._here.started(replica)

    def joined(self, key: StreamKey) -> bool:
        """Whether a committed configuration that the replica knows names it."""
        replica = self._here.by_key(key)
        return replica is None or replica.committed_config.peer(key.replica_id) is not None
