"""Group commit, back-pressure, failures, full disks, modes, reading back, threads."""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.model.entry import Entry
from stele.model.errors import Corrupt, InvariantViolation, Rejected, Retryable
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.wal import Log, LogOptions, SyncMode
from stele.wal.append_queue import Writer
from tests.wal.simfs import SimFiles, SimLoop
from tests.wal.support import (
    CONFIG,
    DIRECTORY,
    NODE,
    SMALL,
    entries,
    entry,
    fill,
    key,
    loaded,
    open_log,
    open_still,
    run_all,
    settle,
    stream_of,
    until,
)


def _until_idle(log: Log) -> None:
    until(lambda: log.shared.append_queue.writer is Writer.NOBODY)


# --- group commit


def test_64_appends_that_wait_together_cost_one_sync() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, segment_bytes=1 << 20))
    streams = [stream_of(log, key(i)) for i in range(1, 65)]
    log.turn()
    syncs, writes, done = files.syncs, len(files.write_calls), []
    for i, stream in enumerate(streams):
        stream.append_entries((entry(1, 1),), lambda i=i: done.append(i))  # type: ignore[misc]
    log.turn()
    assert done == list(range(64))
    assert files.syncs == syncs + 1
    assert len(files.write_calls) == writes + 2  # the group, and the marker that is not synced


def test_a_large_payload_is_handed_to_the_system_as_it_is() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, segment_bytes=4 << 20))
    stream = stream_of(log)
    log.turn()
    payload = bytes(1 << 20)
    seen: list[object] = []
    file = log._appender.active.file  # type: ignore[union-attr]
    write = file.write
    file.write = lambda buffers, offset: (seen.extend(buffers), write(buffers, offset))  # type: ignore[method-assign,func-returns-value]
    stream.append_entries((entry(1, 1, b"a"), entry(1, 2, payload)))
    log.turn()
    assert any(b is payload for b in seen)


def test_callbacks_come_once_per_sync() -> None:
    calls: list[int] = []
    log = Log.open(
        DIRECTORY,
        SMALL,
        NODE,
        lambda c: (calls.append(len(c)), run_all(c))[1],
        files=SimFiles(),
        threads=False,
    )
    stream = stream_of(log)
    for i in range(1, 6):
        stream.append_entries((entry(1, i),), lambda: None)
    log.turn()
    assert calls == [5]


# --- refusals


def test_a_full_queue_throttles_entries_but_not_hard_state() -> None:
    log = open_still(SimFiles(), replace(SMALL, queue_bytes_max=1000))
    stream = stream_of(log)
    stream.append_entries((entry(1, 1, b"x" * 500),))
    with pytest.raises(Retryable, match="THROTTLED"):
        stream.append_entries((entry(1, 2, b"x" * 500),))
    assert stream.last_opid == OpId(1, 1)
    stream.append_vote(2, ReplicaId(1))
    log.turn()
    stream.append_entries((entry(1, 2, b"x" * 5000),))
    log.turn()
    assert log.stats.throttled == 1


def test_low_space_is_told_before_it_refuses_entries_and_loses_nothing() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, low_space_bytes=1 << 20))
    stream = stream_of(log)
    stream.append_entries((entry(1, 1),))
    log.turn()
    files.free = 1 << 19
    log.refresh_space()
    assert log.low_space
    stream.append_entries((entry(1, 2),))
    files.free -= 1
    log.refresh_space()
    assert log.low_space
    with pytest.raises(Retryable, match="DISK_FULL"):
        stream.append_entries((entry(1, 3),))
    stream.append_vote(7, ReplicaId(1))
    log.turn()
    log.close()
    log = open_still(files)
    assert loaded(log.stream(key())).hard_state.term == 7
    assert loaded(log.stream(key())).entries == (entry(1, 1), entry(1, 2))


def test_low_space_is_told_where_inodes_run_out_before_bytes() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, low_space_files=100))
    stream = stream_of(log)
    for index, (inodes, low, none) in enumerate(
        ((None, False, False), (100, False, False), (99, True, False), (50, True, False), (49, True, True)), 1
    ):
        files.free_inodes = inodes
        log.refresh_space()
        assert (log.low_space, log.shared.no_space, log.free_files) == (low, none, inodes)
        if not none:
            stream.append_entries((entry(1, index),))
    with pytest.raises(Retryable, match="DISK_FULL"):
        stream.append_entries((entry(1, 5),))
    stream.append_vote(7, ReplicaId(1))
    log.turn()
    log.close()


def test_a_segment_that_cannot_be_prepared_is_no_failure() -> None:
    files = SimFiles()
    log = open_still(files)
    files.free = 12 << 10  # less than a segment, enough to overrun
    fill(log, 5)
    assert log.failed is None
    assert log.stats.overruns > 0
    files.free = 1 << 30
    fill(log, 40)
    assert len(log.shared.segments) > 1
    log.close()
    assert len(loaded(open_still(files).stream(key())).entries) == 45


