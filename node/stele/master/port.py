"""The masters' port to the catalog tablet, and the batch that goes through it. Implemented by replica_log.py (a raft
replica) and by the tests' in-memory one; one contract suite runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stele.master.records import encode, key_of, stored
from stele.model.config import Configuration
from stele.model.kvop import KeyOp, KeyOperation
from stele.tablet.keyspace import KeySpace


class CatalogLog(Protocol):
    """The catalog tablet's replica on this master. All calls are on the event loop."""

    @property
    def key_space(self) -> KeySpace | None:
        """The applied state; another object after a copy was installed; None while there are no rows."""

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads and may serve."""

    @property
    def term(self) -> int:
        """The current term."""

    @property
    def leader_node(self) -> str:
        """The node that leads, as far as known; empty if none."""

    @property
    def staleness_ms(self) -> int | None:
        """How old what is applied here is at the most, by when the leader's last word came; None: not known."""

    @property
    def committed_config(self) -> Configuration:
        """The newest configuration known committed here."""

    async def propose(self, operations: Sequence[KeyOperation]) -> None:
        """Replicate one batch; on return it is committed and applied here.

        Raises:
            Rejected: ALREADY_PRESENT or CAS_FAILED; it was applied as nothing. TOO_LARGE: the catalog has no room for it, and
                it was never proposed.
            Retryable: NOT_LEADER, NO_QUORUM, NOT_READY, THROTTLED, DISK_FULL: it was never proposed.
                UNKNOWN_OUTCOME: it may or may not come to be; this replica leads no more.
        """

    async def read_barrier(self) -> None:
        """On return everything acknowledged before the call, anywhere, is applied here (ReadIndex).

        Raises:
            Retryable: NOT_LEADER, NO_QUORUM, TIMED_OUT.
        """

    def on_role_change(self, listener: Callable[[], None]) -> None:
        """Call `listener()` at each change of role, term or leader, and once now."""


def put(record: Any) -> KeyOperation:
    """Write a record's row, whatever was there."""
    return KeyOperation(KeyOp.REPLACE, key_of(record), encode(record))


def insert(record: Any) -> KeyOperation:
    """Write a record's row; the batch fails with ALREADY_PRESENT if there is one."""
    return KeyOperation(KeyOp.INSERT, key_of(record), encode(record))


def swap(old: Any, new: Any) -> KeyOperation:
    """Write `new`'s row if it still holds `old`; else the batch fails with CAS_FAILED."""
    return KeyOperation(KeyOp.CAS, key_of(new), encode(new), expected=stored(old))


def unchanged(record: Any) -> KeyOperation:
    """The batch fails with CAS_FAILED unless the row still holds this."""
    return KeyOperation(KeyOp.CHECK, key_of(record), expected=stored(record))


def drop(record: Any) -> KeyOperation:
    """Delete the row if it still holds this; else the batch fails with CAS_FAILED."""
    return KeyOperation(KeyOp.DELETE, key_of(record), expected=stored(record))
