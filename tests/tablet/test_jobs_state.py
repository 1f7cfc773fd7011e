"""What a tablet remembers of jobs: how much a leader admits, what a flush copies, and what a file of it says."""

from __future__ import annotations

import numpy as np
import pytest

from stele.model import writeop
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.job import Attempt
from stele.tablet import jobs
from stele.tablet.jobs import Jobs
from tests.tablet.twin import (
    FIRST,
    JOB,
    SECOND,
    START_US,
    header,
)


def test_a_leader_bounds_jobs_and_their_writes() -> None:
    state = Jobs(jobs_max=2, writes_max=3)
    for number, job in enumerate((JOB, b"k" * 16), 1):
        attempt = Attempt(job, START_US, 0, 1)
        state.admit(attempt, START_US)
        assert state.enter(attempt, (START_US + number) << 12) is None
        state.wrote(attempt, (START_US + number) << 12)
    third = Attempt(b"l" * 16, START_US, 0, 1)
    with pytest.raises(Retryable) as caught:
        state.admit(third, START_US + 10)
    assert caught.value.code is Code.THROTTLED and caught.value.retry_after_ms == 60_000
    state.admit(FIRST, START_US + 10)
    state.admit(third, START_US + 60_000_001)
    state.enter(third, (START_US + 3) << 12)  # it pushes the oldest out, as the log says
    assert not state.knows(JOB) and state.enter(FIRST, (START_US + 4) << 12).code is Code.JOB_TOO_OLD  # type: ignore[union-attr]
    for number in (5, 6):
        state.wrote(third, (START_US + number) << 12)
    with pytest.raises(Rejected) as refused:
        state.admit(third, START_US)
    assert refused.value.code is Code.TOO_LARGE


def test_new_jobs_whose_writes_are_under_way_push_out_none_that_has_just_written() -> None:
    """Only applied ones were counted, so any number of them was admitted at once."""
    state = Jobs(jobs_max=3)
    state.enter(FIRST, START_US << 12)
    coming = [Attempt(bytes([number]) * 16, START_US, 0, 1) for number in (1, 2, 3)]
    for attempt in coming[:2]:
        state.admit(attempt, START_US)
        state.expect(attempt.job)
        state.admit(attempt, START_US)
    with pytest.raises(Retryable, match="3 jobs wrote"):
        state.admit(coming[2], START_US)
    state.stop_expecting(coming[1].job)  # its write was lost
    state.admit(coming[2], START_US)
    state.expect(coming[2].job)
    for attempt in (coming[0], coming[2]):
        assert state.enter(attempt, START_US << 12) is None
    assert state.knows(JOB)


def test_a_payload_without_a_job_is_what_it_was_and_one_with_it_comes_back() -> None:
    body = b"12345678"
    plain = writeop.encode(header(body), body)
    assert len(plain) == 56 + 8 and plain[2] == 0
    for attempt in (FIRST, Attempt(bytes(range(16)), 2**64 - 1, 2**32 - 1, 2**64 - 1)):
        payload = writeop.encode(header(body, attempt=attempt, plain=True), body)
        found, rest = writeop.decode(payload)
        assert (found.attempt, found.plain, bytes(rest)) == (attempt, True, body) and len(payload) == 96 + 8
        for cut in range(56, 96):
            with pytest.raises(Corrupt):
                writeop.decode(payload[:cut])
        with pytest.raises(Rejected) as caught:
            writeop.decode(payload[:92] + b"\1" + payload[93:])
        assert caught.value.code is Code.UNSUPPORTED_VERSION


def test_damaged_jobs_are_found() -> None:
    state = Jobs()
    state.enter(FIRST, START_US << 12)
    state.wrote(FIRST, START_US << 12)
    whole = state.encoded()
    assert Jobs.decode(whole).encoded() == whole
    for cut in range(len(whole)):
        with pytest.raises(Corrupt):
            Jobs.decode(whole[:cut])


def test_a_flush_copies_no_writes_of_jobs_on_the_loop() -> None:
    """65,536 writes of as many parts: what a flush takes of the owner's thread is a few numbers."""
    state = Jobs()
    for number in range(3_000):
        attempt = Attempt(JOB, START_US, number, 1)
        state.enter(attempt, (START_US + number) << 12)
        state.wrote(attempt, (START_US + number) << 12)
    frozen = state.frozen()
    before = jobs.encode(frozen)
    state.wrote(SECOND, (START_US + 5_000) << 12)
    assert jobs.encode(frozen) == before != state.encoded()
    found = Jobs.decode(before)
    assert np.array_equal(found.others(SECOND), [START_US << 12])


def test_a_job_holds_history_after_a_start_too() -> None:
    state = Jobs()
    first = Attempt(b"j" * 16, START_US, 3, 1)
    for at in (9 << 12, 12 << 12):
        assert state.enter(first, at) is None
        state.wrote(first, at)
    assert state.held == (9 << 12) - 1 == Jobs.decode(state.encoded()).held


def test_what_an_attempt_wrote_itself_is_not_of_others() -> None:
    state = Jobs()
    mine, other = (Attempt(b"j" * 16, START_US, 3, number) for number in (1, 2))
    for attempt, at in ((mine, 5), (other, 6), (mine, 7)):
        assert state.enter(attempt, at) is None
        state.wrote(attempt, at)
    assert [list(found) for a in (mine, other) if (found := state.others(a)) is not None] == [[6], [5, 7]]
