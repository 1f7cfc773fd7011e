"""All volumes of a cluster, copied at one moment and started elsewhere: neither copy reaches the other, nor harms it."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.model.errors import Code, Rejected
from stele.model.ids import new_id
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.tserver.options import NodeOptions
from tests.consensus.cluster import wait_until
from tests.harness import Cluster
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill


class Copy(LocalCluster):
    """The volumes of another cluster as they are now, for addresses and masters of their own."""

    def __init__(self, directory: Path, original: LocalCluster, *, fork_id: str) -> None:
        super().__init__(directory)
        shutil.copytree(original.directory, directory)
        self.ids, self.cluster_id, self.fork_id = original.ids, original.cluster_id, fork_id
        self.masters_given: tuple[str, ...] = ()

    def options(self, name: str, *, first: bool = False) -> NodeOptions:
        options = super().options(name, first=first)
        return replace(options, masters=self.masters_given) if self.masters_given else options


async def copied(original: LocalCluster, directory: Path, fork_id: str) -> Copy:
    """A copy of all volumes at one moment; the original runs again."""
    await original.close()
    copy = Copy(directory, original, fork_id=fork_id)
    for name in original.ids:
        await original.launch(name)
    await wait_ready(original)
    return copy


async def begun(directory: Path, nodes: int) -> LocalCluster:
    """A cluster that runs."""
    (directory / "original").mkdir()
    return await LocalCluster(directory / "original", nodes).start()


async def wait_ready(cluster: LocalCluster, *names: str) -> None:
    for name in names or tuple(cluster.running):
        node = cluster.running[name]
        await wait_until(lambda node=node: not node.health.ready() or node.failed.done())
        assert not node.failed.done(), node.failed.result()


async def restart(cluster: LocalCluster, *names: str) -> None:
    for name in names:
        await cluster.stop(name)
        await cluster.launch(name)
    await wait_ready(cluster, *names)


def dialled(cluster: LocalCluster) -> set[str]:
    """Hosts that its processes have dialled."""
    return {a.rpartition(":")[0] for node in cluster.running.values() for a in node.pool._channels}


def hosts(cluster: LocalCluster) -> set[str]:
    return {f"{cluster.network}.{number}" for number in range(1, len(cluster.ids) + 1)}


def unharmed(cluster: LocalCluster) -> bool:
    return all(not n.failed.done() and not n.volume.record.refused for n in cluster.running.values())


@pytest.mark.parametrize("fork_id", ["", new_id()], ids=["by hand", "under a fork id"])
async def test_a_copy_of_all_volumes_serves_beside_the_original(tmp_path: Path, fork_id: str) -> None:
    """It told the original's masters that its nodes were theirs, started later: the original's next starts were refused for ever."""
    original = await begun(tmp_path, nodes=3)
    copy: LocalCluster | None = None
    names = list(original.ids)
    try:
        async with original.client() as client:
            await client.create_table("t", SCHEMA, HASHED)
            await fill(client, 20)
            copy = await copied(original, tmp_path / "copy", fork_id)
            for name in names[:-1]:  # one that is missing is not looked for where the original's is
                await copy.launch(name)
            await wait_ready(copy)
            async with copy.client() as elsewhere:
                assert await count(elsewhere) == 20
                await fill(elsewhere, 25)
                assert dialled(copy) <= hosts(copy)
                await copy.launch(names[-1])
                await wait_ready(copy)
                await fill(client, 30)
                assert (await count(client), await count(elsewhere)) == (30, 25)
                await restart(original, *names)
                await restart(copy, *names)
                await fill(client, 31)
                await fill(elsewhere, 26)
                assert (await count(client), await count(elsewhere)) == (31, 26)
        assert dialled(copy) <= hosts(copy) and dialled(original) <= hosts(original)
        assert unharmed(original) and unharmed(copy)
        for cluster in (original, copy):
            records = [node.volume.record for node in cluster.running.values()]
            assert {r.fork_id for r in records} == {cluster.fork_id}
            await wait_until(
                lambda c=cluster: all(
                    n.volume.record.given == (c.master_address,) for n in c.running.values()
                )
            )
            assert {r.adopted for r in records} == {cluster is copy}
    finally:
        await original.close()
        if copy is not None:
            await copy.close()


async def test_a_copy_that_is_led_to_the_original_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    """Somebody gave it the original's masters by mistake."""
    original = await begun(tmp_path, nodes=1)
    copy = await copied(original, tmp_path / "copy", new_id())
    copy.masters_given = (original.master_address,)
    try:
        node = await copy.launch("node-0")
        (asked,) = node.heartbeater._loops.values()
        await wait_until(lambda: asked._failures > 3)
        assert unharmed(original) and unharmed(copy)
        with pytest.raises(Rejected, match="two copies of a cluster never speak") as refused:
            await node.pool.unary(
                original.master_address, MasterServiceStub, "ListMasters", master_pb2.ListMastersRequest()
            )
        assert refused.value.code is Code.WRONG_CLUSTER
        await restart(original, "node-0")
    finally:
        await asyncio.gather(original.close(), copy.close())


