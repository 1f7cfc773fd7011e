"""Promises that one line of a replica keeps, each asked for by itself, of its parts alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stele.consensus.applier import Applier
from stele.consensus.proposals import Pending, Proposals
from stele.consensus.reads import Reads
from stele.consensus.started import StartedReplica
from stele.consensus.timestamps import Timestamps, encode_ceiling
from stele.consensus.writes import Writes
from stele.model.clock import from_physical_us
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, InvariantViolation, Retryable
from stele.model.ids import OpId
from stele.raft.events import Propose
from stele.tablet.machine import Outcome
from tests.consensus.test_timestamps import Wall, timestamps

LOST = Retryable("another leads", code=Code.NOT_LEADER)


class Standing:
    """A leader of term 4, as long as nobody changes it."""

    tablet_id = "t"

    def __init__(self) -> None:
        self.term = 4
        self.leads = self.running = True

    def refusal(self) -> Retryable:
        return LOST

    def check_leader(self) -> None:
        if not self.leads:
            raise LOST


class Posted(list[Any]):
    """A core that is given events and does nothing."""

    ticked_ms = 0
    core = SimpleNamespace(read_point=None)

    def post(self, event: Any) -> None:
        self.append(event)

    @property
    def writes(self) -> list[bytes]:
        return [e.payload for e in self if isinstance(e, Propose) and e.kind is EntryKind.WRITE]


class Parts:
    """The write path and the read path of a replica without a core, and a clock that is put."""

    def __init__(self, uncommitted_bytes_max: int = 1 << 20) -> None:
        self.wall = Wall()
        self.standing = Standing()
        self.runtime = Posted()
        self.times: Timestamps = timestamps(self.wall)
        self.times.lead()
        self.options = SimpleNamespace(
            write_bytes_max=1000,
            clock_error_max_ms=500,
            read_timeout_ms=10_000,
            raft=SimpleNamespace(uncommitted_bytes_max=uncommitted_bytes_max, lease_ms=0),
        )
        self.host = SimpleNamespace(
            node_id="n",
            low_space=lambda: False,
            stores_full=lambda: False,
            wall_us=self.wall,
            now_ms=lambda: 0,
            read_came=lambda reads: asyncio.get_running_loop().call_soon(reads.begin_round),
        )
        self.storage = SimpleNamespace(machine=None)
        contexts = itertools.count(1)
        self.writes = Writes(
            self.standing,  # type: ignore[arg-type]
            self.host,  # type: ignore[arg-type]
            self.options,  # type: ignore[arg-type]
            self.runtime,  # type: ignore[arg-type]
            self.storage,  # type: ignore[arg-type]
            self.times,
            contexts,
        )
        self.applier = Waits()
        self.reads = Reads(
            self.standing,  # type: ignore[arg-type]
            self.host,  # type: ignore[arg-type]
            self.options,  # type: ignore[arg-type]
            self.runtime,  # type: ignore[arg-type]
            self.storage,  # type: ignore[arg-type]
            self.writes,
            self.applier,  # type: ignore[arg-type]
            contexts,
        )

    def cover(self) -> int:
        """A ceiling is committed."""
        ceiling = self.times.next_ceiling()
        assert ceiling is not None
        self.times.in_log(ceiling)
        self.times.committed(ceiling)
        return ceiling


class Waits:
    """What is applied, and who waits for more."""

    def __init__(self) -> None:
        self.applied_index = 5
        self.committed_index = 9
        self.asked: list[int] = []
        self.meanwhile = lambda: None

    async def wait(self, index: int) -> None:
        self.asked.append(index)
        self.meanwhile()


# Timestamps and ceilings


async def test_timestamps_rise_while_the_clock_stands() -> None:
    parts = Parts()
    parts.cover()
    given = [parts.times.assign() for _ in range(5)]
    assert None not in given
    assert given == sorted(set(given))  # type: ignore[type-var]


async def test_a_ceiling_of_an_earlier_time_as_leader_covers_nothing() -> None:
    """Another may have led meanwhile, and have given the timestamps below it."""
    parts = Parts()
    ceiling = parts.cover()
    assert parts.times.covers(ceiling) and parts.times.assign() is not None
    parts.times.lead()
    assert not parts.times.covers(1) and parts.times.assign() is None


@pytest.mark.parametrize(("term", "counts"), [(3, False), (4, True)])
async def test_a_ceiling_counts_if_it_is_of_the_term_in_which_it_is_committed(
    term: int, counts: bool
) -> None:
    parts = Parts()
    ceiling = from_physical_us(parts.wall.us + 100_000)
    parts.writes.ceilings[7] = term
    parts.writes.ceilings_committed((Entry(term, 7, EntryKind.CEILING, 1, encode_ceiling(ceiling)),))
    assert parts.times.covers(ceiling) is counts


async def test_the_ceiling_of_rows_that_arrive_counts() -> None:
    """Timestamps below it were given by earlier leaders."""
    told: list[int] = []

    async def nothing(*_: object) -> None: ...

    replica = SimpleNamespace(
        writes=SimpleNamespace(timestamps=SimpleNamespace(in_log=told.append)),
        applier=SimpleNamespace(catch_up=nothing),
        storage=SimpleNamespace(read_log=None, take=lambda machine: None),
        runtime=Posted(),
    )
    await StartedReplica.rows_arrived(replica, SimpleNamespace(max_ceiling=77))  # type: ignore[arg-type]
    assert told == [77] and replica.runtime


# Writes


async def test_a_write_waits_behind_those_that_wait() -> None:
    parts = Parts()
    first = parts.writes.submit(b"first")
    parts.cover()
    second = parts.writes.submit(b"second")
    assert parts.runtime.writes == []
    await asyncio.sleep(0.01)
    assert parts.runtime.writes == [b"first", b"second"]
    first.cancel()
    second.cancel()


async def test_writes_that_wait_for_a_timestamp_are_bounded() -> None:
    parts = Parts(uncommitted_bytes_max=100)
    held = [parts.writes.submit(b"x" * 90)]
    with pytest.raises(Retryable) as refused:
        for _ in range(3):
            held.append(parts.writes.submit(b"x" * 90))
    assert refused.value.code is Code.THROTTLED
    parts.writes.end_leading(LOST)


async def test_who_loses_the_lead_refuses_all_that_waits() -> None:
    parts = Parts()
    write = parts.writes.submit(b"w")
    covered = asyncio.ensure_future(parts.writes.covered(from_physical_us(parts.wall.us)))
    await asyncio.sleep(0)
    parts.standing.leads = False
    parts.writes.end_leading(LOST)
    async with asyncio.timeout(5):
        for waits in (write, covered):
            with pytest.raises(Retryable) as refused:
                await waits
            assert refused.value.code is Code.NOT_LEADER


async def test_a_deadline_ends_the_waiting_and_not_the_write() -> None:
    parts = Parts()
    parts.cover()
    write = parts.writes.submit(b"w")
    with pytest.raises(Retryable) as late:
        await parts.writes.outcome(write, 1)
    assert late.value.code is Code.UNKNOWN_OUTCOME
    assert not write.done()


async def test_a_write_that_the_log_dropped_is_of_unknown_outcome() -> None:
    """Another replica may hold it, and commit it."""
    proposals = Proposals()
    write = Pending(b"w", asyncio.get_running_loop().create_future(), 7)
    proposals.posted(1, write)
    proposals.proposed(1, OpId(2, 5))
    proposals.lost(OpId(2, 5))
    error = write.future.exception()
    assert isinstance(error, Retryable) and error.code is Code.UNKNOWN_OUTCOME


async def test_a_replica_that_ends_knows_the_outcome_only_of_what_was_never_proposed() -> None:
    proposals = Proposals()
    waiting, posted, in_log = (Pending(b"w", asyncio.get_running_loop().create_future(), 7) for _ in range(3))
    proposals.add(waiting)
    proposals.posted(1, posted)
    proposals.posted(2, in_log)
    proposals.proposed(2, OpId(2, 5))
    proposals.fail_all(LOST)
    codes = [p.future.exception().code for p in (waiting, posted, in_log)]  # type: ignore[union-attr]
    assert codes == [Code.NOT_LEADER, Code.UNKNOWN_OUTCOME, Code.UNKNOWN_OUTCOME]


# Reads


async def test_reads_under_way_are_refused_when_the_lead_is_lost() -> None:
    parts = Parts()
    reads = [asyncio.ensure_future(parts.reads.linearizable_read())]
    await asyncio.sleep(0.01)  # its round is under way
    assert len(parts.runtime) == 1
    reads.append(asyncio.ensure_future(parts.reads.linearizable_read()))
    await asyncio.sleep(0)
    parts.reads.refuse_all(LOST)
    async with asyncio.timeout(5):
        for read in reads:
            with pytest.raises(Retryable) as refused:
                await read
            assert refused.value.code is Code.NOT_LEADER
    assert not parts.reads.busy


async def test_a_replica_that_has_failed_serves_no_snapshot() -> None:
    parts = Parts()
    parts.times.applied = 100
    await parts.reads.snapshot_ready(99)
    parts.standing.running = parts.standing.leads = False
    with pytest.raises(Retryable):
        await parts.reads.snapshot_ready(99)


async def test_nor_a_prepared_one_if_it_fails_while_that_waits() -> None:
    parts = Parts()
    await parts.reads.snapshot_ready(99, prepared=8)
    assert parts.applier.asked == [8]
    parts.applier.meanwhile = lambda: setattr(parts.standing, "running", False)  # type: ignore[assignment]
    with pytest.raises(Retryable):
        await parts.reads.snapshot_ready(99, prepared=8)


async def test_a_snapshot_waits_for_what_earlier_leaders_committed() -> None:
    parts = Parts()
    parts.cover()
    await parts.reads.snapshot_ready(from_physical_us(parts.wall.us))
    assert parts.applier.asked == [parts.applier.committed_index]


# Applying


async def test_entries_that_are_read_back_leave_no_gap() -> None:
    applied: list[int] = []
    applier = Applier(
        slice_ms=5,
        in_thread=lambda run: None,  # type: ignore[arg-type,return-value]
        applied=lambda entry, outcome: applied.append(entry.index),
        failed=lambda error: None,
    )
    applier.committed_index = 3

    async def read(first_index: int, bytes_max: int) -> Sequence[Entry]:
        return [Entry(1, index, EntryKind.WRITE, 1, b"") for index in (1, 3)]

    machine = SimpleNamespace(applied=OpId(0, 0), begin=lambda entry: Outcome(0))
    with pytest.raises(InvariantViolation, match="leave a gap"):
        await applier.catch_up(machine, read)  # type: ignore[arg-type]
    assert applied == [1]
