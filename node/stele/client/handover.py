"""A coroutine on its way from a caller's thread to the client's, and what came of it on the way back. Used by blocking.py.

Ctrl-C raises KeyboardInterrupt wherever the main thread is, in the standard library too: a `Future` or `Condition` that is
waited for may be left locked by it, and then holds up the loop that would tell of its outcome. Invariant: an interrupt at any
moment leaves nothing locked, and a call that is given up is cancelled, or does not begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """One call, of the coroutine that `make` gives. `hand_over`, then `wait`; `give_up` at any time, from the thread that called."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop) -> None:
        self._make = make
        self._loop = loop
        self._handed_over = False
        self._given_up = False
        self._task: asyncio.Task[T] | None = None
        self._over = threading.Lock()  # held until it is over: C takes and gives it back in one step
        self._over.acquire()

    def hand_over(self) -> None:
        """The loop will run it."""
        self._handed_over = True  # first: interrupted behind it, the loop may have it or not
        self._loop.call_soon_threadsafe(self._begin)

    def wait(self) -> T:
        """What the coroutine returns; raises what it raises, and CancelledError of concurrent.futures if it was cancelled."""
        self._over.acquire()
        assert self._task is not None
        if self._task.cancelled():
            raise CancelledError()
        return self._task.result()

    def give_up(self) -> None:
        """Nobody waits for it any more. Does nothing once it has ended."""
        self._given_up = True
        if not self._handed_over:
            self._make().close()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and has ended all that it had
            self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        if not self._given_up:
            self._task = self._loop.create_task(self._make())
            self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is None:
            self._make().close()
        else:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # whoever asked may have gone
        self._over.release()
