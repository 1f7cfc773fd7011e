"""A leader is moved by hand: what is done, what is refused and why, and that drivers leave it there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

from stele.cli.app import cli
from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.client.step_down import Moved, step_down
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.wire import view_from_pb
from stele.model.errors import Code, SteleError
from stele.model.ids import CATALOG_TABLET_ID, TabletId
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from tests.consensus.cluster import WAIT_S
from tests.tserver.local import HASHED, SCHEMA, LocalCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    made = LocalCluster(tmp_path, nodes=4)
    try:
        yield await made.start()
    finally:
        await made.close()


async def tablets(client: AsyncClient) -> list[master_pb2.TabletViewPB]:
    """A table of four tablets, all of which are led and have told so."""
    await client.create_table("t", SCHEMA, HASHED)
    async with asyncio.timeout(WAIT_S):
        while True:
            view = await cluster_view(client.masters)
            found = [t for t in view.tablets if t.table_name == "t"]
            told = [r.status.role for t in found for r in t.replicas]
            if len(found) == 4 and told.count(common_pb2.LEADER) == 4 and len(told) == 12:
                return found
            await asyncio.sleep(0.05)


async def refused(client: AsyncClient, tablet: str, to: str) -> SteleError:
    with pytest.raises(SteleError) as caught:
        await step_down(client.masters, client.pool, tablet, to=to, timeout_s=2.0)
    return caught.value


def leads(cluster: LocalCluster, tablet_id: str, node_id: str) -> bool:
    (node,) = (n for name, n in cluster.running.items() if cluster.ids[name] == node_id)
    replica = node.replicas.current(tablet_id)
    return replica is not None and replica.is_leader


async def test_a_leader_moves_to_the_node_that_is_named(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        tablet, *others = await tablets(client)
        tablet_id = id_from_pb(tablet.tablet_id)
        peers = [id_from_pb(p.node_id) for p in tablet.committed_config.peers]
        (outside,) = {cluster.ids[n] for n in cluster.ids if n != "master"} - {*peers}
        before = id_from_pb(tablet.leader_node)
        target = next(n for n in peers if n != before)

        async def move(to: str, kept_s: int = 60) -> Moved:
            return await step_down(client.masters, client.pool, tablet_id[:8], to=to, kept_s=kept_s)

        moved = await move(target)
        assert (moved.before, moved.after) == (before[:8], target[:8]) and leads(cluster, tablet_id, target)
        again = await move(target)
        assert again.before == again.after == target[:8], "it leads already"

        view = view_from_pb(await cluster_view(client.masters))
        known = view.tablet(tablet_id)
        assert known is not None and 0 < known.leader_kept_until_us - view.now_us <= 60_000_000
        error = await refused(client, tablet_id, outside)
        assert error.code is Code.UNSAFE_CHANGE and "holds no replica of tablet" in str(error)
        assert "its voters are on" in str(error)
        assert (await refused(client, "ffff", target)).code is Code.NOT_FOUND
        assert (await refused(client, tablet_id, "0123456789")).code is Code.NOT_FOUND
        await drivers_leave_it(client, tablet_id, [id_from_pb(t.tablet_id) for t in others], target)
        await the_order_is_fenced(client, cluster, tablet_id, target)


async def drivers_leave_it(client: AsyncClient, tablet_id: str, others: list[str], target: str) -> None:
    """Although its node leads every tablet of which it has a replica."""
    for other in others:
        view = view_from_pb(await cluster_view(client.masters))
        tablet = view.tablet(other)
        assert tablet is not None
        if tablet.config.peer_on(target) is not None:
            await step_down(client.masters, client.pool, other, to=target, kept_s=0)
    async with asyncio.timeout(WAIT_S):
        while True:
            view = view_from_pb(await cluster_view(client.masters))
            policy = Policy(dead_after_ms=600_000, min_disk_free_bytes=0)
            steps = plan(view, policy)
            if steps and all(type(s).__name__ == "MoveLeader" for s in steps):
                break
            await asyncio.sleep(0.05)
    assert tablet_id not in {s.tablet_id for s in steps}


async def the_order_is_fenced(
    client: AsyncClient, cluster: LocalCluster, tablet_id: str, leader: str
) -> None:
    """A driver's order is about one term. One that was delayed finds another."""
    (node,) = (n for name, n in cluster.running.items() if cluster.ids[name] == leader)
    replica = node.replicas.get(TabletId(tablet_id))
    late = consensus_pb2.LeaderStepDownRequest(tablet_id=id_to_pb(tablet_id), term=replica.term - 1)
    address = next(cluster.options(name).listen for name in cluster.ids if cluster.ids[name] == leader)
    with pytest.raises(SteleError) as caught:
        await client.pool.unary(address, ConsensusServiceStub, "LeaderStepDown", late, timeout_s=5)
    assert caught.value.code is Code.CAS_FAILED and leads(cluster, tablet_id, leader)


