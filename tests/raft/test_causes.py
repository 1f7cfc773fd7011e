"""Every effect that is told names the event it came from."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest

from stele.model.config import MemberType, Peer
from stele.model.entry import EntryKind
from stele.model.errors import InvariantViolation
from stele.model.ids import NodeId, OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.cause import END_OF_TURN, cause_of
from stele.raft.effects import (
    ConfigChanged,
    Effect,
    MessageIgnored,
    PeerNeedsCopy,
    PeerReached,
    PeerSound,
    RoleChanged,
    Send,
)
from stele.raft.events import (
    ChangeType,
    Compacted,
    DataArrived,
    Event,
    Fitness,
    LogRead,
    LogWritten,
    PeerFailed,
    Persisted,
    Promote,
    Propose,
    ProposeChange,
    Received,
    ReportFailed,
    RequestRead,
    Start,
    SyncStalled,
    Tick,
    TransferLeadership,
)
from stele.raft.messages import Message, TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.raft.test_core import accept, initial, lead, leader_in_step, settle

ONE = ReplicaId(1)
CAUSE = "heal/7f3a91c2-12: its node is silent"


def event_of(message: Message) -> Received:
    return Received(ReplicaId(2), message, 5)


NEWCOMER = Peer(NodeId("4" * 32), ReplicaId(4), "", MemberType.NON_VOTER, promote=True)
NAMED: list[tuple[Event, str]] = [
    (Start(0), "Start at 0 ms"),
    (Tick(612), "Tick at 612 ms"),
    (Fitness(False), "Fitness False"),
    (event_of(UpdateRequest(5, OpId(4, 17), (), 0)), "UpdateRequest of term 5 from 2 after 4.17"),
    (event_of(UpdateResponse(5, True, preceding_index=17)), "UpdateResponse of term 5 from 2 after 17"),
    (event_of(VoteRequest(5, OpId(4, 17))), "VoteRequest of term 5 from 2"),
    (event_of(VoteResponse(5, True, pre_vote=True)), "pre-vote VoteResponse of term 5 from 2"),
    (event_of(TimeoutNow(5)), "TimeoutNow of term 5 from 2"),
    (event_of(TimeoutNow(5, CAUSE)), f"TimeoutNow of term 5 from 2 for {CAUSE}"),
    (Propose(7, EntryKind.WRITE, b""), "Propose 7"),
    (ProposeChange(8, ChangeType.ADD, NEWCOMER, -1), "ProposeChange 8"),
    (ProposeChange(8, ChangeType.ADD, NEWCOMER, -1, CAUSE), CAUSE),
    (TransferLeadership(9, None, 5), "TransferLeadership 9"),
    (TransferLeadership(9, None, 5, (), CAUSE), CAUSE),
    (Promote(5, ""), "Promote"),
    (Promote(5, CAUSE), CAUSE),
    (Persisted(41), "Persisted 41"),
    (LogWritten(42), "LogWritten 42"),
    (LogRead(ReplicaId(3), 17, ()), "LogRead from 17 for 3"),
    (RequestRead(10), "RequestRead 10"),
    (DataArrived(), "DataArrived"),
    (PeerFailed(ReplicaId(3)), "PeerFailed 3"),
    (Compacted(OpId(4, 17)), "Compacted 4.17"),
    (ReportFailed("its disk is broken"), "ReportFailed"),
    (SyncStalled(612), "SyncStalled at 612 ms"),
]


@pytest.mark.parametrize(("event", "text"), NAMED)
def test_an_event_is_named_so(event: Event, text: str) -> None:
    assert cause_of(event) == text


def test_every_event_and_message_is_named() -> None:
    assert {type(event) for event, _ in NAMED} == set(get_args(Event))
    messages = {type(event.message) for event, _ in NAMED if isinstance(event, Received)}
    assert messages == set(get_args(Message))


def causes(effects: list[Effect], kind: type[Effect]) -> list[str]:
    """The causes of the effects of one kind."""
    return [str(getattr(effect, "cause", "")) for effect in effects if isinstance(effect, kind)]


def test_a_change_of_role_names_its_event() -> None:
    core = RaftCore(RaftOptions(), ONE, initial(3), random.Random(1))
    assert causes(lead(core), RoleChanged) == [
        "Start at 0 ms: started",
        "pre-vote VoteResponse of term 0 from 2: would get the votes of 1,2",
        "VoteResponse of term 1 from 2: votes of 1,2",
    ]
    assert causes(core.step(event_of(VoteRequest(9, OpId(1, 1), ignore_live_leader=True))), RoleChanged) == [
        "VoteRequest of term 9 from 2: replica 2 stands for term 9"
    ]


def test_of_several_events_of_a_turn_each_effect_names_its_own() -> None:
    core = leader_in_step(RaftOptions(unreached_ms=2_000))
    core.step_many([Tick(75), Received(ReplicaId(2), UpdateResponse(1, True, OpId(1, 1)), 590)])
    answers = [
        Received(ReplicaId(2), UpdateResponse(1, False, failed=True), 600),
        Received(ReplicaId(2), UpdateResponse(1, True, OpId(1, 1)), 601),
        Received(ReplicaId(3), UpdateResponse(1, False, failed=True, preceding_index=1), 602),
    ]
    assert causes(core.step_many(answers), PeerSound) == [
        "UpdateResponse of term 1 from 2 after 0: it says that it is FAILED",
        "UpdateResponse of term 1 from 2 after 0: it answers as a sound replica",
        "UpdateResponse of term 1 from 3 after 1: it says that it is FAILED",
    ]


def test_a_peer_that_does_not_answer_is_told_with_the_tick_that_found_it() -> None:
    core = leader_in_step(RaftOptions(unreached_ms=2_000))
    told: list[str] = []
    for now in range(75, 2_100, 75):
        accept(core, 2, 1, now=now)
        told += causes(core.step(Tick(now)), PeerReached)
    assert told == ["Tick at 2025 ms: no answer for 2000 ms"]
    assert causes(accept(core, 3, 1, now=2_100), PeerReached) == [
        "UpdateResponse of term 1 from 3 after 0: it answers"
    ]


def test_a_change_of_members_bears_the_cause_of_its_order_from_append_to_commit() -> None:
    core = leader_in_step()
    demoted = replace(core.config.peers[2], member_type=MemberType.NON_VOTER)
    order = ProposeChange(1, ChangeType.MODIFY, demoted, -1, CAUSE)
    effects = core.step(order)
    assert causes(effects, ConfigChanged) == [f"{CAUSE}: MODIFY of replica 3"]
    effects = settle(core, effects) + accept(core, 2, 2)
    assert causes(effects, ConfigChanged) == [f"{CAUSE}: a majority of 2 voters holds it"]


def test_a_promotion_bears_the_cause_of_the_order_that_added_the_peer() -> None:
    core = leader_in_step()
    settle(core, core.step(ProposeChange(1, ChangeType.ADD, NEWCOMER, -1, CAUSE)))
    accept(core, 2, 2)
    told = causes(accept(core, 4, 2), ConfigChanged)
    assert told == [f"{CAUSE}: replica 4 has caught up"]


def test_a_change_that_a_later_leader_commits_still_bears_its_cause() -> None:
    core = leader_in_step()
    demoted = replace(core.config.peers[2], member_type=MemberType.NON_VOTER)
    effects = core.step(ProposeChange(1, ChangeType.MODIFY, demoted, -1, CAUSE))
    settle(core, effects)
    told = core.step(event_of(UpdateRequest(2, core.log.last_opid, (), core.log.last_index)))
    assert causes(told, ConfigChanged) == [f"{CAUSE}: leader 2 of term 2 has committed it"]


def test_who_takes_a_leadership_over_bears_the_cause_of_the_order_to_hand_it_over() -> None:
    """The new leader's log said only who had led: of a drain or a heal it knew nothing."""
    core = leader_in_step()
    effects = core.step(TransferLeadership(9, ReplicaId(2), 7, (), CAUSE))
    (asked,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, TimeoutNow)]
    heir = RaftCore(RaftOptions(), ReplicaId(2), initial(3), random.Random(1))
    heir.step(Start(0))
    heir.step(Received(ONE, UpdateRequest(asked.term, OpId(0, 0), (), 0), 5))
    told = causes(heir.step(Received(ONE, asked, 7)), RoleChanged)
    assert told == [f"TimeoutNow of term 1 from 1 for {CAUSE}: replica 1 hands over"]


def test_what_follows_from_a_whole_turn_names_its_end() -> None:
    core = leader_in_step()
    core.step(Compacted(core.log.last_opid))
    refusal = UpdateResponse(1, False, conflict_index=1, preceding_index=1, sent_ms=6)
    told = causes(core.step(Received(ReplicaId(3), refusal, 7)), PeerNeedsCopy)
    assert [cause.partition(": ")[0] for cause in told] == [END_OF_TURN]


def test_an_ignored_message_is_told_by_its_own_name() -> None:
    core = leader_in_step()
    told = causes(core.step(event_of(UpdateRequest(1, OpId(1, 1), (), 0))), MessageIgnored)
    assert [cause.partition(": ")[0] for cause in told] == ["UpdateRequest of term 1 from 2 after 1.1"]


def test_a_core_that_broke_a_rule_names_what_it_was_taking_and_holds_no_event_else() -> None:
    """An event may hold the entries of a message; a group at rest would keep them in memory."""
    core = leader_in_step()
    assert core.state.event is None
    with pytest.raises(InvariantViolation):
        core.step_many([Tick(75), Persisted(99), Tick(80)])
    assert core.cause == "Persisted 99"
