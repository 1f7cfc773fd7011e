"""Leadership handed over: to whom, who is refused, and what happens to proposals meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.model.config import Configuration
from stele.model.entry import EntryKind
from stele.model.errors import Code
from stele.model.ids import OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import (
    Proposed,
    Role,
    Send,
    TransferDone,
    TransferFailed,
)
from stele.raft.events import (
    Propose,
    Received,
    Tick,
    TransferLeadership,
)
from stele.raft.messages import TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest
from tests.raft.test_core import accept, configuration, initial, lead, leader_in_step, settle
from tests.raft.test_safety import (
    LEARNER,
    peer,
    refusals,
)


def test_leadership_is_handed_to_nobody_without_rows() -> None:
    core = leader_in_step()
    core.step(Received(ReplicaId(2), UpdateResponse(core.term, True, OpId(1, 1), has_data=False), 6))
    refused = core.step(TransferLeadership(1, ReplicaId(2), 7))
    assert refusals(refused) == [(TransferFailed, Code.UNSAFE_CHANGE)]
    effects = core.step(TransferLeadership(2, None, 7))
    assert [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, TimeoutNow)] == [3]


def test_what_is_proposed_while_leadership_is_handed_over_waits_for_the_end_of_it() -> None:
    """From its beginning on, or a target that lags would never have all of it."""
    core = leader_in_step()
    core.step(Propose(1, EntryKind.WRITE, b"w"))
    core.step(TransferLeadership(2, ReplicaId(2), 10))
    assert not [e for e in core.step(Propose(3, EntryKind.WRITE, b"w")) if isinstance(e, Proposed)]
    effects = accept(core, 2, 2, preceding=1, now=11)
    assert [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, TimeoutNow)] == [2]
    assert not [e for e in core.step(Propose(4, EntryKind.WRITE, b"w")) if isinstance(e, Proposed)]
    accept(core, 3, 2, preceding=1, now=600)
    effects = core.step(Tick(700))
    assert [e.context for e in effects if isinstance(e, Proposed)] == [3, 4]


def test_a_hand_over_that_its_target_took_up_is_not_told_as_failed() -> None:
    """A tick and the target's vote request in one turn: TimeoutNow was due again, and so was taken for not sent."""
    core = leader_in_step()
    sent = core.step(TransferLeadership(7, ReplicaId(2), 7))
    assert any(isinstance(e, Send) and isinstance(e.message, TimeoutNow) for e in sent)
    asks = VoteRequest(core.term + 1, core.log.last_opid, ignore_live_leader=True)
    effects = core.step_many([Tick(80), Received(ReplicaId(2), asks, 81)])
    assert not any(isinstance(e, TransferFailed) for e in effects) and core.role is not Role.LEADER
    leads = UpdateRequest(core.term, core.log.last_opid, (), core.commit_index)
    effects = core.step(Received(ReplicaId(2), leads, 90))
    assert any(isinstance(e, TransferDone) for e in effects)


def heir(core: RaftCore, *leads: tuple[int, int], now: int = 7) -> list[int]:
    """To whom leadership goes where nobody is named."""
    known = tuple((ReplicaId(n), count) for n, count in leads)
    effects = core.step(TransferLeadership(1, None, now, known))
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, TimeoutNow)]


@pytest.mark.parametrize(
    ("leads", "to"), [((), 2), (((2, 4), (3, 4)), 2), (((2, 5), (3, 4)), 3), (((3, 1),), 2), (((2, 1),), 3)]
)
def test_leadership_goes_to_the_voter_that_leads_least(leads: tuple[tuple[int, int], ...], to: int) -> None:
    """It went to the first of the configuration: three restarts moved the leaders of 12 tablets to one node."""
    assert heir(leader_in_step(), *leads) == [to]


def test_a_voter_that_lags_is_not_handed_leadership_however_little_it_leads() -> None:
    core = leader_in_step()
    settle(core, core.step(Propose(1, EntryKind.WRITE, b"w")))
    for now in range(75, 600, 75):  # it answers each heartbeat, and has nothing new on its disk
        core.step(Tick(now))
        accept(core, 3, core.log.last_index, now=now)
        accept(core, 2, 1, now=now)
    assert heir(core, (2, 0), (3, 9), now=601) == [3]


def test_a_target_that_is_named_is_refused_at_once_while_it_lacks_much_of_the_log() -> None:
    """Proposals are held until it has all. They waited an election timeout for a target that was far behind."""
    core = leader_in_step()
    settle(core, core.step(Propose(1, EntryKind.WRITE, b"w")))
    for now in range(75, 600, 75):
        core.step(Tick(now))
        accept(core, 3, core.log.last_index, now=now)
        accept(core, 2, 1, now=now)
    (refused,) = [
        e
        for e in core.step(TransferLeadership(5, ReplicaId(2), 601, at_once=True))
        if isinstance(e, TransferFailed)
    ]
    assert refused.code is Code.NOT_READY and refused.message.startswith("replica 2 lacks 1 entries")
    assert [e for e in core.step(Propose(6, EntryKind.WRITE, b"w")) if isinstance(e, Proposed)]
    effects = core.step(TransferLeadership(7, ReplicaId(2), 602))
    assert not [e for e in effects if isinstance(e, TransferFailed)], "who may wait is not refused"


@pytest.mark.parametrize(
    ("target", "why"),
    [(9, "is not another member"), (1, "is not another member"), (2, "has FAILED"), (4, "is a NON_VOTER")],
)
def test_a_target_that_cannot_lead_is_refused_with_the_reason(target: int, why: str) -> None:
    config = Configuration(1, (*configuration(3).peers, peer(4, LEARNER)))
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), config=config), random.Random(1))
    lead(core)
    for n in (2, 3):
        accept(core, n, 1)
    core.step(Received(ReplicaId(2), UpdateResponse(core.term, True, OpId(1, 1), failed=True), 6))
    (refused,) = [
        e for e in core.step(TransferLeadership(5, ReplicaId(target), 7)) if isinstance(e, TransferFailed)
    ]
    assert refused.code is Code.UNSAFE_CHANGE and why in refused.message
