"""Promises that one line of the log keeps, each asked for by itself. Crashes would seldom meet them."""

from __future__ import annotations

import errno
import struct

import pytest

from stele.model.config import encode_configuration
from stele.model.errors import Code, Rejected
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.wal import Log
from stele.wal.cache import EntryCache
from stele.wal.clear import Suspects
from stele.wal.format import GroupKind, Kind, Record, SegmentHeader
from stele.wal.link import Damage
from stele.wal.metadata import COPY, METADATA, Metadata, Position, Saved, decode_metadata
from stele.wal.pool import Pool
from stele.wal.replay import Raw, Replay
from stele.wal.sectors import PAGE_BYTES, read_content
from stele.wal.segment import ActiveSegment, Chain, FooterRows, Ready, segment_name, sequence_of
from stele.wal.state import HardState, State
from tests.wal.simfs import SECTOR, SimFiles
from tests.wal.support import (
    CONFIG,
    DIRECTORY,
    NODE,
    SMALL,
    entries,
    fill,
    key,
    open_still,
    run_all,
    stream_of,
)

RAW: Raw = (bytes.fromhex(key().tablet_id), int(key().replica_id))
BLOB = encode_configuration(CONFIG)
OTHER = NodeId("cd" * 16)


def closed() -> SimFiles:
    """A log of several segments, closed."""
    files = SimFiles()
    log = open_still(files)
    fill(log, 40)
    log.close()
    return files.copy()


def segments(files: SimFiles) -> list[int]:
    return sorted(n for p in files.paths() if (n := sequence_of(p.name)) is not None)


# Hard state


def test_a_term_never_falls_and_an_old_vote_changes_nothing() -> None:
    state = State(key(), OPID_NONE, BLOB, 0)
    state.hard_record(Kind.VOTE, 5, 2)
    state.hard_record(Kind.TERM, 3, 0)
    state.hard_record(Kind.VOTE, 4, 3)
    state.hard_record(Kind.TERM, 5, 0)
    assert state.hard == HardState(5, ReplicaId(2))


def test_hard_state_of_the_metadata_stands_over_the_records_that_it_covers() -> None:
    hard = HardState(5, ReplicaId(2))
    saved = Saved(key(), hard, OPID_NONE, BLOB, OPID_NONE, False, 0, 0)
    replay = Replay(Metadata(NODE, 1, 0, Position(2, 0), (saved,)), EntryCache(1 << 20))
    replay.apply(Record(Kind.VOTE, 0, *RAW, 5, 3, 0, b""), 1, 4096, True)
    assert replay.states[RAW].hard == hard
    replay.apply(Record(Kind.VOTE, 0, *RAW, 6, 3, 0, b""), 2, 4096, False)
    assert replay.states[RAW].hard == HardState(6, ReplicaId(3))


def test_a_forced_promotion_is_one_after_a_start() -> None:
    files = SimFiles()
    log = open_still(files)
    stream_of(log).append_promote(3, ReplicaId(1))
    log.close()
    again = open_still(files.copy())
    assert again.shared.states[key()].hard == HardState(3, ReplicaId(1), True)


def test_a_tombstone_keeps_its_vote_and_its_last_entry() -> None:
    """By them it answers those that ask for its vote."""
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    stream.append_vote(3, ReplicaId(2))
    stream.append_entries(entries((1, 1), (3, 2)))
    log.tombstone(key())
    log.turn()
    log.close()
    for _ in range(2):
        log = open_still(files := files.copy())
        state = log.shared.states[key()]
        assert (state.tombstoned, state.last, state.hard) == (True, OpId(3, 2), HardState(3, ReplicaId(2)))
        log.close()


# Damage


def test_a_stream_that_is_damaged_is_written_as_such() -> None:
    state = State(key(), OPID_NONE, BLOB, 0)
    state.damaged = True
    assert State.from_saved(state.saved()).damaged
    state.damaged_at = 77
    assert state.saved().damaged_at == 77


def suspects(*records: Record, footer: bool) -> tuple[Replay, dict[Raw, str]]:
    """What a start makes of a gap in segment 5, whose footer names the stream or does not."""
    replay = Replay(None, EntryCache(1 << 20))
    for record in records:
        replay.apply(record, 4, 4096, False)
    rows = FooterRows()
    rows.touch(RAW if footer else (RAW[0], 9), 8192, 0, 0, 0)
    return replay, Suspects(replay, None).judge([Damage(5, 4096, 12288, "gone", rows.rows)])


CREATE = Record(Kind.CREATE, 0, *RAW, 0, 0, 0, BLOB)


def test_a_stream_whose_creation_was_lost_is_failed_by_the_footer() -> None:
    assert RAW in suspects(footer=True)[1]
    assert RAW not in suspects(footer=False)[1]
    assert RAW in suspects(CREATE, footer=True)[1]


def test_a_tombstone_whose_vote_may_be_lost_is_damaged_and_one_that_has_nothing_there_is_not() -> None:
    for footer in (True, False):
        replay, failed = suspects(CREATE, Record(Kind.TOMBSTONE, 0, *RAW, 0, 0, 0, b""), footer=footer)
        assert RAW not in failed
        assert replay.states[RAW].damaged is footer


def test_a_stream_that_was_created_after_the_damage_is_served() -> None:
    replay = Replay(None, EntryCache(1 << 20))
    replay.apply(CREATE, 6, 4096, False)
    assert Suspects(replay, None).judge([Damage(5, 4096, None, "gone", None)]) == {}


def test_a_segment_that_the_metadata_names_and_that_is_gone_is_damage() -> None:
    """And its number is not used again: places in it are known to others."""
    files = closed()
    lost = segments(files)[-1]
    files.unlink(DIRECTORY / segment_name(lost))
    log = open_still(files)
    assert [d for d in log.recovery.damages if f"segment {lost} is missing" in d]
    assert key() in log.recovery.failed
    assert max(log.shared.segments) > lost


