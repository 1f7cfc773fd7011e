"""Terms and votes: who is voted for, what a vote of an earlier term counts, what must be on disk first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.model.entry import Entry, EntryKind
from stele.model.ids import OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import (
    HardState,
    MessageIgnored,
    Persist,
    Role,
    Send,
)
from stele.raft.events import (
    Persisted,
    Propose,
    Received,
    Start,
    SyncStalled,
    Tick,
)
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.raft.test_core import entries, initial, lead, leader_in_step, settle, vote


def test_who_hears_a_leader_neither_votes_nor_takes_the_term_unless_the_leader_asked_for_it() -> None:
    begin = replace(initial(3, entries(1), 1), leader_hint=ReplicaId(2))
    core = RaftCore(RaftOptions(), ReplicaId(1), begin, random.Random(1))
    core.step(Received(ReplicaId(2), UpdateRequest(1, OpId(1, 1), (), 1), 10))
    for asked, granted, term in ((False, False, 1), (True, True, 9)):
        request = VoteRequest(9, OpId(8, 8), ignore_live_leader=asked)
        effects = core.step(Received(ReplicaId(3), request, 20))
        answers = [e.message for e in effects if isinstance(e, Send) and e.to == 3]
        assert [a.granted for a in answers if isinstance(a, VoteResponse)] == [granted]
        assert core.term == term


@pytest.mark.parametrize("sender", [1, 2])
def test_a_leader_takes_no_entry_of_another_that_leads_its_term(sender: int) -> None:
    """Nor of one that goes by its own name, as the node of a volume that was copied would."""
    core = RaftCore(RaftOptions(), ReplicaId(1), initial(3), random.Random(1))
    lead(core)
    theirs = (Entry(core.term, 2, EntryKind.WRITE, 0, b"theirs"),)
    update = UpdateRequest(core.term, OpId(core.term, 1), theirs, 2)
    (ignored,) = core.step(Received(ReplicaId(sender), update, 10))
    assert isinstance(ignored, MessageIgnored) and "a term has one leader" in ignored.cause
    assert core.role is Role.LEADER and core.log.last_index == 1


def candidate(voters: int, log: tuple[int, ...] = ()) -> RaftCore:
    """One that has asked for votes in a term which it has not on disk yet."""
    core = RaftCore(RaftOptions(), ReplicaId(1), initial(voters, entries(*log)), random.Random(1))
    core.step(Start(0))
    if voters > 1:
        vote(core, pre_vote=True)
    assert core.role is Role.CANDIDATE
    return core


def test_a_vote_of_an_earlier_term_elects_nobody_in_a_later_one() -> None:
    core = candidate(3)
    core.step(Persisted(1))
    core.step(Tick(10_000))
    core.step(Received(ReplicaId(3), VoteResponse(1, True, True, 2, True), 10_001))
    core.step(Persisted(2))
    assert (core.role, core.term) == (Role.CANDIDATE, 2)
    core.step(Received(ReplicaId(2), VoteResponse(1, True, False, 1, True), 10_002))  # it came late
    assert core.role is Role.CANDIDATE
    core.step(Received(ReplicaId(2), VoteResponse(2, True, False, 2, True), 10_003))
    assert core.role is Role.LEADER


def test_the_own_vote_counts_when_it_is_on_disk() -> None:
    """Not when what was written before it is."""
    core = candidate(1)
    core.step(Persisted(1))
    assert core.role is Role.LEADER  # and its no-op is on its way to the disk
    core.step(SyncStalled(10))
    core.step(Tick(100_000))
    assert (core.role, core.term) == (Role.CANDIDATE, 2)
    core.step(Persisted(2))
    assert core.role is Role.CANDIDATE
    core.step(Persisted(3))
    assert core.role is Role.LEADER


def test_what_matched_an_earlier_leaders_log_need_not_match_the_next_ones() -> None:
    """Also where this replica stood for the term itself."""
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), leader_hint=None), random.Random(1))
    core.step(Start(0))
    core.step(Received(ReplicaId(2), UpdateRequest(1, OpId(0, 0), entries(1, 1), 0), 1))
    core.step(Persisted(1))
    core.step(Tick(10_000))
    core.step(Received(ReplicaId(3), VoteResponse(1, True, True, 2, True), 10_001))
    assert (core.role, core.term) == (Role.CANDIDATE, 2)
    core.step(Persisted(2))
    core.step(
        Received(ReplicaId(3), UpdateRequest(2, OpId(1, 1), (), 2), 10_002)
    )  # which has another entry at 2
    assert (core.role, core.commit_index) == (Role.FOLLOWER, 1)


def test_an_answer_of_an_earlier_term_is_not_counted() -> None:
    """It came late: its sender held other entries at these places, and a new leader has replaced them since."""
    core = leader_in_step()
    settle(core, core.step_many([Propose(n, EntryKind.WRITE, b"w") for n in (1, 2)]))
    late = UpdateResponse(1, True, OpId(1, 3), preceding_index=1)
    replaced = (Entry(2, 2, EntryKind.NOOP, 0, b""),)
    settle(core, core.step(Received(ReplicaId(3), UpdateRequest(2, OpId(1, 1), replaced, 1), 10)))
    core.step(Tick(10_000))
    core.step(Received(ReplicaId(2), VoteResponse(2, True, True, 3, True), 10_001))
    core.step(Persisted(core.last_persist_id))
    core.step(Received(ReplicaId(2), VoteResponse(3, True, False, 3, True), 10_002))
    core.step(Persisted(core.last_persist_id))
    assert (core.role, core.log.last_opid, core.commit_index) == (Role.LEADER, OpId(3, 3), 1)
    core.step(Received(ReplicaId(2), late, 10_003))
    assert core.commit_index == 1
    core.step(Received(ReplicaId(2), replace(late, term=3, last_received=OpId(3, 3)), 10_004))
    assert core.commit_index == 3


@pytest.mark.parametrize(
    ("theirs", "granted"),
    [
        pytest.param(OpId(1, 9), False, id="longer, of an earlier term"),
        pytest.param(OpId(2, 1), False, id="shorter, of the same term"),
        pytest.param(OpId(2, 2), True, id="the same"),
        pytest.param(OpId(2, 3), True, id="longer"),
        pytest.param(OpId(3, 1), True, id="shorter, of a later term"),
    ],
)
@pytest.mark.parametrize("pre_vote", [True, False], ids=["pre-vote", "vote"])
def test_a_vote_goes_to_logs_that_are_as_up_to_date_by_term_first(
    pre_vote: bool, theirs: OpId, granted: bool
) -> None:
    """Raft §5.4.1: the longer log may lack what a later term committed."""
    begin = replace(initial(3, entries(1, 2)), leader_hint=None)
    core = RaftCore(RaftOptions(), ReplicaId(1), begin, random.Random(1))
    core.step(Start(0))
    effects = core.step(Received(ReplicaId(2), VoteRequest(4, theirs, pre_vote), 1_000))
    answers = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, VoteResponse)]
    assert [a.granted for a in answers] == [granted]


def follower(log: tuple[int, ...] = ()) -> RaftCore:
    """Replica 1 of three, which is not meant to lead and has heard of nobody."""
    core = RaftCore(
        RaftOptions(), ReplicaId(1), replace(initial(3, entries(*log)), leader_hint=None), random.Random(1)
    )
    core.step(Start(0))
    return core


def test_one_vote_is_given_in_a_term() -> None:
    core = follower()
    granted = []
    for sender in (2, 3, 2):
        effects = core.step(Received(ReplicaId(sender), VoteRequest(4, OpId(0, 0)), 1_000))
        granted += [
            e.message.granted for e in effects if isinstance(e, Send) and isinstance(e.message, VoteResponse)
        ]
    assert granted == [True, False, True]


def test_a_term_that_another_brings_is_on_disk_before_it_is_spoken_in() -> None:
    effects = follower().step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 0), 1))
    (persist,) = [e for e in effects if isinstance(e, Persist)]
    assert persist.hard_state == HardState(5, None)
    assert [e.after for e in effects if isinstance(e, Send)] == [persist.id]
