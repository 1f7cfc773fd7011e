"""Marks which rows of overlapping sources are the newest versions. Used by views; one cache for all tablets
of a process.

Masks are computed once from the keys alone, and kept as bits for later scans. Invariant: a mask belongs to
immutable sources and is stored under their names, so it is never applied to other rows.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.tablet.sorted_runs import KeyList, Mask
from stele.tablet.sources import Source, pieces

BYTES_MAX = 16 << 20
"""Bytes of all tablets' masks: one bit each for 128 million rows."""
_GROUP_BYTES = 128
"""Bytes that a group's mask takes beside its bits, about."""

Masks = list[list["pa.BooleanArray | None"]]
"""Per source and group one bit a row: whether it is the newest version of its key and no delete. None: all
rows are."""

Names = tuple[Hashable, ...]
"""Names of the sources, newest first."""

_SERIALS = itertools.count(1)


class MaskCache:
    """The masks used last, up to `bytes_max` in total. Larger ones are not kept. Any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._masks: OrderedDict[tuple[int, Names], tuple[Masks, int]] = OrderedDict()
        self.bytes = 0

    def get(self, serial: int, names: Names) -> Masks | None:
        """The masks stored under these keys; None if they are gone."""
        with self._lock:
            found = self._masks.get((serial, names))
            if found is None:
                return None
            self._masks.move_to_end((serial, names))
            return found[0]

    def put(self, serial: int, names: Names, masks: Masks) -> None:
        """Store masks, and drop those that were used longest ago.

        Other masks under `serial` that share a source are dropped first. At one time a source is in one set of
        overlapping sources only, so those masks are from before a write or a merge.
        """
        size = sum(_GROUP_BYTES + (0 if mask is None else mask.nbytes) for of in masks for mask in of)
        with self._lock:
            self._drop(key for key in self._masks if key[0] == serial and not set(key[1]).isdisjoint(names))
            if size > self._bytes_max:
                return
            self._masks[serial, names] = masks, size
            self.bytes += size
            while self.bytes > self._bytes_max:
                self._drop(itertools.islice(self._masks, 1))

    def forget(self, serial: int) -> None:
        """Drop everything stored under `serial`."""
        with self._lock:
            self._drop(key for key in self._masks if key[0] == serial)

    def _drop(self, keys: Iterable[tuple[int, Names]]) -> None:
        for key in list(keys):
            self.bytes -= self._masks.pop(key)[1]


MASKS = MaskCache(BYTES_MAX)


class LiveMasks:
    """Masks of one store's sources. Any thread."""

    def __init__(self, cache: MaskCache) -> None:
        self._cache = cache
        self._serial = next(_SERIALS)
        self._lock = threading.Lock()

    def of(self, sources: Sequence[Source]) -> Masks:
        """Masks of overlapping sources, which are newest first."""
        names = tuple(s.name for s in sources)
        with self._lock:  # other scans of the same files wait, instead of computing the same masks
            masks = self._cache.get(self._serial, names)
            if masks is None:
                masks = _live(sources)
                self._cache.put(self._serial, names, masks)
            return masks

    def known(self, sources: Sequence[Source]) -> bool:
        """Whether the masks of these sources were computed, and are still kept."""
        return self._cache.get(self._serial, tuple(s.name for s in sources)) is not None

    def close(self) -> None:
        """Drop the store's masks, because it is closed."""
        self._cache.forget(self._serial)


def _live(sources: Sequence[Source]) -> Masks:
    found: Masks = [[None for _ in s.groups_between(b"", b"")] for s in sources]
    unfinished: list[dict[int, Mask]] = [{} for _ in sources]
    for low, high in pieces(sources, b"", b""):
        _mark(sources, low, high, unfinished)
        for source, masks, bits in zip(sources, unfinished, found):
            behind = source.groups_between(high, b"").start if high else len(bits)
            for group in [g for g in masks if g < behind]:
                mask = masks.pop(group)
                bits[group] = None if mask.all() else pa.array(mask)
    return found


def _mark(sources: Sequence[Source], low: bytes, high: bytes, masks: list[dict[int, Mask]]) -> None:
    """Mark the live rows with keys in [low, high). Uses a byte a row, because the next range may touch the
    same groups."""
    parts: list[pa.BinaryArray] = []
    places: list[Mask] = []
    deleted: list[Mask] = []
    holding = 0
    for source, of_source in zip(sources, masks):
        before = len(parts)
        for group in source.groups_between(low, high):
            keys = source.keys(group)
            listed = KeyList(keys)
            start = bisect.bisect_left(listed, low) if low else 0
            end = bisect.bisect_left(listed, high) if high else len(keys)
            if start >= end:
                continue
            marks = source.deleted(group)
            if group not in of_source:
                of_source[group] = np.zeros(len(keys), bool)
            parts.append(keys.slice(start, end - start))
            places.append(of_source[group][start:end])
            deleted.append(np.zeros(end - start, bool) if marks is None else marks[start:end])
        holding += len(parts) > before
    if not parts:
        return
    whole = pa.concat_arrays(parts)
    order = key_bytes.sort_order(whole) if holding > 1 else np.arange(len(whole))
    same = key_bytes.same_as_before(whole.take(pa.array(order)))
    live = np.zeros(len(whole), bool)
    live[order[~same]] = True
    live &= ~np.concatenate(deleted)
    at = 0
    for place in places:
        place[:] = live[at : at + len(place)]
        at += len(place)
