"""Checksums of ranges that come in pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from stele.model.block import RowOp
from stele.model.errors import Corrupt
from stele.tablet import colformat
from stele.tablet.checksums import Range, RangeSums, combined
from stele.tablet.colformat import NAME, TAIL, padded, read_footer, sums_inside
from tests.tablet.twin import Twin, flush, new_store

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
            with pytest.raises(Corrupt, match=f"f: bytes {inside[0]} to {inside[1]} have a wrong checksum"):
                for begin, end in pieces:
                    sums.compare(begin, end, sum_of(data))
        else:
            for begin, end in pieces:
                sums.compare(begin, end, sum_of(data))


def column_file(home: Path) -> tuple[str, bytes]:
    """Name and bytes of one with several columns and a delete."""
    store, twin = new_store(home / "t"), Twin()
    rows = [{"k": "k", "n": n, "v": "v" * 20, "w": n, "d": None} for n in range(500)]
    store.apply(twin.write(rows, RowOp.UPSERT)[0])
    store.apply(twin.write([{"k": "k", "n": 7}], RowOp.DELETE)[0])
    flush(store)
    store.close()
    path = next((home / "t").glob(f"{NAME}*"))
    return path.name, path.read_bytes()


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_each_byte_of_a_column_file_is_compared(tmp_path: Path) -> None:
    """First and last byte of all its parts, of what is before and of what is behind them."""
    name, data = column_file(tmp_path)
    parts = read_footer(name, len(data), reader(data)).parts.values()
    assert len(parts) > 7
    ranges = sorted((offset, offset + padded(length)) for offset, length, _ in parts)
    sums = sums_inside(name, len(data), reader(data))
    assert sums is not None
    sums.compare(0, len(data), sum_of(data))
    assert sums.left == 0
    for begin, end in ranges:
        for at in (begin, end - 1):
            sums = sums_inside(name, len(data), reader(data))
            assert sums is not None
            with pytest.raises(Corrupt, match=f"bytes {begin} to {end} have a wrong checksum"):
                sums.compare(0, len(data), sum_of(flipped(data, at)))
    for at in (0, 10, 63, ranges[-1][1], len(data) - 21, len(data) - 20, len(data) - 9, len(data) - 1):
        with pytest.raises(Corrupt):
            sums_inside(name, len(data), reader(flipped(data, at)))
    assert sums_inside("MANIFEST", len(data), reader(data)) is None


def test_a_rotten_length_of_a_footer_is_not_read(tmp_path: Path) -> None:
    """It has no checksum of its own: four gigabytes of a large file would be held in memory."""
    name, data = column_file(tmp_path)
    size, asked = 10 << 30, list[int]()
    length, crc, magic = TAIL.unpack(data[-TAIL.size :])

    def read(offset: int, wanted: int) -> bytes:
        asked.append(wanted)
        if offset == size - TAIL.size:
            return TAIL.pack(length | 1 << 32, crc, magic)
        return data[offset : offset + wanted] if offset < len(data) else bytes(wanted)

    with pytest.raises(Corrupt, match="tail is damaged"):
        read_footer(name, size, read)
    assert max(asked) < 1000


@pytest.mark.parametrize("alignment", [128, 1 << 20], ids=["over the next", "beyond the file"])
def test_a_footer_of_parts_over_each_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alignment: int
) -> None:
    name, data = column_file(tmp_path)
    monkeypatch.setattr(colformat, "ALIGNMENT", alignment)
    with pytest.raises(Corrupt, match="parts that overlap"):
        sums_inside(name, len(data), reader(data))


def test_what_is_not_summed_is_not_found_right_nor_wrong() -> None:
    sums = RangeSums("f", [(0, 100, crc(0, 100) ^ 1)])
    sums.compare(0, 50, sum_of(DATA))
    sums.compare(51, 100, sum_of(DATA))
    assert sums.left == 1
    with pytest.raises(Corrupt):
        sums.compare(50, 51, sum_of(DATA))
