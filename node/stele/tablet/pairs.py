"""The pairs of a key space in memory. Called by keyspace.py in the owner's thread; opens no files.

While a flush reads a frozen state, changes are kept beside it and merged in afterwards. So no step visits all
pairs.

Invariant: the result of `freeze` does not change before `thaw`.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator, Mapping

import xxhash

Pair = tuple[bytes, int, int]
"""A value, the log index of the entry that set it, and the lease that it is attached to; 0: none."""

PAIR_BYTES = 256
"""About how much memory a key takes, besides its own bytes and those of its value."""
PACKED = struct.Struct("<IIQ")
"""The header before a key and its value: their lengths, and the index."""
LEASED = struct.Struct("<IIQQ")
"""The same with the lease."""
_MASK = (1 << 64) - 1


def size_of(key: bytes, value: bytes) -> int:
    """The bytes that a pair counts."""
    return PAIR_BYTES + len(key) + len(value)


def packed(key: bytes, pair: Pair) -> bytes:
    """A pair as bytes, for files and checksums. A pair without a lease has the same bytes as in release 0.1.0."""
    value, index, lease = pair
    if lease:
        return packed_with_lease(key, pair)
    return PACKED.pack(len(key), len(value), index) + key + value


def packed_with_lease(key: bytes, pair: Pair) -> bytes:
    """A pair as bytes, for files of key spaces with leases."""
    value, index, lease = pair
    return LEASED.pack(len(key), len(value), index, lease) + key + value


class Pairs:
    """Keys with their values. `bytes`: the sum of their sizes. `checksum`: 64 bits over all, whatever their
    order."""

    def __init__(self, pairs: dict[bytes, Pair] | None = None) -> None:
        self._pairs = pairs or {}
        self._changes: dict[bytes, Pair | None] | None = None
        self._keys = sorted(self._pairs)
        self.bytes = sum(size_of(key, value) for key, (value, _, _) in self._pairs.items())
        self.checksum = sum(_digest(key, pair) for key, pair in self._pairs.items()) & _MASK

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def get(self, key: bytes) -> Pair | None:
        """A key's pair; None if it is absent."""
        if self._changes is not None and key in self._changes:
            return self._changes[key]
        return self._pairs.get(key)

    def keys_from(self, start: bytes) -> Iterator[bytes]:
        """Keys from `start` on, ascending. Do not modify the map while iterating."""
        # islice would visit all keys before, for each page of a long list.
        places = range(bisect.bisect_left(self._keys, start), len(self._keys))
        return (self._keys[at] for at in places)

    def put(self, key: bytes, pair: Pair) -> Pair | None:
        """Set a key. Returns the pair that was there."""
        old = self.get(key)
        if old is None:
            bisect.insort(self._keys, key)
        self._change(key, old, pair)
        return old

    def remove(self, key: bytes) -> Pair | None:
        """Remove a key. Returns the pair that was there."""
        old = self.get(key)
        if old is not None:
            del self._keys[bisect.bisect_left(self._keys, key)]
            self._change(key, old, None)
        return old

    def _change(self, key: bytes, old: Pair | None, new: Pair | None) -> None:
        for pair, sign in ((old, -1), (new, 1)):
            if pair is not None:
                self.bytes += sign * size_of(key, pair[0])
                self.checksum = (self.checksum + sign * _digest(key, pair)) & _MASK
        if self._changes is not None:
            self._changes[key] = new
        else:
            _set(self._pairs, key, new)

    def freeze(self) -> Mapping[bytes, Pair]:
        """All pairs as they are now, for any thread. Invalidates the result of an earlier call."""
        self.thaw()
        self._changes = {}
        return self._pairs

    def thaw(self) -> None:
        """End the use of the result of `freeze`, and merge in the changes made meanwhile."""
        for key, pair in (self._changes or {}).items():
            _set(self._pairs, key, pair)
        self._changes = None


def _set(pairs: dict[bytes, Pair], key: bytes, pair: Pair | None) -> None:
    if pair is None:
        pairs.pop(key, None)
    else:
        pairs[key] = pair


def _digest(key: bytes, pair: Pair) -> int:
    return xxhash.xxh3_64_intdigest(packed(key, pair))
