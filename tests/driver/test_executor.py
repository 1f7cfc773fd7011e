"""The executor against the model of a cluster behind real gRPC: claim, observe, order, report. It is
interrupted, and another takes over."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from stele.driver.executor import Executor, Report, StaleEpoch
from stele.driver.leader_trials import BEGINS_MS
from stele.driver.main import run
from stele.driver.progress import Progress
from stele.driver.view import NodeState
from stele.model.errors import Code, SteleError
from stele.model.ids import ClusterId
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, node_name
from tests.driver.served import START_IN_FORCE, Served, serve


@asynccontextmanager
async def driver(
    served: Served,
    told: list[Progress] | None = None,
    holder: str = "d1",
    now_ms: Callable[[], int] = lambda: 0,
) -> AsyncIterator[Executor]:
    """An executor with its own channel pool."""
    pool = ChannelPool(Identity(ClusterId("c" * 32)))
    try:
        on_progress = told.append if told is not None else None
        yield Executor(pool, [served.address], holder=holder, on_progress=on_progress, now_ms=now_ms)
    finally:
        await pool.close()


async def passes(executor: Executor, cluster: Cluster, count: int) -> list[Report]:
    """This many passes, with time in between; fewer if nothing is left to do."""
    reports = []
    for _ in range(count):
        reports.append(await executor.run_once(POLICY))
        if reports[-1].idle:
            break
        cluster.advance()
    return reports


def killed(tablets: int = 2) -> Cluster:
    cluster = Cluster(5, 1, tablets, 3)
    (first, *_) = cluster.tablets.values()
    cluster.nodes[first.config.peers[2].node_id].alive = False
    cluster.advance()
    return cluster


async def test_a_heal_from_end_to_end() -> None:
    cluster, told = killed(), list[Progress]()
    async with serve(cluster) as served, driver(served, told) as executor:
        reports = await passes(executor, cluster, 30)
        assert reports[-1].idle and cluster.healthy()
        errors = [o.error for r in reports for o in r.outcomes if o.error is not None]
        assert not errors
        assert served.witness_starts and set(served.witness_starts) == {START_IN_FORCE}
        kinds = [p.kind for p in told]
        assert kinds.index("BeginIntent") < kinds.index("DemotePeer") < kinds.index("AddWitness")
        assert all(p.reason and p.table_name == "t" for p in told)
        assert {p.next for p in told if p.kind == "DemotePeer"} == {"AddingWitness"}
        await executor.release()
        assert served.holder == ""


async def test_interrupted_after_each_pass_and_taken_over() -> None:
    for stop_after in range(1, 8):
        cluster = killed()
        async with serve(cluster) as served:
            async with driver(served) as first:
                await passes(first, cluster, stop_after)
            async with driver(served, holder="d2") as second:
                reports = await passes(second, cluster, 40)
                assert reports[-1].idle and cluster.healthy(), f"after {stop_after} passes"


async def test_an_intent_is_cancelled_behind_a_fence() -> None:
    cluster = killed()
    (dead,) = [n for n in cluster.nodes.values() if not n.alive]
    async with serve(cluster) as served, driver(served) as executor:
        await passes(executor, cluster, 2)
        dead.alive = True
        before = {t.tablet_id: t.config.opid_index for t in cluster.tablets.values()}
        await passes(executor, cluster, 20)
        assert cluster.healthy()
        assert any(t.config.opid_index > before[t.tablet_id] for t in cluster.tablets.values())


async def test_a_witness_goes_on_with_its_copy_where_the_leader_has_changed() -> None:
    """The order that adds it named the leader as the source. With another source a copy begins again."""
    cluster = killed(tablets=1)
    (t,) = cluster.tablets.values()
    async with serve(cluster) as served, driver(served) as executor:
        while not served.sources:
            await passes(executor, cluster, 1)
        ((replica_id, source),) = set(served.sources)
        assert not served.witness_starts and source == t.leader
        t.leader = next(p.node_id for p in cluster.data_voters(t) if p.node_id != t.leader)
        await passes(executor, cluster, 30)
        assert served.witness_starts and cluster.healthy()
        assert len(served.sources) > 1 and set(served.sources) == {(replica_id, source)}


async def test_a_leader_that_said_that_a_peer_has_failed_is_asked_again() -> None:
    """The peer may be well by now: it was demoted, or removed and copied again."""
    cluster, told = Cluster(4, 1, 1, 3), list[Progress]()
    (t,) = cluster.tablets.values()
    peer = next(p.replica_id for p in t.config.peers if p.node_id != t.leader)
    async with serve(cluster) as served, driver(served, told) as executor:
        served.reported_failed = (peer,)
        assert (await executor.run_once(POLICY)).idle
        served.failed_peers = (peer,)
        await executor.run_once(POLICY)
        assert told and "has FAILED" in told[0].reason


@pytest.mark.parametrize("lacking", [False, True], ids=["failed", "lacking"])
async def test_a_peer_that_had_failed_is_told_of_by_its_own_node_before_it_is_replaced(lacking: bool) -> None:
    """After a restart it may be well, but it lacks entries that its leader's log no longer has."""
    cluster, told = Cluster(4, 1, 1, 3), list[Progress]()
    (t,) = cluster.tablets.values()
    peer = next(p for p in t.config.peers if p.node_id != t.leader)
    async with serve(cluster) as served, driver(served, told) as executor:
        served.lacking = lacking
        served.failed_peers = served.reported_failed = (peer.replica_id,)
        cluster.nodes[peer.node_id].opening = True
        await passes(executor, cluster, 3)
        if lacking:
            assert told[0].kind == "BeginIntent"
            return
        assert {p.kind for p in told} == {"Blocked"} and "its node was restarted" in told[0].reason
        assert not cluster.intents
        cluster.nodes[peer.node_id].opening = False
        served.failed_peers = served.reported_failed = ()
        assert (await executor.run_once(POLICY)).idle


