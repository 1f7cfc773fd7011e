"""Leases of leaders: who promises what, how long a voter is bound, how long a leader counts, and when there is none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.model.config import MemberType
from stele.model.entry import EntryKind
from stele.model.errors import Rejected
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import Effect, Role, Send
from stele.raft.events import (
    ChangeType,
    InitialState,
    PeerFailed,
    Persisted,
    Promote,
    Propose,
    ProposeChange,
    Received,
    ReportFailed,
    Start,
    Tick,
    TransferLeadership,
)
from stele.raft.lease import counted_us
from stele.raft.messages import TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.raft.test_core import configuration, initial, settle, updates
from tests.raft.test_safety import peer

LEASE_MS = 300
LEASED = RaftOptions(lease_ms=LEASE_MS, promised_ms=LEASE_MS)
STEADY_MS = 50_000
"""What a node's steady clock says when its core's time is 0."""


def voter(options: RaftOptions = LEASED, term: int = 1) -> RaftCore:
    """Replica 1 of three, that has long started and follows nobody yet. Its disk is done."""
    core = RaftCore(
        options, ReplicaId(1), InitialState(term, None, OPID_NONE, configuration(3)), random.Random(1)
    )
    core.step(Start(0))
    return core


def asked(
    core: RaftCore, now: int, *, lease_ms: int = LEASE_MS, term: int = 1, steady: int = 1
) -> list[UpdateResponse]:
    """Its answers to a heartbeat of replica 2 that asks for a lease."""
    request = UpdateRequest(
        term, OPID_NONE, (), 0, sent_ms=9, lease_ms=lease_ms, lease_sent_ms=7 if lease_ms else 0
    )
    effects = core.step_many([Received(ReplicaId(2), request, now)], steady)
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, UpdateResponse)]


def votes(core: RaftCore, now: int, *, term: int = 2, **fields: object) -> bool:
    """Whether it gives replica 3 its vote. What it is asked ignores live leaders."""
    request = replace(VoteRequest(term, OpId(0, 0), ignore_live_leader=True), **fields)  # type: ignore[arg-type]
    effects = core.step(Received(ReplicaId(3), request, now))
    (answer,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, VoteResponse)]
    return answer.granted


def timeouts(effects: list[Effect]) -> list[TimeoutNow]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, TimeoutNow)]


# A voter


def test_a_voter_that_promised_gives_no_vote_until_its_own_clock_has_passed_the_lease() -> None:
    core = voter()
    assert [answer.lease_sent_ms for answer in asked(core, 1_000)] == [7]
    assert not votes(core, 1_000 + LEASE_MS)
    assert core.term == 1, "the refusal keeps its leader, so it enters no later term"
    assert not votes(core, 1_000 + LEASE_MS, pre_vote=True)
    assert votes(core, 1_001 + LEASE_MS)


def test_a_promise_is_kept_although_the_leaders_node_is_told_as_failed() -> None:
    core = voter()
    asked(core, 1_000)
    core.step(PeerFailed(ReplicaId(2)))
    assert not votes(core, 1_200)
    core.step(Tick(1_250))
    assert core.term == 1 and core.next_deadline_ms > 1_000 + LEASE_MS, "nor does it stand itself"
    due = core.next_deadline_ms
    assert due <= 1_001 + LEASE_MS + LEASED.election_min_ms // 3, "but soon after"
    effects = core.step(Tick(due))
    assert [e.message.pre_vote for e in effects if isinstance(e, Send) and isinstance(e.message, VoteRequest)]


def test_each_promise_lasts_from_its_own_message_on_and_none_becomes_shorter() -> None:
    core = voter(replace(LEASED, lease_ms=900, promised_ms=900))
    core.step(Tick(5_000))
    asked(core, 6_000, lease_ms=900)
    asked(core, 6_100, lease_ms=200)
    assert not votes(core, 6_900)
    assert votes(core, 6_901)


@pytest.mark.parametrize(
    "why, options, lease_ms, steady",
    [
        ("nobody asks", LEASED, 0, 1),
        ("a longer one than its disk says", LEASED, LEASE_MS + 1, 1),
        ("the cluster's version knows none", LEASED, LEASE_MS, 0),
        ("its node has none", RaftOptions(), LEASE_MS, 1),
    ],
)
def test_nothing_is_promised_if(why: str, options: RaftOptions, lease_ms: int, steady: int) -> None:
    core = voter(options)
    core.step(Tick(900))
    assert [answer.lease_sent_ms for answer in asked(core, 1_000, lease_ms=lease_ms, steady=steady)] == [0]
    assert votes(core, 1_010)


def test_a_voter_that_refuses_entries_of_its_leader_promises_all_the_same() -> None:
    core = voter()
    request = UpdateRequest(1, OpId(1, 9), (), 0, lease_ms=LEASE_MS, lease_sent_ms=7)
    effects = core.step_many([Received(ReplicaId(2), request, 1_000)], 1)
    (answer,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, UpdateResponse)]
    assert not answer.success and answer.lease_sent_ms == 7
    assert not votes(core, 1_000 + LEASE_MS)


def test_a_leader_that_gave_its_lease_up_frees_its_voters_and_an_earlier_one_does_not() -> None:
    core = voter(term=4)
    asked(core, 1_000, term=5)
    assert not votes(core, 1_010, term=6, released=4)
    assert votes(core, 1_010, term=6, released=5)


def test_a_restarted_voter_waits_out_the_longest_promise_of_its_disk() -> None:
    core = voter(replace(LEASED, promised_ms=700))
    assert not votes(core, 700)
    assert votes(core, 701)


def test_who_was_in_no_term_has_promised_nothing_and_waits_for_nothing() -> None:
    assert votes(voter(term=0), 1)


def test_a_node_without_leases_now_still_waits_out_what_it_promised_before() -> None:
    core = voter(RaftOptions(promised_ms=400))
    assert not votes(core, 400)
    assert votes(core, 401)


def test_the_only_voter_of_its_group_waits_after_a_restart_too() -> None:
    core = RaftCore(
        LEASED, ReplicaId(1), InitialState(3, None, OPID_NONE, configuration(1)), random.Random(1)
    )
    effects = core.step(Start(0))
    assert core.role is Role.FOLLOWER and LEASE_MS < core.next_deadline_ms < 3 * LEASE_MS
    effects += core.step(Tick(core.next_deadline_ms))
    assert core.role is Role.CANDIDATE


def test_an_administrators_order_breaks_no_promise() -> None:
    core = voter()
    asked(core, 1_000)
    core.step(Promote(1_100, "an administrator"))
    assert core.term == 1
    core.step(Promote(1_001 + LEASE_MS, "an administrator"))
    assert core.term == 2 and core.role is Role.CANDIDATE


@pytest.mark.parametrize("given_up", [True, False])
def test_who_is_asked_to_stand_does_so_if_the_lease_was_given_up(given_up: bool) -> None:
    core = voter()
    asked(core, 1_000)
    effects = core.step(Received(ReplicaId(2), TimeoutNow(1, "", given_up), 1_010))
    asks = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, VoteRequest)]
    assert [ask.released for ask in asks] == ([1, 1] if given_up else [])


# A leader


def leader(count: int = 3, options: RaftOptions = LEASED) -> RaftCore:
    """Replica 1 leads, and its entry is committed. Nobody has promised anything."""
    core = RaftCore(options, ReplicaId(1), initial(count), random.Random(1))
    core.step(Start(0))
    for pre_vote, term in ((True, 0), (False, 1)):
        for other in (2, 3):
            core.step(Received(ReplicaId(other), VoteResponse(term, True, pre_vote, 1, True), 1))
        core.step(Persisted(core.last_persist_id))
    for other in range(2, count + 1):
        core.step(
            Received(ReplicaId(other), UpdateResponse(core.term, True, OpId(1, 1), preceding_index=0), 5)
        )
    assert core.role is Role.LEADER
    return core


def promises(core: RaftCore, voter_id: int, sent_ms: int, steady: int = STEADY_MS + 1_000) -> list[Effect]:
    """A voter answers a message of `sent_ms` by the steady clock, and promises."""
    answer = UpdateResponse(core.term, True, OpId(1, 1), preceding_index=1, lease_sent_ms=sent_ms)
    return core.step_many([Received(ReplicaId(voter_id), answer, 20)], steady)


def holds_until(core: RaftCore, since_ms: int) -> bool:
    """Whether its lease holds exactly as long as if it counted from this time on."""
    end_us = 1_000 * since_ms + counted_us(LEASE_MS)
    return core.leased(end_us - 1) and not core.leased(end_us)


def test_a_leader_counts_from_when_it_sent_what_a_majority_promised() -> None:
    core = leader()
    assert not core.leased(1_000 * STEADY_MS)
    promises(core, 2, STEADY_MS)
    assert holds_until(core, STEADY_MS)
    promises(core, 3, STEADY_MS + 40)
    assert holds_until(core, STEADY_MS + 40), "one promise beside itself is a majority of three"
    promises(core, 3, STEADY_MS + 10)
    assert holds_until(core, STEADY_MS + 40), "a late answer takes nothing back"


def test_a_majority_of_five_needs_two_promises() -> None:
    core = leader(5)
    promises(core, 2, STEADY_MS + 50)
    assert not core.leased(1_000 * STEADY_MS)
    promises(core, 4, STEADY_MS)
    assert holds_until(core, STEADY_MS)
    promises(core, 5, STEADY_MS + 20)
    assert holds_until(core, STEADY_MS + 20)


def test_a_leader_counts_shorter_than_voters_do_by_the_error_of_two_clocks() -> None:
    slow, fast = 0.9, 1.1
    assert counted_us(LEASE_MS) / slow <= 1_000 * LEASE_MS / fast


def test_promises_count_for_voters_of_the_active_configuration_alone() -> None:
    core = leader(5)
    for other in (2, 3):
        promises(core, other, STEADY_MS)
    assert core.leased(1_000 * STEADY_MS)
    learner = replace(peer(2), member_type=MemberType.NON_VOTER)
    core.step(ProposeChange(1, ChangeType.MODIFY, learner, core.config.opid_index))
    assert len(core.config.voters) == 4, "the change is in force, and not committed"
    assert not core.leased(1_000 * STEADY_MS)
    promises(core, 4, STEADY_MS)
    assert core.leased(1_000 * STEADY_MS)


def test_a_leader_asks_with_each_message_and_says_when_it_left() -> None:
    core = leader()
    effects = core.step_many([Propose(1, EntryKind.WRITE, b"w")], STEADY_MS)
    assert {(u.lease_ms, u.lease_sent_ms) for u in updates(effects, 2)} == {(LEASE_MS, STEADY_MS)}
    effects = core.step_many([Tick(200)], STEADY_MS + 200)
    assert {(u.lease_ms, u.lease_sent_ms) for u in updates(effects, 3)} == {(LEASE_MS, STEADY_MS + 200)}


@pytest.mark.parametrize("options, steady", [(RaftOptions(), STEADY_MS), (LEASED, 0)])
def test_without_leases_messages_are_as_before(options: RaftOptions, steady: int) -> None:
    core = leader(options=options)
    effects = core.step_many([Propose(1, EntryKind.WRITE, b"w"), Tick(200)], steady)
    assert {(u.lease_ms, u.lease_sent_ms) for u in updates(effects, 2)} == {(0, 0)}
    assert not core.leased(1_000 * STEADY_MS)


def test_after_it_asked_another_to_stand_a_leader_takes_no_lease_in_its_term() -> None:
    core = leader()
    promises(core, 2, STEADY_MS)
    promises(core, 3, STEADY_MS)
    assert core.leased(1_000 * STEADY_MS)
    effects = core.step_many([TransferLeadership(1, ReplicaId(2), 30)], STEADY_MS + 30)
    assert timeouts(effects) == [TimeoutNow(core.term, "", True)]
    assert not core.leased(1_000 * STEADY_MS)
    answer = UpdateResponse(core.term, True, OpId(1, 1), preceding_index=1)
    core.step_many([Received(ReplicaId(n), answer, 500) for n in (2, 3)], STEADY_MS + 500)
    effects = core.step_many([Tick(31 + LEASED.election_max_ms)], STEADY_MS + 700)
    assert core.role is Role.LEADER and not core.transferring, "the time for the hand-over is over"
    assert {u.lease_ms for u in updates(effects, 3)} == {0}
    promises(core, 2, STEADY_MS + 900)
    assert not core.leased(1_000 * (STEADY_MS + 900))


def test_a_leader_that_fails_frees_its_voters() -> None:
    core = leader()
    promises(core, 2, STEADY_MS)
    assert timeouts(core.step(ReportFailed("rot"))) == [TimeoutNow(core.term, "", True)]
    assert not core.leased(1_000 * STEADY_MS)


def test_a_higher_term_ends_the_lease() -> None:
    core = leader()
    promises(core, 2, STEADY_MS)
    settle(core, core.step(Received(ReplicaId(3), UpdateResponse(core.term + 1, False), 30)))
    assert not core.leased(1_000 * STEADY_MS)


def test_a_promise_to_a_message_of_the_future_counts_for_nothing() -> None:
    core = leader()
    effects = promises(core, 2, STEADY_MS + 2_000)
    assert "promises a lease for a message" in repr(effects)
    assert not core.leased(1_000 * (STEADY_MS + 2_000))


def test_a_single_voter_leads_alone_at_any_time() -> None:
    core = RaftCore(LEASED, ReplicaId(1), initial(1), random.Random(1))
    settle(core, core.step(Start(0)))
    assert core.role is Role.LEADER and core.leased(1)


def test_a_lease_that_no_disk_knows_is_refused() -> None:
    with pytest.raises(Rejected, match="store the longer promise"):
        RaftOptions(lease_ms=300, promised_ms=200)
