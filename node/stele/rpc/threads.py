"""Threads for blocking work, and what happens to them when the program ends. Used by the client and by
resolve.py.

When the main thread ends, the interpreter first joins the threads of executors and starts no more of them.
Then it joins the program's own threads. Threads left after that are stopped at an arbitrary place. Invariant:
no thread of `ReaderThreads` keeps a program from ending, and none still reads when the interpreter exits.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Thread
from typing import Any, TypeVar

from stele.model.errors import Rejected

T = TypeVar("T")
_END_S = 5.0
"""Seconds that an ending program waits for readers that were told to stop."""
_stop_of: dict[Thread, Callable[[], None]] = {}  # by reader


def main_thread_ended() -> Rejected:
    """Return the error for a thread that cannot be started, because the main thread has ended."""
    return Rejected(
        "the main thread of this program has ended, so Python starts no more threads; join your threads before that"
    )


def begin(executor: Executor | None, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Run `call(*args)` in a thread of `executor`; by default, of the event loop's executor.

    Raises:
        Rejected: the main thread has ended, or the executor was shut down.
    """
    try:
        return asyncio.get_running_loop().run_in_executor(executor, call, *args)
    except RuntimeError as exc:
        # Python has no exception type for this. An executor that already has threads shuts itself down then.
        if "interpreter shutdown" not in str(exc) and "after shutdown" not in str(exc):
            raise
        raise main_thread_ended() from exc


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Run `call(*args)` in a thread, so that the event loop goes on. Returns its result, and raises what it
    raises.

    If no thread can be started, as when a client is closed at the program's exit, it runs in the calling
    thread."""
    try:
        answer = begin(None, call, *args)
    except Rejected:
        return call(*args)
    return await answer


class ReaderThreads(Executor):
    """Runs each call in a thread of its own. When the program ends, `stop` is called, after the program's own
    threads have ended. It makes all these threads return soon.

    A reader may wait for somebody to take what it read, which nobody does in a program that has ended. An
    executor of the standard library joins such a thread before anything could stop it, and so hangs.
    """

    def __init__(self, name: str, stop: Callable[[], None]) -> None:
        self._name = name
        self._stop = stop

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start `fn` in a thread. Raises RuntimeError if no thread can be started."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        found = fn(*args, **kwargs)
                    except BaseException as exc:  # noqa: BLE001 - raised to the caller that waits
                        future.set_exception(exc)
                    else:
                        future.set_result(found)
            finally:
                _stop_of.pop(thread, None)

        thread = Thread(target=work, name=self._name, daemon=True)
        _stop_of[thread] = self._stop
        try:
            thread.start()
        except BaseException:
            del _stop_of[thread]
            raise
        return future


def _end_readers() -> None:
    """Stop readers: a thread that returns from a read after the interpreter has gone could crash the
    process."""
    left = dict(_stop_of)
    for stop in set(left.values()):
        stop()
    until = time.monotonic() + _END_S
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end_readers)
os.register_at_fork(after_in_child=_stop_of.clear)
