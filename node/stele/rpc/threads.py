"""Threads for what blocks, and what becomes of them when the program ends. Used by the client and by resolve.py.

When the main thread ends, the interpreter first joins the threads of executors and gives out no more of them, then joins the
program's own; what is left is stopped in the middle of whatever it does. Invariant: no thread of `ReaderThreads` keeps a
program from ending, and none is left reading when the interpreter goes.
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
"""How long a program that ends waits for readers that were told to stop."""
_stop_of: dict[Thread, Callable[[], None]] = {}  # of each reader there is


def main_thread_ended() -> Rejected:
    """The error of what would need another thread by now."""
    return Rejected(
        "the main thread of this program has ended, and Python begins no more threads then; join your threads first"
    )


def begin(executor: Executor | None, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """`call(*args)` in a thread of `executor`, by default the event loop's.

    Raises:
        Rejected: the main thread has ended, or the executor was shut down.
    """
    try:
        return asyncio.get_running_loop().run_in_executor(executor, call, *args)
    except RuntimeError as exc:
        # Python has no other word for it. An executor that has threads shuts itself down then.
        if "interpreter shutdown" not in str(exc) and "after shutdown" not in str(exc):
            raise
        raise main_thread_ended() from exc


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """What `call(*args)` returns: from a thread, so that the event loop goes on meanwhile; once there are no more threads, as
    when a client is closed at the program's exit, from here. Raises what it raises."""
    try:
        answer = begin(None, call, *args)
    except Rejected:
        return call(*args)
    return await answer


class ReaderThreads(Executor):
    """A thread for each call. `stop` ends them all soon: it is called when the program ends, after its own threads have.

    Calls that wait for somebody to take what they read would hold up for ever a program that left them: an executor of the
    standard library is joined before anything could tell them.
    """

    def __init__(self, name: str, stop: Callable[[], None]) -> None:
        self._name = name
        self._stop = stop

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Begin `fn`; raises RuntimeError if there can be no thread for it."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        found = fn(*args, **kwargs)
                    except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
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
    """A thread that comes back from reading when the interpreter has gone could end the process badly."""
    left = dict(_stop_of)
    for stop in set(left.values()):
        stop()
    until = time.monotonic() + _END_S
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end_readers)
os.register_at_fork(after_in_child=_stop_of.clear)
