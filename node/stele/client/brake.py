"""When a node answers THROTTLED, retries to it take turns instead of each leaving by itself. Owned by a
NodeStream.

The node says how long it takes until there is room; nothing is sent again before that. Then requests leave in
the order they were refused, WINDOW_BYTES at once, until one more is refused or none waits.

Invariant: retries to one node that are sent at once have at most WINDOW_BYTES, or are a single request.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from stele.model.errors import Code, SteleError

WINDOW_BYTES = 1 << 20
PAUSE_FIRST_S, PAUSE_MAX_S = 0.01, 1.0


class Brake:
    """The brake of one node. `on`: it refused requests, and has not accepted all of them since."""

    def __init__(self) -> None:
        self.on = False
        self._until_s = 0.0
        self._pause_s = PAUSE_FIRST_S
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._under_way = 0
        self._under_way_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def refused(self, error: SteleError) -> None:
        """Note that the node answered THROTTLED. Of several answers during the wait, only the longest hint
        counts."""
        now_s = asyncio.get_running_loop().time()
        hint_s = error.retry_after_ms / 1_000
        if now_s >= self._until_s:
            if self.on:
                self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            pause_s = max(hint_s, self._pause_s) * (1 + 0.25 * random.random())
            self._until_s = now_s + pause_s
        else:
            self._until_s = max(self._until_s, now_s + hint_s)
        self.on = True

    async def begin(self, size: int) -> None:
        """Wait for the turn of a request of `size` bytes. Call `end` for it later, unless this was
        cancelled."""
        if self._room_for(size) and not self._waiting:
            self._enter(size)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, size))
        self._let_go_on()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._leave(size)
            self._let_go_on()
            raise

    def end(self, size: int, code: Code | None) -> None:
        """Note that a request which began has ended with `code`; None: its caller left.

        If the node neither accepted it nor answered THROTTLED, the node may be gone. Then nobody waits for a
        turn there any more."""
        self._leave(size)
        if code is not Code.THROTTLED:
            self._pause_s = max(self._pause_s / 2, PAUSE_FIRST_S)
            if code not in (Code.OK, None) or not (self._waiting or self._under_way):
                self._release()
        self._let_go_on()

    def _release(self) -> None:
        self.on = False
        self._until_s, self._pause_s = 0.0, PAUSE_FIRST_S

    def _room_for(self, size: int) -> bool:
        if asyncio.get_running_loop().time() < self._until_s:
            return False
        return not self.on or not self._under_way or self._under_way_bytes + size <= WINDOW_BYTES

    def _enter(self, size: int) -> None:
        self._under_way += 1
        self._under_way_bytes += size

    def _leave(self, size: int) -> None:
        self._under_way -= 1
        self._under_way_bytes -= size

    def _let_go_on(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            future, size = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            if not self._room_for(size):
                if self._timer is None and loop.time() < self._until_s:
                    self._timer = loop.call_at(self._until_s, self._look)
                return
            self._waiting.popleft()
            self._enter(size)
            future.set_result(None)

    def _look(self) -> None:
        self._timer = None
        self._let_go_on()
