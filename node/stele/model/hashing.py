"""Stele hash v1: 64 bits over byte strings, vectorised. It decides which tablet a row is in, and serves bloom
filters and checksums. So it never changes: a better hash would be v2, beside this one.

For a string of n bytes, read as little-endian 64-bit words with the last one zero padded:

    h = fmix(seed + n * P1);  for each word w:  h = rotl(h ^ (w * P2), 29) * P3 + P4;  result fmix(h)

fmix is that of MurmurHash3 (public domain), and everything is modulo 2^64.

Invariant: tests/model/test_hashing.py holds golden vectors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.keys import binary_parts, words

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_P1, _P2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
_P3, _P4 = 0x165667B19E3779F9, 0x27D4EB2F165667C5
_F1, _F2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53

_U1, _U2, _U3, _U4 = np.uint64(_P1), np.uint64(_P2), np.uint64(_P3), np.uint64(_P4)
_M1, _M2 = np.uint64(_F1), np.uint64(_F2)
_29, _33, _35 = np.uint64(29), np.uint64(33), np.uint64(35)
"""Made once: making a numpy scalar takes as long as hashing some dozens of rows with it."""

_SHORT_BYTES = 128
"""Values up to this long are hashed together, padded to the longest of them."""
_FEW = 16
"""Up to this many long values are hashed one by one: a numpy call costs as much as a few words in Python."""


def fmix(values: U64) -> U64:
    """MurmurHash3's finaliser: a one-to-one mix of 64-bit words."""
    h = values ^ (values >> _33)
    h *= _M1
    h ^= h >> _33
    h *= _M2
    h ^= h >> _33
    return h


def hash_binary(values: pa.BinaryArray, seed: int = 0) -> U64:
    """Stele hash v1 of each value of a binary array without nulls.

    Memory and time are proportional to the total number of bytes. One long value makes no other value dearer.
    """
    offsets, data = binary_parts(values)
    lengths = np.diff(offsets)
    if int(lengths.max(initial=0)) <= _SHORT_BYTES:
        return _hash_padded(values, seed)
    found = np.empty(len(values), np.uint64)
    # Values are grouped by the exponent of their length, so lengths in a group differ by a factor of two at
    # most.
    _, kinds = np.frexp(np.maximum(lengths, _SHORT_BYTES) - 1)
    for kind in np.unique(kinds).tolist():
        members = np.flatnonzero(kinds == kind)
        if len(members) <= _FEW:
            each = (data[offsets[at] : offsets[at + 1]].tobytes() for at in members.tolist())
            found[members] = [hash_bytes(value, seed) for value in each]
        else:
            found[members] = _hash_padded(values.take(pa.array(members)), seed)
    return found


def hash_rows(values: npt.NDArray[np.uint8], seed: int = 0) -> U64:
    """Stele hash v1 of byte strings of equal length, given as the rows of a matrix."""
    rows, width = values.shape
    if width % 8:
        padded = np.zeros((rows, width + -width % 8), np.uint8)
        padded[:, :width] = values
        values = padded
    h = np.full(rows, _fmix_int((seed + width * _P1) & _MASK), np.uint64)
    for word in values.view("<u8").T:
        h = _mixed(h, word)
    return fmix(h)


def _mixed(h: U64, word: U64) -> U64:
    """Mix one more word of each value."""
    mixed: U64 = word * _U2
    mixed ^= h
    mixed = (mixed << _29) | (mixed >> _35)
    mixed *= _U3
    mixed += _U4
    return mixed


def _hash_padded(values: pa.BinaryArray, seed: int) -> U64:
    columns, lengths = words(values)
    h = fmix(np.uint64(seed & _MASK) + lengths.astype(np.uint64) * _U1)
    counts = (lengths + 7) // 8
    fewest = int(counts.min()) if len(counts) else 0
    for position, word in enumerate(columns):
        mixed = _mixed(h, word)
        h = mixed if position < fewest else np.where(counts > position, mixed, h)
    return fmix(h)


_LANE_BYTES = 16
_INT_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


def hash_ints(values: Sequence[int], width: int, seed: int = 0) -> list[int]:
    """Stele hash v1 of the key bytes (see stele.model.keys) of some dozens of integers, each `width` bytes.

    All values are packed into one big number, in lanes of 128 bits; the product of two words stays within its
    lane. So one operation on that number does a step for all values. This is cheaper than calls of numpy.
    """
    count = len(values)
    pad = f"{_LANE_BYTES - width}x"
    raw = struct.pack(">" + (_INT_CODES[width] + pad) * count, *values)
    ones = int.from_bytes(b"\x01".ljust(_LANE_BYTES, b"\x00") * count, "little")
    low = _MASK * ones
    lanes = int.from_bytes(raw, "little") ^ (ones << 7)  # flip the sign bit, which is in the first byte
    h = (lanes * _P2 & low) ^ _fmix_int((seed + width * _P1) & _MASK) * ones
    h = (h << 29 | h >> 35) & low
    h = (h * _P3 + _P4 * ones) & low
    h ^= h >> 33 & low
    h = h * _F1 & low
    h ^= h >> 33 & low
    h = h * _F2 & low
    h ^= h >> 33 & low
    return list(struct.unpack(f"<{2 * count}Q", h.to_bytes(_LANE_BYTES * count, "little"))[::2])


def hash_bytes(value: bytes, seed: int = 0) -> int:
    """Stele hash v1 of one value."""
    h = _fmix_int((seed + len(value) * _P1) & _MASK)
    for at in range(0, len(value), 8):
        word = int.from_bytes(value[at : at + 8], "little")
        h ^= (word * _P2) & _MASK
        h = ((h << 29) | (h >> 35)) & _MASK
        h = (h * _P3 + _P4) & _MASK
    return _fmix_int(h)


def _fmix_int(h: int) -> int:
    h ^= h >> 33
    h = (h * _F1) & _MASK
    h ^= h >> 33
    h = (h * _F2) & _MASK
    return h ^ (h >> 33)