async def test_a_driver_that_was_replaced_stops() -> None:
    cluster = killed()
    async with serve(cluster) as served, driver(served) as old, driver(served, holder="d2") as new:
        await passes(old, cluster, 2)
        await passes(new, cluster, 1)
        with pytest.raises(StaleEpoch):
            await old.run_once(POLICY)
        assert old.claim is None


async def test_a_driver_whose_claim_was_ended_by_nobody_claims_again() -> None:
    """The cluster hibernates: the masters took its claim away, and refuse another until it is awake."""
    async with serve(killed()) as served, driver(served) as executor:
        await executor.run_once(POLICY)
        served.cluster.epoch, served.holder = served.cluster.epoch + 1, ""
        with pytest.raises(SteleError) as ended:
            await executor.run_once(POLICY)
        assert ended.value.code is Code.NOT_READY and not isinstance(ended.value, StaleEpoch)
        await executor.run_once(POLICY)
        assert served.holder == "d1"


async def test_without_a_leader_master_there_is_no_pass() -> None:
    cluster = killed()
    async with serve(cluster) as served, driver(served) as executor:
        served.leads = False
        with pytest.raises(SteleError) as refused:
            await executor.run_once(POLICY)
        assert refused.value.code is Code.NOT_LEADER
        assert not cluster.intents


async def test_a_refused_step_is_told_and_planned_again() -> None:
    cluster, told = killed(), list[Progress]()
    async with serve(cluster) as served, driver(served, told) as executor:
        await passes(executor, cluster, 1)
        view = await executor.observe(POLICY)
        targets = {i.target_node for i in cluster.intents.values()}
        for node in targets:
            cluster.nodes[node].alive = False  # after the view was taken
        report = await executor.run_once(POLICY, view)
        assert report.outcomes and all(o.error is not None for o in report.outcomes)
        assert all(p.error for p in told[-len(report.outcomes) :])
        for node in targets:
            cluster.nodes[node].alive = True
        await passes(executor, cluster, 40)
        assert cluster.healthy()


async def test_a_witness_that_its_leader_keeps_refusing_is_begun_anew_with_a_later_start() -> None:
    cluster, told = killed(), list[Progress]()
    async with serve(cluster) as served, driver(served, told) as executor:
        served.too_old = {4}
        reports = await passes(executor, cluster, 60)
        assert reports[-1].idle and cluster.healthy()
    (first, *_) = cluster.tablets.values()
    assert [p.replica_id for p in first.config.peers] == [1, 2, 5]
    kinds = [(p.kind, bool(p.error)) for p in told if p.tablet_id == first.tablet_id]
    assert kinds.count(("AddWitness", True)) == 5 and kinds.count(("CancelCopy", False)) == 1


async def test_a_target_to_which_no_copy_comes_is_left_for_another() -> None:
    cluster, told = Cluster(6, 1, 1, 3), list[Progress]()
    (t,) = cluster.tablets.values()
    cluster.nodes[t.config.peers[2].node_id].alive = False
    cluster.advance()
    time = itertools.count(0, 30_000)
    async with serve(cluster) as served, driver(served, told, now_ms=lambda: next(time)) as executor:
        await passes(executor, cluster, 1)
        (hung,) = (cluster.nodes[i.target_node] for i in cluster.intents.values())
        hung.hangs = True
        reports = await passes(executor, cluster, 40)
        assert reports[-1].idle and cluster.healthy()
        assert any("stalled 3 times" in p.reason for p in told)
        assert t.config.peer_on(hung.node_id) is None