def test_a_segment_under_the_name_of_another_is_damage() -> None:
    files = closed()
    first, second, *_ = segments(files)
    files.set_content(DIRECTORY / segment_name(second), bytes(files.content(DIRECTORY / segment_name(first))))
    log = open_still(files)
    assert log.recovery.damages and key() in log.recovery.failed


# Whose log it is


def open_as(files: SimFiles, node: NodeId) -> Log:
    return Log.open(DIRECTORY, SMALL, node, run_all, files=files, threads=False)


def test_the_log_of_another_node_is_refused() -> None:
    with pytest.raises(Rejected, match="the log belongs to node") as refused:
        open_as(closed(), OTHER)
    assert refused.value.code is Code.WRONG_NODE


def test_a_segment_of_another_node_is_refused() -> None:
    """Where no metadata says whose log it is."""
    files = SimFiles()
    fill(open_still(files), 1)
    files = files.copy()
    for name in (METADATA, COPY):
        files.unlink(DIRECTORY / name)
    with pytest.raises(Rejected, match="the segment belongs to node") as refused:
        open_as(files, OTHER)
    assert refused.value.code is Code.WRONG_NODE


def test_metadata_of_a_later_version_is_refused_and_not_taken_for_damaged() -> None:
    data = bytearray(closed().content(DIRECTORY / METADATA))
    struct.pack_into("<I", data, 8, 2)
    with pytest.raises(Rejected, match="upgrade it") as refused:
        decode_metadata(bytes(data), "metadata")
    assert refused.value.code is Code.UNSUPPORTED_VERSION


# Syncs and space


def active(files: SimFiles) -> ActiveSegment:
    header = SegmentHeader(NODE, 1, 7, 1 << 16, False)
    path = DIRECTORY / segment_name(1)
    return ActiveSegment(Ready(files.create(path), path, header), Chain(), None)


def test_what_is_synced_is_what_was_written() -> None:
    """Not what waits to be written by then."""
    segment = active(SimFiles())
    segment.stage(GroupKind.RECORDS, [b"one"], 1)
    segment.write()
    end = segment.offset
    segment.stage(GroupKind.RECORDS, [b"two"], 1)
    segment.was_synced()
    assert segment.synced == end < segment.offset


def test_a_footer_names_the_lowest_and_the_highest_entry() -> None:
    rows = FooterRows()
    for offset, term, index in ((4096, 1, 5), (8192, 2, 4), (12288, 2, 6)):
        rows.touch(RAW, offset, term, index, index)
    row = rows.rows[RAW]
    assert (row.first, row.last) == (OpId(2, 4), OpId(2, 6))
    assert (row.first_offset, row.last_offset) == (4096, 12288)


def test_a_failed_log_writes_no_metadata_at_its_close() -> None:
    """It would vouch for what is not on the disk."""
    files = SimFiles()
    log = open_still(files)
    fill(log, 3)
    before = bytes(files.content(DIRECTORY / METADATA))
    files.sync_error = True
    stream_of(log).append_entries(entries((1, 4)))
    log.turn()
    assert log.failed is not None
    files.sync_error = False
    log.close()
    assert bytes(files.content(DIRECTORY / METADATA)) == before


def pool(files: SimFiles) -> Pool:
    return Pool(files, DIRECTORY, SMALL, NODE)


def whole_file(files: SimFiles) -> None:
    files.set_content(DIRECTORY / segment_name(1), bytes(SMALL.segment_bytes))


@pytest.mark.parametrize("sound", [True, False])
def test_a_file_with_a_bad_sector_is_not_used_again(sound: bool) -> None:
    files = SimFiles()
    whole_file(files)
    one = pool(files)
    one.adopt(DIRECTORY / segment_name(1), sound=sound)
    assert (one.take() is not None) is sound
    assert bool(files.paths()) is sound


def test_no_file_is_made_in_the_space_that_is_kept_for_hard_state() -> None:
    files = SimFiles()
    one = Pool(files, DIRECTORY, SMALL.__class__(segment_bytes=16 << 10, low_space_bytes=1 << 20), NODE)
    files.free = (16 << 10) + (1 << 20) - 1
    with pytest.raises(OSError, match="too little free space") as full:
        one.fresh()
    assert full.value.errno == errno.ENOSPC and not files.paths()
    files.free += 1
    one.fresh()
    assert files.paths()


# Bad sectors


def test_what_stands_between_two_bad_sectors_is_read() -> None:
    files = SimFiles()
    path = DIRECTORY / segment_name(1)
    files.set_content(path, b"x" * (8 * PAGE_BYTES))
    for page in (1, 5, 6):
        files.spoil(path, page * PAGE_BYTES // SECTOR)
    content = read_content(files.open(path))
    pages = [(begin // PAGE_BYTES, end // PAGE_BYTES) for begin, end in content.unreadable]
    assert pages == [(1, 2), (5, 7)]
    assert content.data[2 * PAGE_BYTES : 5 * PAGE_BYTES] == b"x" * (3 * PAGE_BYTES)


class Failing:
    """A file whose first read finds a bad sector, and the next one another fault."""

    def __init__(self) -> None:
        self._errors = [errno.EIO, errno.EACCES]

    def length(self) -> int:
        return PAGE_BYTES

    def read(self, length: int, offset: int) -> bytes:
        raise OSError(self._errors.pop(0), "no")


def test_another_error_than_a_bad_sector_is_no_damage() -> None:
    with pytest.raises(OSError, match="no") as error:
        read_content(Failing())  # type: ignore[arg-type]
    assert error.value.errno == errno.EACCES
