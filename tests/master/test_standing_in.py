"""No driver anywhere: the leading master heals by the policy in the catalog, and makes way for a driver that comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.driver.executor import Executor
from stele.driver.policy import Policy
from stele.driver.view import Away, ClusterView, Holder
from stele.model.errors import Rejected, SteleError
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.harness.processes import Cluster
from tests.master.harness import create_request
from tests.master.test_processes import Caller, all_run, busiest, healthy

DEAD_AFTER_MS = 3_000


async def set_policy(caller: Caller, **values: int) -> None:
    wanted = {"dead_after_ms": DEAD_AFTER_MS, "max_lost_nodes": 1, "max_copies": 4, "drive_after_ms": 4_000}
    policy = pb.DriverPolicyPB(**{**wanted, **values}, owner="test")
    await caller.call("SetDriverPolicy", pb.SetDriverPolicyRequest(policy=policy))


async def policy_in_force(caller: Caller) -> pb.DriverPolicyPB:
    answer = await caller.call("GetClusterView", pb.GetClusterViewRequest())
    assert isinstance(answer, pb.GetClusterViewResponse)
    return answer.policy


async def test_the_leader_master_heals_while_no_driver_is_heard(tmp_path: Path) -> None:
    async with Cluster(tmp_path, masters=3, nodes=5) as cluster:
        caller = Caller(cluster)
        executor = Executor(caller.pool, cluster.master_addresses, holder="test", ttl_ms=60_000)

        def logged(words: str) -> bool:
            return any(words in m.log_path.read_text() for m in cluster.masters)

        try:
            defaults = await policy_in_force(caller)
            assert (defaults.drive_after_ms, defaults.owner) == (120_000, "")
            with pytest.raises(
                Rejected, match=r"driver policy: dead_after_ms is 1; expected 3000 to .*max_copies is 0"
            ):
                await set_policy(caller, dead_after_ms=1, max_copies=0)
            await set_policy(caller)
            await caller.call("CreateTable", create_request("t", buckets=3))
            view = await caller.until(lambda v: v.settled and all_run(v, 3))

            # While a driver asks for views under its name, no master drives, even if that driver does nothing.
            lost = cluster.member(busiest(view))
            cluster.lose(lost)
            for _ in range(20):
                await executor.observe(Policy())
                await asyncio.sleep(0.5)
            assert not (await caller.view()).intents and not logged("this master drives")

            # Once it is silent, the leading master heals, also after another master took over as leader.
            await caller.until(lambda v: bool(v.intents))
            assert logged("no driver was heard; this master drives until one returns")
            leading = (await caller.view()).leader_master
            cluster.kill(cluster.member(leading))
            await caller.until(lambda v: v.leader_master != leading and healthy(v, {lost.node_id}))
            assert (await policy_in_force(caller)).owner == "test", "a new leader has the policy too"
            cluster.restart(cluster.member(leading))

            # It compares what it healed. Then the cluster costs no claim; a driver gets it at once, and the master makes way.
            await caller.until(lambda v: {c.result for t in v.tablets for c in t.copies} == {"Equal"})
            view = await caller.until(lambda v: v.claim is None or v.claim.expires_us == 0)
            assert view.claim is not None and view.claim.holder.startswith("master/")
            await until_claimed(executor)
            second = cluster.member(busiest(await caller.view()))
            cluster.lose(second)
            epoch = executor.claim.epoch if executor.claim is not None else 0
            for _ in range(20):
                await executor.ensure_claim()
                await asyncio.sleep(0.5)
            view = await caller.view()
            assert view.claim is not None and (view.claim.holder, view.claim.epoch) == ("test", epoch)

            # By policy it never drives.
            await set_policy(caller, drive_after_ms=0)
            await executor.release()
            await asyncio.sleep(8)
            assert not (await caller.view()).intents
            await set_policy(caller)
            await caller.until(lambda v: healthy(v, {lost.node_id, second.node_id}))
        finally:
            await caller.pool.close()


async def test_what_a_driver_took_away_outlives_it_and_whoever_drives_instead_begins_nothing_beside_it(
    tmp_path: Path,
) -> None:
    """The budget goes from a driver to the leading master, to the next leading master, and to the next driver."""
    async with Cluster(tmp_path, masters=3, nodes=6) as cluster:
        caller = Caller(cluster)
        try:
            await caller.call("CreateTable", create_request("t", buckets=6))
            view = await caller.until(lambda v: v.settled and all_run(v, 6))
            first, second = sorted(n.node_id for n in view.nodes if n.role == "node")[:2]
            # As an operator does: it writes down who goes, and then makes that pod go. Then it is killed, too.
            node = view.node(first)
            assert node is not None
            away = pb.AwayPB(node_id=id_to_pb(first), incarnation=node.incarnation)
            upgrade = pb.BudgetHolderPB(holder="upgrade", away=[away])
            executor = Executor(caller.pool, cluster.master_addresses, holder="test", ttl_ms=60_000)
            policy = pb.DriverPolicyPB(
                dead_after_ms=600_000, max_lost_nodes=1, max_copies=4, drive_after_ms=4_000,
                holding=[upgrade], waiting=["park/x"],
            )  # fmt: skip
            await caller.call("SetDriverPolicy", pb.SetDriverPolicyRequest(policy=policy))
            cluster.kill(cluster.member(first))
            while silent_ms(await executor.observe(Policy()), first) <= Policy().lost_after_ms:
                await asyncio.sleep(0.3)
            drained = pb.WantNodeRequest(node_id=id_to_pb(second), wanted=pb.WANTED_DRAINED, reason="test")
            await caller.call("WantNode", drained)

            # The leading master takes over what is written down. Leaders leave, but no replica moves.
            held = (Holder(f"drain/{second[:8]}"), Holder("upgrade", (Away(first, node.incarnation),)))
            await caller.until(lambda v: v.holding == held)
            await caller.until(lambda v: all(t.leader_node != second for t in v.tablets))
            leading = (await caller.view()).leader_master
            cluster.kill(cluster.member(leading))
            view = await caller.until(lambda v: v.settled and v.leader_master != leading)
            assert view.holding == held
            for _ in range(20):
                assert not (await caller.view()).intents
                await asyncio.sleep(0.5)
            assert (await policy_in_force(caller)).waiting == ["park/x"]

            # Once the node is back the drain begins, and the upgrade waits for its own driver.
            cluster.restart(cluster.member(first))
            await caller.until(lambda v: bool(v.intents))
            await caller.until(lambda v: not v.intents and names_of(v, second) == 0)
            told = await policy_in_force(caller)
            assert list(told.waiting) == ["upgrade", "park/x"]

            # The next driver finds it there, and what it writes stays.
            await executor.observe(Policy())
            del policy.holding[:]
            policy.waiting[:] = ["park/x"]
            await caller.call("SetDriverPolicy", pb.SetDriverPolicyRequest(policy=policy))
            for _ in range(10):
                view = await executor.observe(Policy())
                told = await policy_in_force(caller)
                assert (view.holding, list(told.waiting)) == ((), ["park/x"])
                await asyncio.sleep(0.3)
        finally:
            await caller.pool.close()


def silent_ms(view: ClusterView, node_id: str) -> int:
    """For how long a node is silent."""
    node = view.node(node_id)
    return node.heartbeat_age_ms if node is not None else 0


def names_of(view: ClusterView, node_id: str) -> int:
    """How many tablets name a node."""
    return sum(t.config.peer_on(node_id) is not None for t in view.tablets)


async def until_claimed(executor: Executor) -> None:
    """A driver that comes while a master drives gets the claim within seconds."""
    deadline = asyncio.get_running_loop().time() + 20
    while True:
        try:
            await executor.ensure_claim()
        except SteleError:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.5)
        else:
            return