@pytest.mark.parametrize("what", ["sync", "write"])
def test_a_failed_write_or_sync_is_final(what: str) -> None:
    files = SimFiles()
    told: list[Exception] = []
    log = Log.open(DIRECTORY, SMALL, NODE, run_all, files=files, on_failure=told.append, threads=False)
    stream = stream_of(log)
    log.turn()
    acknowledged: list[int] = []
    if what == "sync":
        files.sync_error = True
    else:
        files.free = 0
    stream.append_entries((entry(1, 1, b"x" * 50000),), lambda: acknowledged.append(1))
    log.turn()
    files.sync_error, files.free = False, 1 << 30
    assert isinstance(log.failed, Corrupt)
    assert told == [log.failed]
    with pytest.raises(Corrupt, match="IO_ERROR"):
        stream.append_vote(3, ReplicaId(1))
    log.turn()
    log.close()
    assert acknowledged == []


def test_calls_that_do_not_fit_leave_no_trace() -> None:
    log = open_still(SimFiles(), replace(SMALL, append_bytes_max=10_000))
    stream = stream_of(log)
    stream.append_entries(entries((1, 1), (1, 2)))
    for bad in (entries((1, 4)), entries((1, 3), (1, 5)), entries((1, 0)), ()):
        with pytest.raises(InvariantViolation):
            stream.append_entries(bad)
    log.turn()
    assert loaded(stream).entries == entries((1, 1), (1, 2))
    with pytest.raises(Rejected, match="TOO_LARGE"):
        stream.append_entries((entry(1, 3, b"x" * 20_000),))
    with pytest.raises(Rejected, match="ALREADY_PRESENT"):
        log.create_stream(key(), OPID_NONE, CONFIG)
    with pytest.raises(Rejected, match="NOT_FOUND"):
        log.stream(key(9))
    log.tombstone(key())
    with pytest.raises(Rejected, match="was removed"):
        log.create_stream(key(), OPID_NONE, CONFIG)


def test_a_stream_that_never_held_anything_may_be_made_again() -> None:
    """A copy crashed between its stream and its superblock, and begins again from a later checkpoint."""
    files = SimFiles()
    log = open_still(files)
    log.create_stream(key(), OpId(2, 10), CONFIG)
    log.turn()
    log = open_still(files.crash(random.Random(1)))
    log.create_stream(key(), OpId(3, 20), CONFIG).append_entries(entries((4, 21)))
    log.close()
    assert log.shared.files is not files
    state = loaded(open_still(log.shared.files).stream(key()))  # type: ignore[arg-type]
    assert (state.start, state.entries) == (OpId(3, 20), entries((4, 21)))


def test_options_tell_all_their_faults() -> None:
    with pytest.raises(Rejected, match=r"segment_bytes.*compression"):
        LogOptions(segment_bytes=1, compression="rar").check()


# --- sync modes


def test_mode_never_syncs_hard_state_only() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, sync=SyncMode.NEVER, segment_bytes=1 << 20))
    stream = stream_of(log)
    log.turn()
    syncs, done = files.syncs, []
    stream.append_entries((entry(1, 1),), lambda: done.append(1))
    log.turn()
    assert (done, files.syncs) == ([1], syncs)
    stream.append_vote(2, ReplicaId(1))
    log.turn()
    assert files.syncs == syncs + 1
    stream.append_entries((entry(1, 2),))
    log.turn()
    assert files.syncs == syncs + 1
    log.sync(lambda: done.append(2))
    log.turn()
    assert (done, files.syncs) == ([1, 2], syncs + 2)


def test_mode_interval_syncs_after_a_while(tmp_path: Path) -> None:
    options = replace(SMALL, sync=SyncMode.INTERVAL, sync_interval_ms=20)
    log = Log.open(tmp_path / "wal", options, NODE, run_all)
    stream = stream_of(log)
    settle(log)
    before = log.stats.syncs
    done = threading.Event()
    stream.append_entries((entry(1, 1),), done.set)
    assert done.wait(60)
    until(lambda: log.stats.syncs > before)
    log.close()


def test_what_one_turn_of_the_owner_appends_is_synced_together(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "wal", SMALL, NODE, run_all)
    streams = [stream_of(log, key(number)) for number in (1, 2, 3)]
    settle(log)
    _until_idle(log)
    loop = SimLoop()
    log.attach(loop, None)
    batches, done = log.stats.batches, threading.Semaphore(0)
    for stream in streams:
        stream.append_entries((entry(1, 1),), done.release)
    assert len(loop.waiting) == 1
    assert not done.acquire(timeout=0.05)
    loop.turn()
    assert all(done.acquire(timeout=60) for _ in streams)
    assert log.stats.batches == batches + 1
    _until_idle(log)
    other = threading.Thread(target=streams[0].append_entries, args=((entry(1, 2),), done.release))
    other.start()
    assert done.acquire(timeout=60)
    other.join()
    log.close()


