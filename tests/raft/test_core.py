"""What the core promises its owner beyond the paper: turns are coalesced, memory and flight are bounded, rules refused."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.model.config import Configuration, MemberType, Peer
from stele.model.entry import ENTRY_COST_BYTES, Entry, EntryKind
from stele.model.errors import Code, InvariantViolation
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import (
    Committed,
    Effect,
    HardState,
    PeerForgot,
    PeerNeedsCopy,
    PeerReached,
    PeerSound,
    Persist,
    ProposalRefused,
    Proposed,
    ReadLog,
    ReadReady,
    Role,
    Send,
)
from stele.raft.events import (
    Compacted,
    Event,
    InitialState,
    LogRead,
    Persisted,
    Propose,
    Received,
    RequestRead,
    Start,
    Tick,
)
from stele.raft.invariants import check
from stele.raft.log import LogView
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.status import PeerState


def configuration(count: int) -> Configuration:
    """Voters 1 to `count`."""
    return Configuration(-1, tuple(Peer(NodeId(f"{n:032x}"), ReplicaId(n), "") for n in range(1, count + 1)))


def entries(*terms: int) -> tuple[Entry, ...]:
    """A log by the terms of its entries."""
    return tuple(Entry(t, i, EntryKind.WRITE, 0, b"x" * 52) for i, t in enumerate(terms, start=1))


def initial(count: int, log: tuple[Entry, ...] = (), commit: int = 0) -> InitialState:
    """A replica named 1, named to lead."""
    term = log[-1].term if log else 0
    return InitialState(term, None, OPID_NONE, configuration(count), log, commit, leader_hint=ReplicaId(1))


def lead(core: RaftCore, now: int = 0) -> list[Effect]:
    """Let replica 1 win with the votes of 2, all on a disk that is done at once."""
    effects = core.step(Start(now))
    effects += vote(core, pre_vote=True)
    effects += settle(core, effects)
    effects += vote(core, pre_vote=False)
    effects += settle(core, effects)
    assert core.role is Role.LEADER
    return effects


def vote(core: RaftCore, *, pre_vote: bool) -> list[Effect]:
    """The vote of 2."""
    term = core.term + 1 if pre_vote else core.term
    answer = VoteResponse(core.term, True, pre_vote, term, True)
    return core.step(Received(ReplicaId(2), answer, 1))


def settle(core: RaftCore, effects: list[Effect]) -> list[Effect]:
    """The disk is done."""
    return core.step(Persisted(max((e.id for e in effects if isinstance(e, Persist)), default=0)))


def updates(effects: list[Effect], to: int) -> list[UpdateRequest]:
    """What goes to one peer."""
    return [
        e.message
        for e in effects
        if isinstance(e, Send) and e.to == to and isinstance(e.message, UpdateRequest)
    ]


def accept(
    core: RaftCore, peer: int, index: int, *, preceding: int = 0, read: int = 0, now: int = 5
) -> list[Effect]:
    """A peer has everything up to `index` on its disk."""
    opid = OpId(core.log.term_at(index) or 0, index)
    answer = UpdateResponse(core.term, True, opid, read_context=read, preceding_index=preceding)
    return core.step(Received(ReplicaId(peer), answer, now))


def leader_in_step(options: RaftOptions | None = None) -> RaftCore:
    """A leader of three whose peers hold its no-op."""
    core = RaftCore(options or RaftOptions(), ReplicaId(1), initial(3), random.Random(1))
    lead(core)
    accept(core, 2, 1)
    accept(core, 3, 1)
    assert core.commit_index == 1
    return core


def _rank(effect: object) -> int:
    """Where an effect stands among those of one turn, by its kind."""
    if isinstance(effect, Send):
        return 0 if effect.after == 0 else 2
    return 1 if isinstance(effect, Persist) else 3


def test_one_turn_makes_one_persist_and_one_message_per_peer() -> None:
    core = leader_in_step()
    effects = core.step_many([Propose(n, EntryKind.WRITE, b"w") for n in range(100)])
    persists = [e for e in effects if isinstance(e, Persist)]
    assert [len(p.entries) for p in persists] == [100]
    for peer in (2, 3):
        assert [len(u.entries) for u in updates(effects, peer)] == [100]
    assert [e.opid.index for e in effects if isinstance(e, Proposed)] == list(range(2, 102))
    ranks = [_rank(e) for e in effects]
    assert ranks == sorted(ranks)
    assert {0, 1} <= set(ranks)  # its peers receive while it writes


def test_what_is_under_way_to_a_peer_is_bounded() -> None:
    core = leader_in_step(RaftOptions(inflight_bytes_max=1000, batch_bytes_max=300))
    effects = core.step_many([Propose(n, EntryKind.WRITE, b"x" * 52) for n in range(50)])
    sent = updates(effects, 2)
    assert [len(u.entries) for u in sent] == [3, 3, 3, 3]
    effects = accept(core, 2, 4, preceding=1)
    assert [(u.entries[0].index, len(u.entries)) for u in updates(effects, 2)] == [(14, 3)]


def test_proposals_are_throttled_before_memory_is_full() -> None:
    core = leader_in_step(RaftOptions(uncommitted_bytes_max=10 * (52 + ENTRY_COST_BYTES)))
    effects = core.step_many([Propose(n, EntryKind.WRITE, b"x" * 52) for n in range(50)])
    refused = [e for e in effects if isinstance(e, ProposalRefused)]
    assert refused and all(e.code is Code.THROTTLED for e in refused)
    assert len([e for e in effects if isinstance(e, Proposed)]) == 11


def test_a_slow_peer_is_served_from_the_owners_log() -> None:
    core = leader_in_step(RaftOptions(tail_bytes_max=1000))
    for n in range(100):
        effects = core.step(Propose(n, EntryKind.WRITE, b"x" * 52))
        settle(core, effects)
        accept(core, 2, core.log.last_index, preceding=core.log.last_index - 1)
    assert core.log.tail_first > 50
    refusal = UpdateResponse(core.term, False, OpId(1, 1), 2, 0, preceding_index=5)
    effects = core.step(Received(ReplicaId(3), refusal, 6))
    effects += accept(core, 3, 1, preceding=1)
    asked = [e for e in effects if isinstance(e, ReadLog)]
    assert [(e.to, e.first_index) for e in asked] == [(3, 2)]
    read = tuple(Entry(1, i, EntryKind.WRITE, 0, b"x" * 52) for i in range(2, 9))
    effects = core.step(LogRead(ReplicaId(3), 2, read))
    assert updates(effects, 3)[0].entries == read


def test_a_peer_below_the_logs_start_needs_a_copy() -> None:
    core = leader_in_step()
    for n in range(5):
        settle(core, core.step(Propose(n, EntryKind.WRITE, b"w")))
        accept(core, 2, core.log.last_index, preceding=core.log.last_index - 1)
    core.step(Compacted(OpId(1, 4)))
    refusal = UpdateResponse(core.term, False, OpId(1, 1), 2, 0, preceding_index=5)
    effects = core.step(Received(ReplicaId(3), refusal, 6))
    assert [e.replica_id for e in effects if isinstance(e, PeerNeedsCopy)] == [3]


def test_reads_of_a_turn_share_one_round() -> None:
    core = leader_in_step()
    effects = core.step_many([RequestRead(n) for n in range(10)])
    asked = updates(effects, 2)
    assert len(asked) == 1 and asked[0].read_context == 1
    effects = accept(core, 2, 1, read=1)
    assert [(e.context, e.index) for e in effects if isinstance(e, ReadReady)] == [(n, 1) for n in range(10)]


def test_nothing_is_handed_out_before_it_is_on_the_own_disk() -> None:
    core = leader_in_step()
    effects = core.step(Propose(1, EntryKind.WRITE, b"w"))
    assert not [
        e
        for e in accept(core, 2, 2, preceding=1) + accept(core, 3, 2, preceding=1)
        if isinstance(e, Committed)
    ]
    assert core.commit_index == 2
    assert [e.entries[0].index for e in settle(core, effects) if isinstance(e, Committed)] == [2]


def test_answers_of_two_turns_in_one_do_not_vouch_for_a_dropped_suffix() -> None:
    """Two leaders' entries in one turn: what was vouched for gets a Persist of its own before it goes."""
    core = RaftCore(RaftOptions(), ReplicaId(2), initial(3), random.Random(1))
    core.step(Start(0))
    first = UpdateRequest(1, OPID_NONE, entries(1, 1), 0)
    second = UpdateRequest(2, OPID_NONE, (Entry(2, 1, EntryKind.WRITE, 0, b""),), 0)
    effects = core.step_many([Received(ReplicaId(1), first, 1), Received(ReplicaId(3), second, 2)])
    persists = [e for e in effects if isinstance(e, Persist)]
    assert [(p.truncate_from, len(p.entries)) for p in persists] == [(None, 2), (1, 1)]
    assert [(e.to, e.after) for e in effects if isinstance(e, Send)] == [
        (1, persists[0].id),
        (3, persists[1].id),
    ]


