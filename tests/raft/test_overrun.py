"""Elections and probes where nodes are overrun: many tablets lose a leader at once, and answers come late.

Found by `python -m bench large --only busy`: of 1,000 busy tablets hundreds had no leader for minutes after one node was lost.
"""

from __future__ import annotations

import random

import pytest

from stele.model.ids import OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import Persist, Role, Send
from stele.raft.events import Fitness, Persisted, Received, Start, Tick
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.raft.test_core import entries, initial, lead

OPTIONS = RaftOptions()


def asks(core: RaftCore, now_ms: int) -> tuple[int, list[VoteRequest]]:
    """(when, what) it asks the others for votes next, at ticks from `now_ms` on."""
    while True:
        sent = [e.message for e in core.step(Tick(now_ms)) if isinstance(e, Send)]
        if found := [m for m in sent if isinstance(m, VoteRequest)]:
            return now_ms, found
        now_ms += 25


@pytest.mark.parametrize("seed", range(5))
def test_elections_that_nobody_answers_in_time_come_more_and_more_rarely(seed: int) -> None:
    core = RaftCore(OPTIONS, ReplicaId(1), initial(3), random.Random(seed))
    core.step(Start(0))
    now_ms, waits = 0, []
    for _ in range(7):
        began_ms = now_ms
        now_ms, (request, _) = asks(core, now_ms)
        waits.append(now_ms - began_ms)
        assert request.pre_vote
        granted = VoteResponse(request.term - 1, True, True, request.term, True)
        core.step(Received(ReplicaId(2), granted, now_ms))  # its vote comes too late, or never
        assert core.role is Role.CANDIDATE
    for number, wait_ms in enumerate(waits[1:]):
        factor = 2 ** min(number, 4)
        assert OPTIONS.election_min_ms * factor <= wait_ms <= OPTIONS.election_max_ms * factor + 25, waits
    core.step(Received(ReplicaId(2), UpdateRequest(99, OpId(0, 0), (), 0), now_ms))
    again_ms, _ = asks(core, now_ms + 25)
    assert again_ms - now_ms <= OPTIONS.election_max_ms + 25, "a leader was heard meanwhile"


def standing(number: int, log: tuple[int, ...]) -> tuple[RaftCore, VoteRequest]:
    """One of three whose pre-vote is under way, and what it asks."""
    begin = initial(3, entries(*log), max(log, default=0))
    core = RaftCore(OPTIONS, ReplicaId(number), begin, random.Random(number))
    core.step(Start(0))
    _, (request, _) = asks(core, 0)
    return core, request


@pytest.mark.parametrize(
    ("one", "other", "stands"),
    [((1, 1), (1, 1), 2), ((1,), (1, 1), 3), ((1, 1), (1,), 2)],
    ids=["equal", "behind", "ahead"],
)
def test_of_two_whose_pre_votes_cross_one_stands(
    one: tuple[int, ...], other: tuple[int, ...], stands: int
) -> None:
    cores = {}
    cores[2], of_two = standing(2, one)
    cores[3], of_three = standing(3, other)
    answers = [(2, 3, of_three), (3, 2, of_two)]
    told = []
    for to, sender, request in answers:
        effects = cores[to].step(Received(ReplicaId(sender), request, 700))
        told += [
            (to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, VoteResponse)
        ]
    for sender, response in told:
        cores[5 - sender].step(Received(ReplicaId(sender), response, 701))
    assert [number for number, core in cores.items() if core.role is Role.CANDIDATE] == [stands]


def test_who_gave_way_stands_no_more_for_the_answers_of_others() -> None:
    core = RaftCore(OPTIONS, ReplicaId(3), initial(5), random.Random(1))
    core.step(Start(0))
    now_ms, asked = asks(core, 0)
    term = asked[0].term
    core.step(Received(ReplicaId(2), VoteRequest(term, OpId(0, 0), pre_vote=True), now_ms))
    for voter in (4, 5):
        core.step(Received(ReplicaId(voter), VoteResponse(term - 1, True, True, term, True), now_ms))
    assert core.role is Role.FOLLOWER
    again_ms, _ = asks(core, now_ms + 25)
    assert again_ms - now_ms <= OPTIONS.election_max_ms + 25, "it stands later, if nobody leads by then"


def test_one_that_leads_only_if_nobody_can_gives_way() -> None:
    core, _ = standing(2, (1,))
    core.step(Fitness(False))
    request = VoteRequest(2, OpId(1, 1), pre_vote=True)
    effects = core.step(Received(ReplicaId(3), request, 700))
    (answer,) = [e.message for e in effects if isinstance(e, Send)]
    assert isinstance(answer, VoteResponse) and answer.granted


def test_a_silent_peer_is_asked_again_without_entries() -> None:
    """All that it lacks, again and again, for each of many tablets, took two thirds of a node's time."""
    core = RaftCore(OPTIONS, ReplicaId(1), initial(3), random.Random(1))
    lead(core)
    now_ms, probes = 5, []
    for _ in range(60):
        now_ms += 25
        for effect in core.step(Tick(now_ms)):
            if isinstance(effect, Persist):
                core.step(Persisted(effect.persist_id))
            if not isinstance(effect, Send) or not isinstance(effect.message, UpdateRequest):
                continue
            request = effect.message
            last = request.entries[-1].opid if request.entries else request.preceding
            if effect.to == 2:
                core.step(Received(ReplicaId(2), UpdateResponse(core.term, True, last), now_ms))
            else:
                probes.append((now_ms, len(request.entries)))
    early = [count for at, count in probes if at <= OPTIONS.election_min_ms]
    late = [count for at, count in probes if at > OPTIONS.election_min_ms + 50]
    assert any(early) and late and not any(late), probes
    answer = UpdateResponse(core.term, True, OpId(0, 0))
    effects = core.step(Received(ReplicaId(3), answer, now_ms))
    sent = [e.message for e in effects if isinstance(e, Send) and e.to == 3]
    assert any(isinstance(m, UpdateRequest) and m.entries for m in sent), "its answer brings the entries"
