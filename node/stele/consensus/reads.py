"""The read path of a replica: snapshots, and ReadIndex rounds, one for all readers of a turn of the loop.

One part of a StartedReplica. Invariant: a snapshot that is ready holds everything at or below it, here and at
every later leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from types import TracebackType

from stele import metrics
from stele.consensus.applier import Applier
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.read_round import ReadRound
from stele.consensus.runtime import CoreRuntime
from stele.consensus.state import Standing
from stele.consensus.storage import Storage
from stele.consensus.writes import Writes, wrong_clock
from stele.model.clock import from_physical_us
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import HybridTime, ReplicaId
from stele.raft.events import RequestRead


class Reads:
    """Linearizable reads and snapshots.

    `asked_ms`: when a read was last asked for, by the node's clock; 0: never.
    """

    def __init__(
        self,
        standing: Standing,
        host: Host,
        options: ReplicaOptions,
        runtime: CoreRuntime,
        storage: Storage,
        writes: Writes,
        applier: Applier,
        contexts: Iterator[int],
    ) -> None:
        self.asked_ms = 0
        self._standing = standing
        self._host = host
        self._timeout_ms = options.read_timeout_ms
        self._leases = options.raft.lease_ms > 0
        self._runtime = runtime
        self._storage = storage
        self._writes = writes
        self._timestamps = writes.timestamps
        self._applier = applier
        self._contexts = contexts
        self._loop = asyncio.get_running_loop()
        self._next_round: list[asyncio.Future[int]] = []
        self._rounds: dict[int, list[asyncio.Future[int]]] = {}  # under way in the core, by context
        self._confirming: dict[ReadRound, None] = {}  # under way beside the core

    @property
    def busy(self) -> bool:
        """Whether a read waits for a ReadIndex round."""
        return bool(self._rounds or self._next_round or self._confirming)

    async def linearizable_read(self, within_ms: int = 0) -> None:
        """Return once all writes that were acknowledged before the call are applied here (ReadIndex).

        `within_ms`: how long the caller waits, at most the replica's own limit; 0: that limit.

        Raises:
            Retryable: NOT_LEADER, NO_QUORUM, TIMED_OUT.
        """
        async with self._deadline("a read", within_ms):
            await self._applier.wait(await self._confirmed_index())

    async def _confirmed_index(self) -> int:
        """Return an index that covers every write acknowledged before this call.

        It is a read index of this leader, taken after the call. A majority or a lease confirms it.
        """
        self._standing.check_leader()
        if self._leases and (index := self._leased_index()) is not None:
            return index
        future: asyncio.Future[int] = self._loop.create_future()
        if not self._next_round:
            self._host.read_came(self)
        self._next_round.append(future)
        return await future

    def _leased_index(self) -> int | None:
        """The index of `RaftCore.read_point`, if this leader's lease holds at this moment; else None.
        README.md says why that is enough."""
        core = self._runtime.core
        if not core.leased(self._host.steady_us()) or (point := core.read_point) is None:
            return None
        self.asked_ms = self._runtime.ticked_ms  # no group at rest has a lease
        metrics.leased_reads.cell()[0] += 1
        return point[1]

    def index_for(self, follower: ReplicaId, term: int) -> int | None:
        """Return the index up to which a follower must have applied, to serve all that was acknowledged
        before it asked.

        The follower says that it follows this replica in `term`. None: this replica does not lead in that
        term, or leader and follower are no majority. In that case call `index_by_others`.
        """
        point = self._runtime.core.read_point
        if point is None or not self._standing.leads or point[0] != term:
            return None
        return point[1] if self._runtime.core.confirmed_by(term, (follower,)) else None

    async def index_by_others(self, snapshot: int, within_ms: int) -> int:
        """Return the same index as `index_for`, after other voters confirmed that this replica leads.

        If `snapshot` is not 0, return the index that `prepare` gives for it.
        """
        if snapshot:
            return await self.prepare(snapshot, within_ms)
        async with self._deadline("a read of a follower", within_ms):
            return await self._confirmed_index()

    def begin_round(self) -> ReadRound | None:
        """Begin a round of this turn's reads, which the node asks other nodes to confirm.

        None: nobody waits, or the core confirms the reads.
        """
        futures, self._next_round = self._next_round, []
        if not futures:
            return None
        self.asked_ms = self._host.now_ms()
        if self._leases:
            self._runtime.wake()  # heartbeats renew the lease, so that the next reads need not ask
        point = self._runtime.core.read_point
        if point is None:
            self._ask_core(futures)
            return None
        own = self._standing.replica_id
        others = tuple([p for p in self._standing.config.voters if p.replica_id != own])
        begun = ReadRound(self, self._standing, others, *point, futures)
        self._confirming[begun] = None
        if not others and not self.confirmed(begun, ()):
            self.leave_to_core(begun)
        return begun

    def confirmed(self, begun: ReadRound, followers: Collection[ReplicaId]) -> bool:
        """Answer the reads of a round if these followers are enough. Returns whether they are."""
        if not self._runtime.core.confirmed_by(begun.term, followers):
            return False
        del self._confirming[begun]
        for future in begun.end():
            if not future.done():
                future.set_result(begun.index)
        return True

    def leave_to_core(self, begun: ReadRound) -> None:
        """Have the core confirm the reads of a round that the other nodes have not confirmed."""
        del self._confirming[begun]
        self._ask_core(begun.end())

    def _ask_core(self, futures: list[asyncio.Future[int]]) -> None:
        context = next(self._contexts)
        self._rounds[context] = futures
        self._runtime.post(RequestRead(context))

    async def latest_snapshot(self, within_ms: int = 0) -> HybridTime:
        """Return a snapshot that holds everything acknowledged before the call. Errors as
        `linearizable_read`.

        It is at most the later of now and the newest write. The applied timestamp may be later than both,
        because a new leader's first ceiling is above its predecessor's last one. A scan at so late a snapshot
        would read other tablets in the future.
        """
        await self.linearizable_read(within_ms)
        machine = self._storage.machine
        newest = machine.last_timestamp if machine is not None else 0
        snapshot = HybridTime(max(newest, from_physical_us(self._host.wall_us())))
        if self._timestamps.applied:
            return HybridTime(min(self._timestamps.applied, snapshot))
        self._writes.check_clock()
        await self.snapshot_ready(snapshot, within_ms)
        return snapshot

    async def prepare(self, snapshot: int, within_ms: int = 0) -> int:
        """Return the log index that covers everything at or below `snapshot`, whoever leads now or later.

        Any replica of this incarnation of the tablet may serve the snapshot once it has applied that index.
        README.md gives the argument. Raises the errors of `snapshot_ready`.
        """
        await self.snapshot_ready(snapshot, within_ms)
        return self._applier.applied_index

    async def snapshot_ready(
        self,
        snapshot: int,
        within_ms: int = 0,
        *,
        prepared: int = 0,
        ask: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Return once everything at or below `snapshot` is applied here and can never change.

        `within_ms`: as for `linearizable_read`. `prepared`: the index that `prepare` gave for this snapshot;
        0: none. `ask`: how a follower asks its leader if it does not know whether it holds the snapshot
        (`Following.holds`).

        Raises:
            Retryable: NOT_LEADER (a follower that does not know, and was given no `ask`), NO_QUORUM,
                TIMED_OUT, NOT_READY (clocks are apart).
            Rejected: CLOCK_AHEAD.
        """
        timestamps, standing, applier = self._timestamps, self._standing, self._applier
        if snapshot <= timestamps.applied and standing.running:
            return
        if prepared:
            async with self._deadline(f"snapshot {snapshot}", within_ms):
                await applier.wait(prepared)
            if not standing.running:
                raise standing.refusal()
            return
        if ask is not None and standing.running and not standing.leads:
            async with self._deadline(f"snapshot {snapshot}", within_ms):
                await ask(snapshot)
            return
        standing.check_leader()
        if fault := timestamps.fault:
            raise wrong_clock(fault)
        timestamps.reserve(snapshot)
        if not timestamps.covers(snapshot):
            self._writes.check_clock()
        async with self._deadline(f"snapshot {snapshot}", within_ms):
            term = None
            while term != standing.term:
                # All of this must happen in one term. A replica that lost the lead and won it back may hold
                # less than it waited for, until a ceiling of the new term is committed.
                term = standing.term
                await self._writes.covered(snapshot)
                # Entries of earlier leaders are committed with this leader's first ceiling, but may not be
                # applied yet.
                await applier.wait(applier.committed_index)
                outstanding = self._writes.proposals.outstanding(snapshot)
                if outstanding:
                    await asyncio.wait(outstanding)
                standing.check_leader()

    # --- what the core says

    def ready(self, context: int, index: int) -> None:
        """Let the reads of a round continue once `index` is applied: this replica still leads."""
        for future in self._rounds.pop(context, ()):
            if not future.done():
                future.set_result(index)

    def refused(self, context: int, error: SteleError) -> None:
        """Refuse the reads of a round that the core refused."""
        _refuse(self._rounds.pop(context, []), error)

    def refuse_all(self, error: SteleError) -> None:
        """Refuse all reads, because the replica no longer leads, or ends."""
        waiting = [future for futures in self._rounds.values() for future in futures] + self._next_round
        for begun in self._confirming:
            waiting += begun.end()
        self._rounds.clear()
        self._confirming.clear()
        self._next_round = []
        _refuse(waiting, error)

    def _deadline(self, what: str, within_ms: int) -> _Deadline:
        limit_ms = self._timeout_ms
        return _Deadline(
            min(within_ms or limit_ms, limit_ms), f"{what} of tablet {self._standing.tablet_id[:8]}"
        )


def _refuse(futures: list[asyncio.Future[int]], error: SteleError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


class _Deadline:
    """A time limit for `async with`. When it passes, it raises Retryable TIMED_OUT."""

    def __init__(self, timeout_ms: int, what: str) -> None:
        self._timeout = asyncio.timeout(timeout_ms / 1000)
        self._what = what
        self._timeout_ms = timeout_ms

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, exc, trace)
        except TimeoutError:
            raise Retryable(
                f"{self._what} was not ready within {self._timeout_ms} ms; try again", code=Code.TIMED_OUT
            ) from None
