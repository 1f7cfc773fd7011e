"""Checks the quotes of CSV while Arrow reads it. Called by csv_rows.py.

Arrow reads an unclosed quote as one long value, and drops a quote with text after it. Rows would be lost
without an error.
Invariant: a block is checked before it is handed on. If it is the last one, the end of the file is checked with it. So a
file of one block is refused before any row of it is written. A block costs two comparisons for each quote, or one
search if it has none.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stele.model.errors import Rejected

_QUOTE = ord('"')
_LINE_FEED = ord("\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNKNOWN = b'"'
"""Stands for the next block if that cannot be read. A quote right before it then counts as one that is written twice, which is
no fault."""
_TWICE = 'a quote within a value is written twice ("")'


class Readable(Protocol):
    """A file of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes; fewer only at the end."""


class CheckedQuotes:
    """A file of CSV that is read from front to back, in blocks of one size. `name`: what messages call it."""

    closed = False

    def __init__(self, file: Readable, name: str, delimiter: str) -> None:
        self._file = file
        self._name = name
        self._ahead: bytes | None = None  # the block after the last one returned
        self._broken: Exception | None = None  # why there is none, if it could not be read
        self._edges = np.zeros(
            256, bool
        )  # bytes allowed outside a value's quotes; a quote, as it may be written twice
        self._edges[[ord(delimiter), ord("\r"), _LINE_FEED, _QUOTE]] = True
        self._inside = False  # whether a value in quotes continues after the blocks so far
        self._opened_line = 0  # where that value begins
        self._last = _LINE_FEED  # the byte before the next block; a quote only if it closed a value
        self._line_feeds = 0
        self._carriage_returns = 0

    def read(self, size: int = -1) -> bytes:
        """The next block.

        Raises:
            Exception: what the file raises.
            Rejected: a quote that is not closed within the file or within a block, or that has text after it.
        """
        if self._broken is not None:
            raise self._broken
        block = self._file.read(size) if self._ahead is None else self._ahead
        try:
            self._ahead = self._file.read(size) if block else b""
        except Exception as exc:  # noqa: BLE001 - raised by the next read: this block is good
            self._ahead, self._broken = _UNKNOWN, exc
        if block:
            self._check(block, self._ahead)
        return block

    def readable(self) -> bool:
        """Part of the interface of a file: always true."""
        return True

    def close(self) -> None:
        """Part of the interface of a file. Does nothing: the code that opened the file closes it."""

    def _check(self, block: bytes, following: bytes) -> None:
        if self._last == _LINE_FEED and not self._line_feeds and block.startswith(_BYTE_ORDER_MARK):
            block = block[len(_BYTE_ORDER_MARK) :]
        went_on = self._inside
        opened = None
        if b'"' in block:
            opened = self._follow(block, following[0] if following else _LINE_FEED)
        elif block:
            self._last = block[-1]
        if self._inside and opened is not None:
            self._opened_line = self._line(block, opened)
        elif self._inside and went_on and following:
            raise Rejected(
                f"{self._name}: line {self._opened_line}: a value in quotes is longer than "
                f"{len(block) >> 20} MiB; is its quote not closed? {_TWICE}"
            )
        if self._inside and not following:
            raise Rejected(
                f"{self._name}: line {self._opened_line}: a quote opens here and is not closed; {_TWICE}"
            )
        self._line_feeds += block.count(b"\n")
        self._carriage_returns += block.count(b"\r")

    def _follow(self, block: bytes, following: int) -> int | None:
        """Visit each quote. Returns where the value that is still open begins; None if it began before the
        block.

        `following`: the byte after the block.
        """
        text = np.frombuffer(block, np.uint8)
        places = np.flatnonzero(text == _QUOTE)
        before, after = text[places - 1], text[np.minimum(places + 1, len(text) - 1)]
        if places[0] == 0:
            before[0] = self._last
        if places[-1] == len(text) - 1:
            after[-1] = following
        # In all well-formed files every other quote opens a value, and every other closes one.
        opening, closing = (slice(int(self._inside), None, 2), slice(int(not self._inside), None, 2))
        if not (self._edges[before[opening]].all() and self._edges[after[closing]].all()):
            return self._walk(block, places, before, after)
        self._inside = (len(places) + int(self._inside)) % 2 == 1
        self._last = int(text[-1])
        begun = places[opening][before[opening] != _QUOTE]
        return int(begun[-1]) if len(begun) else None

    def _walk(
        self, block: bytes, places: NDArray[np.intp], before: NDArray[np.uint8], after: NDArray[np.uint8]
    ) -> int | None:
        """As `_follow`, but one quote at a time, for blocks where quotes are text in values without quotes,
        as in `5" screen`."""
        edges = self._edges.tolist()
        closed = -1 if self._last == _QUOTE else -2
        opened = None
        for place, left, right in zip(places.tolist(), before.tolist(), after.tolist()):
            if self._inside:
                if not edges[right]:
                    raise self._text_behind(block, place, opened)
                self._inside, closed = False, place
            elif closed == place - 1:  # written twice: the value continues
                self._inside = True
            elif edges[left] and left != _QUOTE:
                self._inside, opened = True, place
        self._last = block[-1] if block[-1] != _QUOTE or closed == len(block) - 1 else 0
        return opened

    def _text_behind(self, block: bytes, place: int, opened: int | None) -> Rejected:
        line = self._line(block, place)
        first = self._opened_line if opened is None else self._line(block, opened)
        value = "" if first == line else f" of a value that begins in line {first}"
        return Rejected(
            f"{self._name}: line {line}: text follows the closing quote{value}; is a quote not closed? "
            f"{_TWICE}"
        )

    def _line(self, block: bytes, place: int) -> int:
        """Return the line in the file, counted from 1."""
        feeds = self._line_feeds + block.count(b"\n", 0, place)
        return 1 + (feeds or self._carriage_returns + block.count(b"\r", 0, place))
