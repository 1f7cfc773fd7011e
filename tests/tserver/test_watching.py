"""Watches on key spaces, on real nodes in this process: what is pushed, to whom, and how a watch ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from stele.client import AsyncClient, AsyncKeySpace, AsyncWatch, KeyChange, KeyWrite
from stele.consensus.replica import Replica
from stele.model.errors import Code, Rejected
from stele.tablet import recent
from stele.tablet.keyspace import KeySpace
from stele.tserver.node import Node
from tests.consensus.cluster import WAIT_S, wait_until
from tests.tserver.local import LocalCluster

LARGE = bytes(3 << 20)


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with cluster.client() as made:
        yield made


def leader(cluster: LocalCluster) -> tuple[Node, Replica]:
    """The node that leads the one key space, and its replica."""
    ((node, replica),) = [
        (node, replica)
        for name, node in cluster.running.items()
        for replica in node.replicas
        if name != "master" and replica.is_leader
    ]
    return node, replica


def kept(replica: Replica) -> recent.Recent:
    assert isinstance(replica.machine, KeySpace)
    return replica.machine.recent


async def take(watch: AsyncWatch, count: int) -> list[KeyWrite]:
    """The next writes."""
    async with asyncio.timeout(WAIT_S):
        return [await anext(watch) for _ in range(count)]


def pairs(write: KeyWrite) -> list[tuple[bytes, bytes | None]]:
    assert all(change.revision == write.revision for change in write.changes)
    return [(change.key, change.value) for change in write.changes]


async def test_each_gets_what_it_watches_whole_and_in_order(client: AsyncClient) -> None:
    space = await client.create_keyspace("s")
    before = await space.replace("a", "0")
    everything = await space.watch()
    one, some = await space.watch("a/1"), await space.watch(prefix="a/")
    first = await space.write({"a/1": "1", "b": "2", "a": None})
    second = await space.write({"a/2": "3"}, when={"a/1": "1"})
    with pytest.raises(Rejected, match="is not what was expected"):
        await space.write({"a/1": "lost"}, when={"a/1": "0"})
    await space.delete("absent")
    third = await space.delete("a/1")
    found = await take(everything, 3)
    assert [write.revision for write in found] == [first, second, third]
    assert pairs(found[0]) == [(b"a/1", b"1"), (b"b", b"2"), (b"a", None)], (
        "the changes of a write come together"
    )
    assert found[2].changes == (KeyChange(b"a/1", None, third),)
    assert [(w.revision, pairs(w)) for w in await take(one, 2)] == [
        (first, [(b"a/1", b"1")]),
        (third, [(b"a/1", None)]),
    ]
    assert [pairs(w) for w in await take(some, 3)] == [[(b"a/1", b"1")], [(b"a/2", b"3")], [(b"a/1", None)]]
    late = await space.watch(after=before)
    assert await take(late, 3) == found, "from a revision on: the same again"
    assert await take(await space.watch(after=second), 1) == found[2:]
    state = await space.snapshot()
    assert state.revision >= third and [(k.key, k.revision) for k in state.keys] == [
        (b"a/2", second),
        (b"b", first),
    ]


async def test_a_change_is_encoded_once_for_all_who_watch_it(
    client: AsyncClient, cluster: LocalCluster
) -> None:
    space = await client.create_keyspace("s")
    watches = [await space.watch(prefix="k") for _ in range(3)]
    revision = await space.replace("k", "v")
    for watch in watches:
        await take(watch, 1)
    _, replica = leader(cluster)
    (written,) = kept(replica).after(revision - 1)
    encoded = written.encoded
    assert encoded is not None
    await take(await space.watch(after=revision - 1), 1)
    assert written.encoded is encoded


async def test_what_is_no_longer_kept_is_compacted_and_says_what_to_do(client: AsyncClient) -> None:
    space = await client.create_keyspace("s")
    first = await space.replace("a", "1")
    for _ in range(3):
        await space.replace("large", LARGE)
    with pytest.raises(
        Rejected, match=r"no longer kept; read all keys, and watch from that read's revision"
    ) as refused:
        await space.watch(after=first)
    assert refused.value.code is Code.COMPACTED
    state = await space.snapshot()
    watch = await space.watch(after=state.revision)
    last = await space.replace("a", "2")
    assert [w.revision for w in await take(watch, 1)] == [last]
    with pytest.raises(Rejected, match="is newer than the key space") as ahead:
        await space.watch(after=last + 1_000)
    assert ahead.value.code is Code.INVALID_ARGUMENT


async def test_who_takes_changes_too_slowly_is_told_and_holds_nothing_up(
    client: AsyncClient, cluster: LocalCluster
) -> None:
    """The program takes nothing: its client keeps some MB, tells the node to stop, and finds that more was compacted."""
    space = await client.create_keyspace("s")
    watch = await space.watch()
    written = [await space.replace("large", LARGE) for _ in range(10)]
    node, _ = leader(cluster)
    await wait_until(lambda: not len(node.watches))
    found = list[KeyWrite]()
    with pytest.raises(Rejected) as ended:
        while True:
            found += await take(watch, 1)
    assert ended.value.code is Code.COMPACTED
    assert [w.revision for w in found] == written[: len(found)], "what came before is whole and in order"
    assert 2 <= len(found) < 8


async def test_a_client_that_does_not_read_costs_its_node_a_bounded_memory(
    client: AsyncClient, cluster: LocalCluster
) -> None:
    async with cluster.client() as stalled:
        watch = await (await _space(client, stalled)).watch()
        (stream,) = [s for s in stalled._streams._streams.values() if s.watched]
        connection = stream._connection
        assert connection is not None
        connection.read(False)
        node, _ = leader(cluster)
        (feed,) = node.watches._feeds.values()
        (one,) = feed._watches.values()
        space = await client.keyspace("s")
        for _ in range(12):
            await space.replace("large", LARGE)
        assert one.behind and one.sink.full, "the node waits with what it has not sent"
        assert one.sink._connection._transport.get_write_buffer_size() < 12 << 20  # type: ignore[attr-defined]
        words = "reads too slowly"
        if stream._connection is connection:
            connection.read(True)
        else:  # on a slow machine the client has given it up, and begins anew
            words = "the watch after revision .* cannot begin"
        with pytest.raises(Rejected, match=words) as ended:
            while True:
                await take(watch, 1)
        assert ended.value.code is Code.COMPACTED


async def _space(client: AsyncClient, other: AsyncClient) -> AsyncKeySpace:
    await client.create_keyspace("s")
    return await other.keyspace("s")


async def test_it_goes_on_where_it_was_when_another_leads(client: AsyncClient, cluster: LocalCluster) -> None:
    space = await client.create_keyspace("s")
    watch, twin = await space.watch(prefix="n"), list[tuple[int, bytes]]()
    for n in range(60):
        twin.append((await space.replace("n", str(n)), str(n).encode()))
        if n % 20 == 10:
            node, replica = leader(cluster)
            await node.replicas.transfer(replica)
            await wait_until(lambda node=node, replica=replica: not replica.is_leader)
            await wait_until(lambda node=node: not len(node.watches))
    found = await take(watch, 60)
    assert [(w.revision, w.changes[0].value) for w in found] == twin


async def test_a_quiet_watch_learns_how_far_it_is(client: AsyncClient, cluster: LocalCluster) -> None:
    """So it can go on from there, though the changes that it did not watch are compacted."""
    space = await client.create_keyspace("s")
    watch = await space.watch("quiet")
    waiting = asyncio.create_task(take(watch, 1))
    for _ in range(3):
        last = await space.replace("large", LARGE)
    async with asyncio.timeout(WAIT_S):
        while watch.revision < last:
            await asyncio.sleep(0.05)
    node, replica = leader(cluster)
    await node.replicas.transfer(replica)
    revision = await space.replace("quiet", "no more")
    assert [w.revision for w in await waiting] == [revision]


async def test_a_watch_that_nobody_holds_ends_at_the_node(client: AsyncClient, cluster: LocalCluster) -> None:
    space = await client.create_keyspace("s")
    closed, dropped = await space.watch(), await space.watch()
    node, _ = leader(cluster)
    assert len(node.watches) == 2
    await closed.close()
    await wait_until(lambda: len(node.watches) == 1)
    with pytest.raises(StopAsyncIteration):
        await anext(closed)
    del dropped
    gc.collect()
    await space.replace("a", "1")
    await wait_until(lambda: not len(node.watches))
    async with cluster.client() as other:
        await (await other.keyspace("s")).watch()
        assert len(node.watches) == 1
    await wait_until(lambda: not len(node.watches))


async def test_a_deleted_key_space_ends_its_watches(client: AsyncClient) -> None:
    space = await client.create_keyspace("s")
    watch = await space.watch()
    await client.delete_table("s")
    with pytest.raises(Rejected) as ended:
        await take(watch, 1)
    assert ended.value.code is Code.NOT_FOUND
