"""Entries that are written again at the log's end: what held them goes, and nothing else changes."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stele.model.entry import Entry
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.ids import OpId, ReplicaId
from stele.wal import Log
from stele.wal import stream as stream_module
from stele.wal.append_queue import RECORD_COST_BYTES
from stele.wal.stream import StreamLog
from tests.wal.simfs import SimFile, SimFiles
from tests.wal.support import (
    SMALL,
    entries,
    entry,
    fill,
    key,
    loaded,
    open_log,
    open_still,
    settle,
    stream_of,
)

MAX = 1 << 20


def pinned(files: SimFiles) -> Log:
    """A log of many segments, the first of which hold ten entries that are not flushed."""
    log = open_still(files)
    fill(log, 10, 100)
    stream = log.stream(key())
    stream.append_vote(3, ReplicaId(2))
    stream.append_entries(entries((3, 11), (3, 12)))
    stream.set_flushed(2)
    fill(log, 60, stream=2)
    log.stream(key(2)).set_flushed(60)
    log.collect()
    assert len(log.shared.segments) > 3
    return log


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_what_holds_the_log_moves_to_its_end(cache: int) -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, cache_bytes_max=cache))
    fill(log, 10, 100)
    fill(log, 60, stream=2)
    log.stream(key(2)).set_flushed(60)
    stream = log.stream(key())
    stream.set_flushed(2)
    before = loaded(stream)
    done: list[int] = []
    assert log.pins()
    assert stream.write_again(MAX, lambda: done.append(1)) > 8 * 100
    assert loaded(stream) == before and not done
    log.turn()
    assert done and loaded(stream) == before and not log.pins()
    assert log.collect().segments > 2
    assert len(log.shared.segments) == 1
    for seed in range(10):
        again = open_still(files.copy().crash(random.Random(seed)))
        assert not again.recovery.failed and not again.recovery.damages
        found = loaded(again.stream(key()))
        assert (found.start, found.entries) == (OpId(1, 2), before.entries[2:])


def test_power_that_goes_at_any_moment_loses_no_entry() -> None:
    """Each record voids what is above it: half of them written again would be half of them lost."""
    for after in range(60):
        files = SimFiles()
        log = pinned(files)
        before = loaded(log.stream(key()))
        files.fail_after = after
        try:
            log.stream(key()).write_again(MAX)
            log.turn()
            log.collect()
        except (OSError, Corrupt):
            pass
        for seed in range(3):
            again = open_still(files.copy().crash(random.Random(seed)))
            assert not again.recovery.failed and not again.recovery.damages
            found = loaded(again.stream(key()))
            assert found.hard_state == before.hard_state
            assert found.last == before.last
            assert found.entries == before.entries[found.start.index :] and found.start.index <= 2


def test_segments_in_between_that_stay_say_nothing_of_it() -> None:
    """Of entries that were written again the first go with their segment, and the others stay, before what replaced them."""
    files = SimFiles()
    log = open_still(files)
    for _ in range(6):
        fill(log, 2, 100)
        fill(log, 14, stream=2)
    stream, other = log.stream(key()), log.stream(key(2))
    other.set_flushed(30)
    before = loaded(stream).entries
    assert stream.write_again(MAX)
    log.turn()
    assert log.collect().segments
    assert len(log.shared.segments) > 3
    for closed in (False, True):
        if closed:
            log.close()
        again = open_still(files.copy().crash(random.Random(1)))
        assert not again.recovery.failed
        assert loaded(again.stream(key())).entries == before


def test_what_follows_takes_its_place_behind_it() -> None:
    files = SimFiles()
    log = pinned(files)
    stream = log.stream(key())
    stream.append_entries(entries((3, 13)))
    assert stream.write_again(MAX)
    stream.append_entries(entries((3, 14)))
    stream.pop_entries(12)
    stream.append_entries(entries((4, 12), (4, 13)))
    assert stream.write_again(MAX)
    log.turn()
    log.collect()
    want = [OpId(1, i) for i in range(3, 11)] + [OpId(3, 11), OpId(4, 12), OpId(4, 13)]
    assert [e.opid for e in loaded(stream).entries] == want
    log.close()
    assert [e.opid for e in loaded(open_still(files).stream(key())).entries] == want


def test_nothing_is_written_where_nothing_is_to_be_or_it_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = SimFiles()
    log = pinned(files)
    stream = log.stream(key())
    with pytest.raises(Rejected) as refused:
        stream.write_again(500)
    assert refused.value.code is Code.TOO_LARGE
    log.shared.no_space = True
    with pytest.raises(Retryable) as full:
        stream.write_again(MAX)
    assert full.value.code is Code.DISK_FULL
    log.shared.no_space = False
    assert not log.shared.append_queue.items
    reads: list[int] = []
    read = StreamLog.read_entries
    with monkeypatch.context() as patched:
        patched.setattr(stream_module, "_LOAD_BYTES", 1)
        patched.setattr(StreamLog, "read_entries", lambda *at: reads.append(at[1]) or read(*at))
        with pytest.raises(Rejected):
            stream.write_again(300)
    assert reads == [3, 4], "it reads no more than it would write"
    stream.set_flushed(12)
    stream.set_flushed(2)  # told late
    assert stream.write_again(MAX) == 0
    log.tombstone(key())
    assert stream.write_again(MAX) == 0
    log.turn()
    assert loaded(open_still(files.crash(random.Random(1))).stream(key())).last == OpId(3, 12)


def test_a_full_queue_does_not_hold_it_up() -> None:
    log = open_still(SimFiles(), replace(SMALL, queue_bytes_max=1000))
    stream = stream_of(log)
    log.turn()
    stream.append_entries((entry(1, 1, b"x" * 900),))
    assert stream.write_again(MAX) > 900
    log.turn()
    assert [e.opid for e in loaded(stream).entries] == [OpId(1, 1)]


class Looked(dict[int, Entry]):
    """Entries in memory; counts the looks at them, and what of those written comes to be kept."""

    looks = 0

    def get(self, index: int, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        self.looks += 1
        return super().get(index, default)

    def pop(self, index: int, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        self.looks += 1
        return super().pop(index, default)

    def __contains__(self, index: object) -> bool:
        self.looks += 1
        return super().__contains__(index)


def test_what_is_not_in_memory_is_not_looked_for_there_index_by_index() -> None:
    """Each time with the log's lock held, which the event loop takes too: half a million entries may be written again at once."""
    log = open_still(SimFiles(), replace(SMALL, cache_bytes_max=0))
    stream = stream_of(log)
    stream.append_entries(tuple(entry(1, index) for index in range(1, 5_001)))
    log.turn()
    stream.append_entries(entries((1, 5_001)))
    state = log.shared.states[key()]
    state.cache = cache = Looked(state.cache)
    assert len(cache) == 1 and stream.write_again(MAX)
    log.turn()
    assert not cache and len(log.shared.states[key()].extents) == 1
    state.raise_start(2_000)
    stream.pop_entries(4_000)
    assert [e.index for e in stream.read_entries(2_001, MAX)] == list(range(2_001, 4_000))
    assert cache.looks < 20


