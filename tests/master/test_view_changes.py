"""What changed since: pages put together are the whole view, whatever happened between them, and none is large."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.driver.keeping import Kept, ViewKeeper, WholeView, whole_view
from stele.driver.view import ClusterView
from stele.driver.wire import view_from_pb
from stele.master import view_changes
from stele.master.cluster_view import cluster_view
from stele.model.ids import CATALOG_TABLET_ID, TabletId
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.consensus.cluster import WAIT_S
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    World,
    claimed,
    create_request,
    made,
    ready,
    ready_again,
    world,
)

SLOW = replace(OPTIONS, alive_ms=3_600_000, missing_after_ms=200, create_timeout_ms=600_000)


class Reader:
    """A driver's view, and what the pages were like. `calls`: units in each page."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.keeper = ViewKeeper()
        self.pages: list[pb.GetClusterViewResponse] = []

    async def page(self, since: pb.ViewPlacePB) -> pb.GetClusterViewResponse:
        request = pb.GetClusterViewRequest(since=since)
        answer = await self.w.leader.GetClusterView(request, None)
        self.pages.append(pb.GetClusterViewResponse.FromString(answer.SerializeToString()))
        return self.pages[-1]

    async def renew(self) -> Kept:
        self.pages.clear()
        return await self.keeper.renew(self.page)

    @property
    def units(self) -> int:
        """Tablets and tables in the pages of the last renewal, without the catalog's own tablet."""
        tablets = {t.tablet_id for p in self.pages for t in p.tablets} - {id_to_pb(CATALOG_TABLET_ID)}
        return len(tablets) + sum(len(p.tables) for p in self.pages)


def still(view: ClusterView) -> ClusterView:
    """The view without what differs from one moment to the next."""
    tablets = []
    for tablet in view.tablets:
        replicas = [
            replace(r, age_ms=0, unreached_ms=dict.fromkeys(r.unreached_ms, 0)) for r in tablet.replicas
        ]
        tablets.append(replace(tablet, replicas=tuple(replicas)))
    nodes = tuple(replace(n, heartbeat_age_ms=0) for n in view.nodes)
    return replace(view, nodes=nodes, tablets=tuple(tablets), now_us=0)


def now(w: World) -> pb.GetClusterViewResponse:
    """The whole view, built in one step."""
    return cluster_view(w.masters[w.group.leader].scene(), "")


async def same(reader: Reader) -> None:
    """The renewed view is the whole one. Time goes on between the two, so a difference must stay to count."""
    for _ in range(5):
        kept = await reader.renew()
        whole = now(reader.w)
        mine, theirs = still(kept.view), still(view_from_pb(whole))
        if mine == theirs and list(kept.tables) == list(whole.tables):
            return
    assert mine.tablets == theirs.tablets
    assert mine == theirs
    assert list(kept.tables) == list(whole.tables)


def _report(w: World, rng: random.Random) -> None:
    """A node tells something else of one of its replicas, or no longer has it."""
    node = w.nodes[rng.choice(sorted(w.nodes))]
    if not node.replicas:
        return
    key = rng.choice(sorted(node.replicas))
    match rng.randrange(4):
        case 0:
            node.replicas[key] = not node.replicas[key]
        case 1:
            node.versions[key[0]] = rng.randrange(2, 9)
        case 2:
            node.incarnation += 1
        case 3:
            del node.replicas[key]


async def _ask(w: World, rng: random.Random, names: list[str], epoch: int) -> None:
    """An administrator or a driver changes something."""
    rows = [
        t.tablet_id
        for t in w.catalog.tablets.values()
        if t.state == "RUNNING" and t.tablet_id != CATALOG_TABLET_ID
    ]
    match rng.randrange(5):
        case 0:
            names.append(f"t{rng.randrange(1 << 40)}")
            await w.leader.CreateTable(create_request(names[-1], buckets=rng.randrange(2, 5)), None)
        case 1 if len(names) > 1:
            name = names.pop(rng.randrange(len(names)))
            await w.leader.DeleteTable(pb.DeleteTableRequest(name=name), None)
        case 2:
            name = rng.choice(names)
            factor = 5 if w.catalog.table("", name).replication_factor == 3 else 3
            request = pb.SetReplicationFactorRequest(name=name, replication_factor=factor)
            await w.leader.SetReplicationFactor(request, None)
        case 3 | 4 if rows:
            row = w.catalog.tablets[TabletId(rng.choice(rows))]
            free = [n for n in w.nodes if row.config.peer_on(n) is None]
            if free and row.config.peers and row.tablet_id not in w.catalog.intents:
                intent = pb.IntentPB(
                    tablet_id=id_to_pb(row.tablet_id),
                    target_node=id_to_pb(rng.choice(free)),
                    kind="add",
                    reason="a test",
                    expires_us=1 << 60,
                    epoch=epoch,
                    config_index=row.config.opid_index,
                )
                await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=intent), None)


