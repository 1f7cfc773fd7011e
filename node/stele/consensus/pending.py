"""A write without an outcome yet. Made by Writes, owned by Proposals.

Invariant: `future` ends exactly once. `early` ends no later than `future`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stele.model.ids import OpId
from stele.tablet.machine import Outcome


@dataclass(slots=True, eq=False)
class Pending:
    """A write and the future of its outcome. `timestamp` is 0 until the write is given to the core.

    `came_s`: when it was submitted, by the clock of durations. `rows_only`: the write changes only rows, so
    it cannot change the outcome of a later write. `early`: a future of its outcome that may end before the
    write is committed (see early.py). None: its caller did not ask for an early outcome.
    """

    payload: bytes
    future: asyncio.Future[Outcome]
    timestamp: int = 0
    opid: OpId | None = None
    came_s: float = 0.0
    rows_only: bool = False
    early: asyncio.Future[Outcome] | None = None

    def ends(self, outcome: Outcome) -> None:
        """Give the callers the outcome: the write was applied."""
        for future in (self.future, self.early):
            if future is not None and not future.done():
                future.set_result(outcome)

    def fails(self, error: Exception) -> None:
        """Give the callers the error: the write never entered a log, or this log dropped it."""
        for future in (self.future, self.early):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # the caller that waited may have gone; then nobody else retrieves it
