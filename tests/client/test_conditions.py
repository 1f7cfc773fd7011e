"""Several keys of a key space in one write, under conditions: on real nodes, and while their leaders are killed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from stele.client import AsyncClient, AsyncKeySpace
from stele.model import kvop
from stele.model.errors import Code, Rejected, SteleError
from stele.model.kvop import KeyOp, KeyOperation, decode_write, encode_operations, encode_write
from tests.client.commands import runner
from tests.client.small import small_cluster
from tests.harness import Cluster
from tests.tserver.local import LocalCluster

ACCOUNTS, MONEY = 4, 100


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """A client of real nodes in this process."""
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            yield client
    finally:
        await cluster.close()


async def test_all_or_nothing_and_only_under_conditions(client: AsyncClient) -> None:
    space = await client.create_keyspace("s")
    await space.write({"a": "1", b"b": b"2", "c": None}, when={"owner": None})
    assert await space.list() == [(b"a", b"1"), (b"b", b"2")]
    for when in ({"a": "2"}, {"a": None}, {"c": "1"}, {"a": "1", "b": "3"}):
        with pytest.raises(Rejected, match="is not what was expected; read it again") as failed:
            await space.write({"a": None, "d": "4"}, when=when)
        assert failed.value.code is Code.CAS_FAILED
    assert "key 'b' is not" in str(failed.value), "the key as its caller wrote it"
    assert await space.list() == [(b"a", b"1"), (b"b", b"2")], "nothing was done"
    await space.write({"a": "5", "b": None}, when={"a": "1", "c": None})
    assert await space.list() == [(b"a", b"5")], "a key may be expected and changed in one write"
    await space.write({"e": "\N{SNOWMAN}"})
    assert await space.read("e") == "\N{SNOWMAN}".encode()


async def test_what_is_no_write_is_refused_before_anything_is_done(client: AsyncClient) -> None:
    space = await client.create_keyspace("s")
    many = {str(n): "v" for n in range(kvop.WRITE_KEYS_MAX)}
    for values, when, code, words in (
        ({}, {"a": "1"}, Code.INVALID_ARGUMENT, "it changes no key"),
        ({"": "v", "k" * 4097: "v"}, {}, Code.INVALID_ARGUMENT, "a key has 0 bytes"),
        ({"a": 1}, {}, Code.INVALID_ARGUMENT, "value 1: expected bytes or str"),
        ({"a": "1", b"a": "2"}, {}, Code.INVALID_ARGUMENT, "key 'a' is given twice"),
        ([("a", "1")], {}, Code.INVALID_ARGUMENT, "expected a dict"),
        (many, {"one more": None}, Code.TOO_LARGE, "1,001 keys; at most 1,000"),
        (
            {"a": bytes(5 << 20), "b": bytes(5 << 20)},
            {},
            Code.TOO_LARGE,
            "at most 8,388,608 are allowed",
        ),
    ):
        with pytest.raises(Rejected) as refused:
            await space.write(values, when=when)  # type: ignore[arg-type]
        assert refused.value.code is code and words in str(refused.value)
    assert await space.list() == []
    await space.write(many)
    assert len(await space.list()) == kvop.WRITE_KEYS_MAX


@pytest.mark.parametrize(
    ("operations", "code"),
    [
        ([KeyOperation(KeyOp.CHECK, b"a")], Code.INVALID_ARGUMENT),
        ([KeyOperation(KeyOp.INSERT, b"a", b"1")], Code.INVALID_ARGUMENT),
        ([KeyOperation(KeyOp.CAS, b"a", b"1", b"0")], Code.INVALID_ARGUMENT),
        ([KeyOperation(KeyOp.DELETE, b"a", expected=b"0")], Code.INVALID_ARGUMENT),
        ([KeyOperation(KeyOp.DELETE, bytes([n % 256, n >> 8, 1])) for n in range(1_001)], Code.TOO_LARGE),
        ([KeyOperation(KeyOp.REPLACE, bytes([n]), bytes(3 << 20)) for n in range(3)], Code.TOO_LARGE),
    ],
)
def test_a_node_takes_only_what_a_client_writes(operations: list[KeyOperation], code: Code) -> None:
    with pytest.raises(Rejected) as refused:
        decode_write(encode_operations(operations))
    assert refused.value.code is code
    with pytest.raises(Rejected):
        decode_write(b"")
    wanted = {b"a": b"1", b"b": None}
    assert decode_write(encode_write(wanted, {b"a": None})) == [
        KeyOperation(KeyOp.CHECK, b"a"),
        KeyOperation(KeyOp.REPLACE, b"a", b"1"),
        KeyOperation(KeyOp.DELETE, b"b"),
    ]


async def _transfer(space: AsyncKeySpace, rng: random.Random) -> bool:
    """Move some money from one account to another, if nobody else changed them meanwhile. Returns whether it was done."""
    source, target = rng.sample(range(ACCOUNTS), 2)
    before = {f"account-{n}": await space.read(f"account-{n}") for n in (source, target)}
    has, had = (int(value or b"0") for value in before.values())
    amount = rng.randint(0, has)
    after = {f"account-{source}": str(has - amount), f"account-{target}": str(had + amount)}
    try:
        await space.write(dict(after), when=dict(before))
    except SteleError as exc:
        changed = (Code.CAS_FAILED, Code.CHANGE_IN_PROGRESS, Code.UNKNOWN_OUTCOME, Code.NO_QUORUM)
        assert exc.code in changed, exc
        return False
    return True


async def test_no_money_is_lost_while_leaders_are_killed(tmp_path: Path) -> None:
    """A write that is done twice, or half, or against a value of before, changes the sum."""
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        space = await client.create_keyspace("bank")
        await space.write({f"account-{n}": str(MONEY) for n in range(ACCOUNTS)})
        stop = asyncio.Event()
        done = 0

        async def work(number: int) -> None:
            nonlocal done
            rng = random.Random(number)
            while not stop.is_set():
                done += await _transfer(space, rng)

        async def look() -> None:
            while not stop.is_set():
                found = await space.list("account-")
                assert sum(int(value) for _, value in found) == ACCOUNTS * MONEY, found
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(work(n)) for n in range(4)] + [asyncio.create_task(look())]
        await cluster.kill_each()
        stop.set()
        await asyncio.gather(*tasks)
        assert done > 20
        assert sum(int(value) for _, value in await space.list("account-")) == ACCOUNTS * MONEY


async def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with small_cluster(tmp_path) as (cluster, _):
        run = partial(runner(cluster, monkeypatch), "kv")
        await run("create", "s")
        both = ("--put", "colour", "blue", "--put", "owner", "me")
        assert await run("write", "s", *both, "--when-absent", "owner") == (0, "", "")
        assert (await run("list", "s"))[1] == "colour\tblue\nowner\tme\n"
        refused = "stele: CAS_FAILED: key 'owner' is not what was expected; read it again\n"
        assert await run("write", "s", *both, "--when", "owner", "you") == (1, "", refused)
        code, out, err = await run(
            "write", "s", "--delete", "owner", "--put", "colour", "red", "--when", "owner", "me", "--json"
        )
        told = json.loads(out)
        (tablet,) = cluster.tablets.values()
        assert told.pop("revision") == tablet.store.revision
        assert (code, told, err) == (0, {"keyspace": "s", "keys": ["colour", "owner"]}, "")
        assert (await run("list", "s"))[1] == "colour\tred\n"
        code, _, err = await run("write", "s", "--when", "owner", "me")
        assert code == 2 and "it changes no key" in err
        code, _, err = await run(
            "write", "s", "--put", "a", "1", "--delete", "a", "--when", "b", "1", "--when-absent", "b"
        )
        assert code == 2 and "a is named twice to be changed; b is named twice as a condition" in err
