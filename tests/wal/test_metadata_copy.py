"""The metadata and its copy: one of them damaged, missing, unreadable or older is no harm."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from stele.model.errors import Corrupt
from stele.wal import Log
from stele.wal.dump import main
from stele.wal.metadata import COPY, METADATA, decode_metadata, read_metadata
from stele.wal.segment import sequence_of
from tests.wal.simfs import SECTOR, PowerOff, SimFiles
from tests.wal.support import DIRECTORY, NODE, SMALL, fill, key, loaded, open_still, run_all

FIRST, SECOND = DIRECTORY / METADATA, DIRECTORY / COPY


def _collected(rounds: int = 3) -> SimFiles:
    """A log whose first segments are gone: without metadata it does not open."""
    files = SimFiles()
    log = open_still(files)
    for _ in range(rounds):
        fill(log, 20)
        log.stream(key()).set_flushed(log.stream(key()).last_opid.index)
        assert log.collect().segments
    fill(log, 3)
    log.close()
    return files.copy()


def _opens(files: SimFiles, entries_to: int) -> None:
    log = open_still(files)
    assert not log.recovery.failed
    assert loaded(log.stream(key())).last.index == entries_to
    assert files.content(FIRST) == files.content(SECOND)


@pytest.mark.parametrize("path", [FIRST, SECOND], ids=str)
@pytest.mark.parametrize("how", ["missing", "empty", "unreadable", "cut"])
def test_the_other_file_stands_in(path: Path, how: str) -> None:
    files = _collected()
    if how == "missing":
        files.unlink(path)
    elif how == "unreadable":
        for sector in range(len(files.content(path)) // SECTOR + 1):
            files.spoil(path, sector)
    else:
        files.set_content(path, b"" if how == "empty" else bytes(files.content(path)[:-1]))
    _opens(files, 63)
    _opens(files, 63)


def test_both_damaged_refuse_to_open() -> None:
    files = _collected()
    for path in (FIRST, SECOND):
        files.content(path)[40] ^= 1
    with pytest.raises(Corrupt, match="checksum"):
        open_still(files)


def test_a_volume_of_a_release_that_kept_one_file_opens_and_gets_the_second() -> None:
    files = _collected()
    files.unlink(SECOND)
    log = open_still(files)
    assert not log.recovery.failed
    assert decode_metadata(bytes(files.content(SECOND)), "copy") == decode_metadata(
        bytes(files.content(FIRST)), "first"
    )


def test_power_lost_at_every_step_of_a_collection_then_either_file_damaged() -> None:
    """Between the two writes the copy is older. It must serve as well: no segment that it needs has gone yet."""
    steps = 0
    while True:
        files = SimFiles()
        log = open_still(files)
        fill(log, 40)
        log.stream(key()).set_flushed(30)
        files.fail_after = steps
        with contextlib.suppress(PowerOff, Corrupt):
            log.collect()
        if not files.off:
            break
        for seed in range(3):
            for path in (FIRST, SECOND):
                after = files.crash(random.Random(seed))
                after.content(path)[40] ^= 1
                _opens(after, 40)
        steps += 1
    assert steps > 8


def test_a_copy_older_than_the_segments_fails_streams_and_loses_nothing_in_silence() -> None:
    """A release that knows no copy ran meanwhile and collected; then its file is damaged."""
    early, late = _collected(1), _collected(6)
    assert min(_sequences(late)) > max(_sequences(early))
    late.set_content(SECOND, bytes(early.content(SECOND)))
    late.content(FIRST)[40] ^= 1
    log = open_still(late)
    assert key() in log.recovery.failed
    assert key() in open_still(late).recovery.failed


def test_a_copy_that_an_earlier_release_left_behind_does_not_count() -> None:
    early, late = _collected(1), _collected(6)
    late.set_content(SECOND, bytes(early.content(SECOND)))
    _opens(late, 123)


def _sequences(files: SimFiles) -> list[int]:
    return [n for n in (sequence_of(p.name) for p in files.paths()) if n is not None]


def test_dump_says_which_file_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log.open(tmp_path / "wal", SMALL, NODE, run_all)
    log.close()
    damaged = tmp_path / "wal" / METADATA
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main([str(tmp_path / "wal")]) == 0
    assert "metadata: CORRUPT" in capsys.readouterr().out
    assert damaged.read_bytes() != (tmp_path / "wal" / COPY).read_bytes()


def test_a_mending_that_the_disk_refuses_does_not_keep_the_log_from_opening() -> None:
    files = _collected()
    files.content(FIRST)[40] ^= 1
    found = read_metadata(files, DIRECTORY)
    assert [name for name, _ in found.faults] == [METADATA]
    create = files.create

    def refuse(path: Path):  # type: ignore[no-untyped-def]
        if path.name.startswith("metadata"):
            raise OSError(28, "no space left on device")
        return create(path)

    files.create = refuse  # type: ignore[method-assign]
    log = open_still(files)
    assert not log.recovery.failed and loaded(log.stream(key())).last.index == 63
