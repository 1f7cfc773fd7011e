"""A fenced node runs and serves nobody: neither clients nor its tablets' other replicas, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stele.model.errors import Code, SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from stele.tserver.fencing import Fencing
from stele.tserver.node import Node
from stele.tserver.replicas import Replicas
from tests.consensus.cluster import WAIT_S, wait_until
from tests.tserver.local import count, fill
from tests.tserver.test_node_commands import POLICY, driving, listed, made


def ends(node: Node) -> dict[str, int]:
    """The index up to which each replica here has committed."""
    return {r.tablet_id: r.committed_opid.index for r in node.replicas}


async def refuses_a_checksum(node: Node, tablet: str) -> bool:
    """Whether a client's call about this tablet is refused because the node is fenced."""
    pool = ChannelPool(node.description.identity)
    try:
        await pool.unary(
            node.address,
            TabletServerServiceStub,
            "Checksum",
            tserver_pb2.ChecksumRequest(tablet_id=id_to_pb(tablet)),
            timeout_s=5,
        )
    except SteleError as exc:
        return exc.code is Code.NOT_LEADER and "fenced" in str(exc)
    finally:
        await pool.close()
    return False


async def test_a_fenced_node_serves_nobody_and_catches_up_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made(tmp_path, monkeypatch) as (cluster, run):
        before = await listed(run)
        node_id = max(before.values(), key=lambda n: (n["leaders"], n["replicas"]))["node_id"]
        name = next(n for n, one in cluster.ids.items() if one == node_id)
        node = cluster.running[name]
        async with driving(cluster), cluster.client() as client:
            code, out, err = await run("node", "fence", node_id, "--for", "2h", "--reason", "odd rows")
            assert code == 0 and "is fenced for" in out, err
            await wait_until(lambda: node.replicas.fenced)
            assert not any(r.is_leader for r in node.replicas), "leaders were handed over before"
            assert "fenced" in node.health.ready() and not node.health.live()
            tablet = next(iter(node.replicas)).tablet_id
            assert await refuses_a_checksum(node, tablet)

            # Nothing arrives, in this start or the next, and nothing is copied elsewhere for it.
            stood = ends(node)
            await fill(client, 150)
            assert ends(node) == stood
            await cluster.stop(name)
            node = await cluster.launch(name)
            await wait_until(lambda: node.replicas.opened)
            assert node.replicas.fenced
            await fill(client, 200)
            await asyncio.sleep(2 * POLICY.dead_after_ms / 1_000)
            now = await listed(run)
            assert now[node_id]["wanted"] == "FENCED" and now[node_id]["seen"] == "live"
            assert now[node_id]["replicas"] == before[node_id]["replicas"] and not any(
                n["copies"] for n in now.values()
            )
            assert await count(client) == 200

            assert (await run("node", "unpark", node_id))[0] == 2
            code, out, _ = await run("node", "unfence", node_id)
            assert code == 0 and "in service" in out
            await wait_until(lambda: not node.health.ready())
            async with asyncio.timeout(WAIT_S):
                while any(index <= stood[tablet_id] for tablet_id, index in ends(node).items()):
                    await asyncio.sleep(0.1)
            assert not await refuses_a_checksum(node, tablet)


async def test_a_volume_that_cannot_keep_it_fences_all_the_same_and_is_tried_again() -> None:
    """A sick disk may be why the node is fenced."""
    replicas, kept, full = Replicas(), [], [True]

    def remember(fenced: bool) -> None:
        if full[0]:
            raise OSError(28, "no space left on device")
        kept.append(fenced)

    async def in_thread(work: Any, *args: Any) -> Any:
        return work(*args)

    fencing = Fencing(replicas, fenced=False, remember=remember, in_thread=in_thread)
    fencing.told(True, 4)
    await wait_until(lambda: replicas.fenced)
    assert not kept
    full[0] = False
    fencing.told(True, 4)
    await wait_until(lambda: kept == [True])
    full[0] = True
    fencing.told(False, 4)
    await asyncio.sleep(0.05)
    assert replicas.fenced, "its next start would fence it again, unasked"
    full[0] = False
    fencing.told(False, 4)
    await wait_until(lambda: kept == [True, False] and not replicas.fenced)
    await fencing.close()


async def test_a_leader_master_that_was_replaced_does_not_end_a_fence() -> None:
    replicas = Replicas()

    async def in_thread(work: Any, *args: Any) -> Any:
        return work(*args)

    fencing = Fencing(replicas, fenced=False, remember=lambda fenced: None, in_thread=in_thread)
    fencing.told(True, 5)
    await wait_until(lambda: replicas.fenced)
    fencing.told(False, 4)
    await asyncio.sleep(0.05)
    assert replicas.fenced
    fencing.told(False, 5)
    await wait_until(lambda: not replicas.fenced)
    await fencing.close()


async def test_a_fence_is_refused_where_tablets_would_stop_and_on_a_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made(tmp_path, monkeypatch, nodes=3) as (cluster, run):
        first, second, _ = await listed(run)
        assert (await run("node", "fence", first, "--for", "1h"))[0] == 0
        code, _, err = await run("node", "fence", second, "--for", "1h")
        assert code == 2 and "too few voters would be left" in err
        code, _, err = await run("node", "fence", cluster.ids["master"], "--for", "1h")
        assert code == 2 and "only nodes can be fenced" in err
        code, _, err = await run("node", "fence", second)
        assert code == 2 and "--for" in err
