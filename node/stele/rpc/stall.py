"""Waits for Flight that end: a stream whose other end goes silent is given up, a call that is not taken is left behind.

Used by stele.rpc.flight_client, in its callers' threads. pyarrow bounds a whole call only, and a stream may rightly take hours; so what is
bounded here is the time between two signs of life. A stopped process or a machine that dropped off the network keeps
its connections for minutes otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, RLock, Thread
from typing import Any

from stele.model.errors import Code, Retryable

_LOOK_S = 0.2


class Watched:
    """A stream under watch. `due`: when it is cancelled unless something has come, on time.monotonic."""

    __slots__ = ("cancel", "due", "gone")

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self.due = math.inf
        self.gone = False


class Watchdog:
    """One thread, begun with the first stream, that cancels those that are overdue."""

    def __init__(self) -> None:
        self._lock = RLock()  # the end of an object may call `forget` wherever memory is taken, in here too
        self._watched: dict[int, Watched] = {}
        self._thread: Thread | None = None
        self._closed = Event()

    def watch(self, cancel: Callable[[], None]) -> Watched:
        """Begin; `cancel` is called from another thread, at most once."""
        watched = Watched(cancel)
        with self._lock:
            self._watched[id(watched)] = watched
            if self._thread is None:
                self._thread = Thread(target=self._run, name="stele-flight-watch", daemon=True)
                self._thread.start()
        return watched

    def forget(self, watched: Watched) -> None:
        """The stream has ended."""
        with self._lock:
            self._watched.pop(id(watched), None)

    def close(self) -> None:
        """End the thread; nothing is cancelled any more."""
        self._closed.set()

    def cancel_all(self) -> None:
        """Cancel whatever is under watch, now."""
        with self._lock:
            watched, self._watched = list(self._watched.values()), {}
        for one in watched:
            one.gone = True
            one.cancel()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            now = time.monotonic()
            with self._lock:
                overdue = [w for w in list(self._watched.values()) if w.due < now]
                for watched in overdue:
                    self._watched.pop(id(watched), None)
            for watched in overdue:
                watched.gone = True
                watched.cancel()


def silent(where: str, stall_s: float) -> Retryable:
    """The error of a stream that was given up."""
    return Retryable(f"{where} has sent nothing for {stall_s:g} s", code=Code.TIMED_OUT)


def stopped(where: str) -> Retryable:
    """The error of a stream that its reader no longer wants."""
    return Retryable(f"{where}: the stream was stopped", code=Code.UNAVAILABLE)


def open_stream(call: Callable[[], Any], stall_s: float, stop: Event, where: str) -> Any:
    """What `call()` returns, a Flight reader, or raises; waits `stall_s` for it and until `stop` at most.

    A call that is left behind keeps a thread until TCP gives up, and its stream is cancelled if it comes after all.

    Raises:
        Retryable: TIMED_OUT; UNAVAILABLE, `stop` was set.
    """
    answer: SimpleQueue[Any] = SimpleQueue()
    left = Event()

    def work() -> None:
        try:
            reader = call()
        except Exception as exc:  # noqa: BLE001 - raised where it is waited for
            answer.put(exc)
            return
        answer.put(reader)
        if left.is_set():
            reader.cancel()

    Thread(target=work, name="stele-flight-open", daemon=True).start()
    due = time.monotonic() + stall_s
    while True:
        try:
            found = answer.get(timeout=min(_LOOK_S, stall_s))
        except Empty:
            if not stop.is_set() and time.monotonic() < due:
                continue
            left.set()
            if stop.is_set():
                raise stopped(where) from None
            raise silent(where, stall_s) from None
        if isinstance(found, Exception):
            try:
                raise found
            finally:
                del found  # its traceback holds this frame
        return found
