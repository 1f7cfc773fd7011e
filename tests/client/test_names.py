"""Tables and key spaces by name, made, found and given up by several at a time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import NoReturn

import pytest

from stele.client import AsyncClient
from stele.client.streams import NodeStream
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from tests.client.small import EIGHT, ONE, SCHEMA, small_cluster


async def test_key_spaces_and_elections(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        space = await client.create_keyspace("settings")
        await space.replace("colour", "blue")
        assert await space.read("colour") == b"blue"
        assert await space.read("shape") is None
        with pytest.raises(Rejected) as caught:
            await space.insert("colour", "red")
        assert caught.value.code is Code.ALREADY_PRESENT
        (tablet,) = cluster.tablets.values()
        tablet.after.append(lambda: Retryable("lost", code=Code.UNKNOWN_OUTCOME))
        await space.insert("size", "L")  # the retry is answered as the first attempt would have been
        assert [(a.sequence, a.lowest_unfinished) for a in tablet.attempts] == [
            (1, 1),
            (2, 2),
            (3, 3),
            (3, 3),
        ]
        assert len({a.client_id for a in tablet.attempts}) == 1
        tablet.after.append(lambda: Rejected("forgotten", code=Code.TOO_OLD))
        with pytest.raises(Retryable, match="forgotten this client id"):
            await space.replace("colour", "blue")
        assert await space.list("") == [(b"colour", b"blue"), (b"size", b"L")]
        assert await space.elect("primary", "me") == "me"
        assert await space.elect("primary", "you") == "me"
        await space.delete("primary")
        assert await space.changed("primary", b"me") is None


async def test_who_finds_a_name_given_up_meanwhile_holds_it_only_once_it_is_written(tmp_path: Path) -> None:
    """Found by tests/linear, seed 100: told to be elected, and the key was not there."""
    async with small_cluster(tmp_path) as (cluster, client):
        space = await client.create_keyspace("settings")
        (tablet,) = cluster.tablets.values()
        assert await space.elect("primary", "me") == "me"

        def resigns() -> None:
            request = tserver_pb2.KvRequest(
                tablet_id=id_to_pb(tablet.tablet_id),
                op=tserver_pb2.KV_DELETE,
                key=b"primary",
                client_id=b"another client, ",
                sequence=1,
                first_attempt_us=1,
            )
            cluster.nodes[tablet.leader]._kv(request)

        tablet.before_read.append(resigns)
        assert await space.elect("primary", "you") == "you"
        assert await space.read("primary") == b"you"
        assert await space.elect("primary", "me") == "you"


async def test_what_was_made_and_deleted_by_another_before_the_answer_came_is_not_there(
    tmp_path: Path,
) -> None:
    """Rather than there already: nothing is."""
    async with small_cluster(tmp_path) as (cluster, client):
        cluster.deletes_next = True
        with pytest.raises(Rejected) as told:
            await client.create_keyspace("settings")
        assert told.value.code is Code.NOT_FOUND
        await client.create_keyspace("settings")


async def test_a_table_whose_deletion_was_not_answered_is_deleted(tmp_path: Path) -> None:
    """The retry is told that there is none of this name, which is what was wanted."""
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", SCHEMA, ONE)
        cluster.deleted_unheard = 1
        await client.delete_table("t")
        assert await client.list_tables() == []
        with pytest.raises(Rejected):
            await client.delete_table("t")


async def test_what_was_under_way_as_this_client_deleted_the_table_is_not_acknowledged(
    tmp_path: Path,
) -> None:
    """Here the node answers later than the masters, and has the table still."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        space = await client.create_keyspace("k")
        for node in cluster.nodes:
            node.speaks.clear()
        writes = [
            asyncio.ensure_future(table.put({"id": 1})),
            asyncio.ensure_future(space.replace("a", "b")),
            asyncio.ensure_future(table.get({"id": 1})),
        ]
        await asyncio.sleep(0)
        for name in ("t", "k"):
            await client.delete_table(name)
        for node in cluster.nodes:
            node.speaks.set()
        for write in writes:
            with pytest.raises(Rejected, match="was deleted") as told:
                await write
            assert told.value.code is Code.NOT_FOUND


async def test_a_deletion_is_waited_for_while_nodes_answer_and_no_longer(tmp_path: Path) -> None:
    """A table of thousands of tablets takes longer than any one node may be silent."""
    async with small_cluster(tmp_path) as (cluster, client):
        for name, answers in (("t", (9, 8, 7, 6, 5, 0)), ("u", (3, 3, 3, 3, 0))):
            await client.create_table(name, SCHEMA, ONE)
            cluster.unreached.extend(answers)
            if name == "t":
                await client.delete_table(name, timeout_s=0.0001)
                assert not cluster.unreached
                continue
            with pytest.raises(Retryable, match=r"table u is deleted, but 1 node \(node-1\) does not answer"):
                await client.delete_table(name, timeout_s=0.0001)
            cluster.unreached.clear()


async def test_a_watch_goes_on_while_nobody_leads(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=3.0) as (cluster, client):
        space = await client.create_keyspace("settings")
        (tablet,) = cluster.tablets.values()
        await space.replace("owner", "me")
        watching = asyncio.ensure_future(space.changed("owner", "me"))
        tablet.leader = -1
        await asyncio.sleep(4.5)
        tablet.leader = 0
        assert not watching.done()
        async with AsyncClient([cluster.master_address]) as other:
            await (await other.keyspace("settings")).replace("owner", "you")
        async with asyncio.timeout(60):
            assert await watching == b"you"


