"""Holds of a table by the client and the command line, on real nodes: every replica keeps what they say, and so do copies."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime
from typing import NoReturn

import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable
from stele.model.errors import Code, Rejected, Retryable
from stele.model.holds import HOLDS_MAX, Action, HoldOrder
from stele.model.partitioning import RangePartitioning
from stele.tserver import holds as node_holds
from stele.tserver import maintenance, tablet_service
from tests.client.commands import runner
from tests.consensus.cluster import wait_until
from tests.tserver.history import settled, without_history
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, fill, machines_of

ROWS = 50


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes look at holds all the time."""
    monkeypatch.setattr(maintenance, "COLLECT_S", 0.05)
    monkeypatch.setattr(node_holds, "MEASURE_MS", 50)


async def overwritten(client: AsyncClient, table: AsyncTable, turns: int = 3, text: str = "n") -> None:
    for turn in range(turns):
        await table.write_arrow(pa.table({"id": range(ROWS), "name": [f"{text}{turn}"] * ROWS}))


async def test_every_replica_keeps_what_a_hold_says_until_it_is_released(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner(cluster, monkeypatch)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, ROWS)
        start = table.scan()
        assert await start.count() == ROWS
        stores = await without_history(cluster, table)
        held = await table.hold("copy", start.snapshot, expires_in_s=3_000, max_bytes=1 << 20)
        assert (held.since, held.max_bytes, held.broken) == (start.snapshot, 1 << 20, "")
        assert (len(held.tablets), held.tablets_without) == (4, 0)
        assert 2_900 < (held.expires - datetime.now(UTC)).total_seconds() < 3_100
        await overwritten(client, table)
        await wait_until(lambda: all(store.held.since == start.snapshot for store in stores))
        await settled(cluster, table)
        assert len(stores) == 12
        for store in stores:
            assert store.history_mark == start.snapshot < store.free_mark
            with store.view(start.snapshot) as view:
                assert all(n.startswith("n") for b in view.scan() for n in b["name"].to_pylist())
        assert await table.changes(start.snapshot, every=True).count() == 3 * ROWS
        assert await table.scan(snapshot=start.snapshot).count() == ROWS

        later = client.now()
        renewed = await table.renew_hold(held, expires_in_s=600, since=later)
        assert renewed.since == later and renewed.expires < held.expires
        with pytest.raises(Rejected) as lost:
            await table.changes(start.snapshot).count()
        assert lost.value.code is Code.CURSOR_LOST
        with pytest.raises(Rejected, match="is gone in part; this replica has it from") as gone:
            await table.hold("other", start.snapshot)
        assert gone.value.code is Code.CURSOR_LOST
        assert [hold.name for hold in await table.holds()] == ["copy"], "nothing is left of what was refused"

        code, out, err = await run("table", "holds", "t")
        assert code == 0 and out.splitlines()[1].startswith("copy") and out.rstrip().endswith("4 of 4"), err
        code, out, err = await run("table", "hold", "t", "nightly", "--for", "36h", "--since", str(later))
        assert code == 0 and out.startswith("hold nightly keeps the history of t from ") and str(later) in out
        code, out, _ = await run("table", "holds", "t", "--json")
        assert [(h["name"], h["since"]) for h in json.loads(out)] == [
            ("copy", str(later)),
            ("nightly", str(later)),
        ]
        code, out, _ = await run("table", "release", "t", "nightly")
        assert (code, out) == (0, "released hold nightly of t\n")
        code, _, err = await run("table", "release", "t", "nightly")
        assert code == 2 and "NOT_FOUND: there is no hold nightly" in err
        code, _, err = await run("table", "hold", "t", "a b")
        assert code == 2 and "name of a hold 'a b'" in err
        code, _, err = await run("table", "hold", "t", "x", "--since", "soon")
        assert code == 2 and "--since soon: expected a hybrid time" in err

        await table.release_hold("copy")
        assert await table.holds() == []
        await wait_until(lambda: all(store.held.since is None for store in stores))
        code, out, _ = await run("table", "holds", "t")
        assert (code, out) == (0, "no holds on the history of t\n")
        with pytest.raises(Rejected, match="there is no hold copy any more") as ended:
            await table.renew_hold("copy")
        assert ended.value.code is Code.CURSOR_LOST


