"""Real processes: three masters, five nodes; tables, a dead leader, a dead node healed by the real driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stele.client.streams import Streams
from stele.driver.executor import Executor
from stele.driver.policy import Policy
from stele.driver.view import ClusterView, NodeState
from stele.driver.wire import view_from_pb
from stele.model.config import MemberType
from stele.model.errors import Rejected, SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto import tserver_pb2
from tests.harness.processes import Cluster
from tests.master.harness import create_request

POLICY = Policy(dead_after_ms=2_500, lost_after_ms=1_500, max_lost_nodes=1, max_copies=8)
PATIENT = replace(POLICY, dead_after_ms=120_000)
"""A machine that stands still for as long as POLICY waits makes no node a dead one; only those in `lost` may be."""


class Caller:
    """Calls to the masters, again until one leads."""

    def __init__(self, cluster: Cluster) -> None:
        self.pool = ChannelPool(Identity())
        self.masters = Masters(self.pool, cluster.master_addresses, first_contact_s=None)

    async def call(self, method: str, request: object) -> object:
        return await self.masters.call(method, request, timeout_s=120.0)

    async def view(self) -> ClusterView:
        answer = await self.call("GetClusterView", pb.GetClusterViewRequest())
        assert isinstance(answer, pb.GetClusterViewResponse)
        return view_from_pb(answer)

    async def until(self, done: Callable[[ClusterView], bool], *, seconds: float = 120) -> ClusterView:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            view = await self.view()
            if done(view):
                return view
            assert asyncio.get_running_loop().time() < deadline, f"it never came: {view}"
            await asyncio.sleep(0.1)


def all_run(view: ClusterView, tablets: int) -> bool:
    mine = [t for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID]
    return len(mine) == tablets and all(t.state == "RUNNING" for t in mine)


def healthy(view: ClusterView, gone: set[str]) -> bool:
    """All tablets have their voters, none on a node that is gone, and nothing is under way."""
    if view.intents:
        return False
    for t in view.tablets:
        voters = [p for p in t.config.peers if p.member_type is MemberType.VOTER]
        if len(voters) != t.replication_factor or len(t.config.peers) != len(voters):
            return False
        if any(p.node_id in gone for p in t.config.peers):
            return False
    return True


async def drive(
    executor: Executor, caller: Caller, gone: set[str], policy: Policy, *, until: str = ""
) -> list[str]:
    """Run the driver until all is well, or it took a step of the kind `until`; the steps it took, in order."""
    taken: list[str] = []
    deadline = asyncio.get_running_loop().time() + 180
    while True:
        try:
            report = await executor.run_once(policy)
        except SteleError as exc:
            taken.append(str(exc))
        else:
            taken += [type(o.step).__name__ for o in report.outcomes if o.error is None]
            if until in taken or (report.idle and healthy(report.view, gone) and not until):
                return taken
        assert asyncio.get_running_loop().time() < deadline, f"not healed: {taken[-30:]}"
        await asyncio.sleep(0.2)


async def test_the_life_of_a_cluster(tmp_path: Path) -> None:
    """One cluster for all stories: starting eight processes takes longer than any of them."""
    async with Cluster(tmp_path, masters=3, nodes=5) as cluster:
        caller = Caller(cluster)
        try:
            await no_client_writes_the_catalog(cluster, caller)
            await create_fail_over_delete(cluster, caller)
            await a_silent_node_returns_in_time(cluster, caller)
            await a_node_is_drained(cluster, caller)
            lost = await a_dead_node_is_replaced(cluster, caller)
            await a_dead_master_is_replaced(cluster, caller, lost)
        finally:
            await caller.pool.close()


async def no_client_writes_the_catalog(cluster: Cluster, caller: Caller) -> None:
    request = tserver_pb2.KvRequest(
        tablet_id=id_to_pb(CATALOG_TABLET_ID),
        op=tserver_pb2.KV_REPLACE,
        key=b"k",
        value=b"v",
        deadline_ms=2000,
    )
    streams = Streams(caller.pool)
    try:
        for master in cluster.masters:
            stream = streams.to(master.node_id, master.address)
            with pytest.raises(Rejected, match="written by the masters alone"):
                await stream.ask(tserver_pb2.ClientRequest(kv=request), timeout_s=60)
    finally:
        await streams.close()


async def create_fail_over_delete(cluster: Cluster, caller: Caller) -> None:
    answer = await caller.call("CreateTable", create_request("t", buckets=4))
    view = await caller.until(lambda v: all_run(v, 4))
    assert all(len({p.node_id for p in t.config.peers}) == 3 for t in view.tablets)
    leader = cluster.member(view.leader_master)
    cluster.kill(leader)
    located = await caller.call("GetTableLocations", pb.GetTableLocationsRequest(name="t"))
    assert isinstance(located, pb.GetTableLocationsResponse) and len(located.tablets) == 4
    assert isinstance(answer, pb.CreateTableResponse) and located.table.table_id == answer.table_id
    new = await caller.until(lambda v: v.settled and v.leader_master != view.leader_master)
    assert all_run(new, 4)
    await caller.call("CreateTable", create_request("u", buckets=3))
    await caller.until(lambda v: all_run(v, 7))
    await caller.call("DeleteTable", pb.DeleteTableRequest(name="t"))
    await caller.until(lambda v: all_run(v, 3))
    gone = {id_from_pb(t.tablet_id) for t in located.tablets}
    deadline = asyncio.get_running_loop().time() + 120
    while gone & {tablet for n in cluster.nodes for tablet in held(n.directory / "tablets")}:
        assert asyncio.get_running_loop().time() < deadline, "replicas of a deleted table stay on disk"
        await asyncio.sleep(0.1)
    cluster.restart(leader)
    await cluster.wait_ready(leader)


def held(tablets: Path) -> set[str]:
    """The tablets of which there is a replica, whatever its node removes meanwhile."""
    found = set()
    for tablet in os.listdir(tablets):
        with contextlib.suppress(FileNotFoundError):
            if os.listdir(tablets / tablet):
                found.add(tablet)
    return found


def busiest(view: ClusterView) -> str:
    """The ACTIVE node with the most replicas."""
    active = [n for n in view.nodes if n.role == "node" and n.state is NodeState.ACTIVE]
    return max(active, key=lambda n: n.replicas).node_id


async def a_silent_node_returns_in_time(cluster: Cluster, caller: Caller) -> None:
    view = await caller.until(lambda v: v.settled and all_run(v, 3))
    before = {t.tablet_id: {p.replica_id for p in t.config.peers} for t in view.tablets}
    silent = cluster.member(busiest(view))
    executor = Executor(caller.pool, cluster.master_addresses, holder="test-0", ttl_ms=5_000)
    cluster.pause(silent)
    await drive(executor, caller, set(), POLICY, until="DemotePeer")
    cluster.resume(silent)
    taken = await drive(executor, caller, set(), POLICY)
    assert "PromoteBack" in taken or "RemovePeer" in taken, taken
    after = {t.tablet_id: {p.replica_id for p in t.config.peers} for t in (await caller.view()).tablets}
    assert "PromoteBack" not in taken or any(after[t] == before[t] for t in after)
    await executor.release()


async def a_node_is_drained(cluster: Cluster, caller: Caller) -> None:
    node_id = busiest(await caller.view())
    state = pb.SetNodeStateRequest(node_id=id_to_pb(node_id), state=pb.DRAINING, reason="test")
    await caller.call("SetNodeState", state)
    executor = Executor(caller.pool, cluster.master_addresses, holder="test-1", ttl_ms=5_000)
    taken = await drive(executor, caller, {node_id}, PATIENT)
    assert "AddPreFollower" in taken and "DemotePeer" not in taken, taken
    node = (await caller.view()).node(node_id)
    assert node is not None and node.state is NodeState.RETIRED
    await executor.release()


async def a_dead_node_is_replaced(cluster: Cluster, caller: Caller) -> str:
    """Returns the lost node's id."""
    view = await caller.until(lambda v: v.settled and all_run(v, 3))
    victim = cluster.member(busiest(view))
    executor = Executor(caller.pool, cluster.master_addresses, holder="test-2", ttl_ms=5_000)
    cluster.lose(victim)
    policy = replace(PATIENT, lost=frozenset({victim.node_id}))
    taken = await drive(executor, caller, {victim.node_id}, policy)
    order = [taken.index(s) for s in ("BeginIntent", "StartCopy", "DemotePeer", "AddWitness", "RemovePeer")]
    assert order == sorted(order), taken

    def retired(v: ClusterView) -> bool:
        node = v.node(victim.node_id)
        return node is not None and node.state is NodeState.RETIRED

    await caller.until(retired)
    await executor.release()
    return victim.node_id


async def a_dead_master_is_replaced(cluster: Cluster, caller: Caller, lost_node: str) -> None:
    view = await caller.view()
    dead = next(m for m in cluster.masters if m.node_id != view.leader_master)
    executor = Executor(caller.pool, cluster.master_addresses, holder="test-3", ttl_ms=5_000)
    cluster.lose(dead)
    fresh = cluster._member("master", len(cluster.masters))
    cluster.masters.append(fresh)
    cluster.launch(fresh, "--join")
    policy = replace(PATIENT, lost=frozenset({dead.node_id}))
    await drive(executor, caller, {dead.node_id, lost_node}, policy)
    listed = await caller.call("ListMasters", pb.ListMastersRequest())
    assert isinstance(listed, pb.ListMastersResponse)
    masters = {id_from_pb(m.node_id) for m in listed.masters}
    assert masters == {m.node_id for m in cluster.masters if m is not dead} and fresh.node_id in masters
    await cluster.wait_ready(fresh)
    await executor.release()
