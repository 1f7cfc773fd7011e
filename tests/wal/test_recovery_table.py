"""The recovery table, row by row, on a small log whose bytes are damaged on purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import google_crc32c as crc32c
import pytest

from stele.model.entry import Entry
from stele.model.errors import Corrupt, Rejected
from stele.model.ids import NodeId
from stele.tserver.options import EXIT_USAGE
from stele.tserver.process import exit_code
from stele.wal import Log
from stele.wal.dump import describe_record
from stele.wal.files import Files
from stele.wal.format import (
    GROUP_HEADER_BYTES,
    GroupHeader,
    GroupKind,
    Kind,
    Record,
    encode_group,
    encode_record,
)
from stele.wal.metadata import COPY, METADATA
from stele.wal.options import HEADER_BYTES
from stele.wal.reader import entries_of
from stele.wal.scan import Behind, Found, Verdict, judge, scan_segment
from stele.wal.sectors import Content
from stele.wal.segment import sequence_of
from tests.wal.simfs import SimFiles
from tests.wal.support import CONFIG, DIRECTORY, SMALL, entry, key, loaded, open_still, run_all, stream_of


@dataclass
class _Written:
    files: SimFiles
    path: Path
    groups: list[GroupHeader]


def scan_file(files: SimFiles, path: Path) -> list[GroupHeader]:
    number = sequence_of(path.name)
    return [] if number is None else scan_segment(Content(bytes(files.content(path))), number, path).groups


def record_groups(groups: list[GroupHeader]) -> list[GroupHeader]:
    return [g for g in groups if g.kind == GroupKind.RECORDS]


def write(batches: int, *, markers: bool = True) -> _Written:
    """Entries 1 to `batches`, each in a batch of its own; then the power goes with everything on the disk."""
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    log.turn()
    for index in range(1, batches + 1):
        stream.append_entries((entry(1, index, bytes([index]) * 100),))
        log.turn()
    after = files.copy()
    files.off = True
    path = max(p for p in after.paths() if sequence_of(p.name) is not None)
    groups = scan_file(after, path)
    if not markers:  # as if the last marker, which is not synced, never reached the disk
        last = groups[-1]
        assert last.kind == GroupKind.SYNCED
        after.content(path)[last.offset : last.end] = bytes(last.end - last.offset)
        groups = groups[:-1]
    return _Written(after, path, groups)


def reopen(files: SimFiles) -> tuple[Log, list[int]]:
    log = open_still(files)
    found: list[Entry] = []
    if not log.recovery.failed and key() in log.shared.states:
        found = list(loaded(log.stream(key())).entries)
    for e in found:
        assert e == entry(1, e.index, bytes([e.index]) * 100)
    return log, [e.index for e in found]


def flip(w: _Written, offset: int) -> None:
    w.files.content(w.path)[offset] ^= 0x40


def test_row_whole_keep() -> None:
    log, found = reopen(write(3).files)
    assert found == [1, 2, 3]
    assert log.recovery.warnings == ()


def test_row_blank_tail_nothing_behind_end() -> None:
    w = write(3, markers=False)
    log, found = reopen(w.files)
    assert found == [1, 2, 3]
    assert log.recovery.warnings == ()
    assert log.recovery.rewritten_bytes > 0


@pytest.mark.parametrize("at", [0, GROUP_HEADER_BYTES + 3], ids=["header bad", "body bad"])
def test_row_bad_tail_nothing_behind_cut(at: int) -> None:
    w = write(3, markers=False)
    last = record_groups(w.groups)[-1]
    flip(w, last.offset + at)
    log, found = reopen(w.files)
    assert found == [1, 2]
    [warning] = log.recovery.warnings
    assert f"at {last.offset}" in warning and "bytes" in warning and "1.2" in warning


def test_row_bad_tail_unsynced_behind_cut() -> None:
    """Three groups of one batch, the first of which never reached the disk."""
    files = SimFiles()
    log = Log.open(
        DIRECTORY,
        replace(SMALL, group_bytes_max=50),
        NodeId("ab" * 16),
        run_all,
        files=files,
        threads=False,
    )
    stream = stream_of(log)
    log.turn()
    for index in (1, 2, 3):
        stream.append_entries((entry(1, index, bytes([index]) * 100),))
    log.turn()
    after = files.copy()
    path = max(p for p in after.paths() if sequence_of(p.name) is not None)
    groups = scan_file(after, path)
    records = record_groups(groups)[-3:]
    assert len({g.synced_offset for g in records}) == 1
    after.content(path)[groups[-1].offset : groups[-1].end] = bytes(64)
    after.content(path)[records[0].offset + 70] ^= 1
    log, found = reopen(after)
    assert found == []
    [warning] = log.recovery.warnings
    assert "1.2 to 1.2" in warning or "1.2 to 1.3" in warning


@pytest.mark.parametrize("at", [0, GROUP_HEADER_BYTES + 3], ids=["header bad", "body bad"])
def test_row_bad_tail_synced_behind_refuse(at: int) -> None:
    w = write(3)
    flip(w, record_groups(w.groups)[2].offset + at)
    before = bytes(w.files.content(w.path))
    log, _ = reopen(w.files)
    assert "copied from its peers" in log.recovery.failed[key()]
    assert bytes(w.files.content(w.path)) == before
    with pytest.raises(Corrupt):
        list(log.stream(key()).load())


def test_row_blank_tail_synced_behind_refuse() -> None:
    w = write(3)
    group = record_groups(w.groups)[2]
    w.files.content(w.path)[group.offset : group.end] = bytes(group.end - group.offset)
    log, _ = reopen(w.files)
    assert key() in log.recovery.failed


def test_row_bad_before_the_last_segment_refuse() -> None:
    w = write(60)
    first = min(
        p for p in w.files.paths() if sequence_of(p.name) is not None and len(scan_file(w.files, p)) > 5
    )
    assert first != w.path
    group = record_groups(scan_file(w.files, first))[-1]
    w.files.content(first)[group.offset + 80] ^= 1
    log, _ = reopen(w.files)
    assert key() in log.recovery.failed


def test_a_failed_stream_stays_failed_until_its_tombstone() -> None:
    w = write(3)
    flip(w, record_groups(w.groups)[2].offset)
    log, _ = reopen(w.files)
    log.close()
    log, _ = reopen(w.files)
    assert key() in log.recovery.failed
    assert log.collect().segments
    log.close()
    log, _ = reopen(w.files)
    assert key() in log.recovery.failed
    log.tombstone(key())
    log.create_stream(key(1, 2), entry(1, 1).opid, CONFIG)
    log.turn()
    log.close()
    log, _ = reopen(w.files)
    assert not log.recovery.failed
    assert log.stream(key()).tombstoned


def test_a_footer_clears_streams_that_are_not_in_the_damaged_place() -> None:
    files = SimFiles()
    log = open_still(files)
    one, two = stream_of(log, key(1)), stream_of(log, key(2))
    log.turn()
    one.append_entries((entry(1, 1),))
    log.turn()
    two.append_entries((entry(1, 1),))
    log.turn()
    log.close()
    path = next(p for p in files.paths() if len(record_groups(scan_file(files, p))) == 3)
    files.content(path)[record_groups(scan_file(files, path))[2].offset + 90] ^= 1
    log = open_still(files)
    assert set(log.recovery.failed) == {key(2)}
    assert [e.index for e in loaded(log.stream(key(1))).entries] == [1]


def test_the_metadata_clears_streams_whose_log_begins_behind_the_damage() -> None:
    w = write(60)
    log, _ = reopen(w.files)
    log.stream(key()).set_flushed(60)
    quiet = stream_of(log, key(2))
    quiet.append_entries((entry(1, 1),))
    log.turn()
    assert log.collect().segments > 0
    log.close()
    metadata = bytes(w.files.content(DIRECTORY / METADATA))
    log = open_still(w.files)
    assert not log.recovery.failed
    assert log.stream(key()).start.index == 60
    assert metadata


@pytest.mark.parametrize("keep", [10, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100])
def test_a_prepared_file_that_became_shorter_is_damage(keep: int) -> None:
    w = write(60)
    w.files.set_content(w.path, bytes(w.files.content(w.path)[:keep]))
    log, _ = reopen(w.files)
    assert key() in log.recovery.failed


def test_a_missing_segment_is_damage() -> None:
    w = write(120)
    paths = [p for p in w.files.paths() if sequence_of(p.name) is not None]
    assert len(paths) > 2
    w.files.unlink(paths[1])
    log, _ = reopen(w.files)
    assert key() in log.recovery.failed


def test_metadata_that_is_damaged_refuses_to_open() -> None:
    w = write(3)
    for name in (METADATA, COPY):
        w.files.content(DIRECTORY / name)[30] ^= 1
    with pytest.raises(Corrupt):
        open_still(w.files)


def test_the_log_of_another_node_is_refused() -> None:
    w = write(1)
    files: Files = w.files
    with pytest.raises(Rejected, match="WRONG_NODE"):
        Log.open(DIRECTORY, SMALL, NodeId("cd" * 16), run_all, files=files, threads=False)


def test_the_table_answers_every_case() -> None:
    answers = {
        (found, tail, behind): judge(found, tail, behind)
        for found in Found
        for tail in (True, False)
        for behind in Behind
    }
    for (found, tail, behind), verdict in answers.items():
        if found is Found.WHOLE:
            assert verdict is Verdict.KEEP
        elif not tail or behind is Behind.SYNCED or found is Found.UNREADABLE:
            assert verdict is Verdict.REFUSE
        elif found is Found.BLANK and behind is Behind.NOTHING:
            assert verdict is Verdict.END
        else:
            assert verdict is Verdict.CUT


def test_a_group_of_a_later_version_is_refused_not_skipped() -> None:
    w = write(2, markers=False)
    last = w.groups[-1]
    assert last.kind == GroupKind.RECORDS
    head = bytearray(w.files.content(w.path)[last.offset : last.offset + GROUP_HEADER_BYTES])
    head[4] = 9
    body = bytes(w.files.content(w.path)[last.offset + GROUP_HEADER_BYTES :][: last.stored_bytes])
    head[56:60] = crc32c.extend(crc32c.value(bytes(head[:56])), body).to_bytes(4, "little")
    head[60:64] = crc32c.value(bytes(head[:60])).to_bytes(4, "little")
    w.files.content(w.path)[last.offset : last.offset + GROUP_HEADER_BYTES] = head
    with pytest.raises(Rejected, match="UNSUPPORTED_VERSION"):
        open_still(w.files)


class LaterKind(IntEnum):
    ALTER = 5


def test_an_entry_of_a_later_kind_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """It was a bare ValueError: the process ended as for a fault of its own (70), again and again."""
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    stream.append_entries((entry(1, 1), Entry(1, 2, LaterKind.ALTER, 0, b"x")))  # type: ignore[arg-type]
    log.turn()
    after = files.copy()
    with pytest.raises(Rejected, match=r"entry 1\.2: kind 5 is unknown.*upgrade") as refused:
        open_still(after)
    assert exit_code(refused.value) == EXIT_USAGE
    assert "upgrade" in capsys.readouterr().err
    record = Record(Kind.ENTRY, 5, b"t" * 16, 1, 1, 2, 0, b"x")
    for read in (
        lambda: entries_of(encode_record(*record), 1, (b"t" * 16, 1), 1, 2),
        lambda: describe_record(record),
    ):
        with pytest.raises(Rejected, match=r"entry 1\.2: kind 5 is unknown.*upgrade"):
            read()


def test_a_group_that_follows_on_another_than_stands_before_it_is_damage() -> None:
    """Each is whole by itself; but one of them is of another past, as a disk has it that lost a write."""
    w = write(3)
    first = record_groups(w.groups)[-2]
    data = w.files.content(w.path)
    body = bytearray(
        data[first.offset + GROUP_HEADER_BYTES : first.offset + GROUP_HEADER_BYTES + first.stored_bytes]
    )
    body[-1] ^= 1
    buffers, length, _ = encode_group(
        GroupKind.RECORDS,
        [bytes(body)],
        first.record_count,
        segment_id=first.segment_id,
        prev_segment_id=first.prev_segment_id,
        prev_crc=first.prev_crc,
        offset=first.offset,
        synced_offset=first.synced_offset,
    )
    assert first.offset + length == first.end
    data[first.offset : first.end] = b"".join(buffers)
    log, _ = reopen(w.files)
    assert key() in log.recovery.failed
