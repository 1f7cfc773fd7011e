"""The holds on a store's history: which there are, and what they cost. One for each TabletStore, which asks it for its mark.

Orders come as entries of the log (`stele.model.holds`). Only the owner's thread changes anything; any thread may read.

Invariant: equal on replicas with the same applied OpId. A hold ends by the time of an entry, never by a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.model import writeop
from stele.model.clock import physical_us
from stele.model.entry import Entry
from stele.model.errors import Rejected
from stele.model.holds import Held, HoldOrder, told_broken
from stele.model.writeop import WriteHeader
from stele.tablet.colfile import ColumnFile
from stele.tablet.machine import Outcome
from stele.tablet.reclaim import dead_shares

Costs = dict[tuple[str, int], int]
"""Maps (name, time) of a hold to about how many bytes of files only this hold keeps. A hold that moved to a later time
gets a new cost."""


class Holding:
    """`held`: the holds of this moment. `since`: the hybrid time from which on they keep history; None: they keep none."""

    __slots__ = ("expires_us", "held", "since")

    def __init__(self, held: Held) -> None:
        self._set(held)

    def _set(self, held: Held) -> None:
        # Set once here, because the mark is asked for at each read, and time passes with each entry.
        self.held, self.since, self.expires_us = held, held.since, held.expires_us

    def pass_time(self, time: int) -> None:
        """End the holds that have expired at an entry's hybrid time."""
        if self.expires_us is not None and physical_us(time) > self.expires_us:
            self._set(self.held.at(time))

    def change(self, entry: Entry, header: WriteHeader, body: memoryview) -> Outcome:
        """Carry out an order, after `pass_time`. Raises what `TabletStore.apply` raises."""
        try:
            order = HoldOrder.decoded(body)
        except Rejected as exc:
            raise writeop.not_understood(header, body, exc) from exc
        try:
            self._set(self.held.after(order, entry.timestamp))
        except Rejected as exc:
            return Outcome(entry.timestamp, code=exc.code, message=str(exc.args[0]))
        return Outcome(entry.timestamp)

    def mark(self, free: int) -> int:
        """Return the history mark. `free`: the mark that there would be without holds."""
        since = self.since
        return free if since is None else min(free, since)

    def broken_since(self, time: int) -> str:
        """Return the end of an error message, which names a broken hold that would have kept history from this time on.
        Return "" if there is none."""
        broken = [hold for hold in self.held.holds if hold.broken and hold.since <= time]
        return f"; {told_broken(broken[0])}" if broken else ""

    def costs(self, files: Sequence[ColumnFile], free: int) -> Costs:
        """Return how many bytes each hold keeps in these files. Without the hold, a merge of all would drop them.

        It is estimated from the keys of some parts of the files. `free`: as for `mark`. Blocks.

        Raises:
            Corrupt: a file is damaged.
        """
        holds = [hold for hold in self.held.holds if not hold.broken]
        found = dict.fromkeys(((hold.name, hold.since) for hold in holds), 0)
        costly = [hold for hold in holds if hold.since < free]
        if costly and files:
            most, *shares = dead_shares(files, [free, *(hold.since for hold in costly)])
            total = sum(file.size for file in files)
            for hold, share in zip(costly, shares, strict=True):
                found[hold.name, hold.since] = round(total * max(0.0, most - share))
        return found