async def test_until_healthy_waits_for_a_node_that_is_silent_and_not_yet_given_up() -> None:
    cluster = Cluster(5, 1, 2, 3)
    (first, *_) = cluster.tablets.values()
    silent = cluster.nodes[first.config.peers[2].node_id]
    async with serve(cluster) as served:
        async with asyncio.timeout(60):  # all is well
            await run([served.address], POLICY, until_healthy=True)
        silent.alive = False
        cluster.advance()
        patient = replace(POLICY, dead_after_ms=10 * POLICY.dead_after_ms)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await run([served.address], patient, until_healthy=True)
        silent.alive = True
        cluster.advance()
        async with asyncio.timeout(60):
            await run([served.address], patient, until_healthy=True)


@pytest.mark.parametrize(("option", "code"), [((), 0), (("--until-healthy",), 130)])
async def test_a_driver_that_is_told_to_stop_gives_its_claim_back(option: tuple[str, ...], code: int) -> None:
    """SIGTERM, as a pod gets it. The next driver need not wait until the claim expires."""
    cluster = Cluster(5, 1, 2, 3)
    (first, *_) = cluster.tablets.values()
    cluster.nodes[first.config.peers[2].node_id].alive = False
    cluster.advance()
    async with serve(cluster) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stele.cli", "driver", "run", "--masters", served.address),
            *("--dead-after", "86400", *option),
        )
        try:
            async with asyncio.timeout(60):
                while "GetClusterViewRequest" not in served.calls:  # it has heard that the claim is its own
                    await asyncio.sleep(0.05)
            assert served.holder
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await process.wait() == code
            assert not served.holder
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_driver_that_had_nothing_to_do_says_so() -> None:
    async with serve(Cluster(5, 1, 5, 3)) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stele.cli", "driver", "run", "--masters", served.address),
            "--until-healthy",
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    assert (process.returncode, printed) == (
        0,
        b"there was nothing to do; `stele ksck` shows the cluster's health\n",
    )


async def test_a_node_that_was_given_up_returns_over_the_wire() -> None:
    cluster = killed()
    node = next(n for n in cluster.nodes.values() if not n.alive)
    async with serve(cluster) as served, driver(served) as executor:
        lost = replace(POLICY, lost=frozenset({node.node_id}))
        await executor.run_once(lost)
        assert node.state is NodeState.DRAINING and node.given_up
        node.alive = True
        told = [p for report in await passes(executor, cluster, 20) for p in report.progress]
    assert node.state is NodeState.ACTIVE and cluster.healthy()
    returned = next(p for p in told if p.kind == "ReturnNode")
    assert returned.where == f"node {node.node_id[:8]}" and not returned.error


async def test_witnesses_that_have_no_turn_to_copy_join_over_the_wire() -> None:
    cluster = Cluster(6, 1, 6, 3)
    lost = [t for t in cluster.tablets.values() if t.config.peer_on(node_name(3)) is not None]
    cluster.nodes[node_name(3)].alive = False
    cluster.advance()
    policy = replace(POLICY, max_copies=1)
    async with serve(cluster) as served, driver(served) as executor:
        for _ in range(4):  # begin, prepare, demote, add
            await executor.run_once(policy)
        assert len(lost) == 3 and all(cluster.spare(t) == 1 for t in lost)
        replicas = [r for t in lost for n, r in t.replicas.items() if n > 3]
        assert [r.waiting for r in replicas].count(True) == 2
        await passes(executor, cluster, 40)
    assert cluster.healthy()


async def test_a_copy_that_the_masters_do_not_know_to_run_yet_has_its_slot() -> None:
    """Nodes report each second, and a pass comes sooner. Witnesses that wait for their turn are not asked, but this one is."""
    cluster = Cluster(6, 1, 6, 3)
    cluster.nodes[node_name(3)].alive = False
    cluster.advance()
    policy = replace(POLICY, max_copies=1)
    async with serve(cluster) as served, driver(served) as executor:
        for _ in range(4):  # begin, prepare, demote, add
            await executor.run_once(policy)
        replicas = [r for t in cluster.tablets.values() for n, r in t.replicas.items() if n > 3]
        while [r.has_data for r in replicas].count(True) < 1:
            cluster.advance()
        served.behind = served.view()
        served.calls.clear()
        for _ in range(6):
            await executor.run_once(policy)
            assert [r.waiting for r in replicas].count(True) >= 1
        assert [r.waiting for r in replicas].count(True) == 1
        assert served.calls.count("StartTabletCopyRequest") == 1
        served.behind = None
        await passes(executor, cluster, 40)
    assert cluster.healthy()


