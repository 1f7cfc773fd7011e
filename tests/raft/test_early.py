"""Proposals whose owner wants to know when every voter has written them: what a core tells, and that nothing follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.model.entry import EntryKind
from stele.model.ids import OpId, ReplicaId
from stele.raft import RaftCore
from stele.raft.effects import Effect, HeldByAll, Persist, ReadReady, Send
from stele.raft.events import ChangeType, LogWritten, Propose, ProposeChange, Received, RequestRead
from stele.raft.messages import UpdateRequest, UpdateResponse
from tests.raft.test_core import entries, leader_in_step, settle, updates
from tests.raft.test_promises import follower, removal


def held(effects: list[Effect]) -> list[int]:
    return [e.index for e in effects if isinstance(e, HeldByAll)]


def proposed(core: RaftCore, context: int = 7) -> tuple[int, list[Effect]]:
    """The index of a proposal that is to be answered early, and what it led to."""
    effects = core.step(Propose(context, EntryKind.WRITE, b"x", 1, True))
    return core.log.last_index, effects


def written_at(core: RaftCore, peer: int, index: int, *, failed: bool = False) -> list[Effect]:
    """A peer has written everything up to `index`, and synced what is committed."""
    synced = core.log.opid_at(core.commit_index)
    answer = UpdateResponse(core.term, True, synced, preceding_index=index - 1, written_index=index)
    return core.step(Received(ReplicaId(peer), replace(answer, failed=failed, success=not failed), 5))


def own_is_written(core: RaftCore) -> list[Effect]:
    return core.step(LogWritten(core.last_persist_id))


def test_a_leader_tells_what_every_voter_has_written_and_commits_nothing() -> None:
    core = leader_in_step()
    before = core.commit_index
    index, effects = proposed(core)
    assert all(update.early for update in updates(effects, 2) + updates(effects, 3) if update.entries)
    assert [e.tells_written for e in effects if isinstance(e, Persist)] == [True]
    assert not held(written_at(core, 2, index)) and not held(written_at(core, 3, index))
    assert held(own_is_written(core)) == [index]
    assert core.commit_index == before and core.log.durable_index < index
    assert not held(written_at(core, 2, index)), "once is enough"


@pytest.mark.parametrize("missing", [2, 3])
def test_a_majority_that_has_written_it_is_not_enough(missing: int) -> None:
    """One of them that loses power would leave a majority without it."""
    core = leader_in_step()
    index, _ = proposed(core)
    own_is_written(core)
    assert not held(written_at(core, 5 - missing, index))
    assert not held(written_at(core, missing, index, failed=True)), "a FAILED voter holds nothing"
    assert held(written_at(core, missing, index)) == [index]


def test_nothing_is_told_of_proposals_that_nobody_asks_about() -> None:
    core = leader_in_step()
    effects = core.step(Propose(7, EntryKind.WRITE, b"x", 1))
    assert not any(update.early for update in updates(effects, 2))
    assert not any(e.tells_written for e in effects if isinstance(e, Persist))
    index = core.log.last_index
    assert not held(written_at(core, 2, index) + written_at(core, 3, index) + own_is_written(core))


def test_nothing_is_told_while_members_change() -> None:
    """Those who elect the next leader may be others then."""
    core = leader_in_step()
    core.step(replace(removal(3, core), change_type=ChangeType.REMOVE))
    assert core.pending_change_index is not None
    index, _ = proposed(core)
    assert not held(written_at(core, 2, index) + written_at(core, 3, index) + own_is_written(core))


def test_a_read_waits_for_what_was_told_early() -> None:
    core = leader_in_step()
    index, _ = proposed(core)
    assert core.read_point == (core.term, core.commit_index)
    written_at(core, 2, index)
    written_at(core, 3, index)
    own_is_written(core)
    assert core.read_point == (core.term, index) and core.commit_index < index
    core.step(RequestRead(9))
    effects = core.step(
        Received(ReplicaId(2), UpdateResponse(core.term, True, read_context=1, preceding_index=1), 6)
    )
    assert [e.index for e in effects if isinstance(e, ReadReady)] == [index]


def test_who_refuses_what_it_had_written_has_lost_it() -> None:
    """It lost power. Its next word counts, and not the one before."""
    core = leader_in_step()
    index, _ = proposed(core)
    own_is_written(core)
    written_at(core, 2, index)
    core.step(
        Received(
            ReplicaId(2),
            UpdateResponse(core.term, False, conflict_index=index, preceding_index=index, sent_ms=9),
            10,
        )
    )
    assert not held(written_at(core, 3, index))
    assert held(written_at(core, 2, index)) == [index]


def test_a_follower_answers_twice_and_first_promises_only_what_is_written() -> None:
    core = follower(entries(1, 1))
    request = UpdateRequest(1, OpId(1, 2), entries(1, 1, 1)[2:], 2, early=True)
    effects = core.step(Received(ReplicaId(2), request, 1))
    (persist,) = [e for e in effects if isinstance(e, Persist)]
    first, second = [e for e in effects if isinstance(e, Send)]
    assert persist.tells_written and (first.written, second.written) == (True, False)
    assert first.after == second.after == persist.id
    assert isinstance(first.message, UpdateResponse) and isinstance(second.message, UpdateResponse)
    assert (first.message.last_received.index, first.message.written_index) == (2, 3)
    assert (second.message.last_received.index, second.message.written_index) == (3, 0)
    settle(core, effects)
    again = core.step(Received(ReplicaId(2), request, 2))
    assert [e.written for e in again if isinstance(e, Send)] == [False], "it is synced already"


def test_a_follower_says_nothing_early_in_a_term_that_is_not_on_its_disk() -> None:
    core = follower(entries(1, 1))
    request = UpdateRequest(2, OpId(1, 2), entries(1, 1, 2)[2:], 2, early=True)
    effects = core.step(Received(ReplicaId(2), request, 1))
    assert [e.written for e in effects if isinstance(e, Send)] == [False]


def test_more_than_the_leader_has_is_no_answer() -> None:
    core = leader_in_step()
    index, _ = proposed(core)
    own_is_written(core)
    written_at(core, 2, index + 5)
    assert not held(written_at(core, 3, index))


def test_a_change_that_is_proposed_later_ends_what_is_told() -> None:
    core = leader_in_step()
    index, _ = proposed(core)
    core.step(ProposeChange(3, ChangeType.REMOVE, core.config.peers[2], core.config.opid_index))
    assert not held(written_at(core, 2, index) + written_at(core, 3, index) + own_is_written(core))
