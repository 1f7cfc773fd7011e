"""Whether a node ends, and why: it got an order to stop, or one of its parts cannot continue.

Any part may call `fail`; process.py waits for `failed`. Invariant: the first failure is the one that is
reported.
"""

from __future__ import annotations

import asyncio

import structlog

log = structlog.get_logger("stele.tserver")


class Shutdown:
    """The shutdown of one node. Made on its event loop, and used there only."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Resolves with the first failure. It never raises."""
        self._stopping = False
        self._hand_over = True

    @property
    def stopping(self) -> bool:
        """Whether the node got an order to stop."""
        return self._stopping

    @property
    def hands_over(self) -> bool:
        """Whether leaderships are handed over at the end. A node that failed ends at once."""
        return self._hand_over and not self.failed.done()

    def begin(self, *, hand_over: bool) -> bool:
        """Record the order to stop. Returns False if there was one before."""
        if self._stopping:
            return False
        self._stopping, self._hand_over = True, hand_over
        return True

    def fail(self, error: Exception) -> None:
        """Record that the node cannot continue. It ends, and leaves all files as they are."""
        if not self.failed.done():
            log.error("node fails", error=str(error), exc_info=error)
            self.failed.set_result(error)

    def reason(self) -> str:
        """Why the node no longer serves; "" while it does."""
        if self._stopping:
            return "stopping"
        return str(self.failed.result()) if self.failed.done() else ""
