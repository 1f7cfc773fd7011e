"""Split-block bloom filter over 64-bit key hashes (Putze et al., 2007; the layout of Apache Parquet). Pure
numpy.

A filter is an array of 256-bit blocks of eight 32-bit words. A key sets one bit in each word of one block.

Invariant: a key that was added is always found. At 10 bits a key, about one other key in a hundred is found
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_BITS_PER_KEY = 10
_BLOCK_BITS = 256
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31],
    dtype=np.uint32,
)
_SALT_INTS = tuple(int(s) for s in _SALTS)
_STEP = 1 << 18


def block_count(keys: int) -> int:
    """The number of blocks in a filter of `keys` keys."""
    return max(1, (keys * _BITS_PER_KEY + _BLOCK_BITS - 1) // _BLOCK_BITS)


def build(keys: int, ranges: Iterable[tuple[int, U64]]) -> Iterator[bytes]:
    """The filter of `keys` keys, in pieces.

    `ranges`: pairs (end, hashes whose upper 32 bits are below `end` and not below the previous end), up to
    2^32. A hash's upper bits choose its block, so the pieces follow each other.
    """
    blocks, first = block_count(keys), 0
    left = np.zeros(0, np.uint64)
    for upper_end, found in ranges:
        hashes = np.concatenate((left, found)) if len(left) else found
        end = blocks if upper_end == 1 << 32 else upper_end * blocks >> 32
        of_block = _block(hashes, blocks)
        # The block at the boundary may get hashes of the next range too.
        inside = of_block < end
        left = hashes[~inside]
        if end > first:
            yield _filled(hashes[inside], of_block[inside] - first, end - first)
        first = end


def _filled(hashes: U64, of_block: npt.NDArray[np.int64], blocks: int) -> bytes:
    bits = np.zeros(blocks * _BLOCK_BITS, bool)
    for start in range(0, len(hashes), _STEP):
        part = slice(start, start + _STEP)
        base = of_block[part] * _BLOCK_BITS
        low = hashes[part].astype(np.uint32)
        for word, salt in enumerate(_SALTS):
            bits[base + word * 32 + ((low * salt) >> np.uint32(27)).astype(np.int64)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def may_hold(bloom: npt.NDArray[np.uint8], hashes: U64) -> npt.NDArray[np.bool_]:
    """Which of `hashes` may have been added."""
    words = bloom.view("<u4")
    base = _block(hashes, len(bloom) // 32) * 8
    low = hashes.astype(np.uint32)
    found = np.ones(len(hashes), bool)
    for word, salt in enumerate(_SALTS):
        bit = (low * salt) >> np.uint32(27)
        found &= (np.take(words, base + word) >> bit) & np.uint32(1) == 1
    return found


def may_hold_one(words: memoryview, hash_: int) -> bool:
    """Whether `hash_` may have been added; `words` are the filter's 32-bit words."""
    base = (((hash_ >> 32) * (len(words) // 8)) >> 32) * 8
    low = hash_ & 0xFFFF_FFFF
    return all(
        words[base + i] >> (((low * salt) & 0xFFFF_FFFF) >> 27) & 1 for i, salt in enumerate(_SALT_INTS)
    )


def _block(hashes: U64, blocks: int) -> npt.NDArray[np.int64]:
    return (((hashes >> np.uint64(32)) * np.uint64(blocks)) >> np.uint64(32)).astype(np.int64)
