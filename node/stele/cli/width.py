"""Tables that fit a terminal. Pure.

Invariant: no line is wider than the width, a column is cut or left out as a whole, and the first column
always stays.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

_GAP = 2
_CUT_TO = 8
"""Columns are cut to this width, or to their longest value if shorter, before a column is left out."""
_CUT = "…"


@dataclass(frozen=True, slots=True)
class Fitted:
    """Lines to print, the headers of columns that did not fit, and whether a cell was cut."""

    lines: list[str]
    left_out: list[str]
    cut: bool = False


def cells_of(text: str) -> int:
    """The number of terminal cells of a text: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def fitted(rows: Sequence[Sequence[str]], width: int | None, whole: int = 0) -> Fitted:
    """Lines of at most `width` cells (None: no limit) for `rows`, of which the first holds the headers.

    The first `whole` columns are cut only if nothing else is left to cut or to leave out."""
    headers = rows[0]
    natural = [max(cells_of(row[i]) for row in rows) for i in range(len(headers))]
    widths = natural if width is None else _widths(natural, width, whole)
    lines = [
        (" " * _GAP).join(_padded(cell, wide) for cell, wide in zip(row, widths)).rstrip() for row in rows
    ]
    return Fitted(lines, list(headers[len(widths) :]), widths != natural[: len(widths)])


def _widths(natural: list[int], width: int, whole: int) -> list[int]:
    """The widths of the columns that are shown."""
    least = [wide if i < whole else min(wide, _CUT_TO) for i, wide in enumerate(natural)]
    count = len(natural)
    while count > 1 and _total(least[:count]) > width:
        count -= 1
    kept = natural[: min(whole, count)]
    if not kept or len(kept) == count:
        return _levelled(natural[:count], width)
    return kept + _levelled(natural[len(kept) : count], width - _total(kept) - _GAP)


def _levelled(natural: list[int], width: int) -> list[int]:
    """The widths of these columns, the widest of them cut until all fit into `width`."""
    widths = list(natural)
    while (over := _total(widths) - width) > 0:
        widest = max(widths)
        # Cut the widest columns first, down to the next widest.
        those = [i for i, wide in enumerate(widths) if wide == widest]
        next_wide = max((wide for wide in widths if wide < widest), default=1)
        step = max(1, min(widest - next_wide, -(-over // len(those))))
        if widest - step < 1:
            break
        for i in those[: max(1, min(len(those), over))]:
            widths[i] -= min(step, over)
            over -= min(step, over)
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _padded(text: str, width: int) -> str:
    taken = cells_of(text)
    if taken <= width:
        return text + " " * (width - taken)
    kept = text
    while kept and cells_of(kept) > width - 1:
        kept = kept[: max(0, len(kept) - max(1, (cells_of(kept) - width + 1) // 2))]
    return kept + _CUT + " " * (width - 1 - cells_of(kept))
