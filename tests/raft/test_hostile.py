"""Messages that no sound replica sends: they change nothing, and are told. A replica that stopped for them would be dead."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.model.entry import Entry, EntryKind
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import Effect, MessageIgnored, Role
from stele.raft.events import Propose, Received, Start
from stele.raft.invariants import check
from stele.raft.messages import Message, UpdateRequest, UpdateResponse
from tests.raft.test_core import accept, entries, initial, leader_in_step, settle

HUGE = (1 << 64) - 1


def follower(log: int = 3) -> RaftCore:
    """Replica 1, which follows 2 in term 5 and holds entries 1 to `log`, of which 2 are committed."""
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), leader_hint=None), random.Random(1))
    core.step(Start(0))
    settle(core, receive(core, 2, UpdateRequest(5, OPID_NONE, entries(*[5] * log), 2)))
    assert (core.role, core.leader, core.log.last_index, core.commit_index) == (Role.FOLLOWER, 2, log, 2)
    return core


def receive(core: RaftCore, sender: int, message: Message) -> list[Effect]:
    effects = core.step(Received(ReplicaId(sender), message, 5))
    check(core)
    return effects


def ignored(effects: list[Effect]) -> bool:
    return any(isinstance(effect, MessageIgnored) for effect in effects)


def entry(term: int, index: int) -> Entry:
    return Entry(term, index, EntryKind.WRITE, 0, b"hostile")


@pytest.mark.parametrize(
    ("preceding", "new"),
    [
        pytest.param(OpId(5, 3), (entry(5, 9),), id="gap behind the end"),
        pytest.param(OpId(5, 3), (entry(4, 4),), id="a term that falls"),
        pytest.param(OpId(0, 2), (entry(5, HUGE),), id="gap behind what is committed"),
        pytest.param(OpId(0, 1), (entry(5, 2), entry(5, 3), entry(1, 4)), id="a term that falls later"),
    ],
)
def test_entries_that_cannot_follow_are_ignored(preceding: OpId, new: tuple[Entry, ...]) -> None:
    core = follower()
    assert ignored(receive(core, 2, UpdateRequest(5, preceding, new, 2)))
    assert core.log.last_opid == OpId(5, 3)
    receive(core, 2, UpdateRequest(5, OpId(5, 3), (entry(5, 4),), 3))
    assert (core.log.last_index, core.commit_index) == (4, 3)


def test_a_second_leader_of_a_term_is_not_followed() -> None:
    core = follower()
    assert ignored(receive(core, 3, UpdateRequest(5, OpId(5, 2), (entry(5, 3), entry(5, 4)), HUGE)))
    assert (core.leader, core.log.last_index, core.commit_index) == (2, 3, 2)
    assert not ignored(receive(core, 3, UpdateRequest(6, OpId(5, 3), (), 2)))
    assert core.leader == 3
    assert ignored(receive(core, 2, UpdateRequest(6, OpId(5, 3), (), 2)))


def test_who_was_named_to_lead_has_its_term_once_it_does() -> None:
    core = RaftCore(
        RaftOptions(), ReplicaId(1), replace(initial(3), term=5, leader_hint=ReplicaId(2)), random.Random(1)
    )
    core.step(Start(0))
    receive(core, 2, UpdateRequest(5, OPID_NONE, (), 0))
    assert ignored(receive(core, 3, UpdateRequest(5, OPID_NONE, (), 0)))
    assert core.leader == 2


@pytest.mark.parametrize("sender", [1, 2, 3])
def test_a_leader_leads_on_where_another_claims_its_term(sender: int) -> None:
    core = leader_in_step()
    assert ignored(receive(core, sender, UpdateRequest(core.term, OPID_NONE, entries(1, 1), HUGE)))
    assert core.role is Role.LEADER
    core.step(Propose(1, EntryKind.WRITE, b"w"))
    accept(core, 2, 2, preceding=1)
    assert core.log.last_index == 2


@pytest.mark.parametrize(
    "answer",
    [
        UpdateResponse(1, True, OpId(1, HUGE), preceding_index=1),
        UpdateResponse(1, True, OpId(1, 2), preceding_index=1),
        UpdateResponse(1, True, OpId(1, 1), preceding_index=HUGE),
        UpdateResponse(1, False, OpId(1, 1), HUGE, HUGE, preceding_index=HUGE),
    ],
)
def test_an_answer_to_what_was_never_sent_counts_for_nothing(answer: UpdateResponse) -> None:
    """The leader believed its peer beyond the end of its own log, and stopped at its next heartbeat to it."""
    core = leader_in_step()
    assert ignored(receive(core, 2, answer))
    settle(core, core.step(Propose(1, EntryKind.WRITE, b"w")))
    accept(core, 2, 2, preceding=1)
    assert core.commit_index == 2


@pytest.mark.parametrize("preceding_index", [1, 2, 9])
def test_a_late_refusal_of_an_older_term_says_nothing_of_a_log(preceding_index: int) -> None:
    """A peer told the leader of term 1 that term 2 had begun. That leader has won term 2 since, with a shorter log."""
    core = leader_in_step()
    effects = core.step(Propose(1, EntryKind.WRITE, b"w"))
    before = core.status().peers[0]
    # The clock of the process that asked ran ahead of this one's.
    effects = receive(
        core, 2, UpdateResponse(core.term, False, sent_ms=10_000, preceding_index=preceding_index)
    )
    assert not ignored(effects)
    assert core.status().peers[0] == before
    accept(core, 2, 2, preceding=1)


def test_a_witness_never_believes_that_all_hold_more_than_it_does() -> None:
    core = follower()
    receive(core, 2, UpdateRequest(5, OpId(5, 3), (), 2, all_replicated_index=HUGE))
    assert core.all_replicated_index == 3