def test_a_tick_is_asked_for_only_when_it_is_due() -> None:
    core = leader_in_step()
    assert core.next_deadline_ms == 1 + 75
    assert core.step(Tick(50)) == []
    assert len(updates(core.step(Tick(80)), 2)) == 1


def test_entries_that_go_out_are_a_heartbeat_too() -> None:
    core = leader_in_step()
    for now in (60, 120, 180):
        core.step(Tick(now))
        core.step(Propose(now, EntryKind.WRITE, b"w"))
        accept(core, 2, core.log.last_index, now=now)
        accept(core, 3, core.log.last_index, now=now)
    assert core.next_deadline_ms <= 180 + 75
    assert updates(core.step(Tick(250)), 2) == []
    (beat,) = updates(core.step(Tick(255)), 2)
    assert beat.commit_index == core.commit_index == core.log.last_index


def test_a_peer_that_stopped_answering_is_probed_though_entries_go_out_all_the_time() -> None:
    core = leader_in_step()
    for now in range(20, 600, 20):
        core.step(Tick(now))
        core.step(Propose(now, EntryKind.WRITE, b"w"))
        accept(core, 3, core.log.last_index, now=now)
    assert {p.replica_id: p.state for p in core.status().peers} == {
        2: PeerState.PROBE,
        3: PeerState.REPLICATE,
    }