async def test_one_that_costs_too_much_is_broken_on_all_replicas_and_one_that_is_forgotten_expires(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        await table.put({"id": 1, "name": "first"})
        since = client.now()
        held = await table.hold("dear", since, max_bytes=1 << 20)
        await table.hold("cheap", max_bytes=1 << 40)
        stores = await without_history(cluster, table)
        for turn in range(4):
            rows = random.Random(turn)  # nothing that files store shorter
            texts = [rows.randbytes(20_000).hex() for _ in range(ROWS)]
            await table.write_arrow(pa.table({"id": range(ROWS), "name": texts}))
        await settled(cluster, table)
        await wait_until(lambda: all(store.held.named("dear").broken for store in stores))
        why = {store.held.named("dear").broken for store in stores}
        assert len(why) == 1 and "of old rows in one replica" in why.pop()
        assert not any(store.held.named("cheap").broken for store in stores)
        with pytest.raises(
            Rejected, match=r"is broken: at .* its limit is 1 MiB; begin again with a scan"
        ) as told:
            await table.renew_hold(held)
        assert told.value.code is Code.CURSOR_LOST
        assert [bool(hold.broken) for hold in await table.holds()] == [False, True]
        again = await table.hold("dear", expires_in_s=1)
        assert not again.broken and again.since > since

        # Nobody writes, and nobody renews: its leader lets all replicas know that its time is over.
        await wait_until(lambda: all(store.held.named("dear") is None for store in stores))
        assert [hold.name for hold in await table.holds()] == ["cheap"]


async def test_a_copy_has_the_holds_and_a_restart_forgets_none(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        await table.put({"id": 1, "name": "first"})
        since = client.now()
        await table.hold("h", since, expires_in_s=3_000)
        await overwritten(client, table)
        (tablet,) = table.scan().plan.tablets
        await settled(cluster, table)
        for name in ("node-0", "node-1"):
            await cluster.stop(name)
            await cluster.launch(name)
        for store in await machines_of(cluster, tablet.tablet_id):
            await wait_until(lambda store=store: store.held.since == since)
        assert await table.changes(since, every=True).count() == 3 * ROWS


async def test_ranges_come_without_holds_and_go_with_theirs(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        parts = RangePartitioning(("id",), ranges=((0, 10), (10, 20)))
        table = await client.create_table("t", SCHEMA, [parts])
        held = await table.hold("h")
        await table.alter(add_ranges=[(20, 30)])
        (now,) = await table.holds()
        assert (len(now.tablets), now.tablets_without) == (2, 1)
        assert len((await table.renew_hold(held)).tablets) == 2
        with pytest.raises(Rejected, match="was not renewed in 1 tablet of 3: there is no hold h any more"):
            await table.renew_hold("h")
        assert len((await table.hold("h", held.since)).tablets) == 3, "it is taken where it was missing"
        await table.alter(drop_ranges=[(0, 10)])
        renewed = await table.renew_hold(held)
        assert len(renewed.tablets) == 1
        await table.alter(drop_ranges=[(10, 20)])
        with pytest.raises(Rejected, match="all ranges that had hold h were dropped"):
            await table.renew_hold(held)
        await table.release_hold("h")


async def test_what_nodes_refuse(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        for bad, told in [
            ({"name": "a b"}, "name of a hold 'a b'"),
            ({"expires_in_s": 0.5}, "a number of seconds, 1 to a year"),
            ({"expires_in_s": "1h"}, "a number of seconds"),
            ({"max_bytes": 5}, "max_bytes 5: expected a whole number, 1048576 to"),
            ({"since": "noon"}, "since 'noon': expected a hybrid time"),
            ({"since": client.now() + (3_600_000_000 << 12)}, "in the future"),
        ]:
            with pytest.raises(Rejected, match=told):
                await table.hold(**{"name": "h", "timeout_s": 20.0, **bad})  # type: ignore[arg-type]
        for number in range(HOLDS_MAX):
            await table.hold(f"h{number}")
        with pytest.raises(Rejected, match="which is the most; release one of h0") as full:
            await table.hold("another")
        assert full.value.code is Code.TOO_LARGE

        def hear(version: int) -> None:
            for node in cluster.running.values():
                node.heartbeater._cluster_version = version
                node.heartbeater.leader_answered = lambda response: None  # type: ignore[method-assign]

        hear(1)
        with pytest.raises(Rejected, match="this needs cluster version 2, but the cluster has 1") as early:
            await table.hold("h1")
        assert early.value.code is Code.UNSUPPORTED_VERSION
        hear(0)
        with pytest.raises(Retryable, match="has not heard a leading master") as unheard:
            await table.hold("h1", timeout_s=0.5)
        assert unheard.value.code is Code.NOT_READY


async def test_a_full_node_still_takes_releases(cluster: LocalCluster) -> None:
    """Otherwise a hold that fills a disk could never give it back."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        await table.hold("h")
        (tablet,) = table.scan().plan.tablets
        for node in cluster.running.values():
            node.host.low_space = lambda: True  # type: ignore[method-assign]
        with pytest.raises(Retryable) as full:
            await table.hold("more", timeout_s=2.0)
        assert full.value.code is Code.DISK_FULL
        before = [store.applied for store in await machines_of(cluster, tablet.tablet_id)]
        await table.release_hold("nobody")
        assert [store.applied for store in await machines_of(cluster, tablet.tablet_id)] == before
        await table.release_hold("h")
        assert await table.holds() == []


async def test_a_refusal_is_told_though_the_last_attempt_was_cut_off(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def once(*args: object) -> NoReturn:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.sleep(60)
        raise Retryable("the disk is full", code=Code.DISK_FULL)

    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        monkeypatch.setattr(tablet_service, "hold_history", once)
        with pytest.raises(Retryable, match="the disk is full") as refused:
            await table.hold("h", timeout_s=3.0)
        assert (refused.value.code, asked) == (Code.DISK_FULL, 2)


def test_an_order_that_only_passes_time_needs_no_name() -> None:
    assert HoldOrder(Action.EXPIRE).encoded()
