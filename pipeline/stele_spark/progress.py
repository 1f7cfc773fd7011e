"""Shows how far a `save()` is, in one line at a terminal: rows, rows per second, tasks. Started by
session.py; tasks report to it (sink.py).

Tasks run in processes of their own. Each sends the number of rows that it has written to a socket of the
user's process. The path of the socket is a setting of the session, which Spark gives to tasks. A thread of
the user's process shows the sum. A task on another machine cannot reach the socket, so its rows are not
shown.

Invariant: no write waits for this, or fails because of it. The line is gone before a save ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from stele.model.texts import printable

SETTING = "spark.stele.progress"
_TELL_EVERY_S = 0.2
_SHOW_EVERY_S = 0.25
_SHOW_AFTER_S = 0.5
"""Seconds after which a save shows its progress. A save that ends sooner shows nothing."""
_REST_S = 1.0
"""Seconds without a progress line after a task has failed, because an error message may follow."""
_MESSAGE_BYTES = 4096

Tasks = Callable[[int], int | None]
"""Returns the number of tasks of a stage, or None if the stage no longer runs."""


# -- in a task


@contextlib.contextmanager
def telling(
    path: str | None, table: str, stage: int, part: int, attempt: int
) -> Iterator[Callable[[int], None] | None]:
    """A context for one attempt at a task. It gives a function to call with the number of rows each time that
    rows were written. It gives None if there is no display.
    """
    if not path or not path.startswith("/"):
        yield None
        return
    about = {"table": table, "stage": stage, "part": part, "attempt": attempt}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.setblocking(False)
        rows, due_s = 0, 0.0

        def tell(state: str) -> None:
            with contextlib.suppress(OSError):  # the display is gone, or slow
                there.sendto(json.dumps(about | {"rows": rows, "state": state}).encode(), path)

        def add(written: int) -> None:
            nonlocal rows, due_s
            rows += written
            if (now_s := time.monotonic()) >= due_s:
                due_s = now_s + _TELL_EVERY_S
                tell("running")

        tell("running")
        try:
            yield add
        except BaseException:
            tell("failed")
            raise
        tell("done")


# -- in the user's process


@dataclass
class _Save:
    """What is known of one stage that writes. `rows`: the rows written, by part and attempt."""

    table: str
    begun_s: float
    rows: dict[int, dict[int, int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def line(self, now_s: float, tasks: int) -> str:
        """The progress line: rows, rows per second, tasks done. If a task had several attempts, the one with
        the most rows counts.
        """
        rows = sum(max(attempts.values()) for attempts in self.rows.values())
        speed = rows / max(now_s - self.begun_s, 0.001)
        return f"stele: table {printable(self.table)}: {rows:,} rows, {speed:,.0f} rows/s, {len(self.done)} of {tasks} tasks"


class Display:
    """The socket, and the thread that shows what tasks send to it. `path`: the socket's path, which tasks
    need.
    """

    def __init__(self, out: TextIO, tasks: Tasks) -> None:
        """Open the socket and start the thread.

        Raises:
            OSError: the socket cannot be created.
        """
        self._out = out
        self._tasks = tasks
        self._saves: dict[int, _Save] = {}
        self._shown = False
        self._rest_until_s = 0.0
        folder = tempfile.mkdtemp(prefix="stele-")  # only this user may enter it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.path = str(Path(folder) / "progress")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        threading.Thread(target=self._run, name="stele-progress", daemon=True).start()

    def _run(self) -> None:
        due_s = 0.0
        while True:
            wait_s = max(0.0, due_s - time.monotonic()) if self._saves else None
            ready, _, _ = select.select([self._socket], [], [], wait_s)
            if ready:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # not of our tasks
                    self._take(self._socket.recv(_MESSAGE_BYTES))
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + _SHOW_EVERY_S
                try:
                    self._show()
                except Exception:  # noqa: BLE001 - no terminal or no Spark any more
                    self._saves.clear()

    def _take(self, message: bytes) -> None:
        told = json.loads(message)
        stage, part = int(told["stage"]), int(told["part"])
        now_s = time.monotonic()
        save = self._saves.setdefault(stage, _Save(str(told["table"]), now_s))
        save.rows.setdefault(part, {})[int(told["attempt"])] = int(told["rows"])
        if told["state"] == "failed":
            self._rest_until_s = now_s + _REST_S
            self._clear()
        if told["state"] == "done":
            save.done.add(part)
            tasks = self._tasks(stage)
            if tasks is None or len(save.done) >= tasks:
                self._end(stage)

    def _show(self) -> None:
        now_s = time.monotonic()
        for stage in list(self._saves):
            if self._tasks(stage) is None:  # also one that had ended, when its last message came
                self._end(stage)
        newest = self._saves.get(max(self._saves, default=-1))
        if newest is None or now_s < max(newest.begun_s + _SHOW_AFTER_S, self._rest_until_s):
            return
        width = os.get_terminal_size(self._out.fileno()).columns or 80
        line = newest.line(now_s, self._tasks(max(self._saves)) or 0)
        self._out.write(f"\r{line[: width - 1]}\x1b[K")
        self._out.flush()
        self._shown = True

    def _end(self, stage: int) -> None:
        del self._saves[stage]
        self._clear()

    def _clear(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._shown = False


_display: Display | None = None


def path_at_terminal() -> str | None:
    """The socket's path, as the value for `SETTING`; None if standard error is no terminal. One display
    serves all sessions of a process.
    """
    global _display
    if _display is None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(OSError):
            _display = Display(sys.stderr, _tasks)
    return None if _display is None else _display.path


def _tasks(stage: int) -> int | None:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        return None
    tracker = context.statusTracker()
    found = tracker.getStageInfo(stage) if stage in tracker.getActiveStageIds() else None
    return None if found is None else int(found.numTasks)
