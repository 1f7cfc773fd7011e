"""Leases as locks on real processes: never two holders at once, while each node is killed and comes back."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import tserver_pb2
from tests.client.commands import runner
from tests.consensus.cluster import WAIT_S
from tests.harness import Cluster
from tests.linear.held import faults_of
from tests.linear.keys import NAME, History
from tests.tserver.local import LocalCluster


async def test_two_never_hold_one_name_while_leaders_are_killed(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as one,
        AsyncClient(cluster.master_addresses) as other,
    ):
        spaces = [await one.create_keyspace("s"), await other.keyspace("s")]
        history = History()
        kept = await spaces[0].lease(3.0)
        await spaces[0].insert("kept", "1", lease=kept)
        tasks = [asyncio.create_task(history.hold(spaces[n % 2], f"c{n}")) for n in range(4)]
        await cluster.kill_each()
        await asyncio.sleep(1.0)
        history.stop.set()
        await asyncio.gather(*tasks)
        assert faults_of(history.holds) == []
        assert len(history.holds) > 2 and len({hold.holder for hold in history.holds}) > 1
        if kept.alive:
            assert await spaces[1].read("kept") == b"1", "its holder was not told that it is lost"


async def test_a_holder_that_is_cut_off_knows_before_another_can_have_it(tmp_path: Path) -> None:
    """All nodes stand still, so nobody confirms a sign. When they go on, the next leader gives the lease its whole time."""
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        space = await client.create_keyspace("s")
        lease = await space.lease(1.5)
        assert await space.elect(NAME, "first", lease=lease) == "first"
        for node in cluster.nodes:
            cluster.kill(node)
        async with asyncio.timeout(WAIT_S):
            assert await lease.lost()
        assert lease.lost_by.startswith("no leader confirmed it in time")
        lost = time.monotonic()
        for node in cluster.nodes:
            cluster.restart(node)
        await cluster.wait_ready()
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    second = await space.lease(5.0)
                    if await space.elect(NAME, "second", lease=second) == "second":
                        break
                except SteleError:
                    pass
                await asyncio.sleep(0.02)
        assert time.monotonic() > lost


async def test_a_leader_that_is_cut_off_confirms_no_sign(tmp_path: Path) -> None:
    """The others stand still, so it cannot know whether they have elected another."""
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        space = await client.create_keyspace("s")
        lease = await space.lease(30.0)
        view = await cluster_view(client.masters)
        (tablet,) = [each for each in view.tablets if each.table_name == "s"]
        others = [node for node in cluster.nodes if node.node_id != id_from_pb(tablet.leader_node)]
        assert len(others) == 2
        for node in others:
            cluster.pause(node)
        try:
            request = tserver_pb2.KvRequest(op=tserver_pb2.KV_LEASE_KEEP, lease=lease.id)
            with pytest.raises(Retryable):
                await space._tablet.kv(request, timeout_s=2.0)
        finally:
            for node in others:
                cluster.resume(node)
        await lease.keep()
        assert lease.alive


async def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            space = await client.create_keyspace("s")
            run = runner(cluster, monkeypatch)
            code, lease, _ = await run("kv", "lease-grant", "s", "--ttl", "30")
            lease = lease.strip()
            assert code == 0 and len(lease) == 16
            assert (await run("kv", "put", "s", "a", "1", "--lease", lease))[0] == 0
            assert (await run("kv", "insert", "s", "b", "2", "--lease", lease))[0] == 0
            assert (await run("kv", "write", "s", "--put", "c", "3", "--lease", lease))[0] == 0
            code, out, _ = await run("kv", "leases", "s", "--json")
            (told,) = json.loads(out)
            assert told.pop("leftS") > 0
            assert told == {"lease": lease, "ttlS": 30.0, "keys": [{"key": "a"}, {"key": "b"}, {"key": "c"}]}
            assert f"{lease}  30" in (await run("kv", "leases", "s"))[1]
            assert (await run("kv", "lease-revoke", "s", lease))[0] == 0
            assert await space.list() == []
            for call in (space.keep_lease, space.revoke_lease):
                with pytest.raises(Rejected, match=r"expected a number; int\(id, 16\) of an id that"):
                    await call(lease)  # type: ignore[arg-type]
            code, out, _ = await run("table", "describe", "s")
            assert code == 0 and "keyspace" in out and "row" not in out
            code, _, err = await run("kv", "lease-keep", "s", lease)
            assert code == 1 and "LEASE_LOST" in err
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "stele.cli",
                    "kv",
                    "lease-keep",
                    "s",
                    f"{(await space.lease(3)).id:016x}",
                ),
                *("--masters", cluster.master_address),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None and process.stderr is not None
            keeping = (await process.stdout.readline()).decode().split()
            await space.revoke_lease(int(keeping[2].rstrip(","), 16))
            said = (
                f"stele: LEASE_LOST: lease {keeping[2].rstrip(',')} is lost: it has expired, or was revoked"
            )
            assert (await process.stderr.read()).decode().strip() == said
            assert await process.wait() == 1
            code, _, err = await run("kv", "put", "s", "a", "1", "--lease", "no")
            assert code == 2 and "16 hexadecimal digits" in err
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "stele.cli",
                    "kv",
                    "elect",
                    "s",
                    "primary",
                    "--id",
                    "me",
                    "--ttl",
                    "1",
                ),
                *("--masters", cluster.master_address, "--json"),
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            try:
                line = json.loads(await process.stdout.readline())
                assert line == {"name": "primary", "holder": "me", "me": True}
            finally:
                process.kill()
                await process.wait()
            async with asyncio.timeout(WAIT_S):
                while await space.read("primary") is not None:
                    await asyncio.sleep(0.05)
    finally:
        await cluster.close()


async def test_a_holder_whose_machine_slept_knows_that_its_lease_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock of its machine stood still meanwhile, and that of the leader went on."""
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            space = await client.create_keyspace("s")
            holder = await space.lease(3.0)
            assert holder.alive
            slept_s = 30.0
            monkeypatch.setattr(
                "stele.client.lease.now_s", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + slept_s
            )
            assert not holder.alive and holder.left_s == 0
            with pytest.raises(Rejected) as refused:
                await holder.keep()
            assert refused.value.code is Code.LEASE_LOST
            async with asyncio.timeout(WAIT_S):
                assert await holder.lost()
    finally:
        await cluster.close()


def test_a_holder_counts_the_sleep_of_its_machine() -> None:
    """A process whose clocks are those of a machine that has slept for an hour."""
    asleep = ["unshare", "--user", "--map-root-user", "--time", "--boottime", "3600", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*asleep, "true"], capture_output=True).returncode:
        pytest.skip("needs time namespaces (unshare)")
    script = "import time; from stele.client.lease import now_s; print(now_s() - time.monotonic())"
    here = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    told = subprocess.run(
        [*asleep, sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert float(told) == pytest.approx(here + 3600, abs=60)
