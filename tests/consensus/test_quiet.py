"""Quiet groups: no heartbeats when nothing happens, and awake for whatever does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from stele.consensus import quiet
from stele.consensus.ports import ReplicaOptions
from stele.consensus.quiet import begin_quiet, follow_quiet
from stele.consensus.replica import Replica, ReplicaState
from stele.model import bounds
from stele.model.ids import NodeId, OpId, new_id
from stele.raft.messages import UpdateRequest
from stele.rpc.proto import consensus_pb2
from stele.tserver.beating import Beating
from stele.tserver.confirming import Confirming
from stele.tserver.quiet import QuietGroups
from stele.tserver.replicas import Replicas
from tests.consensus.cluster import WAIT_S, Group, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import resting


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "QUIET_AFTER_MS", 200)


async def put_to_rest(group: Group) -> Replica:
    async with asyncio.timeout(WAIT_S):
        while True:
            leader = await group.leader()
            begin_quiet(leader, lambda node_id: True)
            await asyncio.sleep(0.02)
            if all(resting(r) for r in group.replicas()):
                return leader


async def test_an_idle_group_rests_and_keeps_its_leader(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await put_to_rest(group)
    await asyncio.sleep(1.0)
    assert all(resting(r) for r in group.replicas())
    assert await group.leader() is leader


async def test_a_write_wakes_it(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await put_to_rest(group)
    await asyncio.sleep(0.5)
    term = leader.term
    await group.write(rows([2]))
    await leader.reads.linearizable_read()
    assert leader.term == term and table(leader) == {1: "x1", 2: "x2"}
    for replica in group.replicas():
        await group.caught_up(replica)


async def test_a_restarted_follower_wakes_it_and_catches_up(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await put_to_rest(group)
    follower = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(follower)
    group.nodes[group.nodes.index(node)] = await node.restart()
    back = group.replica(follower.replica_id)
    await wait_until(lambda: table(back) == {1: "x1"})
    assert await group.leader() is leader


async def test_a_follower_with_all_its_rows_in_files_is_running_again_without_a_write(
    group_of: MakeGroup,
) -> None:
    """Nothing is left to commit there, and so nothing that would tell it that its leader's term has something committed:
    it was CONFIGURING until somebody wrote, counted as having found no leader, and would have been replaced."""
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await put_to_rest(group)
    follower = next(r for r in group.replicas() if r is not leader)
    await group.all_applied()
    last = follower.core.log.last_opid if follower.core is not None else None
    assert await follower.storage.flush() == last
    node = group.node_of(follower)
    group.nodes[group.nodes.index(node)] = await node.restart()
    back = group.replica(follower.replica_id)
    await wait_until(lambda: back.state is ReplicaState.RUNNING)
    assert await put_to_rest(group) is leader
    assert back.core is not None and back.core.log.last_opid == last


@pytest.mark.usefixtures("quick_elections")
async def test_a_silent_leaders_followers_wake_and_elect(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await put_to_rest(group)
    nodes[0].network.cut.add(leader.host.node_id)
    for replica in group.replicas():
        if replica is not leader and replica.runtime is not None:
            replica.runtime.wake()
    await wait_until(lambda: any(r.is_leader for r in group.replicas() if r is not leader))
    await group.write(rows([2]))


async def test_a_follower_that_lacks_something_answers(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    behind = next(r for r in group.replicas() if r is not leader)
    nodes[0].network.cut.add(behind.host.node_id)
    await group.write(rows([2]))
    for _ in range(20):
        assert not begin_quiet(leader, lambda node_id: True)
        await asyncio.sleep(0.02)
    nodes[0].network.cut.clear()
    await put_to_rest(group)
    await group.all_applied()
    assert table(behind) == {1: "x1", 2: "x2"}


@pytest.mark.usefixtures("quick_elections")
async def test_a_resting_leader_that_fails_wakes_the_others(group_of: MakeGroup) -> None:
    """Its node lives and is heard, so nobody else would notice."""
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await put_to_rest(group)
    leader.fail("a scan found damage")
    await wait_until(lambda: any(r.is_leader for r in group.replicas() if r is not leader))
    await group.write(rows([2]))


async def test_a_follower_rests_only_with_a_leader_that_it_agrees_with(group_of: MakeGroup) -> None:
    """It does not look at the message otherwise: what it lacks, or does not know to be committed, it would lack for as long
    as the group rests."""
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await put_to_rest(group)
    follower = next(r for r in group.replicas() if r is not leader)
    third = next(r for r in group.replicas() if r not in (leader, follower))
    assert follower.core is not None and follower.runtime is not None
    status, own = follower.core.status(), follower.runtime
    last, commit = status.last_logged, status.commit_index
    good = UpdateRequest(status.term, last, (), commit, 0, own.now_ms(), last.index)
    refused = (
        (leader, replace(good, term=good.term - 1)),
        (leader, replace(good, term=good.term + 1)),
        (leader, replace(good, preceding=OpId(last.term, last.index - 1))),
        (leader, replace(good, preceding=OpId(last.term, last.index + 1))),
        (leader, replace(good, commit_index=commit - 1)),
        (leader, replace(good, commit_index=commit + 1)),
        (third, good),
    )
    for sender, message in refused:
        assert not follow_quiet(follower, sender.replica_id, message, lambda node_id: True), message
    assert not follow_quiet(follower, leader.replica_id, good, lambda node_id: node_id != third.host.node_id)
    assert follow_quiet(follower, leader.replica_id, good, lambda node_id: True)


def test_frames_in_many_names_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "PEERS_HEARD_MAX", 4)
    groups = QuietGroups(Replicas(), ReplicaOptions().raft, lambda node_id, resting: None, 0)
    first, *others = (NodeId(new_id()) for _ in range(20))
    for node_id in (first, *others):
        groups.heard(node_id)
    assert len(groups._heard_ms) == 4 and not groups.lives(first) and groups.lives(others[-1])
    groups.heard(first)
    assert groups.lives(first)


def test_frames_in_many_names_push_out_the_node_heard_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pushed out the one heard first: a live node whose replicas rest, which woke them all."""
    monkeypatch.setattr(bounds, "PEERS_HEARD_MAX", 4)
    groups = QuietGroups(Replicas(), ReplicaOptions().raft, lambda node_id, resting: None, 0)
    live, *others = (NodeId(new_id()) for _ in range(20))
    for now_ms, node_id in enumerate(others):
        groups.tick(now_ms)
        groups.heard(live)
        groups.heard(node_id)
        assert groups.lives(live) and groups.lives(node_id)
    assert len(groups._heard_ms) == 4


def test_answers_of_many_nodes_push_out_the_one_heard_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats and questions are sent to nodes that answer. A live node got a message for each tablet instead."""
    monkeypatch.setattr(bounds, "PEERS_HEARD_MAX", 4)
    beats, questions = [0], [0]
    beating = Beating(
        Replicas(), lambda node_id, beat: beats.append(beat.number), first=1, patience_ms=600, now_ms=0
    )
    confirming = Confirming(
        Replicas(), lambda node_id, asked: questions.append(asked.number), first=1, patience_ms=600, now_ms=0
    )
    live, *others = (NodeId(new_id()) for _ in range(20))
    for node_id in others:
        for name in (live, node_id):
            beating.takes_beats(name)
            beating.told(name, consensus_pb2.BeatPB(number=beats[-1], answers=True))
            confirming._questions.greet(name)
            confirming.told(name, consensus_pb2.ConfirmPB(number=questions[-1], answers=True))
        assert beating.takes_beats(live) and live in confirming._questions.answering
    assert len(beating._questions.answering) == len(confirming._questions.answering) == 4
