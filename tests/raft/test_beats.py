"""Beats: in place of a heartbeat that would say nothing new, and never in place of one that does."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from stele.model.entry import EntryKind
from stele.model.ids import OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import Role, Send
from stele.raft.events import (
    ChangeType,
    PeerFailed,
    Propose,
    ProposeChange,
    Received,
    RequestRead,
    Start,
    Tick,
    TransferLeadership,
)
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.raft.test_causes import NEWCOMER
from tests.raft.test_core import accept, entries, initial, leader_in_step, settle

OPTIONS = RaftOptions()


def yes(replica_id: ReplicaId) -> bool:
    return True


def beats(core: RaftCore, now_ms: int) -> tuple[ReplicaId, ...] | None:
    return core.beat(now_ms, yes)


def told(core: RaftCore, now_ms: int) -> int:
    """A leader whose peers have heard all there is to hear, by heartbeats. Returns the time when beats are due."""
    due_ms = now_ms + OPTIONS.heartbeat_ms + 1
    for effect in core.step(Tick(due_ms)):
        if isinstance(effect, Send) and isinstance(effect.message, UpdateRequest):
            last = core.log.last_opid
            core.step(Received(effect.to, UpdateResponse(core.term, True, last), due_ms))
    return due_ms + OPTIONS.heartbeat_ms


def in_step() -> tuple[RaftCore, int]:
    core = leader_in_step()
    return core, told(core, told(core, 5))


def commit(core: RaftCore) -> None:
    settle(core, core.step(Propose(1, EntryKind.WRITE, b"w")))
    accept(core, 2, 2)
    assert core.commit_index == 2


def heartbeats(core: RaftCore, now_ms: int) -> list[int]:
    return [
        e.to for e in core.step(Tick(now_ms)) if isinstance(e, Send) and isinstance(e.message, UpdateRequest)
    ]


def test_a_beat_takes_the_place_of_a_heartbeat_that_is_due() -> None:
    core, now_ms = in_step()
    assert beats(core, now_ms - 20) == () and not heartbeats(core, now_ms - 20), "none is due yet"
    assert beats(core, now_ms) == (2, 3)
    assert not heartbeats(core, now_ms + 1)
    assert core.next_deadline_ms == now_ms + OPTIONS.heartbeat_ms
    for _ in range(100):
        now_ms += OPTIONS.heartbeat_ms
        for peer in (2, 3):
            core.beat_answered(ReplicaId(peer), core.term, True, now_ms - 10)
        assert beats(core, now_ms) == (2, 3) and not heartbeats(core, now_ms)
    assert core.role is Role.LEADER


@pytest.mark.parametrize(
    "happens",
    [
        lambda core, now: core.step(RequestRead(7)),
        lambda core, now: core.step(TransferLeadership(9, ReplicaId(2), now)),
        lambda core, now: core.step(ProposeChange(8, ChangeType.ADD, NEWCOMER, -1)),
        lambda core, now: core.step(
            Received(ReplicaId(2), UpdateResponse(core.term, False, failed=True), now)
        ),
        lambda core, now: core.beat_answered(ReplicaId(2), core.term, False, now),
        lambda core, now: commit(core),
    ],
    ids=["a read", "a transfer", "a change", "a FAILED peer", "a refused beat", "a commit"],
)
def test_whatever_is_not_as_usual_takes_a_heartbeat(happens: Callable[[RaftCore, int], object]) -> None:
    core, now_ms = in_step()
    happens(core, now_ms)
    assert beats(core, now_ms + OPTIONS.heartbeat_ms) is None


def test_a_peer_that_is_silent_for_long_gets_heartbeats_before_it_misses_its_leader() -> None:
    core, now_ms = in_step()
    began_ms = now_ms - OPTIONS.heartbeat_ms
    while beats(core, now_ms) is not None:
        now_ms += OPTIONS.heartbeat_ms
    assert now_ms - began_ms < OPTIONS.election_min_ms
    assert heartbeats(core, now_ms) == [2, 3]


def test_a_peer_whose_node_takes_no_beats_gets_heartbeats() -> None:
    core, now_ms = in_step()
    assert core.beat(now_ms, lambda peer: peer != 2) is None
    assert heartbeats(core, now_ms) == [2, 3]


def test_a_leader_without_a_majority_still_steps_down() -> None:
    core, now_ms = in_step()
    for peer in (2, 3):
        core.step(PeerFailed(ReplicaId(peer)))
    began_ms = now_ms
    while core.role is Role.LEADER:
        if beats(core, now_ms) is None:
            core.step(Tick(now_ms))
        now_ms += 25
    assert now_ms - began_ms <= OPTIONS.election_max_ms + 2 * OPTIONS.heartbeat_ms


def test_a_lost_peer_is_probed_rarely_and_the_other_still_takes_beats() -> None:
    """A probe costs a turn of the core. A thousand tablets that lost a peer sent 13,000 of them a second, and then 3,000."""
    core, now_ms = in_step()
    core.step(PeerFailed(ReplicaId(3)))
    probes, told_2 = [], 0
    for _ in range(400):
        now_ms += 25
        chosen = beats(core, now_ms)
        if chosen is None:
            sent = [e.to for e in core.step(Tick(now_ms)) if isinstance(e, Send)]
            probes += [now_ms] * sent.count(3)
            told_2 += sent.count(2)
        else:
            assert 3 not in chosen
            told_2 += len(chosen)
        core.beat_answered(ReplicaId(2), core.term, True, now_ms)
    assert core.role is Role.LEADER and told_2 >= 400 * 25 // (OPTIONS.heartbeat_ms + 25)
    gaps = [after - before for before, after in pairwise(probes)]
    low = OPTIONS.election_min_ms
    assert low <= gaps[0] <= low + 100 and 2 * gaps[0] <= gaps[1] <= 2 * gaps[0] + 100
    assert all(4 * low <= gap <= 4 * low + 100 for gap in gaps[2:]) and gaps[4:], "up to four time-outs"


def test_a_lost_peer_that_asks_for_votes_is_back_and_is_probed_at_once() -> None:
    """A replica that starts again waits for its leader no longer than its own election timeout."""
    core, now_ms = in_step()
    core.step(PeerFailed(ReplicaId(3)))
    for _ in range(200):
        now_ms += 25
        if beats(core, now_ms) is None:
            core.step(Tick(now_ms))
        core.beat_answered(ReplicaId(2), core.term, True, now_ms)
    asks = VoteRequest(core.term + 1, core.log.last_opid, pre_vote=True)
    sent = [e.message for e in core.step(Received(ReplicaId(3), asks, now_ms)) if isinstance(e, Send)]
    assert [type(message) for message in sent] == [VoteResponse, UpdateRequest]
    assert not sent[0].granted and core.role is Role.LEADER  # type: ignore[union-attr]


def test_an_answer_of_another_term_or_of_nobody_counts_for_nothing() -> None:
    core, now_ms = in_step()
    while beats(core, now_ms) is not None:
        core.beat_answered(ReplicaId(2), core.term - 1, True, now_ms)
        core.beat_answered(ReplicaId(3), core.term + 1, True, now_ms)
        core.beat_answered(ReplicaId(9), core.term, True, now_ms)
        now_ms += 25
    follower = RaftCore(OPTIONS, ReplicaId(1), initial(3), random.Random(1))
    follower.step(Start(0))
    follower.beat_answered(ReplicaId(2), follower.term, True, 10)
    assert beats(follower, 10) is None


def test_a_broken_connection_is_not_healed_by_an_answer_from_before() -> None:
    core, now_ms = in_step()
    core.step(PeerFailed(ReplicaId(2)))
    core.beat_answered(ReplicaId(2), core.term, True, now_ms)
    assert not next(p for p in core.status().peers if p.replica_id == 2).reachable


# A follower


def following(commit: int = 0) -> RaftCore:
    core = RaftCore(OPTIONS, ReplicaId(1), initial(3), random.Random(1))
    core.step(Start(0))
    effects = core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), commit), 10))
    settle(core, effects)
    assert core.leader == 2
    return core


def test_a_follower_that_hears_beats_does_not_stand() -> None:
    core, now_ms = following(), 10
    for _ in range(100):
        now_ms += OPTIONS.heartbeat_ms
        assert core.take_beat(ReplicaId(2), 5, 0, now_ms)
        assert not core.step(Tick(now_ms))
    assert core.leader == 2 and core.next_deadline_ms >= now_ms + OPTIONS.election_min_ms
    while core.leader is not None:
        now_ms += 25
        core.step(Tick(now_ms))


def test_a_follower_refuses_what_a_heartbeat_would_have_to_tell() -> None:
    core = following()
    due_ms = core.next_deadline_ms
    assert not core.take_beat(ReplicaId(3), 5, 0, 100), "another replica"
    assert not core.take_beat(ReplicaId(2), 4, 0, 100), "an earlier term"
    assert not core.take_beat(ReplicaId(2), 6, 0, 100), "a later term"
    assert not core.take_beat(ReplicaId(2), 5, 1, 100), "a commit index that it was not told"
    assert core.next_deadline_ms == due_ms and core.term == 5
    assert core.take_beat(ReplicaId(2), 5, 0, 100)


def test_entries_that_a_heartbeat_overtook_are_committed_when_they_come() -> None:
    """The heartbeat told of the commit. Its leader sends beats from then on, so nothing else would tell of it again."""
    core = following()
    core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 1), 20))
    assert core.commit_index == 0
    settle(core, core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), entries(5), 0), 30)))
    assert core.take_beat(ReplicaId(2), 5, 1, 100)
    assert core.commit_index == core.log.handed_index == 1


def test_a_follower_refuses_a_beat_while_its_term_is_not_durable() -> None:
    core = RaftCore(OPTIONS, ReplicaId(1), initial(3), random.Random(1))
    core.step(Start(0))
    effects = core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 0), 10))
    assert not core.take_beat(ReplicaId(2), 5, 0, 20)
    settle(core, effects)
    assert core.take_beat(ReplicaId(2), 5, 0, 20)


def test_one_that_missed_its_leader_or_stands_refuses_beats() -> None:
    core, now_ms = following(), 10
    while core.leader is not None:
        now_ms += 25
        core.step(Tick(now_ms))
    assert not core.take_beat(ReplicaId(2), 5, 0, now_ms), (
        "a heartbeat tells the others, too, that the leader lives"
    )
    granted = VoteResponse(core.term, True, True, core.term + 1, True)
    core.step(Received(ReplicaId(3), granted, now_ms))
    assert core.role is Role.CANDIDATE and not core.take_beat(ReplicaId(2), 5, 0, now_ms)


# False alarms


def misses(core: RaftCore, now_ms: int) -> int:
    """Let it wait for its leader until it asks for votes. Returns when."""
    while True:
        now_ms += 5
        sent = [e.message for e in core.step(Tick(now_ms)) if isinstance(e, Send)]
        if any(isinstance(m, VoteRequest) for m in sent):
            return now_ms


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_was_missed_and_still_leads_is_waited_for_longer(seed: int) -> None:
    """Two slow nodes missed each other's leaders again and again, and the pre-votes made them slower."""
    core = RaftCore(OPTIONS, ReplicaId(1), initial(3), random.Random(seed))
    core.step(Start(0))
    heard_ms, waits = 10, []
    for _ in range(5):
        core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 0), heard_ms))
        missed_ms = misses(core, heard_ms)
        waits.append(missed_ms - heard_ms)
        heard_ms = missed_ms + 10
    for wait_ms, factor in zip(waits, (1, 2, 4, 4, 4), strict=True):
        assert OPTIONS.election_min_ms * factor <= wait_ms <= OPTIONS.election_max_ms * factor + 5, waits
    core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 0), heard_ms))
    for _ in range(2):  # half a minute and a minute without a false alarm
        for _ in range(150):
            heard_ms += 210
            core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 0), heard_ms))
    assert misses(core, heard_ms) - heard_ms <= OPTIONS.election_max_ms + 5


def test_a_leader_whose_connection_broke_is_no_false_alarm() -> None:
    """Its process is alive, and so is this one. A switch that restarts breaks connections, and slows nobody down."""
    core, heard_ms = following(), 10
    for _ in range(6):
        core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 0), heard_ms))
        core.step(PeerFailed(ReplicaId(2)))
        missed_ms = misses(core, heard_ms)
        assert missed_ms - heard_ms <= OPTIONS.election_min_ms // 3 + 5
        heard_ms = misses(core, missed_ms) + 10
    core.step(Received(ReplicaId(2), UpdateRequest(5, OpId(0, 0), (), 0), heard_ms))
    assert core.state.timer.alarms == 0
    assert misses(core, heard_ms) - heard_ms <= OPTIONS.election_max_ms + 5


def test_a_leader_of_a_new_term_is_no_false_alarm() -> None:
    core, now_ms = following(), 10
    for term in range(6, 12):
        now_ms = misses(core, now_ms)
        effects = core.step(Received(ReplicaId(3), UpdateRequest(term, OpId(0, 0), (), 0), now_ms))
        settle(core, effects)
        assert misses(core, now_ms) - now_ms <= OPTIONS.election_max_ms + 5
        now_ms = core.state.now_ms
