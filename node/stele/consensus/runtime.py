"""Feeds a raft core, once per turn of the event loop, and carries out its effects in their order.

All events of one turn go to the core together. So a turn costs one Persist and one message per peer, however
many writes came. The runtime knows nothing of tablets: its `EffectSink` knows what an effect
means to callers. Its ports are the log, the sink, the `Loop` and the node's clocks; it starts no thread and
reads no other clock.

Invariant: a Send never leaves before the Persist that it names is durable, and Persists reach the log in
order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from stele.consensus.log_reads import read_patiently
from stele.consensus.ports import CoreLog, Loop
from stele.model.entry import Entry
from stele.model.errors import Code, InvariantViolation, Retryable, SteleError
from stele.model.ids import ReplicaId
from stele.raft import effects as fx
from stele.raft.core import RaftCore
from stele.raft.events import Event, LogRead, LogWritten, Persisted, Received, SyncStalled, Tick
from stele.raft.messages import Message
from stele.raft.ports import persist_calls

log = structlog.get_logger("stele.consensus")

_RETRY_S = 0.005


class EffectSink(Protocol):
    """Takes the effects that concern neither log nor transport, and the messages that may leave."""

    def send(self, to: ReplicaId, message: Message) -> None:
        """Send the message, which may leave now."""

    def takes_beats(self, to: ReplicaId) -> bool:
        """Whether the node of this peer takes beats."""

    def beat(self, to: ReplicaId, term: int, commit_index: int) -> None:
        """Tell this peer's node, with other tablets' beats, that this replica leads."""

    def effect(self, effect: fx.Effect) -> None:
        """Handle any other effect, in order."""

    def appending(self, entries: tuple[Entry, ...]) -> None:
        """Note that these entries are about to be written to the log."""

    def committed(self, entries: tuple[Entry, ...]) -> None:
        """Take entries that are committed and durable here, in the order of the effects."""

    def woken(self) -> None:
        """Give the core ticks again: its time goes on after a rest."""

    def runtime_failed(self, error: Exception) -> None:
        """End the replica: the core or the log has failed. Nothing more is fed or persisted."""

    async def read_log(self, first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        """Read entries of the log from `first_index` on. Returns an empty tuple if they are gone.

        Raises:
            Retryable: another try may help.
        """


class CoreRuntime:
    """Runs one core in the event loop in which it is made."""

    def __init__(
        self,
        core: RaftCore,
        stream: CoreLog,
        sink: EffectSink,
        now_ms: Callable[[], int],
        lease_clock: Callable[[], int] | None = None,
    ) -> None:
        """`lease_clock`: as `steady_ms` of `RaftCore.step_many`; None: always 0."""
        self.core = core
        self._lease_clock = lease_clock
        self._stream = stream
        self._sink = sink
        self._now_ms = now_ms
        self.ticked_ms = now_ms()
        """The node's time at its last tick. Use it where exactness does not matter: it costs no call."""
        self._loop: Loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._scheduled = False
        self._stopped = False
        self._held: deque[fx.Send] = deque()
        self._held_until_written: deque[fx.Send] = deque()
        self._deadline_ms: int | None = 0  # of the core; None: ask the core, as a turn may have changed it
        self._asked = 0  # id of the last Persist
        self._durable = 0
        self._appends: list[Callable[[], None]] = []  # which the log has refused so far; rarely any
        self._waits_after = -1  # the Persist after this one waits to be durable ...
        self._waits_since_ms = 0  # ... at least since the tick of this time
        self._log_stands: object = None  # `under_way` of the log, at the last look
        self._log_moved_ms = 0
        self._no_space = False  # the log refuses what is to be appended next
        self._stall_told_ms = 0
        self._reads: set[asyncio.Task[None]] = set()
        self._quiet_since_ms: int | None = None
        self._quiet_ms = 0  # for how long the core's time has stood still, in total

    def now_ms(self) -> int:
        """The core's time: the node's time less the times in which the group was quiet."""
        now = self._now_ms() if self._quiet_since_ms is None else self._quiet_since_ms
        return now - self._quiet_ms

    @property
    def quiet(self) -> bool:
        """Whether the core's time stands still: no heartbeats, no elections."""
        return self._quiet_since_ms is not None

    def rest(self) -> bool:
        """Stop the core's time if nothing is under way.

        The next event starts it again. Returns whether it is stopped.
        """
        if self._scheduled or self._asked > self._durable or self._held or self._reads or self._stopped:
            return False
        self._quiet_since_ms = self._now_ms()
        return True

    def wake(self) -> None:
        """Let the core's time go on where it stopped."""
        if self._quiet_since_ms is not None:
            self.ticked_ms = self._now_ms()
            self._quiet_ms += self.ticked_ms - self._quiet_since_ms
            self._quiet_since_ms = None
            self._sink.woken()

    def post(self, event: Event) -> None:
        """Feed `event` to the core at the end of this turn of the loop."""
        if self._stopped:
            return
        if self._quiet_since_ms is not None:
            self.wake()
        self._events.append(event)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def receive(self, sender: ReplicaId, message: Message) -> None:
        """Feed a message from another replica. It wakes a group at rest, since its sender does not rest."""
        self.post(Received(sender, message, self.now_ms()))

    def tick(self, now_ms: int) -> None:
        """Feed a tick to the core if one is due; cheap if not. A group at rest needs no ticks."""
        self.ticked_ms = now_ms
        # The core gets it again well within the shortest election timeout.
        due_ms = self._stall_told_ms + self.core.options.election_min_ms // 2
        if self._asked > self._durable and self._log_stalls(now_ms) and now_ms > due_ms:
            self._stall_told_ms = now_ms
            self.post(SyncStalled(now_ms - self._quiet_ms))
        if self._deadline_ms is None:
            self._deadline_ms = self.core.next_deadline_ms
        if (
            self._quiet_since_ms is None
            and now_ms - self._quiet_ms >= self._deadline_ms
            and not self._beats(now_ms - self._quiet_ms)
        ):
            self.post(Tick(now_ms - self._quiet_ms))

    def _beats(self, now_ms: int) -> bool:
        """In place of a Tick: have the node tell the peers that this replica leads. Returns False if the core needs the Tick."""
        core = self.core
        if self._stopped or self._scheduled or (peers := core.beat(now_ms, self._sink.takes_beats)) is None:
            return False
        for peer in peers:
            self._sink.beat(peer, core.term, core.commit_index)
        self._deadline_ms = core.next_deadline_ms
        return True

    def take_beat(self, leader: ReplicaId, term: int, commit_index: int, now_ms: int) -> bool:
        """As `RaftCore.take_beat`, at the node's time. A group at rest takes none: a heartbeat wakes it."""
        if self._stopped or self._quiet_since_ms is not None:
            return False
        self._deadline_ms = None
        return self.core.take_beat(leader, term, commit_index, now_ms - self._quiet_ms)

    def beat_answered(self, peer: ReplicaId, term: int, followed: bool, now_ms: int) -> None:
        """As `RaftCore.beat_answered`, at the node's time."""
        if not self._stopped and self._quiet_since_ms is None:
            self._deadline_ms = None
            self.core.beat_answered(peer, term, followed, now_ms - self._quiet_ms)

    def _log_stalls(self, now_ms: int) -> bool:
        """Whether a Persist has waited longer than an election timeout, and the log did not move in that
        time.

        A slow log that moves is not a stall: an entry waits for the sync under way, and then for its own. If
        the other disks are as slow, a hand-over would not help. If they are faster, the others commit without
        this one.
        """
        stands = self._stream.under_way
        if stands != self._log_stands:
            self._log_stands, self._log_moved_ms = stands, now_ms
        if self._durable != self._waits_after:
            self._waits_after, self._waits_since_ms = self._durable, now_ms
        since_ms = self._waits_since_ms
        if not self._no_space:  # else it may move for others
            since_ms = max(since_ms, self._log_moved_ms)
        return now_ms - since_ms > self.core.options.election_max_ms

    def stop(self) -> None:
        """Feed and persist nothing more."""
        self._stopped = True
        self.wake()
        self._events.clear()
        self._held.clear()
        self._held_until_written.clear()
        self._appends.clear()
        for task in self._reads:
            task.cancel()

    def _turn(self) -> None:
        self._scheduled = False
        if self._stopped or not self._events:
            return
        events, self._events = self._events, []
        try:
            self._deadline_ms = None
            steady_ms = self._lease_clock() if self._lease_clock is not None else 0
            self._carry_out(self.core.step_many(events, steady_ms))
        except Exception as exc:  # noqa: BLE001 - as above
            self._core_failed(exc)

    def _core_failed(self, error: Exception) -> None:
        expected = isinstance(error, SteleError)
        log.error(
            "the core of a replica failed; the replica stops",
            cause=self.core.cause,
            exc_info=None if expected else error,
        )
        self._fail(error if expected else InvariantViolation(f"raft core: {error!r}; this replica stops"))

    def _fail(self, error: Exception) -> None:
        self.stop()
        self._sink.runtime_failed(error)

    def _carry_out(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            if self._stopped:
                return  # the log failed: effects that follow from what it refused must not be carried out
            if type(effect) is fx.Send:
                if effect.written:
                    self._held_until_written.append(effect)
                elif effect.after > self._durable:
                    self._held.append(effect)
                else:
                    self._sink.send(effect.to, effect.message)
            elif type(effect) is fx.Persist:
                self._persist(effect)
            elif type(effect) is fx.Committed:
                self._sink.committed(effect.entries)
            elif type(effect) is fx.ReadLog:
                task = self._loop.create_task(self._read_log(effect))
                self._reads.add(task)
                task.add_done_callback(self._reads.discard)
            else:
                self._sink.effect(effect)

    def _persist(self, persist: fx.Persist) -> None:
        self._asked = persist.id
        done = partial(self._persisted, persist.id)
        if persist.entries:
            self._sink.appending(persist.entries)
        if persist.hard_state is None and persist.truncate_from is None:
            # Nearly always: one call.
            calls: Sequence[Callable[[], None]] = (
                partial(self._stream.append_entries, persist.entries, done),
            )
        else:
            calls = persist_calls(self._stream, persist, done)
        if persist.tells_written:
            calls = (*calls, partial(self._stream.when_written, partial(self._written, persist.id)))
        for call in calls:
            if self._appends or not self._taken(call):
                self._appends.append(call)

    def _push_appends(self) -> None:
        """Try the calls again that the log refused, in order."""
        while self._appends and not self._stopped and self._taken(self._appends[0]):
            del self._appends[0]

    def _taken(self, call: Callable[[], None]) -> bool:
        """Make a call on the log.

        Returns False if the log refused it (queue full, disk full). The call is tried again later.
        """
        try:
            call()
        except Retryable as exc:
            log.debug("the log is full and refuses appends for now", error=str(exc))
            self._no_space = exc.code is Code.DISK_FULL
            self._loop.call_later(_RETRY_S, self._push_appends)
            return False
        except SteleError as exc:
            self._fail(exc)
            return False
        self._no_space = False
        return True

    def _written(self, persist_id: int) -> None:
        """Note that everything up to this Persist survives the end of the process, but not yet power loss."""
        if self._release(self._held_until_written, persist_id) and self.core.role is fx.Role.LEADER:
            self.post(LogWritten(persist_id))

    def _persisted(self, persist_id: int) -> None:
        if self._stopped:
            return
        if persist_id > self._durable:
            self._durable = persist_id
        if self._release(self._held, persist_id):
            self.post(Persisted(persist_id))

    def _release(self, held: deque[fx.Send], persist_id: int) -> bool:
        """Send what waited for this Persist or an earlier one. Returns False if that ended the replica."""
        try:
            while held and held[0].after <= persist_id:
                send = held.popleft()
                self._sink.send(send.to, send.message)
        except Exception as exc:  # noqa: BLE001 - as above
            self._core_failed(exc)
            return False
        return True

    async def _read_log(self, request: fx.ReadLog) -> None:
        """Read the log for a peer, as long as this replica leads. A group never rests meanwhile."""
        entries = await read_patiently(
            lambda: self._sink.read_log(request.first_index, request.bytes_max),
            lambda: self.core.role is fx.Role.LEADER,
            self._fail,
        )
        if entries is not None:
            self.post(LogRead(request.to, request.first_index, entries))
