"""Records whether replicas that heals and moves made hold the same rows as another voter. Shared by catalog, driver
and command line. Pure.

Invariant: the record of a replica that differs, or that still waits to be compared, stays. It goes only when the
replica is found equal or leaves the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stele.model.config import Configuration


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """One replica that a heal or a move made, and its last comparison with another voter.

    Attributes:
        replica_id: The replica.
        cause: The heal or move that made it, as one word; "" if unknown.
        other_id: The voter that it was compared with; 0: it was not compared yet.
        at_us: When the comparison was recorded, in µs since 1970, by the wall clock of a master.
        snapshot: The hybrid time at which both replicas computed the checksums of their rows.
        index: For a key space, the log index at which both computed the checksums of their keys; else 0.
        rows: The number of its rows, or of its keys.
        checksum: The checksum of its rows or keys, 64 bits.
        other_rows: The number of the other voter's rows or keys.
        other_checksum: The checksum of the other voter's rows or keys, 64 bits.
    """

    replica_id: int
    cause: str = ""
    other_id: int = 0
    at_us: int = 0
    snapshot: int = 0
    index: int = 0
    rows: int = 0
    checksum: int = 0
    other_rows: int = 0
    other_checksum: int = 0

    @property
    def waits(self) -> bool:
        """Whether the replica was not compared yet."""
        return not self.other_id

    @property
    def equal(self) -> bool:
        """Whether the replica was compared, and held the same rows as the other voter."""
        return bool(self.other_id) and self._sum == self._other_sum

    @property
    def differs(self) -> bool:
        """Whether the replica was compared, and held different rows from the other voter."""
        return bool(self.other_id) and self._sum != self._other_sum

    @property
    def result(self) -> str:
        """`Waits`, `Equal` or `Differs`: for programs."""
        return "Waits" if self.waits else "Equal" if self.equal else "Differs"

    @property
    def _sum(self) -> tuple[int, int]:
        return self.rows, self.checksum

    @property
    def _other_sum(self) -> tuple[int, int]:
        return self.other_rows, self.other_checksum


def of_members(copies: Sequence[CopyRecord], config: Configuration) -> tuple[CopyRecord, ...]:
    """The records of replicas in this configuration."""
    return tuple(c for c in copies if config.peer(c.replica_id) is not None)


def with_record(
    copies: Sequence[CopyRecord], record: CopyRecord, config: Configuration
) -> tuple[CopyRecord, ...]:
    """Return the records with `record` added. It replaces an earlier record of the same replica.

    Only the newest record of equal rows stays, so that a tablet whose replicas often move has few records. Records
    of replicas that left the configuration are dropped.
    """
    kept = (c for c in of_members(copies, config) if c.replica_id != record.replica_id)
    return (*(c for c in kept if not (c.equal and record.equal)), record)


def with_made(
    copies: Sequence[CopyRecord], replica_id: int, cause: str, config: Configuration
) -> tuple[CopyRecord, ...]:
    """Return the records with one for this new member, which waits to be compared. An existing record of it stays
    unchanged."""
    if any(c.replica_id == replica_id for c in copies):
        return tuple(copies)
    return with_record(copies, CopyRecord(replica_id, cause), config)
