"""Where a stream's entries are on disk. Used by state.py; opens no files.

An extent is a range of consecutive entries of one stream and one term in one group. It takes 24 bytes of
memory, however many entries it has. Invariant: extents are contiguous: each begins where the one before it
ends, and the last one ends at `last`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from stele.model.ids import OpId

_OFFSET_BITS = 40
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


class Extent(NamedTuple):
    """Entries `first` to `last` of one term, in the group at `offset` of segment `sequence`."""

    first: int
    last: int
    term: int
    sequence: int
    offset: int


class Extents:
    """The extents of one stream, by index."""

    __slots__ = ("_firsts", "_places", "_terms", "last")

    def __init__(self, start_index: int) -> None:
        self._firsts = array("Q")
        self._places = array("Q")
        self._terms = array("Q")
        self.last = start_index

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, first: int, last: int, term: int, sequence: int, offset: int) -> None:
        """Add entries that were written. They void what stood at or above `first`."""
        if first <= self.last:
            self.cut(first)
        self.last = last
        places, place = self._places, sequence << _OFFSET_BITS | offset
        if places and places[-1] == place and self._terms[-1] == term:
            return
        self._firsts.append(first)
        places.append(place)
        self._terms.append(term)

    def cut(self, from_index: int) -> None:
        """Void the entries at or above `from_index`."""
        firsts = self._firsts
        while firsts and firsts[-1] >= from_index:
            firsts.pop()
            self._places.pop()
            self._terms.pop()
        self.last = min(self.last, from_index - 1)

    def reset(self, start_index: int) -> None:
        """Void everything. The next entry is the one after `start_index`."""
        del self._firsts[:], self._places[:], self._terms[:]
        self.last = start_index

    def drop_to(self, start_index: int) -> None:
        """Forget the entries up to `start_index`."""
        if start_index >= self.last:
            self.reset(start_index)
            return
        at = bisect_right(self._firsts, start_index + 1) - 1
        if at < 0:
            return
        del self._firsts[:at], self._places[:at], self._terms[:at]
        self._firsts[0] = max(self._firsts[0], start_index + 1)

    def copy_to(self, index: int) -> Extents:
        """A copy of the extents that hold entries up to `index`."""
        found = Extents(min(index, self.last))
        at = bisect_right(self._firsts, index)
        found._firsts, found._places, found._terms = self._firsts[:at], self._places[:at], self._terms[:at]
        return found

    def ends(self) -> Iterator[OpId]:
        """The last entry of each run of entries with the same term, in order."""
        firsts, terms = self._firsts, self._terms
        for at in range(1, len(terms)):
            if terms[at] != terms[at - 1]:
                yield OpId(terms[at - 1], firsts[at] - 1)
        if terms:
            yield OpId(terms[-1], self.last)

    def find(self, index: int) -> int | None:
        """The position of the extent that holds `index`; None if none does."""
        at = bisect_right(self._firsts, index) - 1
        return None if at < 0 or index > self.last else at

    def __getitem__(self, at: int) -> Extent:
        firsts = self._firsts
        last = firsts[at + 1] - 1 if at + 1 < len(firsts) else self.last
        place = self._places[at]
        return Extent(firsts[at], last, self._terms[at], place >> _OFFSET_BITS, place & _OFFSET_MASK)

    def first_at_or_behind(self, sequence: int) -> int | None:
        """The lowest index in segment `sequence` or a later one; None if there is none."""
        # Places rise with the index, because a later entry was written later.
        at = bisect_right(self._places, (sequence << _OFFSET_BITS) - 1)
        return self._firsts[at] if at < len(self._firsts) else None