async def test_an_attempt_that_was_not_proposed_says_nothing_of_the_one_before(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        space = await client.create_keyspace("settings")
        (tablet,) = cluster.tablets.values()

        def answer(code: Code) -> None:
            tablet.after.append(lambda: Retryable("a fault", code=code))

        answer(Code.UNKNOWN_OUTCOME)
        answer(Code.CHANGE_IN_PROGRESS)  # its own claim
        await space.insert("size", "L")
        answer(Code.UNKNOWN_OUTCOME)
        answer(Code.SCHEMA_MISMATCH)
        with pytest.raises(Retryable) as caught:
            await space.replace("size", "M")
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        answer(Code.CHANGE_IN_PROGRESS)  # somebody else's
        with pytest.raises(Rejected) as refused:
            await space.replace("size", "S")
        assert refused.value.code is Code.CHANGE_IN_PROGRESS


async def test_a_key_space_that_was_deleted_is_told_from_a_key_that_is_not_there(tmp_path: Path) -> None:
    """To a program that looks who holds a name it said that nobody does."""
    async with small_cluster(tmp_path) as (cluster, client):
        space = await client.create_keyspace("settings")
        (tablet,) = cluster.tablets.values()
        await space.replace("owner", "me")
        watching = asyncio.ensure_future(space.changed("owner", "me"))
        await asyncio.sleep(0.1)
        await client.delete_table("settings")
        tablet.store.close()
        cluster.tablets.clear()
        for asked in (space.read("owner"), watching):
            with pytest.raises(Rejected) as caught:
                async with asyncio.timeout(60):
                    await asked
            assert caught.value.code is Code.NOT_FOUND


async def test_replicas_that_moved_while_no_master_leads_say_nothing_of_rows_and_keys(tmp_path: Path) -> None:
    """Each says that it has no such tablet: no row or key is absent for that, and the same request does not fail again."""
    async with small_cluster(tmp_path, timeout_s=3.0) as (cluster, client):
        space = await client.create_keyspace("settings")
        table = await client.create_table("t", SCHEMA, ONE)
        await space.replace("owner", "me")
        await table.put({"id": 1})
        there = dict(cluster.tablets)
        cluster.tablets.clear()
        cluster.not_leading = 1_000_000
        *asked, scanned = await asyncio.gather(
            space.read("owner"),
            space.replace("owner", "you"),
            table.get(1),
            table.update({"id": 1, "n": 1}),
            table.scan().count(),
            return_exceptions=True,
        )
        for told in asked:
            assert isinstance(told, Retryable) and told.code is Code.NO_QUORUM
            assert "nothing was done" in str(told)
        assert isinstance(scanned, Retryable) and scanned.code is Code.UNAVAILABLE
        assert "no such tablet here" in str(scanned)
        cluster.tablets.update(there)
        cluster.not_leading = 0
        assert await space.read("owner") == b"me"
        await table.update({"id": 1, "n": 1})


async def test_tables_by_name(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        cluster.not_leading = 3  # a master that does not lead yet is asked again
        await client.create_table("b", SCHEMA, EIGHT)
        await client.create_keyspace("a")
        assert [info.name for info in await client.list_tables()] == ["a", "b"]
        assert (await client.describe("b")).schema == SCHEMA
        with pytest.raises(Rejected) as caught:
            await client.create_table("b", SCHEMA, EIGHT)
        assert caught.value.code is Code.ALREADY_PRESENT
        with pytest.raises(Rejected, match="key space"):
            await client.open_table("a")
        await client.delete_table("b")
        with pytest.raises(Rejected) as caught:
            await client.open_table("b")
        assert caught.value.code is Code.NOT_FOUND


async def test_what_is_opened_again_and_again_is_not_kept(tmp_path: Path) -> None:
    """As a server does that opens its table for each request, with one client for all of them."""
    async with small_cluster(tmp_path) as (_, client):
        await client.create_table("t", SCHEMA, ONE)
        await client.create_keyspace("s")
        opened = weakref.WeakSet[object]()
        for number in range(20):
            table = await client.open_table("t")
            await table.put({"id": number})
            opened.add(table.locations)
            space = await client.keyspace("s")
            opened.add(space._tablet._way.locations)
        del table, space
        async with asyncio.timeout(60):  # what looks after a row under way comes back once more
            while len(opened) > 2:
                await asyncio.sleep(0.1)
                gc.collect()


async def test_a_refusal_is_told_though_the_last_attempt_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that the caller's time cuts off says nothing of why: what a node said before it does."""

    async def silent(self: NodeStream, request: tserver_pb2.ClientRequest, *, timeout_s: float) -> NoReturn:
        await asyncio.sleep(timeout_s)
        raise Retryable("no answer", code=Code.TIMED_OUT)

    def refused() -> Retryable:
        monkeypatch.setattr(NodeStream, "ask", silent)
        return Retryable("its log is replayed", code=Code.NOT_READY)

    async with small_cluster(tmp_path, timeout_s=1.9) as (cluster, client):
        space = await client.create_keyspace("settings")
        (tablet,) = cluster.tablets.values()
        tablet.before_read.append(refused)
        with pytest.raises(Retryable, match="its log is replayed") as told:
            await space.read("colour")
        assert told.value.code is Code.NOT_READY
