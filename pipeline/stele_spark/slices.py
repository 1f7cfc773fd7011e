"""Finds where a batch must end to have at most a given number of changes. Used by following.py.

Nodes keep no count of changes by time. So a slice of time after the batch's start is scanned for the times of
its changes, with one key column. The slice grows or shrinks until it has about as many changes as wanted.

Invariant: a batch ends between two writes. If one write has more changes than the limit, it is a batch of its
own.
"""

from __future__ import annotations

from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from stele.client import AsyncScanner, Client, Table

_READ_AT_MOST = 4
"""A slice with more than this many times the limit is made shorter."""
_GROW = 4

Times = npt.NDArray[np.uint64]


class Slices:
    """Finds the ends of batches. It remembers how long the last slice was, as a first guess for the next one."""

    def __init__(self) -> None:
        self._width = 0

    def end(self, client: Client, table: Table, start: int, end: int, rows_max: int) -> int | None:
        """The hybrid time at which a batch from `start` on must end, at most `end`; None if nothing changed.
        `rows_max`: the most changes of the batch; 0 for no limit.

        Raises:
            Rejected: CURSOR_LOST, some changes after `start` are gone.
            SteleError: a tablet cannot be read.
        """
        if not rows_max:
            times, _ = _times(client, table, start, end, 0)
            return end if len(times) else None
        found = self._cut(client, table, start, end, rows_max)
        if found is not None:
            self._width = 2 * (found - start)
        return found

    def _cut(self, client: Client, table: Table, start: int, end: int, rows_max: int) -> int | None:
        low, upto = start, min(end, start + self._width) if self._width else end
        too_long = 0
        while True:
            times, whole = _times(client, table, low, upto, _READ_AT_MOST * rows_max)
            if not whole:
                too_long = upto
                upto = max(low + 1, min(_at(times, rows_max), upto - 1))
                if upto == too_long:
                    return upto  # one write
            elif len(times) > rows_max:
                return _last(times, rows_max)
            elif upto == end:
                return end if len(times) else None
            elif not len(times):
                low, upto = upto, too_long or min(end, upto + _GROW * (upto - low))
            elif too_long or 2 * len(times) > rows_max:
                return upto
            else:
                upto = min(end, low + _GROW * (upto - low))


def _at(times: Times, rows_max: int) -> int:
    return int(np.partition(times, rows_max - 1)[rows_max - 1])


def _last(times: Times, rows_max: int) -> int:
    """The latest of these times up to which there are at most `rows_max` changes. If the first time alone has
    more changes, the first time.
    """
    ascending = np.sort(times)
    beyond = ascending[rows_max]
    before = int(np.searchsorted(ascending, beyond, "left"))
    return int(ascending[before - 1]) if before else int(beyond)


def _times(client: Client, table: Table, start: int, upto: int, most: int) -> tuple[Times, bool]:
    """The times of changes, and whether these are all. Reading stops once there are more than `most`."""
    key = table.schema.key_columns[0].name
    scanner = table.asynchronous.changes(start, upto, [key], every=True)
    return client.run(_read(scanner, most))


async def _read(scanner: AsyncScanner, most: int) -> tuple[Times, bool]:
    found: list[Times] = [np.empty(0, np.uint64)]
    rows = 0
    async with aclosing(scanner.batches()) as batches:
        async for batch in batches:
            found.append(np.asarray(batch.column(batch.num_columns - 1)))
            rows += batch.num_rows
            if rows > most:
                return np.concatenate(found), False
    return np.concatenate(found), True
