"""A call from a caller's thread to the client's loop, and its result. Used by blocking.py.

Ctrl-C raises KeyboardInterrupt wherever the main thread is, also within the standard library. It may leave a
`Future` or `Condition` locked, which would block the loop. So a call waits for a plain lock. Invariant: an
interrupt at any moment leaves nothing locked. An abandoned call is cancelled or never begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """One call of the coroutine from `make`. The calling thread calls `submit`, then `wait`; `abandon` at any
    time."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop) -> None:
        self._make = make
        self._loop = loop
        self._submitted = False
        self._abandoned = False
        self._task: asyncio.Task[T] | None = None
        self._over = threading.Lock()  # held until the end; C code takes and releases it in one step
        self._over.acquire()

    def submit(self) -> None:
        """Pass the call to the loop."""
        self._submitted = True  # set first: after an interrupt the loop may have the call or not
        self._loop.call_soon_threadsafe(self._begin)

    def wait(self) -> T:
        """The coroutine's result. Raises what it raises; concurrent.futures.CancelledError if it was
        cancelled."""
        self._over.acquire()
        assert self._task is not None
        if self._task.cancelled():
            raise CancelledError()
        return self._task.result()

    def abandon(self) -> None:
        """Cancel the call, because nobody waits for it. Does nothing once it has ended."""
        self._abandoned = True
        if not self._submitted:
            self._make().close()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed and has ended all its calls
            self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        if not self._abandoned:
            self._task = self._loop.create_task(self._make())
            self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is None:
            self._make().close()
        else:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # read it, because the caller may have gone
        self._over.release()
