"""The receiving side of a tablet copy: turns an order into a running replica. Owned by the tablet manager.

Order of what becomes durable:
1. the superblock, as COPYING
2. a witness only: its stream in the log, then its start in the superblock; it runs from here on
3. the files; every checksum is compared as they arrive
4. for a witness: its log up to the checkpoint; for other replicas: a stream that begins at the checkpoint
5. the superblock as READY, which is one rename.

Invariant: until the superblock says READY there is no replica with rows, and the files in its directory are
debris. A replica whose files were damaged at their source or on their way never becomes READY. Damage after
the sync is found when the bytes are read, as in every replica.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import structlog

from stele.consensus.bootstrap import STORE, open_machine, sums_of
from stele.consensus.copy_bounds import refuse_beyond, refuse_offer
from stele.consensus.copy_order import CopyHome, CopyOrder, CopyProgress
from stele.consensus.copy_source import SessionInfo
from stele.consensus.fetch import SILENT_MAX_S, CopySource, Fetcher, RateLimit, session_lost
from stele.consensus.files import make_directory, remove_tree, sync_directory
from stele.consensus.ports import InThread
from stele.consensus.shielded import until_done, until_finished
from stele.consensus.superblock import DataState, Superblock, write_superblock
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError, let_go
from stele.model.ids import OPID_NONE, OpId, StreamKey

log = structlog.get_logger("stele.consensus.copy")

INCOMING = "incoming"
_SESSIONS_MAX = 5
_KEEP_ALIVE_S = 15.0
_JOIN_TIMEOUT_S = 300.0
_JOIN_LOOK_S = 0.2
_LOG_LOOK_S = 0.05
_END_S = 2.0


class TabletCopy:
    """One copy under way.

    `progress`: the copy's state, for reports. `witness_start`: where the witness's log begins.
    """

    def __init__(
        self,
        order: CopyOrder,
        source: CopySource,
        home: CopyHome,
        in_thread: InThread,
        *,
        resumed: Superblock | None = None,
    ) -> None:
        self.order = order
        begins = "Waiting" if order.log_only else "Starting"
        self.progress = CopyProgress(order.replica_id, order.source_node, state=begins)
        self.bytes_per_second = order.bytes_per_second
        """The bound on its rate now, in bytes per second; 0: unbounded."""
        self._rate = RateLimit(order.bytes_per_second)
        self.witness_start = resumed.witness_start if resumed is not None else OPID_NONE
        self._prepared = asyncio.Event()
        self._source = source
        self._home = home
        self._in_thread = in_thread
        self._resumed = resumed is not None
        self.key = StreamKey(order.tablet_id, order.replica_id)
        self._directory = home.replica_directory(self.key)
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def failed(self) -> bool:
        """Whether the copy ended without a replica."""
        return self.progress.state == "Failed"

    @property
    def waits(self) -> bool:
        """Whether the copy made a witness, and has no order yet to fetch its rows."""
        return self.order.log_only

    def pace(self, bytes_per_second: int) -> None:
        """Continue at this rate; 0: unbounded."""
        self.bytes_per_second = bytes_per_second
        self._rate.change(bytes_per_second)

    async def wait_prepared(self, timeout_s: float) -> bool:
        """Wait until the replica's directory is made and a witness runs, or the copy has failed.

        Returns False if neither came about within `timeout_s` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._prepared.wait()
        except TimeoutError:
            return False
        return True

    def when_over(self, call: Callable[[], None]) -> None:
        """Call `call` when the copy has joined its group or failed."""
        self._task.add_done_callback(lambda _: call())

    async def wait(self) -> None:
        """Return once the copy is done or has failed."""
        await asyncio.wait((self._task,))

    async def cancel(self) -> None:
        """Stop at once. The next copy uses the files that arrived, or the next start removes them."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self.progress.error:
            self.progress.state, self.progress.error = "Failed", "cancelled"
        self._prepared.set()

    async def _run(self) -> None:
        order = self.order
        about = {"tablet": order.tablet_id, "replica": order.replica_id, "cause": order.cause}
        log.info(
            "copy ordered",
            source=order.source_node,
            witness=order.witness,
            log_only=order.log_only,
            **about,
        )
        try:
            if self.order.log_only:
                await self._prepare_log()
                log.info("witness prepared", **about)
            else:
                await self._copy()
                self.progress.state = "Done"
                log.info("copy done", **about)
        except Exception as exc:
            self.progress.state, self.progress.error = "Failed", str(exc) or repr(exc)
            unexpected = None if isinstance(exc, SteleError) else exc
            log.warning("copy failed", error=self.progress.error, exc_info=unexpected, **about)
            let_go(exc)  # the error's frames hold the last received bytes, and this frame holds the error
        finally:
            self._prepared.set()

    async def _prepare_log(self) -> None:
        """Make a running witness, then end the session so that the source keeps no files for it."""
        if self._resumed:
            return
        session = await self._begin()
        try:
            await self._prepare(session)
        finally:
            await self._end(session.session_id, True, "")

    async def _copy(self) -> None:
        """Fetch and install the files.

        A source that restarts forgets its sessions. In that case begin another session.
        """
        for attempt in range(_SESSIONS_MAX):
            session = await self._begin()
            keeper = asyncio.create_task(self._keep_alive(session.session_id))
            success, damage = False, ""
            try:
                superblock = await self._prepare(session)
                try:
                    await self._verify(session, superblock, await self._fetch(session))
                except Corrupt as exc:
                    # IO_ERROR: this node's disk failed, or the source has reported its own. The files are not
                    # at fault.
                    damage = "" if exc.code is Code.IO_ERROR else str(exc)
                    await until_finished(self._in_thread(remove_tree, self._incoming(session)))
                    if not damage:
                        raise
                    raise Corrupt(f"data from {self.order.source_address} is damaged: {exc.args[0]}") from exc
                await self._install(session, superblock)
                success = True
                self.progress.state = "Done"
                await self._until_joined()
                return
            except SteleError as exc:
                if not session_lost(exc) or attempt == _SESSIONS_MAX - 1:
                    raise
                log.info("copy session lost, beginning another", tablet=self.order.tablet_id)
            finally:
                keeper.cancel()
                await self._end(session.session_id, success, damage)

    @property
    def _at_least(self) -> OpId:
        """The OpId that the source's checkpoint must hold."""
        at_least = self.order.witness_start if self.order.witness else OPID_NONE
        return max(at_least, self.witness_start) if self._resumed else at_least

    async def _begin(self) -> SessionInfo:
        clock, delay_s = asyncio.get_running_loop().time, 0.1
        begun_at = clock()
        while True:
            try:
                return await self._source.begin(self.order.tablet_id, self.order.replica_id, self._at_least)
            except Retryable as exc:
                self.progress.error = str(exc)
                silent_s = clock() - begun_at
                if silent_s >= SILENT_MAX_S:
                    where = self.order.source_address
                    raise Retryable(f"no session at {where} for {silent_s:.0f} s: {exc}") from exc
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, 2.0)

    async def _prepare(self, session: SessionInfo) -> Superblock:
        """Make the replica's directory and superblock, and start a witness.

        Raises:
            Rejected: the source's offer breaks a bound.
        """
        refuse_offer(session, at_least=self._at_least, caller_term=self.order.caller_term)
        self.progress.error = ""
        superblock = replace(
            session.superblock,
            replica_id=self.order.replica_id,
            data_state=DataState.COPYING,
            witness_start=OPID_NONE,
            leader_hint=None,
        )
        if superblock.tablet_id != self.order.tablet_id:
            raise Rejected(
                f"{self.order.source_address} sent tablet {superblock.tablet_id[:8]}, but tablet "
                f"{self.order.tablet_id[:8]} was ordered; report this as a bug in Stele"
            )
        if self.order.witness and not self._resumed:
            start = self.order.witness_start if self.order.witness_start != OPID_NONE else session.checkpoint
            # A superblock without a start is debris. The start is written only after the stream that begins
            # there exists.
            await self._write_superblock(superblock)
            await self._home.create_stream(self.key, start, session.config)
            superblock = replace(superblock, witness_start=start)
            await self._write_superblock(superblock)
            self.witness_start = start
            await self._home.start_replica(superblock)
            self._resumed = True
        elif self._resumed:
            superblock = replace(superblock, witness_start=self.witness_start)
            # The superblock says READY if rows had arrived and could not be used. They are removed before the
            # next ones are in place, so it must say COPYING before that.
            await self._write_superblock(superblock)
        else:
            await self._write_superblock(superblock)
        self._prepared.set()
        return superblock

    async def _write_superblock(self, superblock: Superblock) -> None:
        def write() -> None:
            make_directory(self._directory)
            write_superblock(self._directory, superblock)

        await self._in_thread(write)

    async def _fetch(self, session: SessionInfo) -> frozenset[str]:
        """Fetch the files. Returns the names of those that need not be verified."""
        self.progress.state = "Fetching"
        self.progress.bytes_total = sum(f.size for f in session.files)
        self.progress.bytes_done = 0
        incoming = self._incoming(session)

        def make_place() -> None:
            for other in self._directory.glob(f"{INCOMING}*"):
                if other != incoming:
                    remove_tree(other)
            make_directory(incoming)
            here = {path.name: path.stat().st_size for path in incoming.iterdir()}
            wanted = sum(f.size for f in session.files if here.get(f.name) != f.size)
            refuse_beyond(wanted, self._home.room_bytes())

        await self._in_thread(make_place)
        fetcher = Fetcher(
            self._source,
            incoming,
            self._in_thread,
            self._rate,
            self._count,
            sums_of(session.superblock),
        )
        return await fetcher.fetch(session)

    def _incoming(self, session: SessionInfo) -> Path:
        """The folder for this source's files. Files of the same name differ from replica to replica."""
        return self._directory / f"{INCOMING}-{session.superblock.replica_id}"

    def _count(self, size: int) -> None:
        self.progress.bytes_done += size

    async def _verify(self, session: SessionInfo, superblock: Superblock, compared: frozenset[str]) -> None:
        """Compare all files with the checksums that they were once written with, and open the store.

        The frames' checksums prove nothing if the bytes were damaged at their source. Files in `compared`
        were compared as they arrived. The others, which an earlier session brought, are read from the disk.
        Reading may take minutes, so it has a thread of its own.
        """
        self.progress.state = "Verifying"
        stop = Event()

        def going_on(size: int) -> None:
            if stop.is_set():
                raise Retryable("the copy was stopped")

        def verify() -> None:
            machine = open_machine(superblock, self._directory, self._incoming(session).name)
            try:
                if machine.flushed != session.checkpoint:
                    raise Corrupt(
                        f"the copied files end at {machine.flushed}, but the source announced {session.checkpoint}; copy the replica anew"
                    )
                machine.verify(going_on, compared)
            finally:
                machine.close()

        thread = ThreadPoolExecutor(1, "stele-verify")
        verifying = asyncio.get_running_loop().run_in_executor(thread, verify)
        try:
            await asyncio.wait((verifying,))
        finally:
            stop.set()
            await until_done(verifying)
            thread.shutdown(wait=False)
        verifying.result()

    async def _install(self, session: SessionInfo, superblock: Superblock) -> None:
        self.progress.state = "Installing"
        directory = self._directory
        if superblock.witness_start != OPID_NONE:
            await self._until_log_reaches(session.checkpoint)

        def swap() -> None:
            remove_tree(directory / STORE)
            os.rename(self._incoming(session), directory / STORE)
            sync_directory(directory)

        await self._in_thread(swap)
        if superblock.witness_start == OPID_NONE:
            await self._home.create_stream(self.key, session.checkpoint, session.config)
        ready = replace(superblock, data_state=DataState.READY, witness_start=OPID_NONE)
        await self._write_superblock(ready)
        if superblock.witness_start == OPID_NONE:
            await self._home.start_replica(ready)
        else:
            await self._home.rows_arrived(ready)

    async def _until_log_reaches(self, checkpoint: OpId) -> None:
        """Wait until the witness's log holds the checkpoint.

        If the store were ahead of the log, the next start would find a log that lost entries. There is no
        time limit: if nobody can send the witness what it lacks, its driver removes it. That ends the wait.
        """
        while True:
            if self._home.log_reaches(self.key, checkpoint):
                return
            await asyncio.sleep(_LOG_LOOK_S)

    async def _keep_alive(self, session_id: str) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S)
            try:
                await self._source.keep_alive(session_id)
            except SteleError as exc:
                log.info("copy lease not renewed", session=session_id, error=str(exc))

    async def _until_joined(self) -> None:
        """Keep the session, which holds the log that this replica needs next, until the configuration names it."""
        for _ in range(int(_JOIN_TIMEOUT_S / _JOIN_LOOK_S)):
            if self._home.joined(self.key):
                return
            await asyncio.sleep(_JOIN_LOOK_S)

    async def _end(self, session_id: str, success: bool, damage: str) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await self._source.end(session_id, success, damage)
        except (SteleError, TimeoutError) as exc:
            log.info(
                "cannot end the copy session; it ends when its lease does", session=session_id, error=str(exc)
            )
