"""Segments: prepared, recycled, closed early, collected, kept by anchors."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stele.model.config import Configuration, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Rejected
from stele.model.ids import ReplicaId
from stele.wal import Log, StreamLog
from stele.wal.segment import sequence_of
from tests.wal.simfs import SimFiles
from tests.wal.support import (
    CONFIG,
    NODE,
    SMALL,
    entry,
    fill,
    key,
    loaded,
    open_still,
    run_all,
    settle,
    stream_of,
    until,
)


def test_old_bytes_of_a_recycled_segment_are_never_taken_for_new() -> None:
    """Every group of the earlier life stands where a group of the new one could: still none is read."""
    files = SimFiles()
    log = open_still(files)
    for _ in range(6):
        fill(log, 12)
        log.stream(key()).set_flushed(log.stream(key()).last_opid.index)
        log.collect()
    assert log.stats.segments_recycled > 0
    stream = log.stream(key())
    want = [e.index for e in loaded(stream).entries]
    stream.append_entries((entry(2, stream.last_opid.index + 1, b"y" * 1000),))
    log.turn()
    for seed in range(20):
        other = open_still(files.copy().crash(random.Random(seed)))
        assert not other.recovery.failed
        found = loaded(other.stream(key())).entries
        assert [e.index for e in found] == [*want, stream.last_opid.index]
        assert all(e.payload == (b"y" if e.term == 2 else b"x") * 1000 for e in found)


def test_closed_early_is_cut_to_its_size() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, segment_bytes=1 << 20))
    fill(log, 2)
    log.close()
    assert all(len(files.content(p)) < 10_000 for p in files.paths() if sequence_of(p.name) is not None)


def test_the_keeper_prepares_the_next_segment(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "wal", replace(SMALL, prepare=True), NODE, run_all)
    stream = stream_of(log)
    for index in range(1, 200):
        stream.append_entries((entry(1, index, b"x" * 500),))
        if index % 20 == 0:
            settle(log)
            time.sleep(0.01)
    settle(log)
    until(lambda: log.stats.segments_prepared > 0)
    log.close()
    log = Log.open(tmp_path / "wal", replace(SMALL, prepare=True), NODE, run_all)
    assert len(loaded(log.stream(key())).entries) == 199
    log.close()


# --- collection


def test_collection_keeps_what_is_unflushed_or_anchored() -> None:
    files = SimFiles()
    log = open_still(files)
    fill(log, 60)
    stream = log.stream(key())
    assert log.collect().starts == {}
    [pin] = log.pins()
    assert (pin.key, pin.index) == (key(), 1)
    stream.set_flushed(50)
    stream.anchor("peer-2", 20)
    got = log.collect()
    assert got.segments > 0
    assert stream.start.index < 20
    assert got.starts[key()] == stream.start
    assert stream.read_entries(20, 1)[0].index == 20
    with pytest.raises(Rejected, match="NOT_FOUND"):
        stream.read_entries(stream.start.index, 1)
    stream.release("peer-2")
    log.collect()
    assert 20 < stream.start.index <= 50
    log.close()
    again = open_still(files).stream(key())
    assert again.start == stream.start
    assert [e.index for e in loaded(again).entries] == list(range(stream.start.index + 1, 61))


def test_a_segment_that_somebody_read_goes_later_and_nothing_is_missing() -> None:
    """The log's first segment named one that the metadata no longer did: the next start called it damaged."""
    files = SimFiles()
    log = open_still(files)
    fill(log, 60)
    oldest = min(log.shared.segments)
    read = log.shared.pin_segment(oldest)
    log.stream(key()).set_flushed(log.stream(key()).last_opid.index)
    log.collect()
    assert (
        sorted(log.shared.segments) == [oldest, log.shared.active_sequence]
        and log.shared.active_sequence > oldest + 2
    )
    log.shared.unpin_segment(read)
    log.collect()
    assert sorted(log.shared.segments) == [log.shared.active_sequence]
    again = open_still(files.crash(random.Random(1)))
    assert not again.recovery.damages and not again.recovery.failed
    assert again.stream(key()).last_opid == log.stream(key()).last_opid


def test_a_segment_that_somebody_links_elsewhere_is_not_written_again(tmp_path: Path) -> None:
    """A copy of the log made by links: what is collected here must not change there."""
    log = Log.open(tmp_path / "wal", SMALL, NODE, run_all, threads=False)
    fill(log, 60)
    closed = [s.path for s in log.shared.segments.values() if s.sequence < log.shared.active_sequence]
    kept = {tmp_path / path.name: path.read_bytes() for path in closed}
    for path in closed:
        os.link(path, tmp_path / path.name)
    log.stream(key()).set_flushed(log.stream(key()).last_opid.index)
    assert log.collect().segments == len(closed) > 2
    fill(log, 60)
    log.close()
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_segment_that_somebody_took_away_is_gone(tmp_path: Path) -> None:
    """It was needed by nobody. Known for ever, its bytes would be counted, and each collection fail again."""
    log = Log.open(tmp_path / "wal", SMALL, NODE, run_all, threads=False)
    fill(log, 60)
    oldest = log.shared.segments[min(log.shared.segments)]
    oldest.path.unlink()
    log.stream(key()).set_flushed(log.stream(key()).last_opid.index)
    log.collect()
    assert sorted(log.shared.segments) == [log.shared.active_sequence]
    log.close()
    again = Log.open(tmp_path / "wal", SMALL, NODE, run_all, threads=False)
    assert not again.recovery.failed and not again.recovery.damages
    again.close()


