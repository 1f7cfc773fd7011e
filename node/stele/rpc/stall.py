"""Bounded waits for Flight: a silent stream is given up, and a call that is not accepted is left behind.

Used by stele.rpc.flight_client, in its callers' threads. pyarrow can only bound a whole call, but a stream
may rightly take hours. So this bounds the time between two signs of life. Otherwise a stopped process, or a
machine that left the network, would hold its connections for minutes.
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
    """A watched stream. `due`: when it is cancelled if nothing arrives, on time.monotonic."""

    __slots__ = ("cancel", "due", "gone")

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self.due = math.inf
        self.gone = False


class Watchdog:
    """A thread that cancels overdue streams. It starts with the first stream."""

    def __init__(self) -> None:
        # Reentrant: an object may be freed and call `forget` at any memory allocation, also in here.
        self._lock = RLock()
        self._watched: dict[int, Watched] = {}
        self._thread: Thread | None = None
        self._closed = Event()

    def watch(self, cancel: Callable[[], None]) -> Watched:
        """Watch a stream. `cancel` is called from another thread, at most once."""
        watched = Watched(cancel)
        with self._lock:
            self._watched[id(watched)] = watched
            if self._thread is None:
                self._thread = Thread(target=self._run, name="stele-flight-watch", daemon=True)
                self._thread.start()
        return watched

    def forget(self, watched: Watched) -> None:
        """Watch the stream no longer, because it has ended."""
        with self._lock:
            self._watched.pop(id(watched), None)

    def close(self) -> None:
        """End the thread. Nothing is cancelled any more."""
        self._closed.set()

    def cancel_all(self) -> None:
        """Cancel all watched streams now."""
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
    """Return the error for a silent stream that was given up."""
    return Retryable(f"{where} has sent nothing for {stall_s:g} s", code=Code.TIMED_OUT)


def stopped(where: str) -> Retryable:
    """Return the error for a stream that its reader does not want any more."""
    return Retryable(f"{where}: the stream was stopped", code=Code.UNAVAILABLE)


def open_stream(call: Callable[[], Any], stall_s: float, stop: Event, where: str) -> Any:
    """Run `call()`, which opens a Flight reader, for at most `stall_s` and until `stop` is set. Raises what
    it raises.

    A call that is left behind keeps a thread until TCP gives up. If it opens a stream after all, that is
    cancelled.

    Raises:
        Retryable: TIMED_OUT; or UNAVAILABLE because `stop` was set.
    """
    answer: SimpleQueue[Any] = SimpleQueue()
    left = Event()

    def work() -> None:
        try:
            reader = call()
        except Exception as exc:  # noqa: BLE001 - raised to the caller that waits
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
