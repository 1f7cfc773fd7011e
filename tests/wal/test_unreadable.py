"""A sector that the disk cannot read is damage of its range, as wrong bytes are: it fails streams, never the log."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from stele.model.errors import Corrupt
from stele.model.ids import ReplicaId, StreamKey
from stele.wal import Log, LogOptions
from stele.wal.options import HEADER_BYTES
from stele.wal.sectors import PAGE_BYTES
from stele.wal.segment import sequence_of
from tests.wal.simfs import SECTOR, SimFiles
from tests.wal.support import SMALL, entry, key, loaded, open_still, stream_of
from tests.wal.test_recovery_table import record_groups, reopen, scan_file, write
from tests.wal.twin import TwinStream

STREAMS = tuple(key(n) for n in range(1, 6))
OPTIONS = replace(SMALL, segment_bytes=32 << 10)


def _several_streams(*, closed: bool) -> tuple[SimFiles, dict[StreamKey, TwinStream]]:
    """Five streams in turns of a few segments, one of them quiet; the first segments are collected."""
    files = SimFiles()
    log = open_still(files, OPTIONS)
    twins = {name: TwinStream() for name in STREAMS}
    for round_ in range(40):
        for name in STREAMS[: 1 + round_ // 10]:
            _append(log, twins, name, 700)
        if round_ == 8:
            _vote(log, twins, STREAMS[0])
        if round_ == 12:
            log.stream(STREAMS[0]).set_flushed(12)
            twins[STREAMS[0]].flushed = 12
    assert log.collect().segments
    _append(log, twins, STREAMS[4], 700)
    _vote(log, twins, STREAMS[1])
    log.close() if closed else log.turn()
    assert len(_segments(files)) > 3
    return files.copy(), twins


def _append(log: Log, twins: dict[StreamKey, TwinStream], name: StreamKey, size: int) -> None:
    new = entry(1, twins[name].last.index + 1, bytes([name.replica_id, twins[name].last.index % 256]) * size)
    stream_of(log, name).append_entries((new,))
    twins[name].put((new,))
    log.turn()


def _vote(log: Log, twins: dict[StreamKey, TwinStream], name: StreamKey) -> None:
    log.stream(name).append_vote(3, ReplicaId(2))
    twins[name].term, twins[name].vote = 3, ReplicaId(2)
    log.turn()


def _segments(files: SimFiles) -> list[Path]:
    return [p for p in files.paths() if sequence_of(p.name) is not None]


def _served(log: Log, twins: dict[StreamKey, TwinStream], where: str) -> int:
    """How many streams are served; each of them whole and right. One that is not known any more is FAILED by its owner."""
    served = 0
    for name, twin in twins.items():
        if name in log.recovery.failed or name not in log.shared.states:
            continue
        assert twin.agrees(loaded(log.stream(name))), (where, name)
        served += 1
    return served


@pytest.mark.parametrize("closed", [True, False])
def test_every_sector_of_the_log_unreadable(closed: bool) -> None:
    files, twins = _several_streams(closed=closed)
    beside_failed = 0
    for path in _segments(files):
        for sector in range(len(files.content(path)) // SECTOR):
            spoiled, where = files.copy(), f"{path.name} sector {sector}"
            spoiled.spoil(path, sector)
            log = open_still(spoiled, OPTIONS)
            served = _served(log, twins, where)
            failed = set(log.recovery.failed)
            beside_failed += bool(failed and served)
            assert served == len(twins) or log.recovery.damages, where
            if sector % 5:
                continue
            again = open_still(spoiled, OPTIONS)
            assert set(again.recovery.failed) == failed, where
            assert _served(again, twins, where) == served, where
    assert beside_failed > 10


def test_a_bad_sector_fails_whom_wrong_bytes_fail() -> None:
    """In a closed segment, where both are seen for what they are."""
    files, _ = _several_streams(closed=True)
    path = _segments(files)[0]
    differs = []
    for page in range(1, len(files.content(path)) // 4096):
        spoiled, wrong = files.copy(), files.copy()
        for sector in range(page * 8, page * 8 + 8):
            spoiled.spoil(path, sector)
        wrong.content(path)[page * 4096 : page * 4096 + 4096] = b"\xa5" * 4096
        if (
            open_still(spoiled, OPTIONS).recovery.failed.keys()
            != open_still(wrong, OPTIONS).recovery.failed.keys()
        ):
            differs.append(page)
    assert not differs


@pytest.mark.parametrize("markers", [True, False])
def test_a_bad_sector_where_the_log_ends_is_no_torn_tail(markers: bool) -> None:
    """Nothing proves that the last batch was acknowledged, and nothing proves that it was not."""
    w = write(25, markers=markers)
    last = record_groups(w.groups)[-1]
    assert last.offset > HEADER_BYTES + PAGE_BYTES  # the stream's creation can be read
    w.files.spoil(w.path, last.offset // SECTOR)
    log, _ = reopen(w.files)
    assert "copied from its peers" in log.recovery.failed[key()]
    assert not log.recovery.warnings
    assert key() in reopen(w.files)[0].recovery.failed


def test_a_bad_sector_in_the_last_body_is_no_torn_tail() -> None:
    """Its header can be read, and says that a group of this length was written there."""
    files = SimFiles()
    log = open_still(files, OPTIONS)
    for index, size in ((1, 5_000), (2, 9_000)):
        stream_of(log).append_entries((entry(1, index, b"x" * size),))
        log.turn()
    spoiled, path = files.copy(), max(_segments(files))
    groups = scan_file(files, path)
    last = record_groups(groups)[-1]
    spoiled.content(path)[last.end : groups[-1].end] = bytes(groups[-1].end - last.end)  # the marker was lost
    spoiled.spoil(path, (last.offset + 5_000) // SECTOR)
    assert key() in open_still(spoiled, OPTIONS).recovery.failed


def test_a_bad_sector_behind_the_end_of_the_log_is_nothing() -> None:
    w = write(3)
    w.files.spoil(w.path, len(w.files.content(w.path)) // SECTOR - 1)
    log, found = reopen(w.files)
    assert not log.recovery.failed and found == [1, 2, 3]
    log.close()
    assert reopen(w.files)[1] == [1, 2, 3]


def test_a_bad_sector_just_behind_the_last_group_does_not_keep_the_log_from_opening() -> None:
    """The footer that closes the old segment goes there; that file system cannot write a part of such a page."""
    w = write(24)
    while w.groups[-1].end // PAGE_BYTES == (w.groups[-1].end + 200) // PAGE_BYTES:
        w = write(len(record_groups(w.groups)))  # until the footer would reach into the next page
    w.files.spoil(w.path, (w.groups[-1].end + 200) // PAGE_BYTES * PAGE_BYTES // SECTOR)
    for _ in range(3):
        log, found = reopen(w.files)
        assert not log.recovery.failed and found == list(range(1, len(record_groups(w.groups))))
        log.close()


def test_the_first_groups_of_the_last_segment_unreadable_fail_their_streams() -> None:
    """The segment must not be taken for one that was only prepared."""
    files = SimFiles()
    log = open_still(files, OPTIONS)
    stream = stream_of(log)
    while log.shared.active_sequence < 3:
        stream.append_entries((entry(1, stream.last_opid.index + 1, b"x" * 900),))
        log.turn()
    spoiled, path = files.copy(), max(_segments(files))
    for sector in range(HEADER_BYTES // SECTOR, len(files.content(path)) // SECTOR):
        spoiled.spoil(path, sector)
    assert key() in open_still(spoiled, OPTIONS).recovery.failed


def test_a_segment_that_was_only_prepared_may_have_a_bad_sector() -> None:
    w = write(3)
    log = open_still(w.files)
    log.shared.pool.make(log.shared.active_sequence + 1).file.close()
    path = max(_segments(w.files))
    w.files.spoil(path, HEADER_BYTES // SECTOR)
    found, read = reopen(w.files)
    assert not found.recovery.failed and read == [1, 2, 3]


def test_a_disk_that_reads_next_to_nothing_is_no_bad_sector() -> None:
    """It may come back. Streams that were failed for it would not."""
    options = replace(SMALL, segment_bytes=1 << 20)
    files = SimFiles()
    log = open_still(files, options)
    stream_of(log).append_entries((entry(1, 1),))
    log.turn()
    spoiled = files.copy()
    path = max(_segments(files))
    for sector in range(len(files.content(path)) // SECTOR):
        spoiled.spoil(path, sector)
    with pytest.raises(OSError) as away:
        open_still(spoiled, options)
    assert away.value.errno == errno.EIO


def test_a_reader_at_run_time_meets_a_bad_sector() -> None:
    """Its replica is told that the disk is wrong; the log and the other streams go on."""
    options = LogOptions(segment_bytes=32 << 10, low_space_bytes=0, prepare=False, cache_bytes_max=0)
    files = SimFiles()
    log = open_still(files, options)
    for name in STREAMS[:2]:
        stream_of(log, name).append_entries((entry(1, 1, b"x" * 20_000),))
        log.turn()
    path = max(_segments(files))
    groups = record_groups(scan_file(files, path))
    files.spoil(path, (groups[-1].offset + 10_000) // SECTOR)
    with pytest.raises(Corrupt, match="cannot read"):
        log.stream(STREAMS[1]).read_entries(1, 1 << 20)
    log.stream(STREAMS[0]).append_entries((entry(1, 2),))
    log.turn()
    assert [e.index for e in log.stream(STREAMS[0]).read_entries(1, 1 << 20)] == [1, 2]
    assert log.failed is None