def test_what_is_held_is_the_sum_of_the_segments_from_there_on() -> None:
    log = open_still(SimFiles(), replace(SMALL, anchor_bytes_max=60_000))
    for _ in range(10):
        for number in range(1, 6):
            fill(log, number, stream=number)
    for number in range(1, 6):
        log.stream(key(number)).set_flushed(9 * number)
        log.stream(key(number)).anchor("peer", 5 * number)

    def held(number: int, index: int) -> int:
        runs = log.shared.states[key(number)].extents
        at = runs.find(index)
        assert at is not None
        return sum(s.length for s in log.shared.segments.values() if s.sequence >= runs[at].sequence)

    want = {key(n): held(n, 9 * n + 1) for n in range(1, 6)}
    assert {p.key: p.bytes for p in log.pins()} == {
        k: b + log.shared.active_length for k, b in want.items() if b
    }
    bound = log.shared.options.anchor_bytes_max - log.shared.active_length
    past = {key(n) for n in range(1, 6) if held(n, 5 * n) > bound}
    assert past and {name for name, _, _ in log.collect().dropped} == past


def test_an_anchor_past_its_bound_is_dropped_and_reported() -> None:
    log = open_still(SimFiles(), replace(SMALL, anchor_bytes_max=50_000))
    stream = stream_of(log)
    stream.anchor("peer-3", 1)
    fill(log, 20)
    stream.set_flushed(20)
    assert log.collect().dropped == ()
    fill(log, 40)
    stream.set_flushed(60)
    got = log.collect()
    assert got.dropped == ((key(), "peer-3", 1),)
    assert got.segments > 0


def test_an_anchor_holds_no_more_than_a_quarter_of_the_volume() -> None:
    files = SimFiles()
    files.total = 200_000
    log = open_still(files)
    stream = stream_of(log)
    stream.anchor("peers", 1)
    fill(log, 30)
    stream.set_flushed(30)
    assert log.collect().dropped == ()
    fill(log, 30)
    stream.set_flushed(60)
    assert log.collect().dropped == ((key(), "peers", 1),)


# --- a disk that gets full

NEEDED = replace(SMALL, low_space_bytes=64 << 10)
"""Free space that is kept; another segment is wanted above it."""


def kept_for_peers() -> tuple[SimFiles, Log, StreamLog]:
    """A log of 60 entries, of which the last five are not flushed; the others are kept for peers alone."""
    files = SimFiles()
    log = open_still(files, NEEDED)
    fill(log, 60)
    stream = log.stream(key())
    stream.set_flushed(55)
    stream.anchor("peers", 1, gives_way=True)
    log.collect()
    assert stream.start.index == 0
    return files, log, stream


def test_what_is_kept_for_peers_goes_where_the_disk_lacks_space_the_oldest_first() -> None:
    files, log, stream = kept_for_peers()
    segments = len(log.shared.segments)
    wanted = NEEDED.low_space_bytes + NEEDED.segment_bytes
    files.free = wanted - 2 * NEEDED.segment_bytes
    got = log.collect()
    assert got.dropped == ((key(), "peers", 1),)
    assert wanted <= files.free < wanted + NEEDED.segment_bytes  # no more than it takes
    assert 0 < got.segments < segments - 1
    assert got.starts[key()] == stream.start
    again = log.collect()
    assert (again.segments, again.dropped) == (0, ())


def test_what_is_not_flushed_stays_however_full_the_disk_is() -> None:
    files, log, stream = kept_for_peers()
    files.free = 4096  # the metadata is written first
    assert log.collect().segments > 0
    assert 40 < stream.start.index < 56
    assert [e.index for e in stream.read_entries(56, 1 << 20)] == [56, 57, 58, 59, 60]
    files.free = 1 << 20
    assert log.collect().segments == 0
    log.close()
    assert [e.index for e in loaded(open_still(files, NEEDED).stream(key())).entries][-5:] == list(
        range(56, 61)
    )


def test_what_a_copy_needs_stays_however_full_the_disk_is() -> None:
    """It is what the disk gets its space back by, where the log is kept for somebody who does not come."""
    files, log, stream = kept_for_peers()
    stream.anchor("copy-1", 20)
    files.free = 4096  # the metadata is written first
    got = log.collect()
    assert got.dropped == ((key(), "peers", 1),)
    assert 0 < stream.start.index < 20
    assert stream.read_entries(20, 1)[0].index == 20


