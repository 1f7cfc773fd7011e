"""Promises that one line of the core keeps, each asked for by itself. Simulations would seldom meet them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.model.config import Configuration, MemberType, Peer, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, InvariantViolation
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import (
    ChangeCommitted,
    ChangeRefused,
    ConfigChanged,
    Effect,
    Persist,
    ProposalRefused,
    ReadLog,
    ReadReady,
    ReadRefused,
    Role,
    Send,
    TransferDone,
    TransferFailed,
)
from stele.raft.events import (
    ChangeType,
    LogRead,
    Persisted,
    Propose,
    ProposeChange,
    Received,
    RequestRead,
    Start,
    Tick,
    TransferLeadership,
)
from stele.raft.log import LogView
from stele.raft.messages import TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.raft.test_core import (
    accept,
    configuration,
    entries,
    failed,
    initial,
    leader_in_step,
    refuse,
    settle,
    updates,
)


def follower(log: tuple[Entry, ...] = (), **others: object) -> RaftCore:
    """Replica 1 of three, led by nobody yet."""
    begin = replace(initial(3, log, len(log)), leader_hint=None, **others)  # type: ignore[arg-type]
    core = RaftCore(RaftOptions(), ReplicaId(1), begin, random.Random(1))
    core.step(Start(0))
    return core


def removal(number: int, core: RaftCore, context: int = 1) -> ProposeChange:
    peer = Peer(NodeId(f"{number:032x}"), ReplicaId(number), "")
    return ProposeChange(context, ChangeType.REMOVE, peer, core.config.opid_index)


def stands(effects: list[Effect]) -> bool:
    return any(isinstance(e, Send) and isinstance(e.message, VoteRequest) for e in effects)


def indexes(effects: list[Effect], to: int) -> list[int]:
    return [e.index for update in updates(effects, to) for e in update.entries]


# The log


def test_the_configuration_of_a_compacted_log_is_the_newest_one_below_its_start() -> None:
    view = LogView(OPID_NONE, configuration(3), (), 0, 10_000)
    for index, count in ((1, 2), (2, 1)):
        payload = encode_configuration(replace(configuration(count), opid_index=index))
        view.append(Entry(1, index, EntryKind.CONFIG, 0, payload))
    view.append(Entry(1, 3, EntryKind.WRITE, 0, b""))
    view.take_persist(1)
    view.persisted(1)
    view.hand_out(3)
    view.compact(OpId(1, 3))
    assert len(view.config.peers) == len(view.config_at(3).peers) == 1


def test_what_was_not_handed_out_is_not_compacted() -> None:
    view = LogView(OPID_NONE, configuration(3), (), 0, 10_000)
    for entry in entries(1, 1, 1):
        view.append(entry)
    view.take_persist(1)
    view.persisted(1)
    view.hand_out(2)
    with pytest.raises(InvariantViolation, match="not a committed entry"):
        view.compact(OpId(1, 3))
    view.compact(OpId(1, 2))
    assert view.start == OpId(1, 2)


# What must be on disk first


def test_a_refusal_waits_for_the_term_that_it_tells() -> None:
    """The term was taken in an earlier turn, and is still being written."""
    core = follower()
    (persist,) = [
        e
        for e in core.step(Received(ReplicaId(2), VoteResponse(7, False, False, 1, True), 5))
        if isinstance(e, Persist)
    ]
    (answer,) = [
        e
        for e in core.step(Received(ReplicaId(3), UpdateRequest(1, OPID_NONE, (), 0), 6))
        if isinstance(e, Send)
    ]
    assert isinstance(answer.message, UpdateResponse) and answer.message.term == 7
    assert answer.after == persist.id


# How fresh rows are


def test_a_follower_is_no_fresher_than_what_it_handed_out() -> None:
    core = follower()
    written = core.step(Received(ReplicaId(2), UpdateRequest(1, OPID_NONE, entries(1, 1), 2), 10))
    core.step(Received(ReplicaId(2), UpdateRequest(1, OpId(1, 2), (), 2), 20))
    assert core.caught_up_ms is None  # it knows that both are committed, and they are not on its disk
    settle(core, written)
    core.step(Received(ReplicaId(2), UpdateRequest(1, OpId(1, 2), (), 2), 30))
    assert core.caught_up_ms == 30


def test_a_leader_vouches_for_the_time_before_another_can_have_replaced_it() -> None:
    core = leader_in_step()
    accept(core, 2, 1, now=1_000)
    core.step(Tick(1_000))
    assert core.caught_up_ms == 1_000 - RaftOptions().election_max_ms


# Replicas that have FAILED, or hold no rows


def test_a_failed_replica_confirms_no_read() -> None:
    core = leader_in_step()
    core.step(RequestRead(1))
    answer = UpdateResponse(core.term, False, OPID_NONE, read_context=1, failed=True)
    for peer in (2, 3):
        effects = core.step(Received(ReplicaId(peer), answer, 6))
        assert not [e for e in effects if isinstance(e, ReadReady)]


def test_failed_replicas_keep_no_leader_in_office() -> None:
    core = leader_in_step()
    for now in range(75, 3_000, 75):
        failed(core, 2, now)
        failed(core, 3, now)
        core.step(Tick(now))
    assert core.role is Role.FOLLOWER


def test_a_leader_without_rows_takes_no_write_and_serves_no_read() -> None:
    """Though it is a voter by the configuration: its rows are still being copied."""
    begin = replace(initial(1), witness_without_data=True)
    core = RaftCore(RaftOptions(), ReplicaId(1), begin, random.Random(1))
    settle(core, core.step(Start(0)))
    for now in range(100, 20_000, 100):
        settle(core, core.step(Tick(now)))
    assert core.role is Role.LEADER
    effects = core.step_many([Propose(1, EntryKind.WRITE, b"w"), RequestRead(2)])
    refused = [e.code for e in effects if isinstance(e, ProposalRefused | ReadRefused)]
    assert refused == [Code.NOT_LEADER, Code.NOT_LEADER]


def test_a_witness_takes_over_from_no_leader_with_rows() -> None:
    peers = list(configuration(3).peers)
    peers[0] = replace(peers[0], member_type=MemberType.WITNESS, witness_start=OpId(1, 1))
    core = follower(entries(1), config=Configuration(-1, tuple(peers)))
    core.step(Received(ReplicaId(2), UpdateRequest(1, OpId(1, 1), (), 1), 10))
    assert not stands(core.step(Received(ReplicaId(2), TimeoutNow(1), 20)))


# Terms


def test_a_leader_follows_an_answer_of_a_later_term() -> None:
    core = leader_in_step()
    core.step(Received(ReplicaId(2), UpdateResponse(9, False, OPID_NONE), 6))
    assert (core.role, core.term) == (Role.FOLLOWER, 9)


@pytest.mark.parametrize(("term", "does"), [(1, False), (2, True)])
def test_only_the_leader_of_this_term_asks_to_stand(term: int, does: bool) -> None:
    core = follower()
    settle(core, core.step(Received(ReplicaId(2), UpdateRequest(2, OPID_NONE, entries(1), 0), 10)))
    assert stands(core.step(Received(ReplicaId(2), TimeoutNow(term), 20))) is does


# What a peer may be sent


def test_a_peer_that_leaves_is_not_sent_its_removal_before_that_is_committed() -> None:
    """Also not where another peer is sent the same entries with it."""
    core = leader_in_step()
    effects = core.step_many([Propose(1, EntryKind.WRITE, b"w"), removal(3, core)])
    assert (indexes(effects, 2), indexes(effects, 3)) == ([2, 3], [2])


def test_nor_when_it_is_probed() -> None:
    core = leader_in_step()
    core.step_many([Propose(1, EntryKind.WRITE, b"w"), removal(3, core)])
    effects = refuse(core, 3, 1, OPID_NONE, asked=4, now=6)
    effects += core.step(Received(ReplicaId(3), UpdateResponse(1, False, OPID_NONE, 1, preceding_index=2), 7))
    for now in range(100, 900, 100):
        effects += core.step(Tick(now))
        accept(core, 2, 1, now=now)
    assert 2 in indexes(effects, 3) and 3 not in indexes(effects, 3)


def slow_peer() -> RaftCore:
    """Peer 3 is at 1, the log at 101, and the leader's memory does not hold what is between."""
    core = leader_in_step(RaftOptions(tail_bytes_max=1000))
    for n in range(100):
        settle(core, core.step(Propose(n, EntryKind.WRITE, b"x" * 52)))
        accept(core, 2, core.log.last_index, preceding=core.log.last_index - 1)
    effects = core.step(
        Received(ReplicaId(3), UpdateResponse(core.term, False, OpId(1, 1), 2, preceding_index=5), 6)
    )
    effects += accept(core, 3, 1, preceding=1)
    assert [e.first_index for e in effects if isinstance(e, ReadLog)] == [2]
    return core