def test_where_answers_come_late_heartbeats_go_beside_the_entries() -> None:
    """Entries may wait behind those of other groups; what tells the peer that its leader lives must not."""
    core = leader_in_step()
    empty = []
    for now in range(20, 300, 20):
        effects = core.step(Tick(now)) + core.step(Propose(now, EntryKind.WRITE, b"w"))
        accept(core, 3, core.log.last_index, now=now)
        empty += [now for update in updates(effects, 2) if not update.entries]
    assert empty and max(b - a for a, b in zip([0, *empty], [*empty, 300])) <= 120


def test_a_vote_in_a_term_that_it_knew_already_is_on_disk_before_it_is_given() -> None:
    """Forgotten in a restart, it could be given again, and the term have two leaders."""
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), leader_hint=None), random.Random(1))
    core.step(Start(0))
    settle(core, core.step(Received(ReplicaId(2), VoteResponse(7, False, False, 1, True), 5)))
    assert (core.term, core.voted_for) == (7, None)
    effects = core.step(Received(ReplicaId(3), VoteRequest(7, OpId(0, 0), False, True, ""), 5))
    (persist,) = [e for e in effects if isinstance(e, Persist)]
    assert persist.hard_state == HardState(7, ReplicaId(3))
    (answer,) = [e for e in effects if isinstance(e, Send)]
    assert isinstance(answer.message, VoteResponse) and answer.message.granted
    assert answer.after == persist.id


def test_what_was_compared_with_one_leader_is_not_with_the_next() -> None:
    """A follower commits only what is known to be the new leader's, though it holds more."""
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), leader_hint=None), random.Random(1))
    core.step(Start(0))
    settle(core, core.step(Received(ReplicaId(2), UpdateRequest(1, OPID_NONE, entries(1, 1, 1), 0), 5)))
    assert core.log.last_index == 3
    core.step(Received(ReplicaId(3), UpdateRequest(2, OpId(1, 1), (), 3), 900))
    assert (core.term, core.commit_index) == (2, 1)


def test_the_log_is_held_for_the_voter_that_lags_most() -> None:
    """Followers go by this too: the next leader could not bring the voter up to date without a copy."""
    core = leader_in_step()
    settle(core, core.step_many([Propose(n, EntryKind.WRITE, b"w") for n in range(5)]))
    accept(core, 2, 6, preceding=1)
    assert (core.commit_index, core.all_replicated_index) == (6, 1)
    accept(core, 3, 4, preceding=1)
    assert core.all_replicated_index == 4


