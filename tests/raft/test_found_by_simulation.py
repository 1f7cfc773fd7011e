"""Faults that seeds of the simulator have found and that no other test of this folder shows. Each was seen failing."""

from __future__ import annotations

import random

from stele.model.entry import EntryKind
from stele.model.ids import OpId, ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import PeerNeedsCopy
from stele.raft.events import Compacted, InitialState, LogRead, Propose, Received, RequestRead, Start, Tick
from stele.raft.messages import UpdateResponse
from stele.raft.status import PeerState
from tests.raft.test_core import (
    accept,
    configuration,
    entries,
    initial,
    lead,
    leader_in_step,
    settle,
    updates,
)


def _needing(effects: list[object]) -> list[ReplicaId]:
    return [e.replica_id for e in effects if isinstance(e, PeerNeedsCopy)]


def _of_a_peer_that_needs_a_copy() -> RaftCore:
    """A leader whose log begins after what its peer 3 has."""
    core = leader_in_step()
    for n in range(5):
        settle(core, core.step(Propose(n, EntryKind.WRITE, b"w")))
        accept(core, 2, core.log.last_index, preceding=core.log.last_index - 1)
    core.step(Compacted(OpId(1, 4)))
    refusal = UpdateResponse(core.term, False, OpId(1, 1), 2, 0, preceding_index=5)
    assert _needing(list(core.step(Received(ReplicaId(3), refusal, 6)))) == [3]
    return core


def test_a_copy_of_entries_above_the_own_term_starts_at_their_term_without_a_vote() -> None:
    """It started at its hard state's term, so it could vote in a term whose leader it had entries of."""
    log = entries(1, 4)
    initial = InitialState(2, ReplicaId(3), OpId(0, 0), configuration(3), log, 2)
    core = RaftCore(RaftOptions(), ReplicaId(1), initial, random.Random(1))
    core.step(Start(0))
    assert (core.term, core.voted_for) == (4, None)


def test_a_pipeline_that_broke_begins_again_with_one_message() -> None:
    """Where the network reorders, a full pipeline broke again and again, and everything was sent many times over."""
    core = leader_in_step(RaftOptions(batch_bytes_max=1))
    for n in range(8):
        settle(core, core.step(Propose(n, EntryKind.WRITE, b"w")))
        accept(core, 3, core.log.last_index)
    refusal = UpdateResponse(core.term, False, OpId(1, 1), 1, 0, preceding_index=5)
    probe = core.step(Received(ReplicaId(2), refusal, 6))
    assert len(updates(probe, 2)) == 1
    effects = accept(core, 2, 2, preceding=1)
    assert len(updates(effects, 2)) == 1, "one message is in flight"
    effects = accept(core, 2, 3, preceding=2)
    assert len(updates(effects, 2)) == 2, "and more as they are acknowledged"


def test_a_peer_that_needs_a_copy_is_named_again_each_election_timeout() -> None:
    """It was named once, and when nobody could act on that it waited for ever."""
    core = _of_a_peer_that_needs_a_copy()
    named = 0
    for now in range(100, 2000, 50):
        named += len(_needing(list(core.step(Tick(now)))))
        accept(core, 2, core.log.last_index, preceding=core.log.last_index - 1, now=now)
    assert named >= 2


def test_a_lost_probe_is_sent_again_though_reads_send_heartbeats_all_the_time() -> None:
    """Seed 50475: each read's heartbeat put the next look off, so a new peer never got an entry, and nothing was committed."""
    core = RaftCore(RaftOptions(), ReplicaId(1), initial(3, entries(1, 1, 1), 3), random.Random(1))
    settle(core, lead(core))  # its first probes ask for what follows 3; that to replica 2 is lost
    accept(core, 3, 4, preceding=3)
    assert core.commit_index == 4
    probes = []
    for now in range(10, 400, 10):
        effects = [*core.step(Tick(now)), *core.step(RequestRead(now))]
        probes += [now for update in updates(effects, 2) if update.preceding.index]
        asked = max((update.read_context for update in updates(effects, 3)), default=0)
        for peer, index in ((2, 0), (3, core.log.last_index)):
            accept(core, peer, index, read=asked, now=now)
    assert len(probes) >= 3 and probes[0] <= 2 * core.options.heartbeat_ms


def test_a_peer_that_needs_a_copy_is_named_again_though_reads_send_heartbeats_all_the_time() -> None:
    """The same fault where the leader's log begins later."""
    core = _of_a_peer_that_needs_a_copy()
    named = 0
    for now in range(10, 2000, 10):
        effects = [*core.step(Tick(now)), *core.step(RequestRead(now))]
        named += len(_needing(effects))
        asked = max((update.read_context for update in updates(effects, 2)), default=0)
        for peer, index in ((2, core.log.last_index), (3, 1)):
            accept(core, peer, index, read=asked, now=now)
    assert named >= 2


def test_a_log_that_was_collected_while_it_was_read_for_a_peer_leaves_it_to_a_copy() -> None:
    """Nothing could be sent any more, and nobody was told."""
    core = leader_in_step(RaftOptions(tail_bytes_max=1000))
    for n in range(100):
        settle(core, core.step(Propose(n, EntryKind.WRITE, b"x" * 52)))
        accept(core, 2, core.log.last_index, preceding=core.log.last_index - 1)
    refusal = UpdateResponse(core.term, False, OpId(1, 1), 2, 0, preceding_index=5)
    core.step(Received(ReplicaId(3), refusal, 6))
    accept(core, 3, 1, preceding=1)
    nothing = LogRead(ReplicaId(3), 2, ())
    assert _needing(list(core.step(nothing))) == [3]
    assert {p.replica_id: p.state for p in core.status().peers}[ReplicaId(3)] is PeerState.SNAPSHOT