def test_segments_that_wait_to_be_used_again_are_no_reason_for_a_full_disk() -> None:
    files, log, stream = kept_for_peers()
    stream.release("peers")
    assert log.collect().segments > 2
    waiting = [p for p in files.paths() if p.name.startswith("prepared-")]
    assert waiting
    stream.anchor("peers", stream.start.index + 1, gives_way=True)
    files.free = NEEDED.low_space_bytes
    assert log.collect().dropped == ()
    assert not [p for p in files.paths() if p.name.startswith("prepared-")]
    assert files.free >= NEEDED.low_space_bytes + NEEDED.segment_bytes
    fill(log, 40)
    log.close()


@pytest.mark.parametrize(("sixteenths", "kept"), [(0, 0), (1, 1), (9, 4)], ids=["none", "one", "the most"])
def test_what_waits_to_be_used_again_is_a_small_part_of_the_volume(sixteenths: int, kept: int) -> None:
    """On a volume of 1 GiB merges had no room beside it."""
    files, log, stream = kept_for_peers()
    log.shared.pool.empty()
    files.total = sixteenths * 16 * NEEDED.segment_bytes
    stream.release("peers")
    assert log.collect().segments > 0
    fill(log, 60)
    stream.set_flushed(110)
    log.collect()
    assert len([p for p in files.paths() if p.name.startswith("prepared-")]) == kept


def test_a_start_that_rises_carries_its_configuration() -> None:
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    fill(log, 10)
    later = Configuration(11, CONFIG.peers[:2])
    stream.append_entries((Entry(1, 11, EntryKind.CONFIG, 0, encode_configuration(later)),))
    fill(log, 40)
    stream.set_flushed(51)
    log.collect()
    assert stream.start.index > 11
    assert stream.config == later
    log.close()
    assert open_still(files).stream(key()).config == later


def test_a_start_that_rises_to_a_configuration_has_that_one() -> None:
    """Where it is the last entry of what is collected; with the one before, voters would be counted wrongly."""
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    fill(log, 8)
    later = Configuration(9, CONFIG.peers[:2])
    stream.append_entries((Entry(1, 9, EntryKind.CONFIG, 0, encode_configuration(later)),))
    log.turn()
    fill(log, 3, 12_000)  # each in a segment of its own
    stream.set_flushed(12)
    stream.anchor("peer-2", 10)
    log.collect()
    assert stream.start.index == 9
    assert stream.config == later
    log.close()
    assert open_still(files).stream(key()).config == later


def test_hard_state_outlives_its_segments() -> None:
    files = SimFiles()
    log = open_still(files)
    stream_of(log, key(2)).append_vote(9, ReplicaId(3))
    fill(log, 60)
    log.stream(key()).set_flushed(60)
    assert log.collect().segments > 0
    after = files.crash(random.Random(3))
    assert open_still(after).stream(key(2)).hard_state.term == 9


def test_the_keeper_never_prepares_over_the_segment_in_use(tmp_path: Path) -> None:
    """It did: between the taking of a prepared segment and its opening the same sequence was wanted again."""
    log = open_still(SimFiles())
    wanted = log.shared.wanted_sequence()
    assert wanted is not None
    log.shared.offer_next(log.shared.pool.make(wanted))
    assert log.shared.wanted_sequence() is None
    ready = log.shared.take_next(wanted - 1)
    assert ready is not None
    assert log.shared.wanted_sequence() == wanted + 1


def test_a_segment_closed_in_this_batch_is_not_collected_before_it_is_indexed() -> None:
    """Groups of one batch on both sides of a border: when the first segment is closed, its entries are known."""
    log = open_still(SimFiles(), replace(SMALL, group_bytes_max=500))
    stream = stream_of(log)
    log.turn()
    seen: list[int] = []
    opened = log.shared.segment_opened

    def look(*args: object) -> None:
        run = log.shared.states[key()].extents
        seen.append(run.last)
        opened(*args)  # type: ignore[arg-type]

    log.shared.segment_opened = look  # type: ignore[method-assign]
    for index in range(1, 21):
        stream.append_entries((entry(1, index, b"x" * 1000),))
    log.turn()
    assert seen and seen[-1] > 5


class HeldFiles(SimFiles):
    """A sync of the directory waits for `go`, once `held` is there."""

    def __init__(self) -> None:
        super().__init__()
        self.held: threading.Event | None = None
        self.go = threading.Event()

    def sync_directory(self, directory: Path) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.set()
            assert self.go.wait(60)
        super().sync_directory(directory)


def test_a_log_that_is_closed_within_a_collection_keeps_what_the_collection_wrote() -> None:
    """Its metadata, over the collection's, named segments that were then removed: every replica was FAILED at the next start."""
    files = HeldFiles()
    log = open_still(files)
    fill(log, 60)
    log.stream(key()).set_flushed(log.stream(key()).last_opid.index)
    held = files.held = threading.Event()
    collecting = threading.Thread(target=log.collect)
    closing = threading.Thread(target=log.close)
    collecting.start()
    assert held.wait(60)
    closing.start()
    closing.join(0.3)
    files.go.set()
    collecting.join(60)
    closing.join(60)
    assert not collecting.is_alive() and not closing.is_alive()
    again = open_still(files.crash(random.Random(1)))
    assert not again.recovery.damages and not again.recovery.failed
    assert min(again.shared.segments) >= log.shared.first_sequence > 1