def test_nor_when_its_entries_are_read_from_disk() -> None:
    core = slow_peer()
    core.step(removal(3, core))
    change = core.log.last_index
    read = tuple(Entry(1, i, EntryKind.WRITE, 0, b"x" * 52) for i in range(2, change + 1))
    sent = indexes(core.step(LogRead(ReplicaId(3), 2, read)), 3)
    assert sent == list(range(2, change))


def test_entries_that_were_read_before_the_log_changed_are_not_sent() -> None:
    core = slow_peer()
    other = tuple(Entry(7, i, EntryKind.WRITE, 0, b"x" * 52) for i in range(2, 9))
    assert indexes(core.step(LogRead(ReplicaId(3), 2, other)), 3) == []


def test_an_acknowledgement_that_comes_late_takes_nothing_back() -> None:
    core = leader_in_step()
    settle(core, core.step_many([Propose(n, EntryKind.WRITE, b"w") for n in range(4)]))
    accept(core, 3, 5, preceding=1)
    accept(core, 3, 3, preceding=1)
    assert {p.replica_id: p.match_index for p in core.status().peers}[ReplicaId(3)] == 5


# Changes and transfers


def transfer(core: RaftCore, target: int, context: int = 9) -> list[Effect]:
    return core.step(TransferLeadership(context, ReplicaId(target), 6))


