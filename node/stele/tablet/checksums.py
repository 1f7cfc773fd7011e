"""Checks a file's checksums while its bytes still arrive, in any order. Called by a tablet copy.

Invariant: a range counts as right only after all its bytes were summed, each once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from stele.model.errors import Corrupt

Range = tuple[int, int, int]
"""Offset of the first byte, offset after the last one, and the CRC-32C of the bytes between."""
SumOf = Callable[[int, int], int]
"""Gives the CRC-32C of `length` bytes (second argument) from an offset (first) on."""
SumsInside = Callable[[str, int, Callable[[int, int], bytes]], "RangeSums | None"]
"""Called with a file's (name, size, read). Returns the checksums that are stored in the file; None if it has none.
`read(offset, length)` gives the file's bytes and may block. Raises Corrupt."""

_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31
"""x to the power of 0. The bits of a reflected checksum are in reverse order."""


class RangeSums:
    """Compares the checksums of ranges as their pieces arrive. Any thread.

    Invariant: for each range it holds the sums of disjoint pieces, and none once they cover it. `left` is the
    number of ranges not yet found right.
    """

    def __init__(self, name: str, ranges: Sequence[Range]) -> None:
        """`ranges` must be ascending and must not overlap."""
        self._name = name
        self._ranges = ranges
        self._ends = [end for _, end, _ in ranges]
        self.left = len(ranges)
        self._pieces: dict[int, _Pieces] = {}
        self._lock = Lock()

    def compare(self, begin: int, end: int, sum_of: SumOf) -> None:
        """Add bytes [begin, end), which arrived for the first time. Blocks as `sum_of` does.

        Raises:
            Corrupt: a range is complete and its checksum is wrong.
        """
        for at in range(bisect.bisect_right(self._ends, begin), len(self._ranges)):
            first, last, crc = self._ranges[at]
            if first >= end:
                break
            low, high = max(begin, first), min(end, last)
            of_piece = sum_of(low, high - low)
            found = of_piece if (low, high) == (first, last) else self._put(at, low, high, of_piece)
            if found is None:
                continue
            if found != crc:
                raise Corrupt(f"{self._name}: bytes {first} to {last} have a wrong checksum")
            with self._lock:
                self.left -= 1

    def _put(self, at: int, begin: int, end: int, crc: int) -> int | None:
        """Add a piece to a range. Returns the checksum of the whole range if this was its last piece, else None."""
        first, last, _ = self._ranges[at]
        with self._lock:
            pieces = self._pieces.setdefault(at, _Pieces())
            pieces.sums.append((begin, end, crc))
            pieces.size += end - begin
            if pieces.size < last - first:
                return None
            del self._pieces[at]
        crc = 0
        for begin, end, of_piece in sorted(pieces.sums):
            crc = combined(crc, of_piece, end - begin)
        return crc


@dataclass(slots=True)
class _Pieces:
    """The pieces of one range. `size`: bytes in all pieces."""

    sums: list[Range] = field(default_factory=list)
    size: int = 0


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32C of some bytes with sum `first`, followed by `length` bytes with sum `second`.

    Works as zlib's crc32_combine: each following byte multiplies the sum before it by x^8, modulo the
    polynomial.
    """
    return _multiplied(_power_of_x(8 * length), first) ^ second


def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _multiplied(square, power)
        square = _multiplied(square, square)
        exponent >>= 1
    return power


def _multiplied(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