class Masters(Cluster):
    """Three masters; where `original` is given, on copies of its volumes."""

    def __init__(self, directory: Path, original: Cluster | None = None) -> None:
        super().__init__(directory, masters=3, nodes=0)
        if original is not None:
            shutil.copytree(original.directory, directory, ignore=shutil.ignore_patterns("*.log"))
            self.cluster_id = original.cluster_id
            for own, theirs in zip(self.masters, original.masters, strict=True):
                own.node_id = theirs.node_id


def spoken_of(cluster: Cluster, other: Cluster) -> list[str]:
    """What its processes logged of the other's addresses, beside that they do not ask there."""
    lines = [line for m in cluster.masters for line in m.log_path.read_text().splitlines()]
    told = [line for line in lines if "none of the masters that were given before" not in line]
    return [line for line in told if any(address in line for address in other.master_addresses)]


async def listed(cluster: Cluster) -> set[str]:
    """Where the masters are, by their leader's word."""
    async with AsyncClient(cluster.master_addresses, timeout_s=60, first_contact_s=60) as client:
        answer = await client.masters.call("ListMasters", master_pb2.ListMastersRequest())
        return {m.address for m in answer.masters}


async def test_masters_of_a_copy_started_by_hand_find_each_other_and_not_the_originals(
    tmp_path: Path,
) -> None:
    """Their catalog's configuration and rows name the originals' addresses, where a later start of a peer shut the first out."""
    original = Masters(tmp_path / "original")
    copy: Masters | None = None
    try:
        await original.start()
        for master in original.masters:
            await original.stop(master)
        copy = Masters(tmp_path / "copy", original)
        for cluster, members in ((original, original.masters), (copy, copy.masters[:2])):
            for master in members:
                cluster.restart(master)
            await cluster.wait_ready(*members)
        missing = copy.masters[2]
        assert not await listed(copy) & set(original.master_addresses)
        copy.restart(missing)
        await copy.wait_ready(missing)
        async with asyncio.timeout(60):  # one that leads since a moment ago has yet to hear the others
            while await listed(copy) != set(copy.master_addresses):
                assert not await listed(copy) & set(original.master_addresses)
                await asyncio.sleep(0.1)
        for master in original.masters:
            original.kill(master)
            original.restart(master)
            await original.wait_ready(master)
        assert await listed(original) == set(original.master_addresses)
        assert all(m.running for m in (*original.masters, *copy.masters))
        assert not spoken_of(copy, original) and not spoken_of(original, copy)
    finally:
        original.kill_all()
        if copy is not None:
            copy.kill_all()


async def test_a_cluster_is_formed_under_a_fork_id_and_new_nodes_learn_it_from_its_masters(
    tmp_path: Path,
) -> None:
    cluster = LocalCluster(tmp_path, nodes=1)
    cluster.fork_id = fork_id = new_id()
    try:
        await cluster.launch("master", first=True)
        await cluster.form()
        form = (sys.executable, "-m", "stele.cli", "master", "form", "--masters", cluster.master_address)
        process = await asyncio.create_subprocess_exec(*form, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert out.decode().strip() == f"formed cluster {cluster.cluster_id[:8]} under fork id {fork_id[:8]}"
        cluster.fork_id = ""
        node = await cluster.launch("node-0")
        await wait_ready(cluster, "node-0")
        assert node.volume.record.fork_id == fork_id and not node.volume.adopted
        await restart(cluster, "node-0")
        assert cluster.running["node-0"].description.shown()["fork_id"] == fork_id
    finally:
        await cluster.close()


async def test_a_fork_id_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="expected 32 hex digits"):
        cluster = LocalCluster(tmp_path)
        cluster.fork_id = "mine"
        cluster.options("master")
