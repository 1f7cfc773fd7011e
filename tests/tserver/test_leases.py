"""Leases on real nodes in this process: when they end, who confirms a sign of their holder, and what a new leader gives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stele.client import AsyncClient, AsyncKeySpace
from stele.consensus.replica import Replica
from stele.model.errors import Code, Rejected, Retryable
from stele.model.kvop import KEY_BYTES_MAX, grant, revoke
from stele.rpc.proto import tserver_pb2 as pb
from stele.tablet.leases import LEASE_KEYS_MAX
from stele.tserver.leases import _Term
from stele.tserver.node import Node
from tests.consensus.cluster import WAIT_S
from tests.tablet.test_leases import Space
from tests.tserver.local import LocalCluster


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with cluster.client() as made:
        yield made


@pytest.fixture
async def space(client: AsyncClient) -> AsyncKeySpace:
    return await client.create_keyspace("s")


def leader(cluster: LocalCluster) -> tuple[Node, Replica]:
    """The node that leads the one key space, and its replica."""
    ((node, replica),) = [
        (node, replica)
        for name, node in cluster.running.items()
        for replica in node.replicas
        if name != "master" and replica.is_leader
    ]
    return node, replica


def term_of(cluster: LocalCluster) -> _Term:
    """What the leader knows of the leases of the one key space."""
    (term,) = leader(cluster)[0].leases._terms.values()
    return term


async def held_by(space: AsyncKeySpace, count: int, keys: int, key_bytes: int = 1) -> dict[int, set[bytes]]:
    """New leases that nobody keeps alive, of an hour, with their keys."""
    held: dict[int, set[bytes]] = {}
    for number in range(count):
        lease = await space.lease(3_600.0)
        await lease.close()
        held[lease.id] = {f"{number}/{n}/".encode().ljust(key_bytes, b"x") for n in range(keys)}
        await space.write(dict.fromkeys(held[lease.id], b""), lease=lease)
    return held


async def gone(space: AsyncKeySpace, key: str) -> float:
    """When a key was seen to be gone."""
    async with asyncio.timeout(WAIT_S):
        while await space.read(key) is not None:
            await asyncio.sleep(0.01)
    return time.monotonic()


async def test_it_ends_once_its_time_has_passed_and_not_before(space: AsyncKeySpace) -> None:
    lease = await space.lease(2.0)
    await space.insert("a", "1", lease=lease)
    await space.write({"b": "2", "c": "3"}, lease=lease)
    await space.replace("free", "4")
    watch = await space.watch()
    await lease.keep()
    kept = time.monotonic()
    await lease.close()
    assert not lease.alive and lease.left_s == 0
    assert await gone(space, "a") >= kept + 2.0 - 0.05, (
        "the leader confirmed the last sign before `keep` returned"
    )
    assert await space.list() == [(b"free", b"4")]
    write = await anext(watch)
    assert [(c.key, c.value) for c in write.changes] == [(b"a", None), (b"b", None), (b"c", None)]
    with pytest.raises(Rejected, match="has expired, or was revoked; take another") as refused:
        await space.insert("a", "1", lease=lease)
    assert refused.value.code is Code.LEASE_LOST
    with pytest.raises(Rejected) as unknown:
        await space.keep_lease(lease.id)
    assert unknown.value.code is Code.LEASE_LOST


async def test_its_holder_keeps_it_alive_and_others_see_it(space: AsyncKeySpace) -> None:
    async with await space.lease(3.0) as lease:
        await space.insert("a", "1", lease=lease)
        (state,) = (await space.snapshot("a")).keys
        assert state.lease == lease.id
        for _ in range(40):
            await asyncio.sleep(0.1)
            assert lease.alive and 0 < lease.left_s <= 2.7
        (seen,) = await space.leases()
        assert (seen.id, seen.ttl_s, seen.keys) == (lease.id, 3.0, (b"a",)) and 0 < seen.left_s <= 3.0
        assert await space.read("a") == b"1"
        assert not await lease.lost(0)
    assert await space.list() == [] and await space.leases() == (), "it is revoked at the end of the block"
    assert await lease.lost() and not lease.alive
    with pytest.raises(Rejected):
        await lease.keep()


async def test_another_that_revokes_it_is_noticed(space: AsyncKeySpace) -> None:
    lease = await space.lease(3.0)
    await space.insert("a", "1", lease=lease)
    await space.revoke_lease(lease.id)
    assert await space.read("a") is None
    async with asyncio.timeout(WAIT_S):
        assert await lease.lost()


async def test_a_new_leader_gives_every_lease_its_whole_time(
    cluster: LocalCluster, space: AsyncKeySpace
) -> None:
    lease = await space.lease(2.0)
    await space.insert("a", "1", lease=lease)
    await lease.close()
    await asyncio.sleep(1.5)
    node, replica = leader(cluster)
    moved = time.monotonic()
    await node.replicas.transfer(replica)
    assert await gone(space, "a") >= moved + 2.0 - 0.05


async def test_no_sign_is_confirmed_while_the_end_is_under_way(
    cluster: LocalCluster, space: AsyncKeySpace
) -> None:
    lease = await space.lease(30.0)
    await lease.close()
    node, replica = leader(cluster)
    (term,) = node.leases._terms.values()
    term.ending.add(lease.id)
    with pytest.raises(Retryable, match="is about to end") as refused:
        await node.leases.keep(replica, lease.id, 1_000)
    assert refused.value.code is Code.NOT_READY
    term.ending.discard(lease.id)
    assert await node.leases.keep(replica, lease.id, 1_000) == 30_000


async def test_no_lease_is_written_before_the_upgrade_is_finalized(
    cluster: LocalCluster, client: AsyncClient, space: AsyncKeySpace
) -> None:
    lease = await space.lease(5.0)
    for node in cluster.running.values():
        node.heartbeater._cluster_version = 1
    node, _ = leader(cluster)
    calls = (
        space.lease(5.0),
        space.insert("a", "1", lease=lease),
        space.write({"a": "1"}, lease=lease),
        space.revoke_lease(lease),
    )
    for call in calls:
        node.heartbeater._cluster_version = 1
        with pytest.raises(Rejected, match="`stele cluster finalize` allows it") as refused:
            await call
        assert refused.value.code is Code.UNSUPPORTED_VERSION
    await space.replace("a", "1")


async def test_times_that_are_no_times_are_refused(space: AsyncKeySpace) -> None:
    for wrong in (0.5, 86_401, -1, "x"):
        with pytest.raises(Rejected) as refused:
            await space.lease(wrong)  # type: ignore[arg-type]
        assert refused.value.code is Code.INVALID_ARGUMENT


async def test_a_name_moves_to_the_newest_lease_of_its_candidate(space: AsyncKeySpace) -> None:
    """A candidate that starts again does not lose the name when its first lease ends."""
    first, second = await space.lease(30.0), await space.lease(30.0)
    assert await space.elect("n", "me", lease=first) == "me"
    assert await space.elect("n", "you", lease=second) == "me"
    assert await space.elect("n", "me", lease=second) == "me"
    await first.revoke()
    assert await space.read("n") == b"me"
    await second.revoke()
    third = await space.lease(30.0)
    assert await space.elect("n", "you", lease=third) == "you"


async def test_a_short_lease_beside_a_long_one_ends_in_its_time(space: AsyncKeySpace) -> None:
    long = await space.lease(3_600.0)
    await space.insert("long", "1", lease=long)
    await asyncio.sleep(0.5)  # the node has seen that nothing is over for an hour
    short = await space.lease(2.0)
    await space.insert("short", "1", lease=short)
    await short.close()
    closed = time.monotonic()
    assert await gone(space, "short") < closed + 20
    assert await space.read("long") == b"1"


async def test_an_entry_ends_few_keys(cluster: LocalCluster, space: AsyncKeySpace) -> None:
    """All of a lease go in one write, but not those of all leases that are over."""
    held = await held_by(space, 5, 90)
    term = term_of(cluster)
    watch = await space.watch()
    term.ends_ms.update(dict.fromkeys(held, 0))
    term.look_ms = 0
    async with asyncio.timeout(WAIT_S):
        ended = [{change.key for change in (await anext(watch)).changes} for _ in range(3)]
    assert [len(keys) for keys in ended] == [180, 180, 90]
    for keys in held.values():
        assert any(keys <= each for each in ended), "the keys of a lease go in one write"
    assert await space.leases() == ()


async def test_a_lease_with_the_most_and_largest_keys_ends_in_one_message(
    cluster: LocalCluster, space: AsyncKeySpace
) -> None:
    held = await held_by(space, 2, LEASE_KEYS_MAX, KEY_BYTES_MAX)
    term = term_of(cluster)
    watch = await space.watch()
    term.ends_ms.update(dict.fromkeys(held, 0))
    term.look_ms = 0
    async with asyncio.timeout(WAIT_S):
        ended = [{change.key for change in (await anext(watch)).changes} for _ in held]
    assert sorted(map(sorted, ended)) == sorted(map(sorted, held.values()))


async def test_a_holder_that_is_heard_while_others_end_keeps_its_lease(
    cluster: LocalCluster, space: AsyncKeySpace
) -> None:
    silent, heard = await held_by(space, 2, 1)
    node, term = leader(cluster)[0], term_of(cluster)
    term.ends_ms[silent] = 0
    await node.leases._end_all(term, [silent, heard])
    async with asyncio.timeout(WAIT_S):
        while silent in term.space.leases:
            await asyncio.sleep(0.01)
    assert [each.id for each in await space.leases()] == [heard]


async def test_a_lease_that_was_granted_again_has_its_whole_time(
    cluster: LocalCluster, space: AsyncKeySpace, tmp_path: Path
) -> None:
    """Revoked and granted between two looks. Its number is the same."""
    again = Space(tmp_path / "again")
    again.do(grant(7, 10_000), grant(8, 10_000))
    term = _Term(leader(cluster)[1], again.store)
    term.follow(0)
    assert term.ends_ms == {7: 10_000, 8: 10_000}
    again.do(revoke(7))
    again.do(grant(7, 10_000))
    term.follow(9_900)
    assert term.ends_ms == {7: 19_900, 8: 10_000}
    assert term.over(10_001) == [8]
    again.do(revoke(8))
    term.follow(9_950)
    assert term.ends_ms == {7: 19_900}
    again.do(revoke(7), grant(9, 1_000))
    term.follow(10_000)
    assert term.ends_ms == {9: 11_000}, "one ended, and one began"


async def test_many_leases_and_keys_are_told_in_parts(cluster: LocalCluster, space: AsyncKeySpace) -> None:
    held = await held_by(space, 3, 600)
    ids = sorted(held)
    node, replica = leader(cluster)
    first = await node.leases.answer(replica, pb.KvRequest(op=pb.KV_LEASES))
    assert [each.lease for each in first.leases] == ids[:1] and first.more
    last = await node.leases.answer(replica, pb.KvRequest(op=pb.KV_LEASES, after_lease=ids[1]))
    assert [each.lease for each in last.leases] == ids[2:] and not last.more
    one = await node.leases.answer(replica, pb.KvRequest(op=pb.KV_LEASES, lease=ids[1]))
    assert [(each.lease, set(each.keys)) for each in one.leases] == [(ids[1], held[ids[1]])]
    assert not one.more
    told = await space.leases()
    assert [(each.id, set(each.keys)) for each in told] == [(lease, held[lease]) for lease in ids]
    assert all(0 < each.left_s <= each.ttl_s == 3_600.0 for each in told)
