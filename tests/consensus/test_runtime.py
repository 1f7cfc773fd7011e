"""When the disk of a replica counts as one that stalls: a real core and a real log, whose syncs end when the test says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stele.consensus.runtime import CoreRuntime
from stele.model.config import Configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Retryable
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft import effects as fx
from stele.raft.core import RaftCore
from stele.raft.events import InitialState, Propose, Start
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.options import RaftOptions
from tests.wal.simfs import SimFiles
from tests.wal.support import CONFIG, ROOMY, LoopSide, key, open_log

ALONE = Configuration(-1, CONFIG.peers[:1])
OPTIONS = RaftOptions()


class Sink:
    """Hears what the core says; a replica alone says nothing to others."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.effects: list[fx.Effect] = []

    def send(self, to: ReplicaId, message: Any) -> None:
        return None

    def effect(self, effect: fx.Effect) -> None:
        self.effects.append(effect)

    def takes_beats(self, to: ReplicaId) -> bool:
        return False

    def beat(self, to: ReplicaId, term: int, commit_index: int) -> None:
        raise AssertionError("no node takes beats")

    def appending(self, entries: Any) -> None:
        return None

    def committed(self, entries: Any) -> None:
        return None

    def woken(self) -> None:
        return None

    def runtime_failed(self, error: Exception) -> None:
        self.errors.append(error)

    async def read_log(self, first_index: int, bytes_max: int) -> tuple[Any, ...]:
        return ()


class Alone:
    """A replica without others, its disk and its time."""

    def __init__(self, config: Configuration = ALONE) -> None:
        self.log = open_log(SimFiles(), ROOMY)
        self.disk = LoopSide(self.log)
        self.now_ms = 0
        self.sink = Sink()
        stream = self.log.create_stream(key(), OPID_NONE, config)
        self.disk.settle()
        core = RaftCore(
            OPTIONS,
            ReplicaId(1),
            InitialState(0, None, OPID_NONE, config, leader_hint=ReplicaId(1)),
            random.Random(1),
        )
        self.runtime = CoreRuntime(core, stream, self.sink, lambda: self.now_ms)

    @property
    def leads(self) -> bool:
        assert not self.sink.errors
        return self.runtime.core.role is fx.Role.LEADER

    async def turn(self) -> None:
        """What waits in the loop runs, and a sync begins if the log has something to write."""
        for _ in range(3):
            await asyncio.sleep(0)
            self.disk.loop.turn()

    async def begin(self) -> None:
        self.runtime.post(Start(0))
        for _ in range(10):
            await self.turn()
            self.disk.run()
        assert self.leads and self.runtime.core.commit_index == 1

    async def write(self, context: int) -> None:
        self.runtime.post(Propose(context, EntryKind.WRITE, b"w"))
        await self.turn()

    async def sync_ends(self) -> None:
        """The one under way; that of what waited for it begins."""
        assert self.disk.sync.under_way
        self.disk.end()
        await self.turn()

    async def pass_ms(self, for_ms: int) -> None:
        """Time passes, in a node's ticks."""
        end_ms = self.now_ms + for_ms
        while self.now_ms < end_ms:
            self.now_ms = min(self.now_ms + 25, end_ms)
            self.runtime.tick(self.now_ms)
            await self.turn()


@pytest.fixture
async def alone() -> AsyncIterator[Alone]:
    made = Alone()
    await made.begin()
    yield made
    made.log.close()


@pytest.mark.parametrize("sync_ms", [200, 350, 550])
async def test_a_disk_that_is_slow_and_moves_is_no_stall(alone: Alone, sync_ms: int) -> None:
    """An entry waits for the sync under way and then for its own. Leaders stepped down in circles, to no quicker disk."""
    await alone.write(0)
    for context in range(1, 40):
        await alone.pass_ms(1)
        await alone.write(context)  # waits for two
        await alone.pass_ms(sync_ms - 1)
        await alone.sync_ends()
        assert alone.leads
    assert alone.runtime.core.commit_index == 1 + 39


async def test_a_disk_that_hangs_is_one_within_an_election_timeout(alone: Alone) -> None:
    await alone.write(1)
    await alone.pass_ms(OPTIONS.election_max_ms)
    assert alone.leads
    await alone.pass_ms(50)
    assert not alone.leads


async def test_a_disk_that_hangs_after_it_was_slow_is_one(alone: Alone) -> None:
    await alone.write(1)
    for context in range(2, 6):
        await alone.write(context)
        await alone.pass_ms(400)
        await alone.sync_ends()
    await alone.pass_ms(OPTIONS.election_max_ms)
    assert alone.leads
    await alone.pass_ms(50)
    assert not alone.leads


async def test_a_log_at_rest_for_long_is_not_taken_for_one_that_hangs(alone: Alone) -> None:
    """Nothing moved for as long as nothing was to be written."""
    await alone.write(1)
    await alone.pass_ms(25)
    await alone.sync_ends()
    await alone.pass_ms(60_000)
    alone.runtime.post(Propose(2, EntryKind.WRITE, b"w"))
    await asyncio.sleep(0)  # the log has it, and has not begun to write
    await alone.pass_ms(OPTIONS.election_max_ms)
    assert alone.leads
    await alone.pass_ms(100)
    assert not alone.leads


