"""What a leader asks of the exactly-once state before it proposes: one client is told alone, the others go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.model.errors import Code, Retryable
from stele.model.writeop import WriteHeader
from stele.tablet.exactly_once import UNFINISHED_MAX, ExactlyOnce, encode
from stele.tablet.machine import Outcome
from tests.tablet.twin import header

ERROR_US = 500_000
NOW_US = 1_000_000_000


def head_of(n: int, sequence: int = 1, lowest: int = 1, made_us: int = NOW_US) -> WriteHeader:
    return header(
        b"",
        client_id=n.to_bytes(16, "little"),
        sequence=sequence,
        lowest_unfinished=lowest,
        first_attempt_us=made_us,
    )


def admit(state: ExactlyOnce, head: WriteHeader, now_us: int = NOW_US) -> None:
    state.admit(head, now_us, ERROR_US)


def write(state: ExactlyOnce, head: WriteHeader, now_us: int = NOW_US) -> Outcome | None:
    """Admit and apply; what a write that came before is answered."""
    admit(state, head, now_us)
    earlier = state.earlier(head, now_us << 12)
    if earlier is None:
        state.record(head, Outcome(now_us << 12))
    return earlier


def test_a_client_that_never_raises_its_lowest_unfinished_is_told_alone() -> None:
    """Its outcomes took 16 MB of each replica, and those of the next such client as much again."""
    state = ExactlyOnce()
    for sequence in range(1, UNFINISHED_MAX + 1):
        assert write(state, head_of(1, sequence)) is None
    late = head_of(1, UNFINISHED_MAX + 1)
    with pytest.raises(Retryable, match="this client id has 4096 unfinished writes") as caught:
        admit(state, late)
    assert caught.value.code is Code.THROTTLED
    retried = write(state, head_of(1, 7))
    assert retried is not None and retried.duplicate
    assert write(state, head_of(2)) is None
    assert write(state, replace(late, lowest_unfinished=2)) is None


def test_the_lowest_unfinished_write_is_admitted_however_many_came_before_it() -> None:
    """It was turned away by the outcomes of those behind it, which its client lets go only once it is done."""
    state = ExactlyOnce(outcomes_max=6)
    for sequence in range(2, 8):
        write(state, head_of(1, sequence))
    write(state, head_of(2))
    with pytest.raises(Retryable, match="unfinished"):
        admit(state, head_of(1, 9))
    assert write(state, head_of(1, 1)) is None
    with pytest.raises(Retryable, match="unfinished"):
        admit(state, head_of(1, 9))
    assert write(state, head_of(1, 9, lowest=9)) is None


def test_where_all_clients_have_many_outcomes_each_has_a_share() -> None:
    """Who has more is told; who has few goes on, and so does who is new."""
    state = ExactlyOnce(outcomes_max=1_000)
    for n in range(1, 11):
        for sequence in range(1, 201):
            try:
                write(state, head_of(n, sequence))
            except Retryable as exc:
                assert exc.code is Code.THROTTLED
                break
    for each in (state, ExactlyOnce.decode(encode(state.frozen()), outcomes_max=1_000)):
        assert 1_000 <= each.outcomes <= 2_000
        assert write(each, head_of(11)) is None
        assert write(each, head_of(11, 2)) is None
        with pytest.raises(Retryable):
            admit(each, head_of(1, 201))
        assert write(each, head_of(1, 201, lowest=190)) is None
    state.expire((NOW_US + (1 << 40)) << 12)
    assert state.outcomes == 0


def test_a_flood_of_new_clients_pushes_out_nobody_who_has_just_written() -> None:
    """24,000 ids made ahead of time pushed all others out, and raised the mark above what right clocks make."""
    state = ExactlyOnce(clients_max=10)
    for n in range(1, 11):
        write(state, head_of(n, made_us=NOW_US + ERROR_US))
    flood = head_of(11, made_us=NOW_US + ERROR_US)
    with pytest.raises(Retryable, match="no new client id") as caught:
        admit(state, flood, NOW_US + ERROR_US)
    assert caught.value.code is Code.THROTTLED
    assert caught.value.retry_after_ms == 500
    assert write(state, head_of(1, 2, made_us=NOW_US + ERROR_US)) is None
    later_us = NOW_US + 2 * ERROR_US
    assert write(state, replace(flood, first_attempt_us=later_us + ERROR_US), later_us) is None
    slow = head_of(12, made_us=later_us - ERROR_US + 1)  # its clock is as far behind as a clock may be
    assert state.earlier(slow, later_us << 12) is None


def test_new_clients_whose_writes_are_under_way_push_out_nobody_who_has_just_written() -> None:
    """Only applied ones were counted. A flood is under way all at once, and all of it was admitted."""
    state = ExactlyOnce(clients_max=10)

    def propose(n: int, now_us: int = NOW_US, sequence: int = 1) -> None:
        admit(state, head_of(n, sequence, made_us=now_us), now_us)
        state.expect(head_of(n).client_id)

    for n in range(1, 7):
        write(state, head_of(n))
    for n in (11, 12, 13, 14):
        propose(n)
        propose(n, sequence=2)  # it is one client, whatever it sends
    with pytest.raises(Retryable, match="no new client id") as caught:
        propose(15)
    assert caught.value.retry_after_ms == 1_000
    state.stop_expecting(head_of(14).client_id)  # its write was lost
    propose(15)
    for n in (11, 12, 13, 15):
        assert write(state, head_of(n)) is None
    assert all(state.knows_client(head_of(n).client_id) for n in (*range(1, 7), 11, 12, 13, 15))
    with pytest.raises(Retryable, match="no new client id"):
        propose(16, NOW_US + 2 * ERROR_US - 1)
    for n in range(16, 26):  # each of them will push out another one
        propose(n, NOW_US + 2 * ERROR_US)
    with pytest.raises(Retryable, match="no new client id"):
        propose(26, NOW_US + 2 * ERROR_US)
