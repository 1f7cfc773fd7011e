"""Writes without an outcome yet: waiting for a timestamp, given to the core, or in the log. Owned by Writes;
no I/O.

Once proposed, a write belongs to the replica. Its outcome comes from applying it, even if its caller has
gone.

Invariant: every write's future ends exactly once. It ends with the outcome, or with a retryable error if the
write never entered a log. It ends with UNKNOWN_OUTCOME if this log dropped it, or the replica stopped
meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from stele import metrics
from stele.consensus.early import EarlyAnswers
from stele.consensus.pending import Pending
from stele.model.entry import ENTRY_COST_BYTES, Entry
from stele.model.errors import Code, Retryable
from stele.model.ids import OpId
from stele.tablet.machine import Outcome

_COMMITTED = metrics.commit_seconds.cell()


class Proposals:
    """All writes of one replica that have no outcome yet."""

    def __init__(self) -> None:
        self.waiting: deque[Pending] = deque()
        self.waiting_bytes = 0
        self._posted: dict[int, Pending] = {}
        self.in_log: dict[int, Pending] = {}
        """Writes in the log and not applied yet, by index."""
        self.early = EarlyAnswers(self.in_log)

    def __len__(self) -> int:
        return len(self.waiting) + len(self._posted) + len(self.in_log)

    def add(self, pending: Pending) -> None:
        """Add a write that waits for its timestamp."""
        self.waiting.append(pending)
        self.waiting_bytes += len(pending.payload) + ENTRY_COST_BYTES

    def next_waiting(self) -> Pending:
        """Remove and return the oldest waiting write."""
        pending = self.waiting.popleft()
        self.waiting_bytes -= len(pending.payload) + ENTRY_COST_BYTES
        return pending

    def posted(self, context: int, pending: Pending) -> None:
        """Note that the write was given to the core under `context`."""
        self._posted[context] = pending

    def proposed(self, context: int, opid: OpId) -> bool:
        """Note that the core put a write into the log at `opid`. Returns False if `context` is not of a
        write.
        """
        pending = self._posted.pop(context, None)
        if pending is None:
            return False
        pending.opid = opid
        self.in_log[opid.index] = pending
        self.early.proposed(pending, opid)
        return True

    def refused(self, context: int, error: Exception) -> bool:
        """Fail a write that the core refused: it never entered a log. Returns False if `context` is not of a
        write.
        """
        pending = self._posted.pop(context, None)
        if pending is None:
            return False
        pending.fails(error)
        return True

    def lost(self, opid: OpId) -> None:
        """Fail the write at `opid` with UNKNOWN_OUTCOME: this log dropped it. Another replica may still hold
        it, and commit it as leader.
        """
        pending = self.in_log.get(opid.index)
        if pending is not None and pending.opid == opid:
            del self.in_log[opid.index]
            self.early.ended(opid.index, pending)
            pending.fails(_unknown(opid))

    def committed(self, entries: tuple[Entry, ...]) -> None:
        """Count how long the committed entries took that were proposed here. What was lost is not there any more."""
        now_s = time.perf_counter()
        for entry in entries:
            pending = self.in_log.get(entry.index)
            if pending is not None:
                _COMMITTED.add(now_s - pending.came_s)

    def applied(self, entry: Entry, outcome: Outcome) -> None:
        """End the write that was proposed at the entry's index: the entry was applied."""
        pending = self.in_log.pop(entry.index, None)
        if pending is None:
            return
        self.early.ended(entry.index, pending)
        if pending.opid is not None and pending.opid.term == entry.term:
            pending.ends(outcome)
        else:
            pending.fails(_unknown(pending.opid))

    def fail_waiting(self, error: Exception) -> None:
        """Fail the writes that were never given to the core."""
        while self.waiting:
            self.next_waiting().fails(error)

    def fail_all(self, never: Exception) -> None:
        """Fail all writes, because the replica stops. Those never given to the core get `never`, the others
        UNKNOWN_OUTCOME.
        """
        self.fail_waiting(never)
        for pending in (*self._posted.values(), *self.in_log.values()):
            pending.fails(_unknown(pending.opid))
        self._posted.clear()
        self.in_log.clear()

    def outstanding(self, timestamp: int) -> list[asyncio.Future[Outcome]]:
        """The futures of writes that have a timestamp at or below `timestamp` and no outcome yet."""
        given = (*self._posted.values(), *self.in_log.values())
        return [p.future for p in given if p.timestamp <= timestamp and not p.future.done()]


def _unknown(opid: OpId | None) -> Retryable:
    where = f"at {opid} " if opid is not None else ""
    return Retryable(
        f"the write {where}was proposed, but this replica does not know whether it will be committed; "
        "send it again with the same client id and sequence",
        code=Code.UNKNOWN_OUTCOME,
    )