async def test_the_cores_time_goes_on_where_it_stopped(alone: Alone) -> None:
    """However often it rested: a leader that slept for a day has not lost touch, and its clock never goes back."""
    for slept_ms in (86_400_000, 7):
        before = alone.runtime.now_ms()
        assert alone.runtime.rest() and alone.runtime.quiet
        alone.now_ms += slept_ms
        assert alone.runtime.now_ms() == before
        alone.runtime.wake()
        assert not alone.runtime.quiet and alone.runtime.now_ms() == before
        alone.now_ms += 3
        assert alone.runtime.now_ms() == before + 3


async def test_a_log_without_space_stalls_though_it_moves_for_others(alone: Alone) -> None:
    """It takes the votes of other replicas, and no entry of this one."""
    alone.log.shared.no_space = True
    other = alone.log.create_stream(key(2), OPID_NONE, ALONE)
    await alone.write(1)
    for term in range(1, 20):
        other.append_term(term)
        await alone.pass_ms(50)
        await alone.sync_ends()
    assert not alone.leads


class NoWayOut(Sink):
    """Cannot send what waited for the disk: a bug."""

    def send(self, to: ReplicaId, message: Any) -> None:
        if not message.pre_vote:
            raise ValueError("a number below zero")


async def test_a_bug_met_where_a_message_has_waited_for_the_disk_ends_the_replica() -> None:
    """The core was never told that its vote is durable, and nobody that anything was wrong."""
    one = Alone(CONFIG)
    one.sink = one.runtime._sink = NoWayOut()
    one.runtime.post(Start(0))
    await one.turn()
    one.runtime.receive(ReplicaId(2), VoteResponse(0, True, True, 1, True))
    await one.turn()
    one.disk.run()
    one.log.close()
    (error,) = one.sink.errors
    assert "a number below zero" in str(error)


class FullStream:
    """A stream whose log has no room for entries so many times."""

    def __init__(self, stream: Any, refusals: int) -> None:
        self._stream = stream
        self.refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def append_entries(self, entries: Any, done: Any = None) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Retryable("the queue is full", code=Code.THROTTLED)
        self._stream.append_entries(entries, done)


async def test_what_the_log_had_no_room_for_is_written_before_what_came_after_it(alone: Alone) -> None:
    """Also where it has room again by then: entries behind a gap would end the replica."""
    alone.runtime._stream = full = FullStream(alone.runtime._stream, 1)
    for context in (1, 2, 3):
        await alone.write(context)
    assert not full.refusals and alone.leads
    while alone.runtime._appends:
        await asyncio.sleep(0.001)
    await alone.turn()
    alone.disk.run()
    await alone.turn()
    assert alone.leads and alone.runtime.core.commit_index == 1 + 3


class RefusingStream:
    """A stream whose log has failed; what votes it is given it keeps."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def append_entries(self, entries: Any, done: Any = None) -> None:
        raise Corrupt("the log has failed")


async def test_nothing_more_is_said_by_a_core_whose_log_refused_what_came_first() -> None:
    """The replica that had FAILED was told after that that it leads."""
    alone = Alone()
    alone.runtime._stream = RefusingStream(alone.runtime._stream)
    alone.runtime.post(Start(0))
    for _ in range(10):
        await alone.turn()
        alone.disk.run()
    alone.log.close()
    (error,) = alone.sink.errors
    assert "the log has failed" in str(error)
    assert not [e for e in alone.sink.effects if isinstance(e, fx.RoleChanged) and e.role is fx.Role.LEADER]


class Mouth(Sink):
    """Keeps what left for others."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def send(self, to: ReplicaId, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        """Messages of one kind, pre-votes left out."""
        return [m for m in self.sent if isinstance(m, kind) and not getattr(m, "pre_vote", False)]


@pytest.fixture
async def speaker() -> AsyncIterator[tuple[Alone, Mouth]]:
    """One of three, its disk and what it says."""
    one, mouth = Alone(CONFIG), Mouth()
    one.sink = one.runtime._sink = mouth
    one.runtime.post(Start(0))
    await one.turn()
    yield one, mouth
    assert not mouth.errors
    one.log.close()


async def test_a_vote_is_asked_for_once_the_own_one_is_on_disk(speaker: tuple[Alone, Mouth]) -> None:
    one, mouth = speaker
    one.runtime.receive(ReplicaId(2), VoteResponse(0, True, True, 1, True))
    await one.turn()
    assert one.disk.sync.under_way and not mouth.of(VoteRequest)
    await one.sync_ends()
    assert [m.term for m in mouth.of(VoteRequest)] == [1, 1]


async def test_a_sync_lets_those_messages_go_that_waited_for_it(speaker: tuple[Alone, Mouth]) -> None:
    """And not those of what was appended while it was under way, which no disk has yet."""
    one, mouth = speaker
    for index in (1, 2):
        entry = Entry(1, index, EntryKind.WRITE, 0, b"w")
        before = OpId(index - 1, index - 1)
        one.runtime.receive(ReplicaId(2), UpdateRequest(1, before, (entry,), 0))
        await one.turn()
    assert not mouth.of(UpdateResponse)
    for index in (1, 2):
        await one.sync_ends()
        assert [m.last_received for m in mouth.of(UpdateResponse)] == [
            OpId(1, n) for n in range(1, index + 1)
        ]