async def test_a_node_that_does_not_answer_is_refused_and_nothing_is_kept(cluster: LocalCluster) -> None:
    """The masters do not know yet that it is silent. The leader does."""
    async with cluster.client() as client:
        tablet, *_ = await tablets(client)
        tablet_id = id_from_pb(tablet.tablet_id)
        peers = [id_from_pb(p.node_id) for p in tablet.committed_config.peers]
        target = next(n for n in peers if n != id_from_pb(tablet.leader_node))
        name = next(n for n in cluster.ids if cluster.ids[n] == target)
        await cluster.stop(name)
        error = await refused(client, tablet_id, target)
        assert error.code in (Code.UNSAFE_CHANGE, Code.TIMED_OUT, Code.NOT_READY)
        assert "stays where it is" in str(error) or "is silent" in str(error)
        view = view_from_pb(await cluster_view(client.masters))
        known = view.tablet(tablet_id)
        assert known is not None and known.leader_kept_until_us <= view.now_us + 1_000


async def test_without_a_name_the_leader_goes_to_another_voter(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        tablet, *_ = await tablets(client)
        tablet_id = id_from_pb(tablet.tablet_id)
        moved = await step_down(client.masters, client.pool, tablet_id)
        assert moved.after != moved.before == id_from_pb(tablet.leader_node)[:8]
        lines = [t for t in (await cluster_view(client.masters)).tablets if t.tablet_id == tablet.tablet_id]
        assert lines


async def test_the_command_line_says_who_leads_now(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        tablet, *_ = await tablets(client)
        before = id_from_pb(tablet.leader_node)
        peers = [id_from_pb(p.node_id) for p in tablet.committed_config.peers]
        target = next(n for n in peers if n != before)

        async def said(*arguments: str) -> str:
            words = ["tablet", "step-down", *arguments, "--masters", cluster.master_address]
            with (
                structlog.testing.capture_logs()
            ):  # the nodes log in this process: a line of theirs may cut one of these
                result = await asyncio.to_thread(CliRunner().invoke, cli, words)
            return (result.output or str(result.exception)).rstrip()

        tablet_id = id_from_pb(tablet.tablet_id)
        assert await said(tablet_id[:8], "--to", target[:8], "--keep", "90") == (
            f"tablet {tablet_id[:8]} of t: {target[:8]} leads now; {before[:8]} led before; no driver moves it for 90 s"
        )
        assert await said(tablet_id[:8], "--to", target, "--keep", "0") == (
            f"tablet {tablet_id[:8]} of t: {target[:8]} leads already"
        )
        assert "NOT_FOUND: 0 tablets begin with 00ff" in await said("00ff")


async def test_a_catalog_of_one_master_has_nobody_else_to_lead(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        error = await refused(client, CATALOG_TABLET_ID, "")
        assert error.code is Code.UNSAFE_CHANGE and "no other sound voter" in str(error)
