"""Which files are merged: what it costs to write, and how many files are left to read, over thousands of flushes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest

from stele.tablet.colformat import FileMeta
from stele.tablet.compaction import FILES_MAX, choose

MIB = 1 << 20


def _file(size: int, *, deletes: int = 0, unique: bool = True, rows: int = 0) -> FileMeta:
    return FileMeta(f"f{size}", size, 0, rows, deletes, unique, 5, 6)


class Model:
    """The files of a store, where a merge takes as many bytes as its inputs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._names = itertools.count()
        self.files = [self._file(size) for size in sizes]
        self.flushed = self.merged = self.most = 0

    def _file(self, size: int) -> FileMeta:
        return FileMeta(f"rows-{next(self._names)}", size, 0, 0, 0, True, 5, 6)

    def flush(self, size: int, *, room_bytes: int | None = None) -> None:
        """A file more, and all merges that are worth it then."""
        self.files.insert(0, self._file(size))
        self.flushed += size
        while chosen := choose(self.files, 9, full=False, room_bytes=room_bytes):
            at, size = self.files.index(chosen[0]), sum(file.size for file in chosen)
            assert self.files[at : at + len(chosen)] == list(chosen), "only neighbours are merged"
            self.files[at : at + len(chosen)] = [self._file(size)]
            self.merged += size
        self.most = max(self.most, len(self.files))


def _trickle(store: Sequence[int], flushes: int) -> tuple[list[int], list[int]]:
    return [size * MIB for size in store], [MIB] * flushes


WORK = {
    "nothing else": _trickle([], 10_000),
    "into 1 GiB": _trickle([1024], 1_000),
    "into 1 GiB in many files": _trickle([2**n for n in range(10)], 1_000),
    "into 1 TiB, for weeks": _trickle([1 << 20], 20_000),
    "into sizes far apart": _trickle([10**n for n in range(1, 12)], 1_000),
    "of any size": ([1 << 30], [Random(1).randint(1, 100) * 10_000 for _ in range(3_000)]),
    "small ones between large ones": (
        [1 << 30],
        [int(2**power) for power in (Random(2).uniform(10, 25) for _ in range(3_000))],
    ),
    "larger and larger": ([1 << 30], [int(1_000 * 1.6 ** (n % 25)) for n in range(2_000)]),
    "smaller and smaller": ([1 << 30], [int(1_000 * 1.6 ** (25 - n % 25)) for n in range(2_000)]),
}


@pytest.mark.parametrize("work", WORK)
def test_a_trickle_rewrites_each_row_a_logarithmic_number_of_times(work: str) -> None:
    """Twelve files were merged whatever their sizes: for each four small flushes the whole tablet, once it had so many."""
    store, flushes = WORK[work]
    model = Model(store)
    for size in flushes:
        model.flush(size)
    # Each merge brings a row into a file half as large again as the one it was in, those that were there before, too.
    grown = math.log(sum(f.size for f in model.files) / min(flushes), 1.5)
    assert model.merged <= model.flushed * (grown + 1 / math.log(1.5))
    assert model.most <= FILES_MAX + 6


def test_the_trickle_that_was_measured_stays_below_eleven_times() -> None:
    """20,000 flushes of 1 MiB, four weeks of one every two minutes, into 1 TiB: it was 259 times what was flushed."""
    store, flushes = WORK["into 1 TiB, for weeks"]
    model = Model(store)
    for size in flushes:
        model.flush(size)
    assert model.merged / model.flushed < 11.1 and model.most <= FILES_MAX


def test_files_of_about_one_size_are_merged() -> None:
    few = [_file(10), _file(12), _file(11)]
    assert not choose(few, 9, full=False)
    assert choose([*few, _file(13), _file(1000)], 9, full=False) == [*few, _file(13)]
    assert choose([_file(1), *few, _file(13), _file(1000)], 9, full=False) == [_file(1), *few, _file(13)]
    assert choose(few, 9, full=True) == few
    assert not choose([_file(1)], 9, full=True)
    assert choose([_file(1, deletes=1)], 9, full=True)
    assert choose([_file(1, unique=False)], 9, full=True)
    assert not choose([_file(1, unique=False)], 4, full=True)  # its history is still wanted


def test_older_files_of_one_size_are_merged_below_newer_ones_of_others() -> None:
    """Only the newest were looked at, so they were there until all files were merged."""
    old = [_file(100 + n) for n in range(4)]
    assert choose([_file(1), _file(10_000), *old], 9, full=False) == old
    assert choose([_file(1), *old, _file(10_000)], 9, full=False) == [_file(1), *old]


def test_where_there_are_many_files_two_of_about_one_size_are_enough() -> None:
    many = [_file(10**n) for n in range(11)]
    assert not choose(many, 9, full=False)
    assert not choose([*many, _file(10**11)], 9, full=False)  # none would be half as large again
    assert choose([_file(1), *many], 9, full=False) == [_file(1), many[0]]
    assert choose([*many, _file(10**10)], 9, full=False)[-2:] == [many[-1], _file(10**10)]


def test_a_merge_that_does_not_fit_is_not_begun() -> None:
    """It was: it filled the disk, failed, and began again half a second later."""
    files = [_file(10), _file(12), _file(11), _file(13), _file(40), _file(80)]
    assert choose(files, 9, full=False, room_bytes=166) == files
    assert choose(files, 9, full=False, room_bytes=165) == files[:5]
    assert choose(files, 9, full=False, room_bytes=46) == files[:4]
    assert not choose(files, 9, full=False, room_bytes=45)
    assert choose(files[:2], 9, full=True, room_bytes=22) == files[:2]
    assert not choose(files[:2], 9, full=True, room_bytes=21)
    assert not choose(files[:3], 9, full=False, room_bytes=1 << 40)
    # Beside the merged rows there is a hash of each key meanwhile.
    both = [_file(10, rows=2), _file(12, rows=1)]
    assert choose(both, 9, full=True, room_bytes=46) == both
    assert not choose(both, 9, full=True, room_bytes=45)
    # Older ones may fit where the newest do not.
    assert choose([_file(900), *files], 9, full=False, room_bytes=46) == files[:4]