def test_no_change_begins_while_leadership_is_handed_over() -> None:
    core = leader_in_step()
    transfer(core, 2)
    (refused,) = [e for e in core.step(removal(3, core)) if isinstance(e, ChangeRefused)]
    assert refused.code is Code.STEPPING_DOWN


def test_a_replica_that_caught_up_is_not_promoted_while_leadership_is_handed_over() -> None:
    core = leader_in_step()
    learner = Peer(NodeId("4".rjust(32, "0")), ReplicaId(4), "", MemberType.NON_VOTER, promote=True)
    core.step(ProposeChange(1, ChangeType.ADD, learner, core.config.opid_index))
    accept(core, 2, 2, preceding=1)
    accept(core, 3, 2, preceding=1)
    settle(core, [Persist(core.last_persist_id, None, None, ())])
    assert core.commit_index == 2
    core.step(Propose(1, EntryKind.WRITE, b"w"))  # so that 2 does not take over at once
    transfer(core, 2)
    effects = accept(core, 4, 3, preceding=3)
    assert not [e for e in effects if isinstance(e, ConfigChanged)]


def test_a_change_is_told_as_done_when_it_is_committed() -> None:
    core = leader_in_step()
    effects = core.step_many([Propose(1, EntryKind.WRITE, b"w"), removal(3, core)])
    settle(core, effects)
    assert not [e for e in accept(core, 2, 2, preceding=1) if isinstance(e, ChangeCommitted)]
    assert core.commit_index == 2
    assert [e for e in accept(core, 2, 3, preceding=1) if isinstance(e, ChangeCommitted)]


@pytest.mark.parametrize(("leader", "done"), [(2, True), (3, False)])
def test_a_transfer_ends_well_only_when_its_target_leads(leader: int, done: bool) -> None:
    core = leader_in_step()
    transfer(core, 2)
    effects = core.step(Received(ReplicaId(leader), UpdateRequest(2, OpId(1, 1), (), 1), 10))
    ended = [type(e) for e in effects if isinstance(e, TransferDone | TransferFailed)]
    assert ended == [TransferDone if done else TransferFailed]


def test_there_is_one_transfer_at_a_time() -> None:
    """Also while the first waits for its target to catch up."""
    core = leader_in_step()
    core.step(Propose(1, EntryKind.WRITE, b"w"))
    transfer(core, 2)
    assert [e.code for e in transfer(core, 3, 10) if isinstance(e, TransferFailed)] == [
        Code.CHANGE_IN_PROGRESS
    ]


def test_a_request_to_stand_that_was_lost_is_sent_again() -> None:
    core = leader_in_step()
    for now in (6, 150):
        effects = transfer(core, 2) if now == 6 else core.step(Tick(now))
        assert [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, TimeoutNow)] == [2]


def test_a_write_under_way_vouches_for_nothing_that_was_dropped_since() -> None:
    """Entries 2 and 3 of one leader are being written when another leader replaces them."""
    core = RaftCore(RaftOptions(), ReplicaId(1), initial(3), random.Random(1))
    core.step(Start(0))
    first = core.step(Received(ReplicaId(2), UpdateRequest(1, OpId(0, 0), entries(1, 1, 1), 0), 1))
    (written,) = [e.id for e in first if isinstance(e, Persist)]
    other = (Entry(2, 2, EntryKind.WRITE, 0, b"other"),)
    effects = core.step(Received(ReplicaId(3), UpdateRequest(2, OpId(1, 1), other, 0), 2))
    later = max(e.id for e in effects if isinstance(e, Persist))
    assert core.log.last_opid == OpId(2, 2)
    core.step(Persisted(written))
    assert core.log.durable_index == 1
    core.step(Persisted(later))
    assert core.log.durable_index == 2
