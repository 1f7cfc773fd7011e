"""A first master's volume that comes up empty under the same command line, as under the pod it was formed with."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stele.client.admin import form_masters, node_status
from stele.driver.executor import Executor
from stele.driver.wire import view_from_pb
from stele.model.config import MemberType
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.tserver.options import EXIT_VOLUME_EMPTY
from tests.harness import Cluster, Member
from tests.master.test_processes import POLICY

REFUSED = "says that the cluster has formed"
ASKING = "asking the other first masters"


@asynccontextmanager
async def three_masters(directory: Path) -> AsyncIterator[Cluster]:
    """Started and formed with --first-masters, no nodes."""
    async with Cluster(directory / "c", masters=3, nodes=0) as cluster:
        yield cluster


def first(cluster: Cluster) -> tuple[str, str]:
    return "--first-masters", ",".join(f"{m.node_id}={m.address}" for m in cluster.masters)


def unmount(cluster: Cluster, member: Member) -> Path:
    """Its process ends, and its volume is elsewhere."""
    cluster.kill(member)
    member.log_path.write_bytes(b"")
    return member.directory.rename(member.directory.with_name(f"{member.name}.volume"))


def mount(member: Member, volume: Path) -> None:
    shutil.rmtree(member.directory)
    volume.rename(member.directory)


def unanswered(cluster: Cluster, member: Member) -> list[str]:
    """By whom it was not answered when it last said so."""
    said = [line["no_answer"] for line in cluster.log_lines(member) if ASKING in line["event"]]
    return said[-1] if said else []


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.05)


async def refused(member: Member) -> None:
    assert member.process is not None
    assert await asyncio.to_thread(member.process.wait, 60) == EXIT_VOLUME_EMPTY, member.tail()
    assert REFUSED in member.tail() and "VolumeEmpty" in member.tail()
    assert not (member.directory / "node.json").exists()


@pytest.mark.parametrize("late", [1, 2])
async def test_it_is_refused_as_long_as_one_other_remembers_the_formation(tmp_path: Path, late: int) -> None:
    """It was formatted, and had the others take the volume that came back for one of an earlier start, for good."""
    async with three_masters(tmp_path) as cluster:
        members = cluster.masters[:late]
        volumes = [unmount(cluster, m) for m in members]
        for member in members:
            cluster.launch(member, *first(cluster))
        for member in members:
            await refused(member)
        for member, volume in zip(members, volumes, strict=True):
            mount(member, volume)
            cluster.launch(member, *first(cluster))
        await cluster.wait_ready()


async def test_it_waits_until_all_others_have_answered(tmp_path: Path) -> None:
    """Two that are empty would have formatted both, each on the other's word, while the third is away."""
    async with three_masters(tmp_path) as cluster:
        away = cluster.masters[2]
        cluster.kill(away)
        members = cluster.masters[:2]
        volumes = [unmount(cluster, m) for m in members]
        for member in members:
            cluster.launch(member, *first(cluster))
        for member in members:
            await until(lambda member=member: unanswered(cluster, member) == [away.address])
            assert member.running and not (member.directory / "node.json").exists()
            with pytest.raises(Retryable) as unformatted:
                await form_masters([member.address], cluster_id=cluster.cluster_id)
            assert unformatted.value.code is Code.NOT_READY
        cluster.restart(away)
        for member in members:
            await refused(member)
        for member, volume in zip(members, volumes, strict=True):
            mount(member, volume)
            cluster.restart(member)
        await cluster.wait_ready()


async def test_a_first_replica_that_nobody_confirms_gives_way_to_a_later_one(tmp_path: Path) -> None:
    """The volume is lost between the list of those that form and their word. Each start held the later replica, which votes, as
    if it were the first one."""
    cluster = Cluster(tmp_path / "c", masters=3, nodes=0)
    cluster.directory.mkdir()
    pool = ChannelPool(Identity())
    try:
        for master in cluster.masters:
            cluster.launch(master, *first(cluster))
        lost, *others = cluster.masters
        listed = pb.ConfirmFormationRequest(cluster_id=id_to_pb(cluster.cluster_id))
        for master in cluster.masters:
            format_id = await formatted(pool, master)
            listed.masters.add(node_id=id_to_pb(master.node_id), format_id=format_id, address=master.address)
        unmount(cluster, lost)
        cluster.launch(lost, *first(cluster))
        await formatted(pool, lost)
        for master in others:
            await pool.unary(master.address, MasterServiceStub, "ConfirmFormation", listed)
        await cluster.wait_ready(*others)
        await drive(pool, cluster, lost)
        await cluster.wait_ready(lost)
        cluster.kill(others[0])
        cluster.kill(lost)
        cluster.launch(lost, *first(cluster))
        await cluster.wait_ready(lost, others[1])
        record = json.loads((lost.directory / "node.json").read_text())
        catalog = [d.name for d in (lost.directory / "tablets" / CATALOG_TABLET_ID).iterdir()]
        assert record["formed"] and "1" not in catalog
    finally:
        await pool.close()
        cluster.kill_all()


async def formatted(pool: ChannelPool, master: Member) -> str:
    """Its format id, once it has one."""
    async with asyncio.timeout(60):
        while True:
            try:
                status = await node_status(pool, master.address)
                if status.format_id:
                    return status.format_id
            except SteleError:
                pass
            await asyncio.sleep(0.05)


async def drive(pool: ChannelPool, cluster: Cluster, lost: Member) -> None:
    """Until a later replica of the catalog votes on the master that lost its first one."""
    masters = Masters(pool, cluster.master_addresses, first_contact_s=None)
    executor = Executor(pool, cluster.master_addresses, holder="test", ttl_ms=5_000)
    async with asyncio.timeout(150):
        while True:
            try:
                await executor.run_once(POLICY)
                answer = await masters.call("GetClusterView", pb.GetClusterViewRequest())
            except SteleError:
                continue
            finally:
                await asyncio.sleep(0.2)
            (catalog,) = view_from_pb(answer).tablets
            peer = catalog.config.peer_on(lost.node_id)
            voters = [p for p in catalog.config.peers if p.member_type is MemberType.VOTER]
            if peer in voters and peer.replica_id > 3 and len(voters) == len(catalog.config.peers) == 3:
                return