async def test_nodes_are_not_asked_for_what_the_masters_know() -> None:
    """After the loss of a node thousands of witnesses wait for their turn. Nodes were asked for all, for 15 s."""
    cluster = Cluster(6, 1, 6, 3)
    cluster.nodes[node_name(3)].alive = False
    cluster.advance()
    policy = replace(POLICY, max_copies=1)
    async with serve(cluster) as served, driver(served) as executor:
        for count in range(4):  # begin, prepare, demote, add
            served.behind = served.view() if count == 3 else None
            report = await executor.run_once(policy)
        waits = {o.step.tablet_id for o in report.outcomes}
        assert waits and waits <= report.situations.keys()
        assert all(s.tablet == report.view.tablet(t) for t, s in report.situations.items())
        waiting = {t.tablet_id for t in cluster.tablets.values() for r in t.replicas.values() if r.waiting}
        assert len(waiting) == 2
        served.asked.clear()
        await executor.observe(policy)
        assert waiting <= served.asked, "the masters do not know that they are witnesses"
        served.behind = None
        served.asked.clear()
        await executor.observe(policy)
        assert served.asked and not waiting & served.asked


def piled_up() -> Cluster:
    """Twelve tablets on three nodes, all led by the first."""
    cluster = Cluster(3, 1, 12, 3)
    for t in cluster.tablets.values():
        t.leader = node_name(1)
    return cluster


def led(cluster: Cluster) -> list[int]:
    """How many tablets each node leads, ascending."""
    leaders = [t.leader for t in cluster.tablets.values()]
    return sorted(leaders.count(n) for n in cluster.nodes)


SPREADS = replace(POLICY, balance_leaders=True)


async def test_leaders_are_spread_and_users_are_told_by_pairs_of_nodes() -> None:
    cluster, told, now_ms = piled_up(), list[Progress](), 0
    async with serve(cluster) as served, driver(served, told, now_ms=lambda: now_ms) as executor:
        report = await executor.run_once(SPREADS)
        assert report.idle and report.leaders_rest, (
            "another driver may have moved some that are not reported yet"
        )
        now_ms += BEGINS_MS
        report = await executor.run_once(SPREADS)
        assert not report.leaders_rest
        assert len(report.outcomes) == 8 and led(cluster) == [4, 4, 4]
        assert [r.leaders.moved for r in told if r.leaders is not None] == [4, 4] and len(told) == 2
        assert (await executor.run_once(SPREADS)).idle
        assert served.calls.count("LeaderStepDownRequest") == 8
        assert max(cluster.leader_moves.values()) == 1


async def test_a_leader_that_did_not_move_is_not_asked_again_at_once() -> None:
    """It lags. Each order could delay writes."""
    cluster, now_ms = piled_up(), 0
    for t in cluster.tablets.values():
        t.behind = {node_name(2), node_name(3)}
    async with serve(cluster) as served, driver(served, now_ms=lambda: now_ms) as executor:
        await executor.ensure_claim()
        now_ms += BEGINS_MS
        for _ in range(6):
            await executor.run_once(SPREADS)
        asked = served.calls.count("LeaderStepDownRequest")
        assert asked == 24, "each tablet once for each of the two"
        for t in cluster.tablets.values():
            t.behind = set()
        now_ms += 10_000
        assert (await executor.run_once(SPREADS)).idle
        now_ms += 10_000
        await executor.run_once(SPREADS)
        assert led(cluster) == [4, 4, 4]


async def test_after_a_node_that_does_not_answer_no_leader_moves_for_a_moment() -> None:
    """It has just stopped, and the masters have not noticed yet. Once, all its tablets were tried one after
    another, and then those of the others moved twice."""
    cluster, now_ms = piled_up(), 0
    async with serve(cluster) as served, driver(served, now_ms=lambda: now_ms) as executor:
        claim = await executor.ensure_claim()
        now_ms += BEGINS_MS
        view = await executor.observe(SPREADS)
        gone = cluster.nodes[node_name(2)]
        gone.alive = False
        await executor.run_once(SPREADS, replace(view, claim=claim))
        assert 0 < cluster.leader_moves.total() < 8
        asked = served.calls.count("LeaderStepDownRequest")
        gone.alive = True
        for _ in range(3):
            now_ms += 1_000
            assert (await executor.run_once(SPREADS)).idle
        assert served.calls.count("LeaderStepDownRequest") == asked
        now_ms += 3_000
        while not (await executor.run_once(SPREADS)).idle:
            now_ms += 1_000
        assert led(cluster) == [4, 4, 4] and max(cluster.leader_moves.values()) == 1


async def test_no_more_leaders_move_in_a_minute_than_the_policy_says() -> None:
    cluster, now_ms = piled_up(), 0
    few = replace(SPREADS, leader_moves_at_once=2, leader_moves_per_minute=3)
    async with serve(cluster) as served, driver(served, now_ms=lambda: now_ms) as executor:
        await executor.ensure_claim()
        now_ms += BEGINS_MS
        for _ in range(5):
            await executor.run_once(few)
        assert cluster.leader_moves.total() == 3
        now_ms += 60_000
        for _ in range(5):
            await executor.run_once(few)
        assert cluster.leader_moves.total() == 6
