"""Prepares the next segment in a thread of its own, and watches the free space. Started and owned by log.py.

Invariant: an error here does not fail the log. Until the next segment is ready, appends go on in the full one.
"""

from __future__ import annotations

import threading

import structlog

from stele.wal.base import SharedLog

_log = structlog.get_logger("stele.wal")


class Keeper:
    """Prepares segments and watches the free space, in a thread of its own."""

    def __init__(self, log: SharedLog) -> None:
        self._log = log
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="stele-wal-keeper", daemon=True)
        self._failing = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Ask for another segment, because one was taken."""
        self._wake.set()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stop = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop:
            try:
                self._log.refresh_space()
                sequence = self._log.wanted_sequence()
                if sequence is not None:
                    self._log.offer_next(self._log.pool.make(sequence))
                    self._log.stats.segments_prepared += 1
                self._failing = False
            except OSError as exc:
                if not self._failing:
                    _log.warning(
                        "cannot prepare the next segment; appends continue in the full one", error=str(exc)
                    )
                self._failing = True
            self._wake.wait(self._log.options.keeper_interval_ms / 1000)
            self._wake.clear()
