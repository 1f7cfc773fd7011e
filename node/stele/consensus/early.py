"""Writes in memory: their callers want an answer once every voter has logged them, before they are synced.
Owned by Proposals; no I/O.

Such a write gets an outcome before it is committed, if the outcome is certain. It must be a block from a
known client, and its effect must be independent of the stored rows. No earlier entry that waits to be applied
may change that effect. Any other write is answered once it is applied.

Invariant: an early outcome equals the outcome of applying the entry, unless the entry is never committed.
"""

from __future__ import annotations

from collections.abc import Mapping

from stele.consensus.pending import Pending
from stele.model import writeop
from stele.model.ids import OpId
from stele.tablet.machine import StateMachine


class EarlyAnswers:
    """The writes of one leader that may be answered early. `in_log`: all its writes in the log and not applied yet, by index."""

    def __init__(self, in_log: Mapping[int, Pending]) -> None:
        self._in_log = in_log
        self._waiting: dict[int, Pending] = {}  # by index, rising
        # By client and sequence: the index of the first entry in the log. Empty until a write in memory comes.
        self._numbers: dict[bytes, int] = {}
        self._used = False
        self._after = 0  # what lies up to here must be applied before any outcome is certain

    def lead(self, last_index: int) -> None:
        """Begin to lead. Answer nothing early until the entries of earlier leaders, up to `last_index`, are
        applied.
        """
        self._after = last_index
        self._waiting.clear()
        self._numbers.clear()
        self._used = False

    def proposed(self, pending: Pending, opid: OpId) -> None:
        """Note a write that is in the log at `opid`."""
        if not pending.rows_only:
            self._after = opid.index
        elif pending.early is not None:
            if not self._used:
                self._used = True
                for index, earlier in self._in_log.items():
                    self._is_first(earlier, index)
            if self._is_first(pending, opid.index):
                self._waiting[opid.index] = pending
        elif self._used:
            self._is_first(pending, opid.index)

    def _is_first(self, pending: Pending, index: int) -> bool:
        """Whether no earlier write here has the same client and sequence, synced ones included.

        A repetition waits until it is applied: it gets the outcome of the first one, which has another
        timestamp.
        """
        return self._numbers.setdefault(writeop.number_of(pending.payload), index) == index

    def held(self, index: int, applied_index: int, machine: StateMachine) -> None:
        """Answer the writes up to `index` whose outcome is certain. Every voter holds the log up to `index`."""
        if applied_index < self._after:
            return
        while self._waiting and (first := next(iter(self._waiting))) <= index:
            pending = self._waiting.pop(first)
            outcome = machine.foreseen(pending.payload, pending.timestamp)
            if outcome is not None and pending.early is not None and not pending.early.done():
                pending.early.set_result(outcome)

    def ended(self, index: int, pending: Pending) -> None:
        """Forget the write at `index`, which was applied, or was dropped from this log."""
        if self._numbers:
            self._waiting.pop(index, None)
            number = writeop.number_of(pending.payload)
            if self._numbers.get(number) == index:
                del self._numbers[number]
