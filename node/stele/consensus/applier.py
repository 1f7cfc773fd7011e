"""Applies committed entries to a state machine in order, in short slices of the event loop, and wakes waiting
callers.

A lookup of stored rows may take long, so it runs in a thread. Later entries wait for the lookup; the event
loop does not. Owned by StartedReplica.

Invariant: every entry is applied exactly once, in order of index; `applied_index` never falls.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from stele.consensus.ports import InThread
from stele.model.entry import Entry
from stele.model.errors import InvariantViolation, SteleError, ensure
from stele.tablet.machine import Lookup, Outcome, StateMachine

_READ_BYTES = 4 << 20


class Applier:
    """Applies the entries of one replica.

    `applied` is called with each entry and its outcome, `failed` with the error that ends applying.
    `in_thread` runs blocking work. Nothing is applied before `attach` or `catch_up`, which supply the state machine.
    """

    def __init__(
        self,
        *,
        slice_ms: float,
        in_thread: InThread,
        applied: Callable[[Entry, Outcome], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._slice_s = slice_ms / 1000
        self._in_thread = in_thread
        self._told = applied
        self._failed = failed
        self._machine: StateMachine  # set by attach or catch_up
        self._queue: deque[Entry] = deque()
        self._scheduled = False  # a slice is scheduled, or a lookup is under way
        self._lookup: asyncio.Task[None] | None = None
        self._ended: Exception | None = None
        self._live = False
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()
        self.committed_index = 0
        self.applied_index = 0

    @property
    def queued(self) -> int:
        """How many committed entries wait to be applied. Excludes an entry whose lookup is under way."""
        return len(self._queue)

    def attach(self, machine: StateMachine) -> None:
        """Apply to `machine` from now on. `machine` already holds everything that was committed before."""
        self._machine = machine
        self.applied_index = machine.applied.index
        self.committed_index = max(self.committed_index, self.applied_index)
        self._live = True

    async def catch_up(
        self, machine: StateMachine, read: Callable[[int, int], Awaitable[Sequence[Entry]]]
    ) -> None:
        """Apply the committed entries that `machine` lacks, then go on with new ones.

        `read(first_index, bytes_max)` reads entries back from the log. On return, everything committed is
        applied.

        Raises:
            SteleError: reading or applying failed, here or in a task that applied at the same time.
        """
        self._machine = machine
        self.applied_index = machine.applied.index
        while self.applied_index < self.committed_index:
            entries = await read(self.applied_index + 1, _READ_BYTES)
            ensure(bool(entries), f"no log entry {self.applied_index + 1} to bring a copied store up to date")
            for entry in entries:
                self._refuse_ended()
                if entry.index > self.committed_index:
                    break
                ensure(entry.index == self.applied_index + 1, "entries read back from the log leave a gap")
                outcome = machine.begin(entry)
                while isinstance(outcome, Lookup):
                    found = await self._in_thread(outcome.run)
                    self._refuse_ended()
                    outcome = machine.begin(entry, found)
                self._was_applied(entry, outcome)
                await asyncio.sleep(0)
        self._refuse_ended()
        self._live = True
        self._wake()

    def add(self, entries: tuple[Entry, ...]) -> None:
        """Apply newly committed entries, in order."""
        self.committed_index = entries[-1].index
        if not self._live or self._ended is not None:
            return
        # A copied store may hold more than this replica knew to be committed.
        if entries[0].index <= self.applied_index:
            entries = tuple([e for e in entries if e.index > self.applied_index])
        self._queue.extend(entries)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    async def wait(self, index: int) -> None:
        """Return once everything up to `index` is applied.

        Raises:
            SteleError: applying has ended with this error.
        """
        if index <= self.applied_index and self._live:
            return
        self._refuse_ended()
        future: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._waiters, (index, next(self._count), future))
        await future

    def stop(self, error: Exception) -> None:
        """Apply nothing more. Callers that wait get `error`."""
        self._ended = error
        self._queue.clear()
        for _, _, future in self._waiters:
            if not future.done():
                future.set_exception(error)
        self._waiters.clear()

    def _refuse_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _slice(self) -> None:
        self._scheduled = False
        if self._ended is not None:
            return
        queue, machine = self._queue, self._machine
        end = time.perf_counter() + self._slice_s if len(queue) > 1 else 0.0
        try:
            while queue:
                entry = queue.popleft()
                outcome = machine.begin(entry)
                if isinstance(outcome, Lookup):
                    self._scheduled = True
                    self._lookup = self._loop.create_task(self._look_up(entry, outcome))
                    break
                self._was_applied(entry, outcome)
                if queue and time.perf_counter() >= end:
                    break
        except Exception as exc:  # noqa: BLE001 - a bug in one replica must not take the node down
            self._broke(exc)
            return
        self._go_on()

    async def _look_up(self, entry: Entry, lookup: Lookup) -> None:
        """Run the lookup that `entry` needs in a thread, and apply the entry. Then continue with later
        entries.
        """
        outcome: Outcome | Lookup = lookup
        try:
            while isinstance(outcome, Lookup):
                found = await self._in_thread(outcome.run)
                if self._ended is not None:
                    return
                outcome = self._machine.begin(entry, found)
            self._was_applied(entry, outcome)
        except Exception as exc:  # noqa: BLE001 - as above
            if self._ended is None:
                self._broke(exc)
            return
        self._scheduled = False
        self._go_on()

    def _was_applied(self, entry: Entry, outcome: Outcome) -> None:
        self.applied_index = entry.index
        self._told(entry, outcome)

    def _broke(self, error: Exception) -> None:
        if not isinstance(error, SteleError):
            error = InvariantViolation(
                f"applying entry {self.applied_index + 1}: {error!r}; this replica stops"
            )
        self._failed(error)

    def _go_on(self) -> None:
        if self._queue and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.applied_index:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)