def test_a_learner_does_not_vote_in_its_own_right() -> None:
    peers = (*configuration(1).peers, Peer(NodeId("f" * 32), ReplicaId(2), "", MemberType.NON_VOTER))
    core = RaftCore(
        RaftOptions(),
        ReplicaId(2),
        InitialState(0, None, OPID_NONE, Configuration(-1, peers)),
        random.Random(1),
    )
    core.step(Start(0))
    assert not [
        e for e in core.step(Tick(10_000)) if isinstance(e, Send) and isinstance(e.message, VoteRequest)
    ]
    assert core.role is Role.LEARNER


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=7), st.integers(0, 30))
def test_the_commit_index_is_what_sorting_and_counting_says(peers: list[tuple[int, bool]], own: int) -> None:
    core = RaftCore(RaftOptions(), ReplicaId(1), initial(len(peers) + 1), random.Random(1))
    settle(core, core.step(Start(0)))
    for pre_vote in (True, False):
        for number in range(2, len(peers) + 2):
            answer = VoteResponse(core.term, True, pre_vote, 1, True)
            settle(core, core.step(Received(ReplicaId(number), answer, 1)))
    assert (core.role, core.log.last_index) == (Role.LEADER, 1)
    asked = core.last_persist_id
    for n in range(29):
        core.step(Propose(n, EntryKind.WRITE, b""))
    turn: list[Event] = []
    for number, (match, failed) in enumerate(peers, start=2):
        answer = UpdateResponse(1, True, OpId(1 if match else 0, match))
        turn.append(Received(ReplicaId(number), answer, 2))
        if failed:
            turn.append(Received(ReplicaId(number), UpdateResponse(1, False, failed=True), 2))
    own = max(own, 1)  # the first entry was persisted with the election
    core.step_many([*turn, Persisted(asked + own - 1)])
    counted = [own, *(0 if failed else match for match, failed in peers)]
    need = len(counted) // 2 + 1
    dumb = max(i for i in range(31) if sum(1 for c in counted if c >= i) >= need)
    assert core.commit_index == dumb


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.randoms(use_true_random=False))
def test_the_log_view_is_a_list_with_a_short_memory(steps: list[int], rng: random.Random) -> None:
    view = LogView(OPID_NONE, configuration(1), (), 0, 300)
    twin: list[Entry] = []
    term, persist_id = 1, 0
    for step in steps:
        if step == 0:
            term += rng.randint(0, 2)
            entry = Entry(term, len(twin) + 1, EntryKind.WRITE, 0, b"x" * rng.randint(0, 60))
            view.append(entry)
            twin.append(entry)
        elif step == 1:
            persist_id += 1
            view.take_persist(persist_id)
            view.persisted(persist_id)
            view.hand_out(rng.randint(view.handed_index, view.last_index))
        elif view.handed_index < view.last_index and not view.dirty:
            cut = rng.randint(view.handed_index + 1, view.last_index)
            assert view.truncate(cut) == tuple(twin[cut - 1 :])
            del twin[cut - 1 :]
        assert view.last_index == len(twin)
        assert [view.term_at(i) for i in range(1, len(twin) + 1)] == [e.term for e in twin]
        assert view.tail() == tuple(twin[view.tail_first - 1 :])
        assert view.unhanded_bytes == sum(e.size_bytes for e in twin[view.handed_index :])


def reached(effects: list[Effect]) -> list[tuple[int, bool]]:
    return [(e.replica_id, e.reached) for e in effects if isinstance(e, PeerReached)]


def unreached(core: RaftCore) -> list[int]:
    return [p.replica_id for p in core.status().peers if p.unreached]


def test_a_peer_that_does_not_answer_for_long_is_told_of_once_and_so_is_its_first_answer() -> None:
    core = leader_in_step(RaftOptions(unreached_ms=2_000))
    told: list[tuple[int, bool]] = []
    for now in range(75, 4_000, 75):
        told += reached(accept(core, 2, 1, now=now))
        told += reached(core.step(Tick(now)))
        assert (unreached(core) == [3]) == (now > 2_005)
    assert told == [(3, False)]
    assert reached(accept(core, 3, 1, now=4_000)) == [(3, True)] and unreached(core) == []
    assert reached(core.step(Tick(4_100))) == []


def test_a_new_leader_believes_of_nobody_that_it_does_not_answer() -> None:
    """However late it is elected: silence counts from when it began to ask."""
    core = RaftCore(RaftOptions(unreached_ms=2_000), ReplicaId(1), initial(3), random.Random(1))
    lead(core, 100_000)
    for now in range(100_000, 101_900, 75):
        told = reached(accept(core, 2, 1, now=now)) + reached(core.step(Tick(now)))
        assert told == [] and unreached(core) == []


def failed(core: RaftCore, peer: int, now: int = 5) -> list[Effect]:
    """A peer says that it is FAILED."""
    answer = UpdateResponse(core.term, False, OpId(0, 0), failed=True)
    return core.step(Received(ReplicaId(peer), answer, now))


def sound(effects: list[Effect]) -> list[tuple[int, bool]]:
    return [(e.replica_id, e.sound) for e in effects if isinstance(e, PeerSound)]


