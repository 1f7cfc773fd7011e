"""Checksums of a file of which only some bytes are here, in whatever order they come. Called by a copy as its files arrive.

Invariant: a range is right only if all its bytes were summed, each once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from stele.model.errors import Corrupt

Range = tuple[int, int, int]
"""Offset of the first byte, offset behind the last one, CRC-32C of what is between."""
SumOf = Callable[[int, int], int]
"""The CRC-32C of so many bytes (second) from an offset (first) on."""
SumsInside = Callable[[str, int, Callable[[int, int], bytes]], "RangeSums | None"]
"""What the file of this name and size carries in itself, None for nothing, for who gives (offset, length) bytes of it. Blocks
as that does. Raises Corrupt."""

_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31
"""x to the power of 0: the bits of a reflected checksum stand the other way round."""


class RangeSums:
    """Compares the checksums of ranges piece by piece. Any thread.

    Invariant: of each range it holds the sums of disjoint pieces, and none once they cover it. `left` ranges were not found
    right yet.
    """

    def __init__(self, name: str, ranges: Sequence[Range]) -> None:
        """`ranges` ascending, none over another."""
        self._name = name
        self._ranges = ranges
        self._ends = [end for _, end, _ in ranges]
        self.left = len(ranges)
        self._pieces: dict[int, _Pieces] = {}
        self._lock = Lock()

    def compare(self, begin: int, end: int, sum_of: SumOf) -> None:
        """Bytes [begin, end) are here, for the first time. Blocks as `sum_of` does.

        Raises:
            Corrupt: a range, all of which is here now, has another checksum.
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
                raise Corrupt(f"{self._name}: bytes {first} to {last} are not those that were written")
            with self._lock:
                self.left -= 1

    def _put(self, at: int, begin: int, end: int, crc: int) -> int | None:
        """The sum of all of a range, if this is the last of its pieces."""
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
    """Of one range. `size`: bytes that they hold together."""

    sums: list[Range] = field(default_factory=list)
    size: int = 0


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32C of bytes with the sum `first` and `length` bytes behind them with the sum `second`.

    As zlib's crc32_combine: a byte that follows multiplies the sum before it by x^8, modulo the polynomial.
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
