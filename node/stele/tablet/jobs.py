"""Jobs that write to a tablet: which of its versions each attempt at a part has written. Part of a store's state.

It is flushed, copied and part of the checksum, beside the exactly-once state. Opens no files and reads no clock: time is
that of the entries.

Why: a task that failed or seems slow is run again, as another client. Its rows must count once, even if others have
written to their keys since. So a write may name an attempt. A row of it counts as done if another attempt at the same part has
written a version of its key (`others`, `stele.tablet.locate`). What the attempt itself wrote is not looked up.

A job is remembered until it was idle for `idle_us` at a write or ceiling, or until newer jobs need its place. Meanwhile
the store keeps all versions since its first write (`held`): a version that somebody else has replaced still says that
the row is done. Afterwards the expiry mark rises to the time that the job was made. An unknown job made at or below the
mark is refused: what it has written is not known.

Invariant: the state depends on the applied entries alone.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.job import Attempt
from stele.model.jsons import parse_json
from stele.tablet.expected import Expected
from stele.tablet.machine import Outcome

IDLE_US = 15 * 60 * 1_000_000
"""How long an idle job is remembered at least. A table with a longer history remembers it as long as that."""
JOBS_MAX = 1_000
WRITES_MAX = 65_536
"""The most writes of all remembered jobs that a leader admits: 1.5 MiB, or 500 million rows in full blocks."""
_FRESH_US = 60_000_000
"""A job that wrote within this time keeps its place."""
NEVER = 1 << 64

Times = npt.NDArray[np.uint64]
"""Hybrid times, rising."""


class _Job:
    """A job, and each write of it that put rows: its time, the part and the attempt, in three columns. They only grow,
    so a flush copies nothing while the owner waits."""

    __slots__ = ("attempts", "last_us", "made_us", "numbers", "parts", "start", "times")

    def __init__(self, made_us: int, start: int, last_us: int) -> None:
        self.made_us = made_us
        self.start = start
        self.last_us = last_us
        self.times, self.parts, self.numbers = array("Q"), array("Q"), array("Q")
        self.attempts: dict[int, tuple[int, ...]] = {}  # the numbers, by part

    def add(self, time: int, part: int, number: int) -> None:
        self.times.append(time)
        self.parts.append(part)
        self.numbers.append(number)
        there = self.attempts.get(part, ())
        if number not in there:
            self.attempts[part] = (*there, number)


class Jobs:
    """The jobs of one tablet, least recently active first."""

    def __init__(self, *, jobs_max: int = JOBS_MAX, writes_max: int = WRITES_MAX) -> None:
        self._jobs_max = jobs_max
        self._writes_max = writes_max
        self._jobs: dict[bytes, _Job] = {}
        self._mark_us = 0
        self._writes = 0
        self._expected = Expected()
        # The first times of jobs that were forgotten since the last flush began, and while it runs.
        self._late = self._leaving = NEVER
        self.held = NEVER
        """All versions after this hybrid time must be kept. NEVER: no job needs any."""

    # --- before a proposal, on the leader

    def admit(self, attempt: Attempt, wall_us: int) -> None:
        """Check a write before the leader proposes it.

        Raises:
            Retryable: THROTTLED: too many jobs write to this tablet now.
            Rejected: TOO_LARGE: jobs have made too many writes.
        """
        if self._writes >= self._writes_max:
            raise Rejected(
                f"this tablet remembers {self._writes} writes of jobs, and cannot remember more; write larger blocks, "
                "use a table with more tablets, or write without a job",
                code=Code.TOO_LARGE,
            )
        if attempt.job in self._jobs or attempt.job in self._expected:
            return
        wait_us = self._expected.wait_us(self._jobs, self._jobs_max, _FRESH_US, wall_us)
        if wait_us > 0:
            raise Retryable(
                f"{self._jobs_max} jobs wrote to this tablet within a minute; try again later",
                code=Code.THROTTLED,
                retry_after_ms=-(-wait_us // 1_000),
            )

    def expect(self, job: bytes) -> None:
        """As leader, note that a write of this job is proposed. The job may be new."""
        if job not in self._jobs:
            self._expected.add(job)

    def stop_expecting(self, job: bytes) -> None:
        """Note that this write was applied, or was lost."""
        self._expected.discard(job)

    def knows(self, job: bytes) -> bool:
        """Whether this job is remembered."""
        return job in self._jobs

    # --- applying

    def has_others(self, attempt: Attempt | None) -> bool:
        """Whether other attempts at the same part have written here."""
        job = None if attempt is None else self._jobs.get(attempt.job)
        if attempt is None or job is None:
            return False
        there = job.attempts.get(attempt.part, ())
        return len(there) > (attempt.number in there)

    def others(self, attempt: Attempt | None) -> Times | None:
        """When other attempts at the same part have written here; None if they have not."""
        if attempt is None or not self.has_others(attempt):
            return None
        job = self._jobs[attempt.job]
        # Slices are copies: a view would forbid the owner to append.
        times, parts, numbers = (
            np.array(column[:], np.uint64) for column in (job.times, job.parts, job.numbers)
        )
        found: Times = times[(parts == attempt.part) & (numbers != np.uint64(attempt.number))]
        return found

    def enter(self, attempt: Attempt, timestamp: int) -> Outcome | None:
        """Note that this attempt is about to write. Returns the outcome if the write is refused, else None.

        Call once for each write that is not a repeated one, in order, after `expire`."""
        job = self._jobs.pop(attempt.job, None)
        if job is None:
            self._expected.discard(attempt.job)
            if attempt.made_us <= self._mark_us:
                return Outcome(
                    timestamp,
                    code=Code.JOB_TOO_OLD,
                    message=(
                        f"the job was made at {utc(attempt.made_us)}; this tablet no longer knows which rows such a job "
                        f"wrote, because it has forgotten all made up to {utc(self._mark_us)}; run the job again "
                        "as a new one; if that is refused too, set the clock of the machine that makes it"
                    ),
                )
            job = _Job(attempt.made_us, timestamp, 0)
            self.held = min(self.held, timestamp - 1)
        job.last_us = max(job.last_us, physical_us(timestamp))
        self._jobs[attempt.job] = job
        if len(self._jobs) > self._jobs_max:
            self._forget_oldest()
        return None

    def wrote(self, attempt: Attempt, timestamp: int) -> None:
        """Note that this attempt wrote rows at this time. `enter` came before."""
        self._jobs[attempt.job].add(timestamp, attempt.part, attempt.number)
        self._writes += 1

    def expire(self, timestamp: int, idle_us: int) -> None:
        """Forget jobs that were idle for longer than `idle_us` at an entry's timestamp. Call for every WRITE and CEILING."""
        now_us = physical_us(timestamp)
        while self._jobs and next(iter(self._jobs.values())).last_us + idle_us < now_us:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        job = self._jobs.pop(next(iter(self._jobs)))
        self._mark_us = max(self._mark_us, job.made_us)
        self._writes -= len(job.times)
        self._late = min(self._late, job.start)
        self._hold()

    def _hold(self) -> None:
        first = min((job.start for job in self._jobs.values()), default=NEVER)
        first = min(first, self._late, self._leaving)
        self.held = NEVER if first == NEVER else first - 1

    @property
    def last_us(self) -> int | None:
        """When the most recently active job wrote last, in µs since 1970; None if there are no jobs."""
        return next(reversed(self._jobs.values())).last_us if self._jobs else None

    # --- flushing

    def frozen(self) -> Any:
        """A copy that later entries do not change, for `encode` in another thread. Call when a flush begins.

        After a crash, entries that follow the flush are applied again. So the versions that they looked up stay until
        `flushed` is called."""
        self._leaving, self._late = min(self._leaving, self._late), NEVER
        return self._copy()

    def flushed(self) -> None:
        """Note that the flush that began last is durable."""
        self._leaving = NEVER
        self._hold()

    def encoded(self) -> bytes:
        """The bytes of the present state."""
        return encode(self._copy())

    def _copy(self) -> Any:
        jobs = [(name, j, j.made_us, j.start, j.last_us, len(j.times)) for name, j in self._jobs.items()]
        return self._mark_us, jobs

    @staticmethod
    def decode(data: bytes) -> Jobs:
        """The state that `encode` wrote.

        Raises:
            Corrupt: the bytes are not such a state.
        """
        state = Jobs()
        try:
            mark_us, jobs = parse_json(data)
            state._mark_us = int(mark_us)
            for name, made_us, start, last_us, *columns in jobs:
                job = state._jobs[bytes.fromhex(name)] = _Job(int(made_us), int(start), int(last_us))
                times, parts, numbers = (
                    np.frombuffer(bytes.fromhex(told), "<u8").tolist() for told in columns
                )
                for time, part, number in zip(times, parts, numbers, strict=True):
                    job.add(time, part, number)
                state._writes += len(times)
        except (ValueError, TypeError, KeyError, OverflowError) as exc:
            raise Corrupt(f"jobs: {exc!r}; the file is damaged; copy the replica from a peer") from exc
        state._hold()
        return state


def encode(frozen: Any) -> bytes:
    """The bytes of `Jobs.frozen()`: JSON without spaces or line ends; b"" if nothing is remembered. Equal states have
    equal bytes. The columns of a job are in hex, eight bytes a number, little-endian: a list would hold the event loop."""
    mark_us, jobs = frozen
    if not jobs and not mark_us:
        return b""
    rows = [
        [
            name.hex(),
            made_us,
            start,
            last_us,
            *(_hex(c[:writes]) for c in (job.times, job.parts, job.numbers)),
        ]
        for name, job, made_us, start, last_us, writes in jobs
    ]
    return json.dumps([mark_us, rows], separators=(",", ":")).encode()


def _hex(column: array[int]) -> str:
    return np.frombuffer(column, np.uint64).astype("<u8", copy=False).tobytes().hex()
