"""What keeps a majority and its rows: who counts, who may become what, and what a witness never does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.model.config import Configuration, MemberType, Peer
from stele.model.entry import EntryKind
from stele.model.errors import Code
from stele.model.ids import NodeId, OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import (
    ChangeRefused,
    Committed,
    Effect,
    ProposalRefused,
    ReadReady,
    ReadRefused,
    TransferFailed,
)
from stele.raft.events import (
    ChangeType,
    Propose,
    ProposeChange,
    Received,
    RequestRead,
)
from stele.raft.invariants import check
from stele.raft.membership import KnownPeer, unsafe
from stele.raft.messages import UpdateResponse
from tests.raft.test_core import accept, configuration, entries, initial, lead, leader_in_step, settle

VOTER, LEARNER, WITNESS = MemberType.VOTER, MemberType.NON_VOTER, MemberType.WITNESS


def peer(n: int, kind: MemberType = VOTER, *, start: int = 0, promote: bool = False) -> Peer:
    """Replica `n` on node `n`; a witness from 1.start."""
    return Peer(
        NodeId(f"{n:032x}"), ReplicaId(n), "", kind, promote, witness_start=OpId(1 if start else 0, start)
    )


def with_learners(*ids: int, promote: bool = False) -> RaftCore:
    """A leader of voters 1 to 3 and of these learners; 2 holds its no-op."""
    learners = tuple(peer(n, LEARNER, promote=promote) for n in ids)
    config = Configuration(-1, (*configuration(3).peers, *learners))
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), config=config), random.Random(1))
    lead(core)
    accept(core, 2, 1)
    return core


def with_joining(kind: MemberType) -> RaftCore:
    """A leader of voters 1 and 2, and of 4: a pre-follower, or a witness whose rows are there. 2 holds its no-op."""
    joining = peer(4, kind, start=1 if kind is WITNESS else 0, promote=kind is LEARNER)
    config = Configuration(-1, (*configuration(2).peers, joining))
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(2), config=config), random.Random(1))
    lead(core)
    accept(core, 2, 1)
    assert core.commit_index == 1
    return core


def commit(core: RaftCore, now: int) -> None:
    """A write that 1 and 2 commit."""
    settle(core, core.step(Propose(1, EntryKind.WRITE, b"w")))
    accept(core, 2, core.log.last_index, now=now)
    assert core.commit_index == core.log.last_index


def committed(effects: list[Effect]) -> list[int]:
    """The indexes that were handed out."""
    return [entry.index for e in effects if isinstance(e, Committed) for entry in e.entries]


def voters(core: RaftCore) -> list[int]:
    """The voters of its configuration."""
    return [p.replica_id for p in core.config.voters]


def refusals(effects: list[Effect]) -> list[tuple[type[Effect], Code]]:
    """What was refused, and as what."""
    refused = ProposalRefused | ReadRefused | ChangeRefused | TransferFailed
    return [(type(e), e.code) for e in effects if isinstance(e, refused)]


def test_learners_confirm_no_read() -> None:
    core = with_learners(4, 5)
    core.step(RequestRead(7))
    for learner in (4, 5):
        assert not [e for e in accept(core, learner, 1, read=1) if isinstance(e, ReadReady)]
    assert [e.context for e in accept(core, 2, 1, read=1) if isinstance(e, ReadReady)] == [7]


def test_what_confirmed_one_read_confirms_none_that_was_asked_later() -> None:
    """Neither those who answered the round before, nor a late answer to it: another may lead meanwhile."""
    core = leader_in_step()

    def ready(effects: list[Effect]) -> list[int]:
        return [e.context for e in effects if isinstance(e, ReadReady)]

    assert ready(core.step(RequestRead(7))) == []
    assert ready(accept(core, 2, 1, read=1)) == [7]
    assert ready(core.step(RequestRead(8))) == []
    assert ready(accept(core, 3, 1, read=1)) == []
    assert ready(accept(core, 3, 1, read=2)) == [8]


def test_of_two_that_have_caught_up_one_is_promoted_at_a_time() -> None:
    core = with_learners(4, 5, promote=True)
    accept(core, 3, 1)
    answer = UpdateResponse(core.term, True, OpId(1, 1))
    for moment in (6, 7):
        core.step_many([Received(ReplicaId(n), answer, moment) for n in (4, 5)])
    assert voters(core) == [1, 2, 3, 4], "the second waits until the first change is committed"
    assert core.pending_change_index == core.log.config_index


def test_what_a_majority_holds_after_a_promotion_is_committed_in_the_same_turn() -> None:
    """The commit index stayed where the quorum before had it. Nothing looked again before the next heartbeat, as answers
    at or below the commit index make no turn."""
    core = with_joining(LEARNER)
    settle(core, core.step_many([Propose(n, EntryKind.WRITE, b"w") for n in range(3)]))
    assert core.commit_index == 1
    effects = accept(core, 4, 4, preceding=1)
    assert voters(core) == [1, 2, 4]
    assert committed(effects) == [2, 3, 4]
    check(core)


@pytest.mark.parametrize(
    ("change", "target"),
    [(ChangeType.REMOVE, peer(2)), (ChangeType.MODIFY, peer(2, LEARNER))],
    ids=["removal", "demotion"],
)
def test_what_a_majority_holds_after_a_voter_leaves_is_committed_in_the_same_turn(
    change: ChangeType, target: Peer
) -> None:
    """One of two holds the writes: too few before the change, all after it."""
    core = RaftCore(RaftOptions(), ReplicaId(1), initial(2), random.Random(1))
    lead(core)
    accept(core, 2, 1)
    settle(core, core.step_many([Propose(n, EntryKind.WRITE, b"w") for n in range(3)]))
    assert core.commit_index == 1
    effects = core.step(ProposeChange(1, change, target, -1))
    assert committed(effects) == [2, 3, 4]
    check(core)


ROUNDS = [
    # how long its round takes, whether it then has all that is committed, whether it is promoted
    pytest.param(600, False, True, id="an election timeout"),
    pytest.param(602, False, False, id="longer"),
    pytest.param(602, True, True, id="longer, as a majority does"),
]


@pytest.mark.parametrize(("round_ms", "has_all", "promoted"), ROUNDS)
@pytest.mark.parametrize("kind", [LEARNER, WITNESS], ids=["pre-follower", "witness"])
def test_who_catches_up_within_an_election_timeout_is_promoted_while_writes_flow(
    kind: MemberType, round_ms: int, has_all: bool, promoted: bool
) -> None:
    """Whoever was a little slower than a majority never was: it lacked something of what is committed at each moment."""
    core = with_joining(kind)
    for moment in (100, round_ms) if not has_all else ():
        commit(core, moment)
    accept(core, 2, core.log.last_index, now=round_ms)
    accept(core, 4, 1, now=round_ms)
    assert (core.config.peer(ReplicaId(4)) == peer(4)) is promoted
    if not promoted:
        commit(core, round_ms + 3)
        accept(core, 4, 3, now=round_ms + 5)
        assert core.config.peer(ReplicaId(4)) == peer(4), "its next round was fast"


def test_who_was_fast_and_is_no_more_is_not_promoted() -> None:
    """Its promotion has to wait for another change, and meanwhile it falls behind."""
    core = with_learners(4, 5, promote=True)
    effects = [e for n in (3, 4, 5) for e in accept(core, n, 1)]
    assert voters(core) == [1, 2, 3, 4]
    for moment in (100, 300, 500):
        accept(core, 3, 1, now=moment)
        accept(core, 5, 1, now=moment)
    effects += core.step(Propose(1, EntryKind.WRITE, b"w"))
    settle(core, effects)
    accept(core, 5, 1, now=700)
    for n in (2, 3):
        accept(core, n, core.log.last_index, now=750)
    assert core.pending_change_index is None
    accept(core, 5, 1, now=751)
    assert voters(core) == [1, 2, 3, 4]


def test_nobody_is_promoted_before_the_leader_has_committed_in_its_term() -> None:
    config = Configuration(-1, (*configuration(3).peers, peer(4, LEARNER, promote=True)))
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), config=config), random.Random(1))
    lead(core)
    for n in (2, 3):
        accept(core, n, 0)  # both answer, and have not got the no-op yet
    for _ in range(2):
        accept(core, 4, 1)
    assert core.pending_change_index is None
    accept(core, 2, 1)
    accept(core, 4, 1)
    assert core.pending_change_index == 2


KNOWN = {n: KnownPeer(9, True, False, True) for n in range(1, 8)}
"""All hold the log up to 9, and its rows, and can be reached."""

FIVE = configuration(5).peers
CASES = [
    # before; what is added, or changed in place; who is otherwise than KNOWN; why it is refused
    ("a witness", FIVE[:3], peer(4, WITNESS, start=6), {}, ""),
    ("a live voter lacks its start", FIVE[:3], peer(4, WITNESS, start=6), {3: KnownPeer(4, True, False, True)}, "holds the log only up to 4"),
    ("so does one that is down", FIVE, peer(6, WITNESS, start=6), {3: KnownPeer(4, False, False, True)}, ""),
    ("one that answers and needs a copy", FIVE, peer(6, WITNESS, start=6), {3: KnownPeer(0, True, False, True, stuck=True)}, ""),
    ("one that answers and has FAILED", FIVE, peer(6, WITNESS, start=6), {3: KnownPeer(4, True, True, True)}, ""),
    ("a start that may be undone", FIVE[:3], peer(4, WITNESS, start=10), {n: KnownPeer(12, True, False, True) for n in (1, 2, 3)},
     "not a committed entry"),
    # 6 and 7 have no rows, 4 and 5 not those that they may vote for: a majority of 7
    ("witnesses and voters that lack", (*FIVE, peer(6, WITNESS, start=8)), peer(7, WITNESS, start=8),
     {n: KnownPeer(4, False, False, True) for n in (4, 5)}, "2 witnesses and 2 voters that lack"),
    ("a learner with rows", (*FIVE[:3], peer(4, LEARNER)), peer(4), {}, ""),
    ("a learner without rows", (*FIVE[:3], peer(4, LEARNER)), peer(4), {4: KnownPeer(9, True, False, False)}, "holds no rows yet"),
    ("a learner that is silent", (*FIVE[:3], peer(4, LEARNER)), peer(4), {4: KnownPeer(9, False, False, True)}, "does not answer"),
    ("a silent learner beside one voter", (peer(1), peer(4, LEARNER)), peer(4), {4: KnownPeer(9, False, False, True)}, "does not answer"),
    ("a voter that nobody has heard", FIVE[:3], peer(4), {}, "does not answer"),
    ("one beside a single voter", FIVE[:1], peer(4), {}, "does not answer"),
    ("a witness beside a single voter", FIVE[:1], peer(4, WITNESS, start=6), {}, "does not answer"),
    ("the added one is no majority", FIVE[:3], peer(4, WITNESS, start=6), {3: KnownPeer(9, False, False, True)}, "2 of the 4 voters"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "changed", "seen", "why"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_change_is_refused_that_could_cost_majority_or_rows(
    before: tuple[Peer, ...], changed: Peer, seen: dict[int, KnownPeer], why: str
) -> None:
    after = (*(p for p in before if p.replica_id != changed.replica_id), changed)
    refusal = unsafe(Configuration(3, before), after, KNOWN | seen, 9, lambda i: 1)
    assert (refusal is not None and why in refusal.message) if why else refusal is None


FORMS = [
    # a change of voters 1 to 3, and why it is refused
    (ChangeType.ADD, replace(peer(9), node_id=peer(2).node_id), Code.ALREADY_PRESENT, "its node"),
    (ChangeType.MODIFY, peer(2, WITNESS, start=1), Code.INVALID_ARGUMENT, "only by being added as one"),
]


@pytest.mark.parametrize(("kind", "changed", "code", "why"), FORMS)
def test_a_node_holds_one_replica_and_no_member_becomes_a_witness(
    kind: ChangeType, changed: Peer, code: Code, why: str
) -> None:
    effects = leader_in_step().step(ProposeChange(1, kind, changed, -1))
    (refused,) = [e for e in effects if isinstance(e, ChangeRefused)]
    assert refused.code is code and why in refused.message


def test_a_witness_that_leads_serves_neither_writes_nor_reads() -> None:
    config = Configuration(3, (peer(1, WITNESS, start=1), *configuration(3).peers[1:]))
    begin = replace(initial(3, entries(1), 1), config=config, witness_without_data=True)
    core = RaftCore(RaftOptions(), ReplicaId(1), begin, random.Random(1))
    lead(core)
    effects = core.step_many([Propose(7, EntryKind.WRITE, b"w"), RequestRead(8)])
    assert refusals(effects) == [(ProposalRefused, Code.NOT_LEADER), (ReadRefused, Code.NOT_LEADER)]


def test_no_change_is_begun_before_the_leader_has_committed_in_its_term() -> None:
    """What an earlier leader began may be committed yet, and two majorities would not meet (dissertation 4.1)."""
    core = RaftCore(RaftOptions(), ReplicaId(1), initial(3, entries(1), 1), random.Random(1))
    lead(core)
    for n in (2, 3):
        accept(core, n, 1)
    change = ProposeChange(7, ChangeType.ADD, peer(4, LEARNER), -1)
    assert refusals(core.step(change)) == [(ChangeRefused, Code.NOT_READY)]
    accept(core, 2, 2)
    assert refusals(core.step(change)) == []
