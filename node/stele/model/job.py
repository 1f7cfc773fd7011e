"""An attempt at a part of a job, as it travels from the client through the log into the store. Pure.

A job is a set of rows that a program writes once, although it may retry parts of it (`stele.client.jobs`). Tablets
remember which of their writes each attempt made (`stele.tablet.jobs`).

Invariant: all attempts at one part have the same `job` and `part`, and each has a `number` of its own.
"""

from __future__ import annotations

from stele.model.record import record

PART_MAX = (1 << 32) - 1


@record
class Attempt:
    """`job`: 16 bytes. `made_us`: when the job was made, µs since 1970. `number`: 64 bits that tell this attempt from
    the part's others."""

    job: bytes
    made_us: int
    part: int
    number: int
