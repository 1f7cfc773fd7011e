"""Jobs: rows that a program writes once, although it may try parts of them again. Pure but for the clock.

Invariant: every attempt has a number of its own, so tablets tell its rows from those of the part's other attempts.
"""

from __future__ import annotations

import secrets
import time
import uuid
from dataclasses import dataclass

from stele.client import arguments
from stele.model.job import PART_MAX, Attempt


@dataclass(frozen=True, slots=True)
class JobPart:
    """A part of a job. Made by `Job.part`.

    Example:
        >>> part = stele.Job.new().part(7)
        >>> part.number
        7
        >>> table.write_arrow(table.scan().to_table(), part=part).rows_written
        2
    """

    job: bytes
    made_us: int
    number: int

    def attempt(self) -> Attempt:
        """A new attempt at this part."""
        return Attempt(self.job, self.made_us, self.number, secrets.randbits(64))


@dataclass(frozen=True, slots=True)
class Job:
    """Rows that a program writes once, although it may try parts of them again. Make one with `Job.new`, and send it to
    all processes that write.

    Example:
        >>> job, rows = stele.Job.new(), table.scan().to_table()
        >>> for attempt in (1, 2):  # the second one changes nothing, whatever others have written meanwhile
        ...     table.write_arrow(rows, part=job.part(0)).rows_written
        2
        2
    """

    id: bytes
    made_us: int

    @staticmethod
    def new() -> Job:
        """A new job, made now."""
        return Job(uuid.uuid4().bytes, time.time_ns() // 1_000)

    def part(self, number: int) -> JobPart:
        """The part with this number. Every attempt at it writes the same rows, in any order.

        Raises:
            Rejected: not a whole number from 0 to 2^32 - 1.
        """
        return JobPart(self.id, self.made_us, arguments.whole_number(number, "part", least=0, most=PART_MAX))
