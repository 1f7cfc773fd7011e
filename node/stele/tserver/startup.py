"""Takes a node from an opened volume to running replicas. Waits for the masters' answer on the volume, then
begins the replicas, the first catalog and maintenance.

Runs in the background while the node already answers probes; requests for replicas get NOT_READY meanwhile.

Invariant: no replica votes or acknowledges anything before the masters had their chance to refuse an older
copy of the volume. If they refuse, the node ends. Their answer is written to the volume first, if the disk
allows it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import structlog

from stele.consensus.ports import InThread
from stele.model.bounds import INCARNATION_JUMP_MAX
from stele.tserver.admission import Admission, Refusal
from stele.tserver.admission_votes import newest
from stele.tserver.formation import Formation
from stele.tserver.maintenance import Maintenance
from stele.tserver.manager import TabletManager
from stele.tserver.options import EXIT_TRY_AGAIN
from stele.tserver.shutdown import Shutdown
from stele.tserver.ticker import ReplicaClock
from stele.tserver.volume import Fate, Volume, volume_old

log = structlog.get_logger("stele.tserver")

ADMISSION_S = 3.0
"""How long a start waits for the masters' answer on its volume. Tablets must come back even when no master
answers."""
ACCEPTED_S = 60.0
"""How long a volume that an administrator took back still reports that fact after it is admitted. By then
each master has recorded what the volume reports.
"""


class Startup:
    """The startup of one node. It does nothing before `begin`."""

    def __init__(
        self,
        volume: Volume,
        admission: Admission,
        manager: TabletManager,
        formation: Formation,
        maintenance: Maintenance,
        clock: ReplicaClock,
        shutdown: Shutdown,
        *,
        in_thread: InThread,
    ) -> None:
        self._volume = volume
        self._admission = admission
        self._manager = manager
        self._formation = formation
        self._maintenance = maintenance
        self._clock = clock
        self._shutdown = shutdown
        self._in_thread = in_thread
        self._opened_ms = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._refusal: asyncio.Task[None] | None = None

    @property
    def opened_ms(self) -> int:
        """When the last replica was opened, by the replicas' clock; 0 before that."""
        return self._opened_ms

    def begin(self) -> None:
        """Begin, once heartbeats report this start to the masters."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._be_admitted()), loop.create_task(self._open_replicas())]
        self._refusal = loop.create_task(self._end_if_refused())

    async def cancel(self) -> None:
        """Open no further replica."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop, once heartbeats have stopped. A refusal that has come is still written to the volume."""
        await self.cancel()
        if self._refusal is not None:
            if not self._admission.refusal.done():
                self._refusal.cancel()
            await asyncio.gather(self._refusal, return_exceptions=True)

    async def _open_replicas(self) -> None:
        try:
            await self._wait_may_open()
            await self._manager.open_all()
            self._opened_ms = self._clock.now_ms()
            await self._formation.make_first_catalog()
            self._maintenance.start()
        except Exception as exc:  # noqa: BLE001 - told to whoever runs the node
            self._shutdown.fail(exc)

    async def _wait_may_open(self) -> None:
        """Wait until the replicas may open. A volume that this start has formatted needs no master's answer,
        because it cannot have forgotten anything."""
        if self._volume.new or not self._admission.has_masters:
            return
        try:
            async with asyncio.timeout(ADMISSION_S):
                await self._admission.wait_may_open()
        except TimeoutError:
            # A doubted start waits on: a majority admits it soon, the doubt ends, or the process does.
            await self._admission.wait_undoubted()
            log.warning("starting without the masters' answer on this volume", waited_s=ADMISSION_S)

    async def _be_admitted(self) -> None:
        """Wait until the masters admit this start, so that they may rely on its reports. Wait longer if an
        administrator ordered a refused volume to be used again."""
        try:
            if not self._volume.new:
                await self._admission.wait_admitted()
            if self._volume.record.found:
                await self._in_thread(lambda: self._volume.update(lambda record: replace(record, found=0)))
        except Exception as exc:  # noqa: BLE001 - told to whoever runs the node
            self._shutdown.fail(exc)
            return
        self._admission.admit()
        if self._volume.record.accepting:
            await asyncio.sleep(ACCEPTED_S)
            with contextlib.suppress(OSError):  # the next start reports it once more, which does no harm
                await self._in_thread(
                    lambda: self._volume.update(lambda record: replace(record, accepting=False))
                )

    async def _end_if_refused(self) -> None:
        refusal = await self._admission.refusal
        for task in self._tasks:
            task.cancel()
        try:
            await self._note(refusal)
        except OSError as exc:
            log.error("the masters' answer on the volume could not be written to it", error=str(exc))
        finally:
            why = str(refusal.error.args[0])
            stale = Fate("StaleStart", EXIT_TRY_AGAIN, why)
            self._shutdown.fail(volume_old(self._volume.directory, why) if refusal.condemned else stale)

    async def _note(self, refusal: Refusal) -> None:
        """Write what the next start needs to know of the masters' refusal.

        The refused start was an older copy, or ran beside another start, or another process used this node's
        name. So the next start gets a number above all that the masters have heard. It is judged by its log
        alone.
        """
        record = self._volume.record
        own = record.incarnation
        later = max(own, min(newest(refusal.error), own + INCARNATION_JUMP_MAX))
        refused = str(refusal.error.args[0]) if refusal.condemned else record.refused
        await self._in_thread(
            lambda: self._volume.update(lambda record: replace(record, incarnation=later, refused=refused))
        )
