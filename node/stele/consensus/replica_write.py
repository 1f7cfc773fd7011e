"""The writing side of a replica: proposals get timestamps under a committed ceiling and go to the core; what finds no ceiling
waits. A layer of Replica.

Invariant: nothing is handed to the core without a timestamp that a committed ceiling covers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.proposals import Pending, Proposals
from stele.consensus.replica_base import ReplicaBase
from stele.consensus.superblock import Superblock
from stele.consensus.timestamps import Timestamps, decode_ceiling, encode_ceiling
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected, Retryable, SteleError, no_outcome
from stele.model.ids import OpId
from stele.raft.events import Propose
from stele.tablet.machine import Outcome

_CEILING_RETRY_S = 0.002


class WritePart(ReplicaBase):
    """Proposals, timestamps, ceilings."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        super().__init__(superblock, directory, host, options)
        self.timestamps = Timestamps(
            host.wall_us,
            self.options.ceiling_ahead_us,
            self.options.ceiling_ahead_max_ms * 1000,
            self.options.clock_error_max_ms * 1000,
            fault=host.clock_fault,
            node=host.node_id,
        )
        self._proposals = Proposals()
        self._pump_scheduled = False
        self._ceiling_contexts: dict[int, int] = {}
        self._ceilings: dict[int, int] = {}  # log index of a ceiling this leader proposed, its term
        self._ceiling_waiters: list[asyncio.Future[None]] = []
        self._retry: asyncio.TimerHandle | None = None

    def submit(self, payload: bytes) -> asyncio.Future[Outcome]:
        """Propose a WRITE. The future is the replica's, not the caller's: cancel only a shield of it.

        Raises:
            Retryable: NOT_LEADER (with a hint), NO_QUORUM, NOT_READY (also where clocks are apart), THROTTLED, DISK_FULL.
            Rejected: TOO_LARGE.
        """
        if len(payload) > self.options.write_bytes_max:
            raise Rejected(
                f"write of {len(payload)} bytes; at most {self.options.write_bytes_max}: send smaller ones",
                code=Code.TOO_LARGE,
            )
        self.check_leader()
        if self.host.low_space():
            raise Retryable("the disk of this node is nearly full; free or add space", code=Code.DISK_FULL)
        if self.host.stores_full():
            raise Retryable(
                f"rows that wait to be flushed fill the memory of node {self.host.node_id}; send again a little later",
                code=Code.THROTTLED,
            )
        timestamp = None if self._proposals.waiting else self.timestamps.assign()
        if timestamp is None:
            self._check_clock()
            if self._proposals.waiting_bytes > self.options.raft.uncommitted_bytes_max:
                raise Retryable("too many writes wait for this leader; slow down", code=Code.THROTTLED)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        pending = Pending(payload, future)
        if timestamp is None:
            self._proposals.add(pending)
            self._schedule_pump()
        else:
            self._post(pending, timestamp)
            if self.timestamps.ceiling_due:
                self._want_ceiling()
        return future

    def _post(self, pending: Pending, timestamp: int) -> None:
        """Hand a write that has its timestamp to the core."""
        pending.timestamp = timestamp
        context = next(self._contexts)
        self._proposals.posted(context, pending)
        if self._runtime is not None:
            self._runtime.post(Propose(context, EntryKind.WRITE, pending.payload, timestamp))

    def _check_clock(self) -> None:
        """Raise where this node's clock is wrong, or timestamps of this log are so far ahead that what needs one would wait
        long, and not know for what."""
        if fault := self.timestamps.fault:
            raise wrong_clock(fault)
        behind_ms = self.timestamps.behind_ms
        if behind_ms > self.options.clock_error_max_ms:
            raise Retryable(
                f"the clock of node {self.host.node_id} is {behind_ms} ms behind the timestamps of tablet "
                f"{self.tablet_id}: this one is wrong, or that of a node that led before it; set the clocks right",
                code=Code.NOT_READY,
            )

    async def propose(self, payload: bytes, deadline_ms: int | None = None) -> Outcome:
        """Propose a WRITE and wait until it is applied here.

        Raises:
            As `submit`, and UNKNOWN_OUTCOME when `deadline_ms` passes or leadership is lost meanwhile.
        """
        return await self.outcome(self.submit(payload), deadline_ms)

    async def outcome(self, future: asyncio.Future[Outcome], deadline_ms: int | None) -> Outcome:
        """Wait for a submitted write; a deadline ends only the waiting (UNKNOWN_OUTCOME)."""
        if deadline_ms is None:
            return await asyncio.shield(future)
        done, _ = await asyncio.wait((future,), timeout=deadline_ms / 1000)
        if not done:
            raise no_outcome(deadline_ms)
        return future.result()

    def let_time_pass(self) -> None:
        """As leader, bring the present into the log where that makes the machine forget all clients: replicas forget by the
        entries' time alone, so those of a tablet that nobody writes to would stay for ever."""
        if self.machine is None or not self.is_leader or not self.running or self.host.low_space():
            return
        idle_us = self.machine.clients_idle_us
        if idle_us is not None and self.host.wall_us() > idle_us:
            self._want_ceiling()

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Give timestamps to writes that waited for a ceiling or for time to pass, and hand them to the core."""
        self._pump_scheduled = False
        if not self.is_leader or not (self._proposals.waiting or self._ceiling_waiters):
            return
        if fault := self.timestamps.fault:
            self._proposals.fail_waiting(wrong_clock(fault))
            self._wake_ceiling_waiters(wrong_clock(fault))
            return
        while self._proposals.waiting:
            timestamp = self.timestamps.assign()
            if timestamp is None:
                break
            self._post(self._proposals.next_waiting(), timestamp)
        self._want_ceiling()

    def _want_ceiling(self, at_least: int = 0) -> None:
        """Propose the next ceiling if one is due; if time must pass first, look again soon."""
        if self._runtime is None or not self.is_leader:
            return
        ceiling = self.timestamps.next_ceiling(at_least)
        if ceiling is not None:
            context = next(self._contexts)
            self._ceiling_contexts[context] = ceiling
            stamp = self.timestamps.stamp(ceiling)
            self._runtime.post(Propose(context, EntryKind.CEILING, encode_ceiling(ceiling), stamp))
        elif not self._ceiling_contexts and not self._ceilings:
            self._look_again_soon(at_least)

    def _look_again_soon(self, at_least: int = 0) -> None:
        if self._retry is None and (self._proposals.waiting or self._ceiling_waiters):
            self._retry = asyncio.get_running_loop().call_later(_CEILING_RETRY_S, self._look_again, at_least)

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

    def _write_proposed(self, context: int, opid: OpId) -> None:
        if not self._proposals.proposed(context, opid) and context in self._ceiling_contexts:
            del self._ceiling_contexts[context]
            self._ceilings[opid.index] = opid.term

    def _write_refused(self, context: int, error: SteleError) -> None:
        if self._proposals.refused(context, error):
            return
        if self._ceiling_contexts.pop(context, None) is not None:
            self.timestamps.lost()
            self._look_again_soon()

    def _write_lost(self, opid: OpId) -> None:
        self._proposals.lost(opid)
        if self._ceilings.pop(opid.index, None) is not None:
            self.timestamps.lost()

    def _ceilings_committed(self, entries: tuple[Entry, ...]) -> None:
        """Those of this leader, which has some."""
        for entry in entries:
            if entry.kind is EntryKind.CEILING and self._ceilings.pop(entry.index, None) == self.term:
                self.timestamps.committed(decode_ceiling(entry.payload))
                self._wake_ceiling_waiters()
                self._schedule_pump()

    def _begin_writes(self) -> None:
        """This replica has become leader."""
        self.timestamps.lead()
        self._ceilings.clear()
        self._ceiling_contexts.clear()

    def _end_writes(self, error: SteleError) -> None:
        """It leads no more: what was never proposed never will be."""
        self._proposals.fail_waiting(error)
        self._wake_ceiling_waiters(error)

    def _stop_writes(self, error: SteleError) -> None:
        """It stops for good."""
        if self._retry is not None:
            self._retry.cancel()
        self._proposals.fail_all(error)
        self._wake_ceiling_waiters(error)


def wrong_clock(fault: str) -> SteleError:
    """Retryable: its node hands over, and whoever leads next has a right clock."""
    return Retryable(f"{fault}; until then this replica makes no timestamps", code=Code.NOT_READY)
