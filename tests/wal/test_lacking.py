"""One file operation is refused, as where the process has no descriptor left: no file of the log is forgotten for it.

Real files. Which operation fails is said by the test; all others reach the system.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from stele.wal import Log
from stele.wal.files import File, Files, OsFile, OsFiles
from stele.wal.segment import sequence_of
from tests.wal.simfs import PowerOff, SimFiles
from tests.wal.support import NODE, SMALL, fill, key, open_still, run_all


class LackingFiles(OsFiles):
    """The operating system's files, but for one call that is refused."""

    def __init__(self) -> None:
        self._operation = ""
        self._before = 0

    def refuse(self, operation: str, *, before: int = 0) -> None:
        """The next call of an operation fails; `before` succeed before it."""
        self._operation, self._before = operation, before

    def grant(self) -> bool:
        """All succeed from now on; whether one was refused."""
        refused = not self._operation
        self._operation = ""
        return refused

    def _step(self, operation: str, path: Path) -> None:
        if self._operation != operation:
            return
        self._before -= 1
        if self._before < 0:
            self._operation = ""
            raise OSError(errno.EMFILE, "Too many open files", str(path))

    def create(self, path: Path) -> File:
        self._step("create", path)
        return self._lacking(super().create(path), path)

    def open(self, path: Path) -> File:
        self._step("open", path)
        return self._lacking(super().open(path), path)

    def _lacking(self, file: File, path: Path) -> File:
        assert isinstance(file, OsFile)
        return LackingFile(file.descriptor, self, path)

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename", old)
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._step("unlink", path)
        super().unlink(path)

    def sync_directory(self, directory: Path) -> None:
        self._step("sync_directory", directory)
        super().sync_directory(directory)


class LackingFile(OsFile):
    __slots__ = ("_files", "_path")

    def __init__(self, fd: int, files: LackingFiles, path: Path) -> None:
        super().__init__(fd)
        self._files = files
        self._path = path

    def write(self, buffers: Sequence[bytes], offset: int) -> None:
        self._files._step("write", self._path)
        super().write(buffers, offset)

    def full_sync(self) -> None:
        self._files._step("full_sync", self._path)
        super().full_sync()


def open_in(directory: Path, files: Files) -> Log:
    return Log.open(directory, SMALL, NODE, run_all, files=files, threads=False)


def forgotten(log: Log) -> set[str]:
    """Files in the log's directory that nobody in the log knows: only a restart would remove them."""
    known = {s.path for s in log.shared.segments.values()} | {*log.shared.pool._waiting}
    return {p.name for p in {*log.directory.iterdir()} - known if p.suffix == ".wal"}


def all_flushed(log: Log) -> None:
    log.stream(key()).set_flushed(log.stream(key()).last_opid.index)


def comes_back_whole(log: Log, files: LackingFiles) -> None:
    """Opened again it is sound, and ends where it ended."""
    last = log.stream(key()).last_opid
    log.close()
    again = open_in(log.directory, files)
    assert not again.recovery.damages and not again.recovery.failed
    assert again.stream(key()).last_opid == last
    again.close()


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("operation", ["open", "rename", "unlink", "sync_directory"])
def test_a_collection_that_is_refused_something_forgets_no_segment(
    tmp_path: Path, operation: str, before: int
) -> None:
    """All segments behind the one that could not be given up were forgotten: no later collection removed them."""
    files = LackingFiles()
    log = open_in(tmp_path / "wal", files)
    fill(log, 120)
    all_flushed(log)
    assert len(log.shared.segments) > SMALL.pool_segments_max + 6
    files.refuse(operation, before=before)
    told = {}
    with contextlib.suppress(OSError):  # the metadata's
        told |= log.collect().starts
    files.grant()
    assert not forgotten(log)
    closed = {
        s.path: s.length for s in log.shared.segments.values() if s.sequence != log.shared.active_sequence
    }
    assert log.bytes_on_disk == log.shared.active_length + sum(closed.values())
    assert all(path.stat().st_size >= length for path, length in closed.items())
    told |= log.collect().starts
    assert told == {key(): log.stream(key()).start}, "whoever reads the stream learns where it begins now"
    assert sorted(log.shared.segments) == [log.shared.active_sequence]
    assert not forgotten(log)
    fill(log, 60)
    comes_back_whole(log, files)


NOT_MADE = [
    *(("recycled", operation) for operation in ("open", "write", "full_sync", "rename", "sync_directory")),
    *(("fresh", operation) for operation in ("create", "write", "full_sync", "rename", "sync_directory")),
]