@pytest.mark.parametrize("seed", range(4))
async def test_pages_make_the_whole_view_whatever_happens_between_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with world(tmp_path, SLOW) as w:
        await ready(w, nodes=7)
        names = ["first"]
        await made(w, "first")
        epoch = await claimed(w)
        reader = Reader(w)
        for _ in range(60):
            match rng.randrange(6):
                case 0 | 1:
                    _report(w, rng)
                    await w.beat(silent=tuple(rng.sample(sorted(w.nodes), 2)))
                case 2 | 3:
                    await _ask(w, rng, names, epoch)
                case 4:
                    w.create_replicas()
                    await w.beat()
                case 5:
                    w.shift_ms += rng.randrange(500)
            await same(reader)


async def test_a_renewal_costs_what_changed(tmp_path: Path) -> None:
    """A heartbeat that tells nothing new still counts as a report here, as it is a full one; a row does not."""
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w, "t", buckets=40)
        await made(w, "u", buckets=4)
        reader = Reader(w)
        await reader.renew()
        assert reader.units == 44 + 2
        await reader.renew()
        assert reader.units == 0 and not reader.pages[0].anew
        await w.leader.SetReplicationFactor(
            pb.SetReplicationFactorRequest(name="u", replication_factor=5), None
        )
        await reader.renew()
        assert reader.units == 4 + 1  # the tablets show their factor
        await same(reader)


async def test_no_page_is_large_and_a_change_between_two_pages_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_changes, "PAGE_BYTES_MAX", 8 << 10)
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w, "t", buckets=100)
        reader = Reader(w)
        place, first = pb.ViewPlacePB(), True
        while True:
            page = await reader.page(place)
            assert page.anew is first
            reader.keeper._take(page)
            if first:  # a tablet that was told already changes
                request = pb.SetReplicationFactorRequest(name="t", replication_factor=5)
                await w.leader.SetReplicationFactor(request, None)
            first, place = False, page.upto
            if not page.more:
                break
        assert len(reader.pages) > 5
        for page in reader.pages:
            page.ClearField("nodes")
            assert page.ByteSize() < (8 << 10) + 2_000
        await same(reader)
        assert {t.replication_factor for t in (await reader.renew()).view.tablets} == {5, 3}


async def test_a_new_leader_and_a_gap_begin_the_view_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w, "t")
        reader = Reader(w)
        assert (await reader.renew()).anew
        assert not (await reader.renew()).anew
        await w.elect(MASTERS[1])
        await ready_again(w)
        assert (await reader.renew()).anew
        await same(reader)
        monkeypatch.setattr(view_changes, "GONE_KEPT", 4)
        for number in range(4):
            await made(w, f"u{number}")
            await w.leader.DeleteTable(pb.DeleteTableRequest(name=f"u{number}"), None)
        await Reader(w).renew()  # by which old deletions are forgotten
        assert (await reader.renew()).anew
        await same(reader)


async def test_replicas_that_a_node_does_not_report_count_as_missing_by_time_alone(tmp_path: Path) -> None:
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w, "t", buckets=3)
        row = next(w.catalog.tablets[t] for t in w.catalog.current if w.catalog.tablets[t].ordinal == 1)
        peer = row.config.peers[0]
        del w.nodes[peer.node_id].replicas[row.tablet_id, peer.replica_id]
        await w.beat()
        reader = Reader(w)

        async def missing() -> bool:
            kept = await reader.renew()
            tablet = kept.view.tablet(row.tablet_id)
            assert tablet is not None
            return any(r.error == "its node reports no such replica" for r in tablet.replicas)

        assert not await missing()
        w.shift_ms += 1_000
        assert await missing()
        assert reader.units == 1
        await same(reader)


