"""What is known of the replicas that heals and moves made: whether they hold the same rows as another voter. One value for
catalog, driver and command line. Pure.

Invariant: the record of a difference, or of a comparison that waits, stays until the replica is found equal or is no member
any more.
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
        cause: The heal that made it, in one word; "" if unknown.
        other_id: The voter that it was compared with; 0: it was not compared yet.
        at_us: When that was recorded, by the wall clock of a master.
        snapshot: The hybrid time at which both summed up their rows.
        index: Of a key space: the log index at which both summed up their keys; else 0.
        rows: Its rows, or keys.
        checksum: The checksum of its rows or keys, 64 bits.
        other_rows: The rows of the other voter.
        other_checksum: Their checksum, 64 bits.
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
        """Whether it was not compared yet."""
        return not self.other_id

    @property
    def equal(self) -> bool:
        """Whether it was compared, and held the same rows."""
        return bool(self.other_id) and self._sum == self._other_sum

    @property
    def differs(self) -> bool:
        """Whether it was compared, and held other rows."""
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
    """The records once `record` is added. It takes the place of an earlier one of the same replica.

    Of comparisons that found equal rows only the newest stays, so that a tablet has few records, however often its replicas
    move. Records of replicas that left the configuration are dropped.
    """
    kept = (c for c in of_members(copies, config) if c.replica_id != record.replica_id)
    return (*(c for c in kept if not (c.equal and record.equal)), record)


def with_made(
    copies: Sequence[CopyRecord], replica_id: int, cause: str, config: Configuration
) -> tuple[CopyRecord, ...]:
    """The records once this replica is a member: it waits to be compared. One that is on record already stays as it is."""
    if any(c.replica_id == replica_id for c in copies):
        return tuple(copies)
    return with_record(copies, CopyRecord(replica_id, cause), config)
