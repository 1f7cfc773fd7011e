"""The masters' port to the catalog tablet, and the operations of its batches.

Implemented by replica_log.py (a raft replica) and by an in-memory log of the tests. One contract suite runs
on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stele.master.records import Row, key_of
from stele.master.row_encoding import encode, stored
from stele.model.config import Configuration
from stele.model.kvop import KeyOp, KeyOperation
from stele.tablet.keyspace import KeySpace


class CatalogLog(Protocol):
    """The catalog tablet's replica on this master. All calls are on the event loop."""

    @property
    def key_space(self) -> KeySpace | None:
        """The applied state; None while there are no rows. After a copy was installed it is a new object."""

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads and may serve."""

    @property
    def term(self) -> int:
        """The current term."""

    @property
    def leader_node(self) -> str:
        """The node that leads, as far as known; "" if none is known."""

    async def fresh(self, max_age_ms: int) -> bool:
        """Whether a follower has applied all that was acknowledged until this long ago. If needed, it asks
        its leader.
        """

    @property
    def committed_config(self) -> Configuration:
        """The newest configuration known committed here."""

    async def propose(self, operations: Sequence[KeyOperation]) -> None:
        """Replicate one batch. On return it is committed and applied here.

        Raises:
            Rejected: ALREADY_PRESENT or CAS_FAILED, the batch was applied without effect. TOO_LARGE, the
                catalog has no room for the batch, and it was not proposed.
            Retryable: NOT_LEADER, NO_QUORUM, NOT_READY, THROTTLED, DISK_FULL: it was not proposed.
                UNKNOWN_OUTCOME: it may still be committed; this replica no longer leads.
        """

    async def read_barrier(self) -> None:
        """Return once everything acknowledged before the call, anywhere, is applied here (ReadIndex).

        Raises:
            Retryable: NOT_LEADER, NO_QUORUM, TIMED_OUT.
        """

    def on_role_change(self, listener: Callable[[], None]) -> None:
        """Call `listener()` at each change of role, term or leader, and once now."""


def put(record: Row) -> KeyOperation:
    """Write a record's row, whether it exists or not."""
    return KeyOperation(KeyOp.REPLACE, key_of(record), encode(record))


def insert(record: Row) -> KeyOperation:
    """Write a record's row. The batch fails with ALREADY_PRESENT if the row exists."""
    return KeyOperation(KeyOp.INSERT, key_of(record), encode(record))


def swap(old: Row, new: Row) -> KeyOperation:
    """Replace the row by `new` if it still holds `old`; else the batch fails with CAS_FAILED."""
    return KeyOperation(KeyOp.CAS, key_of(new), encode(new), expected=stored(old))


def unchanged(record: Row) -> KeyOperation:
    """Make the batch fail with CAS_FAILED unless the row still holds this."""
    return KeyOperation(KeyOp.CHECK, key_of(record), expected=stored(record))


def drop(record: Row) -> KeyOperation:
    """Delete the row if it still holds this; else the batch fails with CAS_FAILED."""
    return KeyOperation(KeyOp.DELETE, key_of(record), expected=stored(record))