async def test_a_report_grows_older_where_that_matters(tmp_path: Path) -> None:
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w, "t", buckets=2)
        node = w.nodes[sorted(w.nodes)[0]]
        status = node.status

        def opening(tablet_id: TabletId, replica_id: int) -> common_pb2.ReplicaStatusPB:
            told = status(tablet_id, replica_id)
            told.state = common_pb2.BOOTSTRAPPING
            return told

        node.status = opening  # type: ignore[method-assign]
        await w.beat()
        reader = Reader(w)
        await reader.renew()
        w.shift_ms += 40_000
        kept = await reader.renew()
        assert reader.units == 0
        opened = [r for t in kept.view.tablets for r in t.replicas if r.node_id == node.node_id]
        assert opened and all(r.leaderless and 40_000 <= r.age_ms < 60_000 for r in opened)


async def test_a_command_that_looks_again_and_again_fetches_what_changed(tmp_path: Path) -> None:
    """`stele tablet recover` and the commands that wait for replicas fetched everything in each look."""
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w, "t", buckets=50)
        reader = Reader(w)

        async def page(since: pb.ViewPlacePB) -> pb.GetClusterViewResponse:
            return pb.GetClusterViewResponse.FromString((await reader.page(since)).SerializeToString())

        whole = WholeView(page)
        assert len((await whole.look()).tablets) == 51
        for _ in range(50):  # until the background has looked at the new tablets
            await asyncio.sleep(0.05)
            reader.pages.clear()
            view = await whole.look()
            if not reader.units:
                break
        assert reader.units == 0 and len(reader.pages) == 1
        assert still(view_from_pb(view)) == still(view_from_pb(now(w)))
        first = next(t for t in view.tablets if t.tablet_id != id_to_pb(CATALOG_TABLET_ID))
        assert all(r.age_ms >= 50 for r in first.replicas), "what was not told again is older now"
        await made(w, "u", buckets=3)
        view = await whole.look()
        assert len(view.tablets) == 54 and still(view_from_pb(view)) == still(view_from_pb(now(w)))


async def test_callers_without_a_place_still_get_all_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w, "t", buckets=50)
        reader = Reader(w)
        changing = asyncio.create_task(w.beat())
        old = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        await changing
        assert not old.HasField("upto")
        old = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        assert still(view_from_pb(old)) == still(view_from_pb(now(w)))
        assert still(view_from_pb(await whole_view(reader.page))) == still(view_from_pb(now(w)))
        keeper = ViewKeeper()

        async def earlier(since: pb.ViewPlacePB) -> pb.GetClusterViewResponse:
            return old

        for _ in range(2):
            kept = await keeper.renew(earlier)
            assert kept.anew and still(kept.view) == still(view_from_pb(old))


class Slow:
    """A page that is taken only when the test lets it."""

    def __init__(self, page: pb.GetClusterViewResponse) -> None:
        self._page = page
        self.taken, self.go = threading.Event(), threading.Event()

    @property
    def anew(self) -> bool:
        self.taken.set()
        self.go.wait(WAIT_S)
        return self._page.anew

    def __getattr__(self, name: str) -> object:
        return getattr(self._page, name)


async def test_a_renewal_that_is_cancelled_has_ended_before_the_next_one_begins(tmp_path: Path) -> None:
    """Its thread cannot be stopped, and would change the view while the next one reads it."""
    async with world(tmp_path, SLOW) as w:
        await ready(w)
        await made(w)
        reader = Reader(w)
        slow = Slow(await reader.page(pb.ViewPlacePB()))

        async def page(since: pb.ViewPlacePB) -> Any:
            return slow

        first = asyncio.create_task(reader.keeper.renew(page))
        assert await asyncio.to_thread(slow.taken.wait, WAIT_S)
        first.cancel()
        second = asyncio.create_task(reader.renew())
        await asyncio.sleep(0.2)
        assert not second.done()
        slow.go.set()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        await second
        await same(reader)