@pytest.mark.parametrize(("kind", "operation"), NOT_MADE)
def test_a_segment_that_is_not_made_ready_leaves_no_file_behind(
    tmp_path: Path, kind: str, operation: str
) -> None:
    """Each try took another file out of the pool, or wrote another one full of zeros, and forgot it."""
    files = LackingFiles()
    log = open_in(tmp_path / "wal", files)
    fill(log, 120)
    if kind == "recycled":
        all_flushed(log)
        log.collect()
        while len(log.shared.pool._waiting) == SMALL.pool_segments_max:
            fill(log, 1)  # the names of those that are left are on the disk
    spare = len(log.shared.pool._waiting)
    assert spare == (3 if kind == "recycled" else 0)
    sequence = log.shared.wanted_sequence()
    assert sequence is not None
    for tries in (1, 2, 3):
        files.refuse(operation)
        with pytest.raises(OSError, match="Too many open files"):
            log.shared.pool.make(sequence)
        assert not forgotten(log)
        if operation in ("write", "full_sync"):  # what the disk did not take is not used again
            assert len(log.shared.pool._waiting) == max(0, spare - tries)
        elif operation in ("rename", "sync_directory"):
            assert len(log.shared.pool._waiting) == max(1, spare)
        else:
            assert len(log.shared.pool._waiting) == spare
    fill(log, 60)
    assert log.stats.overruns == 0 and not forgotten(log)
    comes_back_whole(log, files)


class LackingSimFiles(SimFiles):
    """Loses power, and refuses to sync a directory while `lacks`."""

    lacks = False

    def sync_directory(self, directory: Path) -> None:
        if self.lacks:
            raise OSError(errno.EMFILE, "Too many open files", str(directory))
        super().sync_directory(directory)


@pytest.mark.parametrize("steps", range(8))
def test_a_file_that_was_a_segment_for_a_moment_is_not_written_under_that_name(steps: int) -> None:
    """The power goes while it is made ready again: a segment whose header is torn is damage."""
    for seed in range(40):
        files = LackingSimFiles()
        log = open_still(files)
        fill(log, 30)
        last = log.stream(key()).last_opid
        sequence = log.shared.wanted_sequence()
        assert sequence is not None
        files.lacks = True
        with pytest.raises(OSError, match="Too many open files"):
            log.shared.pool.make(sequence)
        files.lacks = False
        files.fail_after = steps
        with contextlib.suppress(PowerOff):
            log.shared.pool.make(sequence)
        again = open_still(files.crash(random.Random(seed)))
        assert not again.recovery.damages and not again.recovery.failed
        assert again.stream(key()).last_opid == last


def test_a_file_that_was_kept_and_is_gone_holds_nothing_up(tmp_path: Path) -> None:
    """Somebody made space by hand."""
    log = open_in(tmp_path / "wal", OsFiles())
    fill(log, 120)
    all_flushed(log)
    log.collect()
    assert len(log.shared.pool._waiting) > 1
    for path in log.shared.pool._waiting:
        path.unlink()
    fill(log, 120)
    assert not log.shared.pool._waiting and not forgotten(log)
    oldest = log.shared.segments[min(log.shared.segments)]
    oldest.path.unlink()
    all_flushed(log)
    log.collect()
    assert sorted(log.shared.segments) == [log.shared.active_sequence]
    log.close()


@pytest.mark.parametrize("before", range(5))
def test_segments_that_are_set_aside_are_not_forgotten_either(tmp_path: Path, before: int) -> None:
    files = LackingFiles()
    log = open_in(tmp_path / "wal", files)
    fill(log, 1)
    fill(log, 60, stream=2)
    fill(log, 30)
    log.close()
    with log.shared.segments[sorted(log.shared.segments)[1]].path.open("r+b") as lost:
        lost.seek(8000)
        lost.write(b"\xff" * 8)
    log = open_in(tmp_path / "wal", files)
    assert log.recovery.failed.keys() == {key(2)}
    there = set(log.shared.segments) - {log.shared.active_sequence}

    def aside() -> set[int]:
        found = (sequence_of(path.name, "damaged") for path in log.directory.iterdir())
        return {sequence for sequence in found if sequence is not None}

    fill(log, 30)
    all_flushed(log)
    files.refuse("rename", before=before)
    with contextlib.suppress(OSError):  # the metadata's
        log.collect()
    assert files.grant()
    log.collect()
    assert sorted(log.shared.segments) == [log.shared.active_sequence] and aside() == there
    log.tombstone(key(2))
    log.turn()
    files.refuse("unlink", before=before)
    with pytest.raises(OSError, match="Too many open files"):
        log.collect()
    assert aside()
    log.collect()
    assert not aside()
    log.close()
