"""A damaged stream, and whoever goes on beside it: the log is collected, what may tell of the damage stays."""

from __future__ import annotations

import random

from stele.wal import Log
from stele.wal.segment import sequence_of
from tests.wal.simfs import SimFiles
from tests.wal.support import fill, key, open_still


def _set_aside(files: SimFiles) -> set[int]:
    found = (sequence_of(p.name, "damaged") for p in files.paths())
    return {sequence for sequence in found if sequence is not None}


def _damaged(files: SimFiles) -> Log:
    """Stream 2 lost bytes of a segment that is its alone; stream 1 is sound."""
    log = open_still(files)
    fill(log, 1)
    fill(log, 60, stream=2)
    fill(log, 30)
    log.close()
    lost = sorted(log.shared.segments)[1]
    files.content(log.shared.segments[lost].path)[8000] ^= 1
    log = open_still(files)
    assert log.recovery.failed.keys() == {key(2)}
    return log


def _write_on(log: Log) -> None:
    stream = log.stream(key())
    for _ in range(4):
        fill(log, 30)
        stream.set_flushed(stream.last_opid.index)
        log.collect()
    assert len(log.shared.segments) <= 3


def test_a_damaged_stream_does_not_stop_collection() -> None:
    """It held every later segment too, though nothing of it stands there, until the disk was full."""
    files = SimFiles()
    log = _damaged(files)
    there = set(log.shared.segments) - {log.shared.active_sequence}
    _write_on(log)
    assert _set_aside(files) == there
    for _ in range(2):
        files = files.crash(random.Random(1))
        log = open_still(files)
        assert log.recovery.failed.keys() == {key(2)} and not log.recovery.damages
        _write_on(log)
        assert _set_aside(files) == there
    log.tombstone(key(2))
    log.turn()
    _write_on(log)
    assert not _set_aside(files)
    log = open_still(files.crash(random.Random(1)))
    assert not log.recovery.failed and not log.recovery.damages


def test_a_crash_between_metadata_and_files_sets_them_aside_at_the_next_start() -> None:
    files = SimFiles()
    log = _damaged(files)
    there = set(log.shared.segments) - {log.shared.active_sequence}
    before = files.copy()
    _write_on(log)
    before.set_content(log.directory / "metadata", bytes(files.content(log.directory / "metadata")))
    after = SimFiles()
    for path in files.paths():
        if sequence_of(path.name, "damaged") is None:
            after.set_content(path, bytes(files.content(path)))
    for path in before.paths():
        if sequence_of(path.name) in there:
            after.set_content(path, bytes(before.content(path)))
    again = open_still(after)
    assert again.recovery.failed.keys() == {key(2)} and not again.recovery.damages
    assert _set_aside(after) == there


def test_a_segment_without_a_header_is_collected_like_any() -> None:
    """The metadata did not name it, so the next start missed the segment before the first."""
    files = SimFiles()
    log = open_still(files)
    fill(log, 60, stream=2)
    fill(log, 30, stream=3)
    log.close()
    first = log.shared.states[key(3)].extents[0].sequence
    files.content(log.shared.segments[first - 1].path)[20] ^= 1
    log = open_still(files)
    assert log.recovery.failed.keys() == {key(2)}
    log.tombstone(key(2))
    log.turn()
    log.collect()
    assert min(log.shared.segments) == first
    again = open_still(files.crash(random.Random(1)))
    assert not again.recovery.damages and not again.recovery.failed


def test_restarts_beside_a_damaged_stream_leave_no_segments_behind() -> None:
    """Each left the one that had been made ready: a node that was restarted often filled its disk with zeros."""
    files = SimFiles()
    log = _damaged(files)
    for _ in range(5):
        sequence = log.shared.wanted_sequence()
        assert sequence is not None
        log.shared.offer_next(log.shared.pool.make(sequence))  # as the keeper does
        files = files.crash(random.Random(1))
        log = open_still(files)
        assert log.recovery.failed.keys() == {key(2)}
    unknown = [p.name for p in files.paths() if sequence_of(p.name) not in {None, *log.shared.segments}]
    assert not unknown
    assert len([p for p in files.paths() if p.name.startswith("prepared-")]) <= 1