# --- reading back


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_entries_are_read_from_disk_when_the_cache_has_dropped_them(compression: str | None) -> None:
    log = open_still(SimFiles(), replace(SMALL, cache_bytes_max=0, compression=compression))
    fill(log, 30)
    stream = log.stream(key())
    assert not log.shared.states[key()].cache
    assert [e.index for e in stream.read_entries(5, 3000)] == [5, 6, 7]
    assert [e.index for e in stream.read_entries(30, 1)] == [30]
    assert stream.read_entries(31, 1) == []
    assert len(stream.read_entries(1, 1 << 20)) == 30


def test_damage_that_comes_while_the_log_runs_is_never_served() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, cache_bytes_max=0))
    fill(log, 5)
    run = log.shared.states[key()].extents[2]
    files.content(log.shared.segments[run.sequence].path)[run.offset + 200] ^= 1
    stream = log.stream(key())
    assert stream.read_entries(1, 1)[0].index == 1
    with pytest.raises(Corrupt):
        stream.read_entries(3, 1)


# --- threads


def test_many_threads_append_read_and_collect(tmp_path: Path) -> None:
    options = replace(
        SMALL, prepare=True, cache_bytes_max=20_000, segment_bytes=64 << 10, keeper_interval_ms=5
    )
    log = Log.open(tmp_path / "wal", options, NODE, run_all)
    errors: list[BaseException] = []
    done: dict[int, list[int]] = {n: [] for n in range(1, 5)}

    def work(n: int) -> None:
        try:
            stream = stream_of(log, key(n))
            for index in range(1, 301):
                payload = f"{n}.{index}".encode() * 20
                stream.append_entries((entry(1, index, payload),), lambda: done[n].append(index))  # noqa: B023
                if index % 50 == 0:
                    back = stream.read_entries(max(stream.start.index + 1, index - 40), 1 << 20)
                    assert back[-1].payload == payload
                    stream.set_flushed(index - 45)
        except BaseException as exc:  # noqa: BLE001 - told to the main thread
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in done]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        log.collect()
        time.sleep(0.005)
    settle(log)
    assert not errors
    assert all(len(d) == 300 and d == sorted(d) for d in done.values())
    log.close()
    log = Log.open(tmp_path / "wal", options, NODE, run_all)
    for n in done:
        found = loaded(log.stream(key(n)))
        assert found.entries[-1].index == 300
        assert all(e.payload == f"{n}.{e.index}".encode() * 20 for e in found.entries)
    log.close()


def test_close_makes_what_was_appended_durable() -> None:
    files = SimFiles()
    log = open_log(files)
    stream = stream_of(log)
    done: list[int] = []
    for index in range(1, 50):
        stream.append_entries((entry(1, index),), lambda index=index: done.append(index))  # type: ignore[misc]
    log.close()
    log.close()
    assert done == list(range(1, 50))
    with pytest.raises(Retryable, match="closed"):
        stream.append_term(5)
    assert len(loaded(open_still(files.crash(random.Random(1))).stream(key())).entries) == 49


def test_newest_entries_kept_in_memory_take_no_more_than_they_may() -> None:
    """The bound counted payloads and 48 bytes each: of small entries six times as much was kept."""
    bytes_max = 1 << 20
    log = open_still(SimFiles(), replace(SMALL, segment_bytes=8 << 20, cache_bytes_max=bytes_max))
    stream = stream_of(log)
    tracemalloc.start()
    try:
        for first in range(1000, 31_000, 500):
            stream.append_entries(tuple(entry(1, i - 999) for i in range(first, first + 500)))
            log.turn()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        state = log.shared.states[key()]
        state.cache.clear()
        log.shared.cache._fifo.clear()
        taken = before - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert bytes_max // 2 < taken < bytes_max * 1.1


# --- any order of calls, against a plain list

_op = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.just("pop"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    st.tuples(st.just("flush"), st.integers(0, 5), st.just(0)),
)


@settings(max_examples=40, deadline=None)
@given(ops=st.lists(_op, max_size=30), cache=st.sampled_from([0, 500, 1 << 20]))
def test_any_calls_against_a_list(ops: list[tuple[str, int, int]], cache: int) -> None:
    files = SimFiles()
    options = replace(SMALL, segment_bytes=8 << 10, cache_bytes_max=cache)
    log = open_still(files, options)
    stream = stream_of(log)
    twin: list[Entry] = []
    flushed, term = 0, 1
    for what, a, b in ops:
        if what == "append":
            term += 1
            first = max(len(twin) + 1 - a, flushed + 1)
            new = tuple(entry(term, first + i, bytes([term % 256]) * 700) for i in range(b))
            stream.append_entries(new)
            twin[first - 1 :] = new
        elif what == "pop":
            at = max(len(twin) + 1 - a, flushed + 1)
            stream.pop_entries(at)
            del twin[at - 1 :]
        elif what == "turn":
            log.turn()
        elif what == "flush":
            flushed = max(flushed, len(twin) - a)
            stream.set_flushed(flushed)
            log.collect()
        else:
            log.close()
            log = open_still(files, options)
            stream = log.stream(key())
            stream.set_flushed(flushed)
        start = stream.start.index
        assert start <= flushed
        assert [*twin[start:]] == list(loaded(stream).entries)
        assert stream.last_opid == (twin[-1].opid if twin else OPID_NONE)
