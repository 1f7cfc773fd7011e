"""Whether a node ends, and why: it was told to stop, or one of its parts found that it cannot go on.

Any part may call `fail`; whoever runs the node waits for `failed`. Invariant: the first failure is the one that is told.
"""

from __future__ import annotations

import asyncio

import structlog

log = structlog.get_logger("stele.tserver")


class Shutdown:
    """Of one node. Made on its event loop, and used there only."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Resolves with the first failure. It never raises."""
        self._stopping = False
        self._hand_over = True

    @property
    def stopping(self) -> bool:
        """Whether the node was told to stop."""
        return self._stopping

    @property
    def hands_over(self) -> bool:
        """Whether leaderships are to be handed over at the end. A node that failed leaves at once."""
        return self._hand_over and not self.failed.done()

    def begin(self, *, hand_over: bool) -> bool:
        """The node is told to stop. False if it was told before."""
        if self._stopping:
            return False
        self._stopping, self._hand_over = True, hand_over
        return True

    def fail(self, error: Exception) -> None:
        """The node cannot go on. It ends, and leaves all files as they are."""
        if not self.failed.done():
            log.error("node fails", error=str(error), exc_info=error)
            self.failed.set_result(error)

    def reason(self) -> str:
        """Why the node serves no more; "" while it does."""
        if self._stopping:
            return "stopping"
        return str(self.failed.result()) if self.failed.done() else ""
