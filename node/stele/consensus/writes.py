"""The write path of a replica: gives writes timestamps below a committed ceiling, proposes them, and reports
their outcomes.

One part of a StartedReplica. A write waits if no ceiling covers its timestamp yet.

Invariant: every write that the core is given has a timestamp at or below a committed ceiling.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from stele.consensus.pending import Pending
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.proposals import Proposals
from stele.consensus.runtime import CoreRuntime
from stele.consensus.state import Standing
from stele.consensus.storage import Storage
from stele.consensus.timestamps import Timestamps, decode_ceiling, encode_ceiling
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected, Retryable, SteleError, no_outcome
from stele.model.ids import OpId
from stele.raft.events import Propose
from stele.tablet.machine import Outcome

_CEILING_RETRY_S = 0.002


class Writes:
    """Proposals, timestamps and ceilings of one replica.

    `ceilings`: by log index, the terms of this leader's ceilings that are in its log and not committed yet.
    """

    def __init__(
        self,
        standing: Standing,
        host: Host,
        options: ReplicaOptions,
        runtime: CoreRuntime,
        storage: Storage,
        timestamps: Timestamps,
        contexts: Iterator[int],
    ) -> None:
        self.timestamps = timestamps
        self.proposals = Proposals()
        self.ceilings: dict[int, int] = {}
        self.last_applied_ms = 0
        """When a write was last applied, by the node's clock."""
        self._standing = standing
        self._host = host
        self._options = options
        self._runtime = runtime
        self._storage = storage
        self._contexts = contexts
        self._loop = asyncio.get_running_loop()
        self._pump_scheduled = False
        self._ceiling_contexts: dict[int, int] = {}  # proposed, and not in the log yet
        self._ceiling_waiters: list[asyncio.Future[None]] = []
        self._retry: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a write has no outcome yet, or a caller waits for a ceiling."""
        return bool(len(self.proposals) or self._ceiling_waiters)

    # --- proposals

    def submit(
        self,
        payload: bytes,
        *,
        small: bool = False,
        rows_only: bool = False,
        early: asyncio.Future[Outcome] | None = None,
    ) -> asyncio.Future[Outcome]:
        """Propose a WRITE. The future belongs to the replica: a caller may cancel only a shield of it.

        `small`: the write takes next to no space and frees some, so a full node accepts it. `rows_only`: it
        is a block of rows. `early`: another future of the outcome, which may end before the write is
        committed. In that case the outcome says `in_memory`, and every voter has written the entry to its
        log.

        Raises:
            Retryable: NOT_LEADER (with a hint), NO_QUORUM, NOT_READY (also where clocks are apart),
                THROTTLED, DISK_FULL.
            Rejected: TOO_LARGE.
        """
        if len(payload) > self._options.write_bytes_max:
            raise Rejected(
                f"write of {len(payload)} bytes; at most {self._options.write_bytes_max} are allowed; send "
                f"smaller ones",
                code=Code.TOO_LARGE,
            )
        if not self._standing.leads:
            raise self._standing.refusal()
        if not small and self._host.low_space():
            raise Retryable(
                f"the disk of node {self._host.node_id[:8]} is nearly full; free or add space",
                code=Code.DISK_FULL,
            )
        if not small and self._host.stores_full():
            raise Retryable(
                f"rows that wait to be flushed fill the memory of node {self._host.node_id[:8]}; send again a "
                f"little later",
                code=Code.THROTTLED,
            )
        timestamp = None if self.proposals.waiting else self.timestamps.assign()
        if timestamp is None:
            self.check_clock()
            if self.proposals.waiting_bytes > self._options.raft.uncommitted_bytes_max:
                raise Retryable("too many writes wait for this leader; slow down", code=Code.THROTTLED)
        future: asyncio.Future[Outcome] = self._loop.create_future()
        pending = Pending(payload, future, came_s=time.perf_counter(), rows_only=rows_only, early=early)
        if timestamp is None:
            self.proposals.add(pending)
            self._schedule_pump()
        else:
            self._post(pending, timestamp)
            if self.timestamps.ceiling_due:
                self._want_ceiling()
        return future

    def _post(self, pending: Pending, timestamp: int) -> None:
        """Give a write with its timestamp to the core."""
        pending.timestamp = timestamp
        context = next(self._contexts)
        self.proposals.posted(context, pending)
        early = pending.early is not None
        self._runtime.post(Propose(context, EntryKind.WRITE, pending.payload, timestamp, early))

    async def propose(
        self, payload: bytes, deadline_ms: int | None = None, *, small: bool = False
    ) -> Outcome:
        """Propose a WRITE and wait until it is applied here. `small`: see `submit`.

        Raises:
            As `submit`, and UNKNOWN_OUTCOME when `deadline_ms` passes or leadership is lost meanwhile.
        """
        return await self.outcome(self.submit(payload, small=small), deadline_ms)

    async def outcome(self, future: asyncio.Future[Outcome], deadline_ms: int | None) -> Outcome:
        """Wait for a submitted write. If the deadline passes, only the waiting ends, with UNKNOWN_OUTCOME."""
        if deadline_ms is None:
            return await asyncio.shield(future)
        done, _ = await asyncio.wait((future,), timeout=deadline_ms / 1000)
        if not done:
            raise no_outcome(deadline_ms)
        return future.result()

    def check_clock(self) -> None:
        """Raise NOT_READY if this node's clock is wrong, or far behind the timestamps of this log.

        Otherwise a write would wait for long, and its caller would not know why.
        """
        if fault := self.timestamps.fault:
            raise wrong_clock(fault)
        behind_ms = self.timestamps.behind_ms
        if behind_ms > self._options.clock_error_max_ms:
            raise Retryable(
                f"the clock of node {self._host.node_id[:8]} is {behind_ms} ms behind the timestamps of tablet "
                f"{self._standing.tablet_id[:8]}: this clock is wrong, or that of an earlier leader's node; "
                f"correct the clocks",
                code=Code.NOT_READY,
            )

    def let_time_pass(self) -> None:
        """As leader, append one ceiling that is late enough for the machine to forget all its clients.

        Replicas forget clients only by the timestamps of entries. Without such a ceiling, a tablet that gets
        no writes would remember its clients for ever.
        """
        machine = self._storage.machine
        if machine is None or not self._standing.leads or self._host.low_space():
            return
        idle_us = machine.clients_idle_us
        if idle_us is not None and self._host.wall_us() > idle_us:
            self._want_ceiling()

    # --- ceilings

    async def covered(self, snapshot: int) -> None:
        """Return once a ceiling of this leader at or above `snapshot` is committed.

        Raises:
            SteleError: this replica no longer leads, or its clock is wrong.
        """
        while not self.timestamps.covers(snapshot):
            future: asyncio.Future[None] = self._loop.create_future()
            self._ceiling_waiters.append(future)
            self._want_ceiling(snapshot)
            await future

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Give timestamps to waiting writes, as far as the ceiling allows, and give the writes to the core."""
        self._pump_scheduled = False
        if not self._standing.leads or not (self.proposals.waiting or self._ceiling_waiters):
            return
        if fault := self.timestamps.fault:
            self.proposals.fail_waiting(wrong_clock(fault))
            self._wake_ceiling_waiters(wrong_clock(fault))
            return
        while self.proposals.waiting:
            timestamp = self.timestamps.assign()
            if timestamp is None:
                break
            self._post(self.proposals.next_waiting(), timestamp)
        self._want_ceiling()

    def _want_ceiling(self, at_least: int = 0) -> None:
        """Propose the next ceiling if it is due. If time must pass first, look again soon."""
        if not self._standing.leads:
            return
        ceiling = self.timestamps.next_ceiling(at_least)
        if ceiling is not None:
            context = next(self._contexts)
            self._ceiling_contexts[context] = ceiling
            stamp = self.timestamps.stamp(ceiling)
            self._runtime.post(Propose(context, EntryKind.CEILING, encode_ceiling(ceiling), stamp))
        elif not self._ceiling_contexts and not self.ceilings:
            self._look_again_soon(at_least)

    def _look_again_soon(self, at_least: int = 0) -> None:
        if self._retry is None and (self.proposals.waiting or self._ceiling_waiters):
            self._retry = self._loop.call_later(_CEILING_RETRY_S, self._look_again, at_least)

    def _look_again(self, at_least: int) -> None:
        self._retry = None
        self._want_ceiling(at_least)
        self._schedule_pump()

    def _wake_ceiling_waiters(self, error: SteleError | None = None) -> None:
        waiters, self._ceiling_waiters = self._ceiling_waiters, []
        for future in waiters:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    # --- what the core says

    def proposed(self, context: int, opid: OpId) -> None:
        """Note that the core put the write or the ceiling with this context into the log at `opid`."""
        if not self.proposals.proposed(context, opid) and context in self._ceiling_contexts:
            del self._ceiling_contexts[context]
            self.ceilings[opid.index] = opid.term

    def held_by_all(self, index: int) -> None:
        """Answer writes early whose outcome is certain: every voter has the log up to `index` in its file."""
        machine = self._storage.machine
        if machine is not None and self._standing.leads:
            self.proposals.early.held(index, machine.applied.index, machine)

    def refused(self, context: int, error: SteleError) -> None:
        """Note a proposal that never entered a log: a write fails, a ceiling is tried again."""
        if self.proposals.refused(context, error):
            return
        if self._ceiling_contexts.pop(context, None) is not None:
            self.timestamps.lost()
            self._look_again_soon()

    def lost(self, opid: OpId) -> None:
        """Note a proposal that was dropped from this log."""
        self.proposals.lost(opid)
        if self.ceilings.pop(opid.index, None) is not None:
            self.timestamps.lost()

    def ceilings_committed(self, entries: tuple[Entry, ...]) -> None:
        """Use this leader's ceilings among the committed entries."""
        for entry in entries:
            if (
                entry.kind is EntryKind.CEILING
                and self.ceilings.pop(entry.index, None) == self._standing.term
            ):
                self.timestamps.committed(decode_ceiling(entry.payload))
                self._wake_ceiling_waiters()
                self._schedule_pump()

    def applied(self, entry: Entry, outcome: Outcome) -> None:
        """Note an applied entry, and end the write that proposed it."""
        timestamps = self.timestamps
        if entry.timestamp > timestamps.applied:
            timestamps.applied = entry.timestamp
        if entry.kind is EntryKind.WRITE:
            self.last_applied_ms = self._runtime.ticked_ms
            if outcome.schema_version:
                self._standing.report()
            if self.proposals.in_log:
                self.proposals.applied(entry, outcome)

    def begin_leading(self) -> None:
        """Prepare timestamps and early answers: this replica has become leader."""
        self.timestamps.lead()
        self.proposals.early.lead(self._runtime.core.log.last_index)
        self.ceilings.clear()
        self._ceiling_contexts.clear()

    def end_leading(self, error: SteleError) -> None:
        """Refuse the writes that were not proposed yet: this replica no longer leads."""
        self.proposals.fail_waiting(error)
        self._wake_ceiling_waiters(error)

    def stop(self, error: SteleError) -> None:
        """Fail all writes, because the replica ends."""
        if self._retry is not None:
            self._retry.cancel()
        self.proposals.fail_all(error)
        self._wake_ceiling_waiters(error)


def wrong_clock(fault: str) -> SteleError:
    """Return the error for a wrong clock. It is Retryable: the node hands over, and the next leader's clock
    is right.
    """
    return Retryable(f"{fault}; until then this replica assigns no timestamps", code=Code.NOT_READY)
