"""A new replica is compared with another voter after its heal: real nodes, one that holds other rows, one that is silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.driver.copy_checks import CopyCheck, CopyChecks, CopyMade, Voter, copies_to_compare
from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.driver.wire import view_from_pb
from stele.model.config import MemberType
from stele.model.copies import CopyRecord
from stele.model.errors import Code, Retryable
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.proto import tserver_pb2
from stele.tablet.store import TabletStore
from tests.harness.processes import Cluster
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

ROWS = 3_000


def waiting_in(view: Any, new: int = -1, **record: int) -> list[CopyMade]:
    """As if the last voter of each tablet had just become one. `view`: as the masters tell it."""
    for tablet in view.tablets:
        voters = [p for p in tablet.committed_config.peers if p.member_type == MemberType.VOTER]
        ordered = sorted(voters, key=lambda p: p.node_id == tablet.leader_node, reverse=True)
        tablet.copies.add(replica_id=ordered[new].replica_id, **record)
    return copies_to_compare(view_from_pb(view))


class Recorder:
    """Stands for the executor: it has the claim, and keeps what is recorded."""

    def __init__(self) -> None:
        self.found: list[CopyCheck] = []
        self.recorded: list[CopyRecord] = []
        self.refuses = self.claimed_by_another = False
        self.now_s = 0.0

    async def claim(self) -> None:
        if self.claimed_by_another:
            raise Retryable("another driver works", code=Code.NOT_READY)

    async def record(self, check: CopyCheck) -> None:
        if self.refuses:
            raise Retryable("no master leads", code=Code.UNAVAILABLE)
        self.recorded.append(check.record)

    def checks(self, pool: Any) -> CopyChecks:
        return CopyChecks(pool, self.claim, self.record, self.found.append, lambda: self.now_s)

    async def compare(self, checks: CopyChecks, wanted: Sequence[CopyMade]) -> list[CopyCheck]:
        self.found.clear()
        self.recorded.clear()
        checks.look(list(wanted))
        await checks.done()
        return list(self.found)


@asynccontextmanager
async def loaded(tmp_path: Path) -> AsyncIterator[tuple[LocalCluster, AsyncClient, Any]]:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["x"] * ROWS}))
            yield cluster, client, table
    finally:
        await cluster.close()


async def test_replicas_that_differ_are_told_from_those_that_do_not_answer(tmp_path: Path) -> None:
    async with loaded(tmp_path) as (cluster, client, table):
        recorder = Recorder()
        checks = recorder.checks(client.pool)

        async def compared(**record: int) -> list[CopyCheck]:
            recorder.now_s += 3_600
            return await recorder.compare(checks, waiting_in(await cluster_view(client.masters), **record))

        async def write() -> None:
            for number in range(1_000_000):
                await table.put({"id": number % ROWS, "name": f"later {number}"})

        writing = asyncio.create_task(write())
        try:
            equal = await compared()
        finally:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
        assert len(equal) == 4 and all(check.equal for check in equal), equal
        assert sum(check.sums[0][0] for check in equal) == ROWS
        assert CATALOG_TABLET_ID not in {check.made.tablet_id for check in equal}
        assert [r.result for r in recorder.recorded] == ["Equal"] * 4

        # The new replica of one tablet has the rows of another one.
        wrong = equal[0].made
        node = next(n for n in cluster.running.values() if n.node_id == wrong.new.node_id)
        mine = {r.tablet_id: r for r in node.replicas if isinstance(r.machine, TabletStore)}
        replica = mine.pop(wrong.tablet_id)
        assert replica.started is not None
        storage, kept = replica.started.storage, replica.started.storage.machine
        storage.machine = next(iter(mine.values())).machine
        told = await compared()
        assert [c.made.tablet_id for c in told if c.differs] == [wrong.tablet_id]
        (differs,) = [c for c in told if c.differs]
        assert f"node {wrong.new.node_id[:8]}: " in differs.said and " rows with checksum " in differs.said
        assert len(differs.further) == 1, "the third voter says which one stands alone"
        assert differs.said.endswith(
            f"`stele tablet move {wrong.tablet_id[:8]} --from NODE --to NODE` replaces the replica on node "
            f"{wrong.new.node_id[:8]}"
        )
        (record,) = [r for r in recorder.recorded if r.differs]
        assert (record.replica_id, record.other_id) == (wrong.new.replica_id, wrong.others[0].replica_id)
        assert (record.rows, record.checksum) == differs.sums[0] and record.snapshot and not record.index

        # The leader is wrong, not the new one: it differs from one voter, and is not said to be wrong.
        storage.machine = kept
        leader = next(n for n in cluster.running.values() if n.node_id == wrong.others[0].node_id)
        of_leader = {r.tablet_id: r for r in leader.replicas if isinstance(r.machine, TabletStore)}
        victim = of_leader.pop(wrong.tablet_id)
        assert victim.started is not None
        right = victim.started.storage.machine
        victim.started.storage.machine = next(iter(of_leader.values())).machine
        (differs,) = [c for c in await compared() if c.differs]
        assert differs.made == wrong and "`stele table verify t` compares all its replicas" in differs.said
        assert (
            f"node {wrong.others[1].node_id[:8]} holds the same as node {wrong.new.node_id[:8]}"
            in differs.said
        )
        # One that differed is equal again only if it is equal to all.
        swapped = CopyMade(
            wrong.tablet_id, "t", wrong.new, tuple(reversed(wrong.others)), differed=True, config_index=99
        )
        (again,) = await recorder.compare(checks, [swapped])
        assert again.differs and again.other == wrong.others[0]
        victim.started.storage.machine = right
        (mended,) = await recorder.compare(
            checks, [CopyMade(*_fields(swapped), differed=True, config_index=98)]
        )
        assert mended.equal and [r.result for r in recorder.recorded] == ["Equal"]
        await checks.close()


def _fields(made: CopyMade) -> tuple[Any, ...]:
    return made.tablet_id, made.table_name, made.new, made.others, made.cause


async def test_what_cannot_be_compared_or_recorded_is_tried_again_later_and_told_once(tmp_path: Path) -> None:
    async with loaded(tmp_path) as (_, client, _):
        recorder = Recorder()
        checks = recorder.checks(client.pool)
        wanted = waiting_in(await cluster_view(client.masters))
        first = wanted[0]
        nowhere = Voter(9, first.new.node_id, "127.0.0.1:9")
        lost = CopyMade(first.tablet_id, "t", nowhere, first.others)

        (silent,) = await recorder.compare(checks, [lost])
        assert not silent.equal and not silent.differs and "not compared: " in silent.said
        assert not recorder.recorded
        assert await recorder.compare(checks, [lost]) == [], "not due"
        recorder.now_s += 11
        assert (
            await recorder.compare(checks, [lost]) == [] and checks._trials[(lost.tablet_id, 9)].failures == 2
        )
        recorder.now_s += 11
        assert (
            await recorder.compare(checks, [lost]) == [] and checks._trials[(lost.tablet_id, 9)].failures == 2
        )

        recorder.refuses = True
        assert [c.equal for c in await recorder.compare(checks, [first])] == [True]
        recorder.refuses = False
        assert await recorder.compare(checks, [first]) == []
        recorder.now_s += 11
        assert [c.equal for c in await recorder.compare(checks, [first])] == [True] and recorder.recorded
        assert await recorder.compare(checks, [first]) == [], "the view does not have it yet"

        recorder.claimed_by_another = True
        assert await recorder.compare(checks, wanted[1:]) == []
        recorder.claimed_by_another = False
        assert len(await recorder.compare(checks, wanted[1:])) == 3
        await checks.close()


async def test_key_spaces_are_compared_at_one_log_index_while_clients_write(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    recorder = Recorder()
    try:
        await cluster.start()
        async with cluster.client() as client:
            space = await client.create_keyspace("names", replication_factor=3)
            await space.replace("a", "b")
            checks = recorder.checks(client.pool)

            async def compared() -> CopyCheck:
                recorder.now_s += 3_600
                wanted = waiting_in(await cluster_view(client.masters))
                (found,) = await recorder.compare(checks, wanted)
                return found

            quiet = await compared()
            assert quiet.equal and quiet.sums[0][0] == 1 and "1 key with checksum" in quiet.said, quiet

            async def write() -> None:
                for number in range(1_000_000):
                    await space.replace(f"key {number % 100}", str(number))

            writing = asyncio.create_task(write())
            try:
                for _ in range(5):
                    check = await compared()
                    assert check.equal and check.by_index, check
                    (record,) = recorder.recorded
                    assert record.index == check.moment > quiet.moment and not record.snapshot
            finally:
                writing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await writing

            node = next(n for n in cluster.running.values() if n.node_id == check.made.new.node_id)
            machine: Any = next(r for r in node.replicas if r.tablet_id == check.made.tablet_id).machine
            machine._pairs.put(b"a", (b"other", 1, 0))
            differs = await compared()
            assert differs.differs and "once you know which" not in differs.said, differs.said
            await checks.close()
    finally:
        await cluster.close()


def test_sums_of_key_spaces_count_at_the_highest_common_index_alone() -> None:
    from stele.driver.copy_checks import at_one_moment

    def answer(*sums: tuple[int, int, int]) -> tserver_pb2.ChecksumResponse:
        told = [tserver_pb2.StateSumPB(index=i, rows=r, checksum=c) for i, r, c in sums]
        return tserver_pb2.ChecksumResponse(rows=1, checksum=2, sums=told)

    mine, its = answer((3, 1, 1), (5, 2, 2), (9, 3, 3)), answer((3, 1, 1), (5, 2, 7), (8, 4, 4))
    assert at_one_moment(mine, its, 11) == (5, (2, 2), (2, 7))
    assert at_one_moment(answer(), answer(), 11) == (11, (1, 2), (1, 2))
    for other in (answer(), answer((4, 1, 1))):
        with pytest.raises(Retryable, match="no checksum at a common log index"):
            at_one_moment(mine, other, 11)


async def test_after_a_heal_each_copy_is_compared_and_the_masters_keep_it(tmp_path: Path) -> None:
    """The driver ends only when it has done so."""
    found: list[CopyCheck] = []
    async with (
        Cluster(tmp_path, masters=1, nodes=4) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        table = await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
        await table.write_arrow(pa.table({"id": range(ROWS), "name": ["x"] * ROWS}))
        victim = cluster.nodes[0]
        view = view_from_pb(await cluster_view(client.masters))
        lost = {t.tablet_id for t in view.tablets for p in t.config.peers if p.node_id == victim.node_id}
        cluster.lose(victim)
        policy = Policy(dead_after_ms=2_000, balance_leaders=False)
        await drive(cluster.master_addresses, policy, until_healthy=True, on_copy=found.append)
        assert lost and {check.made.tablet_id for check in found} == lost
        assert all(check.equal and check.made.cause for check in found), found
        rows = sum(check.sums[0][0] for check in found)
        assert 0 < rows <= ROWS

        cluster.kill(cluster.masters[0])
        cluster.restart(cluster.masters[0])
        kept = view_from_pb(await cluster_view(client.masters))
        records = {t.tablet_id: t.copies for t in kept.tablets if t.copies}
        assert records.keys() == lost and all(len(c) == 1 and c[0].equal for c in records.values())
        by_tablet = {check.made.tablet_id: check for check in found}
        assert all(c[0].checksum == by_tablet[t].sums[0][1] for t, c in records.items())
        assert copies_to_compare(kept) == []
