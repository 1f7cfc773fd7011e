"""The cursor: a named hold that keeps history for a stream. Used by following.py, in the driver.

Each tablet has a hold of the cursor's name. The hold moves on as Spark commits batches, is renewed while the
stream runs, and outlasts it. So the next run can go on where this one ended.

Invariant: once `keep` has returned, all history from the given time on stays readable until the hold expires
or is broken.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from stele.client import Table, TableHold
from stele.model.clock import LOGICAL_BITS
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele_spark.options import Following

T = TypeVar("T")
_PATIENCE_S = 60.0
_AGAIN_S = 0.2
_RENEW_MOST_S = 300.0
CLOCKS_APART = 10_000_000 << LOGICAL_BITS
"""10 s, in hybrid time. Clocks differ by less. So a range that was added after a time T has no row from
before T - CLOCKS_APART.
"""
_RENEWALS = 4
"""How many times a hold is renewed within its time to expiry."""


class Cursor:
    """The holds of one stream on one table, and the thread that renews them. If the stream names no cursor,
    it does nothing.
    """

    def __init__(self, table: Table, options: Following) -> None:
        self._table = table
        self._options = options
        self._lock = threading.Lock()
        self._held: TableHold | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, since: int) -> None:
        """Hold the history from `since` on, on all tablets that the table has now.

        Raises:
            Rejected: CURSOR_LOST, some of the history is gone. Also other codes of `Table.hold`.
            Retryable: not all tablets answered within a minute.
        """
        if not self._options.cursor:
            return
        with self._lock:
            if self._held is None or self._missing(self._held):
                self._held = patiently(lambda: self._taken(since))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._renewing, name="stele-cursor", daemon=True)
                    self._thread.start()

    def move(self, since: int) -> None:
        """Release the history before `since`, because the batch up to there is done. Holds of tablets that
        cannot be reached move with the next batch. Raises what `keep` raises.
        """
        if not self._options.cursor:
            return
        with self._lock, contextlib.suppress(Retryable):
            if self._held is not None and self._renewed(since):
                return
        self.keep(since)

    def close(self) -> None:
        """End the thread. The holds stay, for the next run."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _missing(self, held: TableHold) -> set[str]:
        """Ids of tablets without the hold. They belong to ranges that were added."""
        tablets = {tablet.tablet_id for tablet in self._table.asynchronous.locations.tablets}
        return tablets - set(held.tablets)

    def _taken(self, since: int) -> TableHold:
        """The hold of an earlier run if it still keeps enough; else a new one."""
        options, table = self._options, self._table
        found = next((hold for hold in table.holds() if hold.name == options.cursor), None)
        if (
            found is None
            or found.broken
            or found.since > since
            or found.max_bytes != options.cursor_bytes_max
        ):
            return self._new(since)
        if missing := self._missing(found):
            self._new(since - CLOCKS_APART, missing)
            found = replace(found, tablets=(*found.tablets, *missing))
        return table.renew_hold(found, expires_in_s=options.cursor_expires_s)

    def _new(self, since: int, tablets: set[str] | None = None) -> TableHold:
        options = self._options
        return self._table.hold(
            options.cursor,
            since,
            expires_in_s=options.cursor_expires_s,
            max_bytes=options.cursor_bytes_max,
            tablets=tablets,
        )

    def _renewed(self, since: int | None = None) -> bool:
        """Renew the hold. Returns False if it is gone. Then the next `keep` takes it again, if the history is
        still there.

        Raises:
            Retryable: a tablet could not be reached. Also other errors of `Table.renew_hold`.
        """
        assert self._held is not None
        try:
            self._held = self._table.renew_hold(
                self._held, expires_in_s=self._options.cursor_expires_s, since=since
            )
        except Rejected as exc:
            if exc.code is not Code.CURSOR_LOST:
                raise
            self._held = None
        return self._held is not None

    def _renewing(self) -> None:
        pause_s = min(_RENEW_MOST_S, self._options.cursor_expires_s / _RENEWALS)
        while not self._stop.wait(pause_s):
            with self._lock, contextlib.suppress(SteleError):  # whoever keeps or moves it next is told
                if self._held is not None:
                    self._renewed()


def patiently(call: Callable[[], T]) -> T:
    """The result of a call. The call is repeated for a minute while masters or tablets cannot be reached."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call()
        except Retryable:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)