class Interrupted(SimFiles):
    """Before the file that is opened as number `at` something happens."""

    at = 0

    def meanwhile(self, at: int, what: Callable[[], None]) -> None:
        self.at, self.what = at, what

    def open(self, path: Path) -> SimFile:
        self.at -= 1
        if not self.at:
            self.what()
        return super().open(path)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_entries_that_a_new_leader_replaces_while_they_are_read_are_not_brought_back(at: int) -> None:
    """The end of what was read may be of the new leader's, and the beginning not."""
    files = Interrupted()
    log = open_still(files, replace(SMALL, cache_bytes_max=0))
    fill(log, 40)
    assert len(log.shared.segments) > 3
    stream = log.stream(key())

    def replaced() -> None:
        stream.append_entries(tuple(entry(2, i) for i in range(10, 41)))
        log.turn()

    files.meanwhile(at, replaced)
    assert stream.write_again(MAX) == 0 and files.at <= 0
    log.turn()
    assert [e.term for e in loaded(stream).entries] == [1] * 9 + [2] * 31
    assert stream.write_again(MAX)
    log.turn()
    assert [e.term for e in loaded(open_still(files).stream(key())).entries] == [1] * 9 + [2] * 31


@pytest.mark.parametrize("what", ["flushed", "removed"])
def test_what_is_not_needed_any_more_once_it_was_read_is_not_written(what: str) -> None:
    files = Interrupted()
    log = open_still(files, replace(SMALL, cache_bytes_max=0))
    stream = stream_of(log)
    stream.append_entries(entries((1, 1), (1, 2), (1, 3)))
    log.turn()
    files.meanwhile(1, lambda: stream.set_flushed(2) if what == "flushed" else log.tombstone(key()))
    assert stream.write_again(MAX) == 0 and not files.at
    assert len(log.shared.append_queue.items) == (what == "removed")


@pytest.mark.parametrize("gone", [False, True], ids=["in memory", "on the disk alone"])
def test_entries_that_come_once_the_others_were_read_are_written_again_with_them(
    monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Or what is written behind them would void them. Where they are not at hand any more, nothing is written."""
    files = SimFiles()
    log = open_still(files, replace(SMALL, cache_bytes_max=0))
    fill(log, 40)
    stream = log.stream(key())
    read = StreamLog.read_entries

    def read_and_more(of: StreamLog, first_index: int, bytes_max: int) -> list[Entry]:
        found = read(of, first_index, bytes_max)
        if of.last_opid.index == 40:
            of.append_entries((entry(1, 41), entry(2, 42)))
            if gone:
                log.turn()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(StreamLog, "read_entries", read_and_more)
        if gone:
            assert stream.write_again(MAX) == 0
        else:
            with pytest.raises(Rejected, match="bytes in one append"):
                stream.write_again(40 * (1_000 + RECORD_COST_BYTES))
    assert stream.write_again(MAX)
    log.turn()
    whole = [OpId(1, index) for index in range(1, 42)] + [OpId(2, 42)]
    assert [e.opid for e in loaded(stream).entries] == whole
    assert [e.opid for e in loaded(open_still(files).stream(key())).entries] == whole


def test_while_others_append_it_never_drops_what_they_did() -> None:
    files = SimFiles()
    log = open_log(files)
    stream = stream_of(log)
    settle(log)
    terms, go = range(1, 301), threading.Semaphore(0)

    def again() -> None:
        for _ in terms:
            go.acquire()
            stream.write_again(MAX)

    interval = sys.getswitchinterval()
    beside = threading.Thread(target=again)
    beside.start()
    try:
        sys.setswitchinterval(1e-5)
        twin = []
        rng = random.Random(1)
        for term in terms:
            at = rng.randint(max(1, len(twin) - 3), len(twin) + 1)
            new = tuple(entry(term, at + i) for i in range(rng.randint(1, 5)))
            go.release()
            stream.append_entries(new)
            twin[at - 1 :] = new
            if term % 50 == 0:
                settle(log)
    finally:
        sys.setswitchinterval(interval)
        go.release(len(terms))
        beside.join()
    settle(log)
    assert loaded(stream).entries == tuple(twin)
    log.close()
    assert loaded(open_still(files).stream(key())).entries == tuple(twin)