def test_a_peer_that_has_failed_is_told_of_once_and_so_is_its_return() -> None:
    """Nobody took back what was said of it: it was replaced, though it was well."""
    core = leader_in_step()
    assert [sound(failed(core, 3)) for _ in range(3)] == [[(3, False)], [], []]
    assert [p.replica_id for p in core.status().peers if p.failed] == [3]
    assert [sound(accept(core, 3, 1)) for _ in range(3)] == [[(3, True)], [], []]
    assert not any(p.failed for p in core.status().peers)
    assert sound(failed(core, 3)) == [(3, False)]


def test_a_peer_that_has_failed_and_is_silent_since_is_told_of_as_any_other() -> None:
    """One whose node was started again and again was taken for FAILED, and nobody knew that nothing was heard of it. While
    it says that it is FAILED it answers."""
    core = leader_in_step(RaftOptions(unreached_ms=2_000))
    told: list[tuple[int, bool]] = []
    for now in range(75, 8_000, 75):
        told += reached(accept(core, 2, 1, now=now))
        if now < 4_000:
            told += reached(failed(core, 3, now))
        told += reached(core.step(Tick(now)))
        assert (unreached(core) == [3]) == (now > 3_975 + 2_000)
    assert told == [(3, False)]
    assert [(p.failed, p.unreached, p.last_heard_ms) for p in core.status().peers if p.replica_id == 3] == [
        (True, True, 3_975)
    ]
    assert reached(failed(core, 3, 8_000)) == [(3, True)] and unreached(core) == []
    assert reached(core.step(Tick(8_075))) == []


def test_a_peer_that_is_sound_again_counts_with_what_it_held_before() -> None:
    """It acknowledges nothing new: what it and the leader hold was not committed before somebody wrote again."""
    core = leader_in_step()
    effects = core.step(Propose(1, EntryKind.WRITE, b"w"))
    accept(core, 3, 2, preceding=1)
    failed(core, 3)
    settle(core, effects)
    assert core.commit_index == 1
    accept(core, 3, 2, preceding=2)
    assert core.commit_index == 2


def refuse(core: RaftCore, peer: int, at: int, last: OpId, *, asked: int, now: int) -> list[Effect]:
    """A peer whose log ends at `last` does not hold entry `at`, as it was asked at `asked`."""
    answer = UpdateResponse(core.term, False, last, last.index + 1, sent_ms=asked, preceding_index=at)
    return core.step(Received(ReplicaId(peer), answer, now))


def test_a_peer_that_lost_what_it_acknowledged_is_told_of_and_sent_it_again() -> None:
    """Its newest volume was put back after an older copy of it had acknowledged entries in its name."""
    core = leader_in_step()
    settle(core, core.step_many([Propose(n, EntryKind.WRITE, b"w") for n in range(3)]))
    accept(core, 3, 4, now=100)
    assert core.commit_index == 4
    stale = refuse(
        core, 3, 4, OpId(0, 0), asked=100, now=150
    )  # sent before the leader knew: it proves nothing
    assert not [e for e in stale if isinstance(e, PeerForgot)]
    found = refuse(core, 3, 4, OpId(0, 0), asked=160, now=170)
    assert [e.replica_id for e in found if isinstance(e, PeerForgot)] == [3]
    assert [e.index for m in updates(found, 3) for e in m.entries] == [1, 2, 3, 4]
    assert core.commit_index == 4
    core.step(Propose(9, EntryKind.WRITE, b"w"))  # until it acknowledges again its copy makes no majority
    accept(core, 3, 4, preceding=0, now=190)
    assert {p.replica_id: p.match_index for p in core.status().peers} == {2: 1, 3: 4}
    again = refuse(core, 3, 9, OpId(core.term, 4), asked=200, now=210)
    assert not [e for e in again if isinstance(e, PeerForgot)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("match", 3),  # the log ends at 2
        ("next", 1),
        ("next", 9),
        ("probe_sent", True),
        ("inflight", deque([(2, 10)])),
        ("inflight_bytes", 5),
        ("window_bytes", 0),
        ("moved_ms", 1_000_000),
        ("heard_ms", -1),
        ("reading", 9),
        ("departing_until_ms", 5),
        ("hold_from", 1),
        ("round_target", 9),
    ],
)
def test_each_field_of_progress_is_held_to_its_invariant(field: str, value: object) -> None:
    core = leader_in_step()
    check(core)
    setattr(core.progress[0], field, value)
    with pytest.raises(InvariantViolation, match="peer 2: "):
        check(core)
