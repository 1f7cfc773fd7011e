"""The leases of a key space: how long each lives without its holder, and which keys end with it. Owned by KeySpace.

This is replicated state, so it knows no clock: the leader measures time (stele.tserver.leases), and ends a lease by an entry.

Invariant: a key is attached to one lease at most, and that lease is here.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping

import xxhash

LEASES_MAX = 10_000
"""The most leases of a key space. The outcome of entries depends on it, so it must never change."""
LEASE_KEYS_MAX = 1_000
"""The most keys of a lease: they all end in one step. It must never change either."""
_DIGESTED = struct.Struct("<QQ")
_MASK = (1 << 64) - 1


class Leases:
    """Leases by id. `checksum`: 64 bits over ids and times; that of the pairs covers the keys. `changes`: how often a
    lease began or ended.

    `changes` and `granted` begin anew with each start of the process: they are in no file and no checksum."""

    def __init__(self, ttl_ms: Mapping[int, int] | None = None) -> None:
        self._ttl_ms: dict[int, int] = {}
        self._granted: dict[int, int] = {}
        self._keys: dict[int, dict[bytes, None]] = {}
        self.checksum = 0
        self.changes = 0
        for lease, ttl in (ttl_ms or {}).items():
            self.grant(lease, ttl)

    def __len__(self) -> int:
        return len(self._ttl_ms)

    def __contains__(self, lease: int) -> bool:
        return lease in self._ttl_ms

    @property
    def ttl_ms(self) -> Mapping[int, int]:
        """How long each lease lives without a sign of its holder."""
        return self._ttl_ms

    @property
    def granted(self) -> dict[int, int]:
        """By lease, the value of `changes` when it began; ascending. A lease that is granted again gets a new value."""
        return self._granted

    def keys_of(self, lease: int) -> Collection[bytes]:
        """The keys that end with a lease."""
        return self._keys.get(lease, {}).keys()

    def grant(self, lease: int, ttl_ms: int) -> None:
        """Begin a lease that does not exist yet."""
        self._ttl_ms[lease] = ttl_ms
        self._keys[lease] = {}
        self.changes += 1
        self._granted[lease] = self.changes
        self.checksum = (self.checksum + _digest(lease, ttl_ms)) & _MASK

    def end(self, lease: int) -> list[bytes]:
        """End a lease. Returns its keys, in order; none if it is not here."""
        ttl_ms = self._ttl_ms.pop(lease, None)
        if ttl_ms is None:
            return []
        self.changes += 1
        del self._granted[lease]
        self.checksum = (self.checksum - _digest(lease, ttl_ms)) & _MASK
        return sorted(self._keys.pop(lease))

    def move(self, key: bytes, before: int, after: int) -> None:
        """Attach a key to the lease `after`; before, it was attached to the lease `before`. 0 means no lease."""
        if before == after:
            return
        if before in self._keys:
            self._keys[before].pop(key, None)
        if after:
            self._keys[after][key] = None


def _digest(lease: int, ttl_ms: int) -> int:
    return xxhash.xxh3_64_intdigest(_DIGESTED.pack(lease, ttl_ms))
