"""Checksums of ranges that come in pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import google_crc32c
import pytest

from stele.model.errors import Corrupt
from stele.tablet.checksums import Range, RangeSums, combined

DATA = random.Random(1).randbytes(200_000)


def crc(begin: int, end: int) -> int:
    return int(google_crc32c.value(DATA[begin:end]))


def sum_of(data: bytes) -> Callable[[int, int], int]:
    return lambda offset, length: int(google_crc32c.value(data[offset : offset + length]))


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 100_000, 199_999, 200_000])
def test_sums_are_combined(at: int) -> None:
    assert combined(crc(0, at), crc(at, len(DATA)), len(DATA) - at) == crc(0, len(DATA))


def pieces_of(seed: int) -> tuple[list[Range], list[tuple[int, int]]]:
    """Ranges with gaps between some, and cuts through all bytes in another order."""
    draw = random.Random(seed)
    borders = sorted(draw.sample(range(64, len(DATA)), 40))
    ranges = [
        (begin, end, crc(begin, end)) for begin, end in itertools.pairwise(borders) if draw.random() < 0.9
    ]
    cuts = sorted({0, len(DATA), *draw.sample(range(len(DATA)), draw.choice([0, 3, 90]))})
    pieces = list(itertools.pairwise(cuts))
    draw.shuffle(pieces)
    return ranges, pieces


@pytest.mark.parametrize("seed", range(12))
def test_each_flipped_byte_of_a_range_is_found(seed: int) -> None:
    ranges, pieces = pieces_of(seed)
    whole = RangeSums("f", ranges)
    for begin, end in pieces:
        whole.compare(begin, end, sum_of(DATA))
    draw = random.Random(seed)
    for _ in range(10):
        at = draw.randrange(len(DATA))
        data = DATA[:at] + bytes([DATA[at] ^ 1 << draw.randrange(8)]) + DATA[at + 1 :]
        sums = RangeSums("f", ranges)
        if inside := next(((begin, end) for begin, end, _ in ranges if begin <= at < end), None):
            with pytest.raises(Corrupt, match=f"f: bytes {inside[0]} to {inside[1]} are not"):
                for begin, end in pieces:
                    sums.compare(begin, end, sum_of(data))
        else:
            for begin, end in pieces:
                sums.compare(begin, end, sum_of(data))


def test_what_is_not_summed_is_not_found_right_nor_wrong() -> None:
    sums = RangeSums("f", [(0, 100, crc(0, 100) ^ 1)])
    sums.compare(0, 50, sum_of(DATA))
    sums.compare(51, 100, sum_of(DATA))
    with pytest.raises(Corrupt):
        sums.compare(50, 51, sum_of(DATA))
