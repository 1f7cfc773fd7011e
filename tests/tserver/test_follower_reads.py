"""Rows and scans that may be old, on real nodes in this process: followers answer, the nearest first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.client import AsyncClient
from stele.client.nearby import AgedRow
from stele.client.table import AsyncTable
from stele.model.errors import Code, Rejected, SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.proto import tserver_pb2
from stele.tserver.tablet_service import TabletService
from tests.tserver.local import HASHED, SCHEMA, LocalCluster
from tests.tserver.test_plans import REFUSED


async def made(cluster: LocalCluster, client: AsyncClient, rows: int = 20) -> AsyncTable:
    """A table with rows 0 to `rows`."""
    table = await client.create_table("t", SCHEMA, HASHED)
    await table.write_arrow(pa.table({"id": range(rows), "name": [f"n{i}" for i in range(rows)]}))
    return table


def leaders(cluster: LocalCluster) -> dict[str, str]:
    """Who leads, by tablet."""
    nodes = cluster.running.items()
    return {
        r.tablet_id: cluster.ids[name]
        for name, node in nodes
        for r in node.replicas
        if r.is_leader and r.tablet_id != CATALOG_TABLET_ID
    }


async def test_followers_answer_and_say_how_old_their_rows_are(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await made(cluster, client)
            for key in range(20):
                found = await table.get(key, max_staleness=5.0)
                assert isinstance(found, AgedRow) and found.row == {"id": key, "name": f"n{key}"}
                assert 0 <= found.age_s <= 5.0
            many = await table.get_many([*range(20), 99], ["name"], max_staleness=5.0)
            assert [each.row for each in many] == [*({"name": f"n{i}"} for i in range(20)), None]
            # All that this client wrote is there, however old rows may be.
            for number in range(30):
                await table.put({"id": 1, "name": f"new{number}"})
                found = await table.get(1, ["name"], max_staleness=900.0)
                assert found.row == {"name": f"new{number}"}
    finally:
        await cluster.close()


async def test_the_followers_of_the_readers_zone_come_first_and_the_leader_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, bool]] = []
    answer = TabletService._read

    async def noted(self: TabletService, request: tserver_pb2.ReadRequest) -> tserver_pb2.ReadResponse:
        replica = self._replicas.of_request(request.tablet_id)
        served.append((self._node_id, replica.is_leader))
        return await answer(self, request)

    monkeypatch.setattr(TabletService, "_read", noted)
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        for name in ("node-0", "node-1", "node-2"):
            zone = cluster.options(name).zone
            client = AsyncClient([cluster.master_address], timeout_s=60, first_contact_s=60, zone=zone)
            async with client:
                table = await made(cluster, client) if name == "node-0" else await client.open_table("t")
                led = leaders(cluster)
                for key in range(20):
                    await table.get(key)  # so that the leaders are known
                at_home = 0
                for key in range(20):
                    served.clear()
                    found = await table.get(key, max_staleness=30.0)
                    here = cluster.ids[name]
                    assert [each for each in served if each[1]] == [], "a leader was asked"
                    at_home += found.node_id == here
                assert at_home or set(led.values()) == {here}, "its followers are not asked first"
                if here not in led.values():
                    assert at_home == 20
    finally:
        await cluster.close()


async def test_reads_go_on_while_followers_are_down(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA)
            await table.put({"id": 1, "name": "one"})
            (led,) = leaders(cluster).values()
            for name in [n for n, i in cluster.ids.items() if n != "master" and i != led][:1]:
                await cluster.stop(name)
            for _ in range(10):
                found = await table.get(1, max_staleness=5.0)
                assert found.row == {"id": 1, "name": "one"}
    finally:
        await cluster.close()


async def test_scans_that_may_be_old_are_served_by_followers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stele.tserver.scan import Scans

    by_leader: list[bool] = []
    opened = Scans._open

    async def noted(self: Scans, ticket: object) -> object:
        found = await opened(self, ticket)  # type: ignore[arg-type]
        by_leader.append(found[0].is_leader)
        return found

    monkeypatch.setattr(Scans, "_open", noted)
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await made(cluster, client, 200)
            for key in range(20):
                await table.get(key)  # so that the leaders are known
            for staleness in (0.0, 1.0, 60.0):
                by_leader.clear()
                scan = table.scan(["id"], max_staleness=staleness)
                ids = sorted((await scan.to_table())["id"].to_pylist())
                assert ids == list(range(200)), "what this client wrote is there"
                assert by_leader and not any(by_leader)
                assert 0 <= scan.age_s <= staleness + 0.1
            async with cluster.client() as other:  # it has seen nothing yet
                scan = (await other.open_table("t")).scan(["id"], max_staleness=60.0)
                assert 50 < scan.age_s <= 60
                assert await scan.count() == 0, "the table was empty then"
    finally:
        await cluster.close()


async def test_keys_that_may_be_old_are_read_at_followers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_leader: list[bool] = []
    answer = TabletService._kv

    async def noted(self: TabletService, request: tserver_pb2.KvRequest) -> tserver_pb2.KvResponse:
        by_leader.append(self._replicas.of_request(request.tablet_id).is_leader)
        return await answer(self, request)

    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            space = await client.create_keyspace("settings")
            await space.replace("colour", "red")
            await space.read("colour")  # so that the leader is known
            monkeypatch.setattr(TabletService, "_kv", noted)
            for staleness in (0.0, 5.0, 60.0):
                found = await space.snapshot("colour", max_staleness=staleness)
                assert [each.value for each in found.keys] == [b"red"] and 0 <= found.age_s <= staleness + 1
                assert found.age_s > 0
            assert by_leader and not any(by_leader)
            for number in range(20):
                revision = await space.replace("colour", str(number))
                found = await space.snapshot(prefix="c", max_staleness=3_600.0)
                assert found.keys[0].value == str(number).encode() and found.revision >= revision
            async with await space.watch(prefix="c", after=found.revision) as watch:
                last = await space.replace("colour", "last")
                assert (await anext(watch)).revision == last, "a watch behind it misses nothing"
            present = await space.snapshot("colour")
            assert present.age_s == 0.0
            with pytest.raises(Rejected, match="max_staleness"):
                await space.snapshot("colour", max_staleness=-1.0)
    finally:
        await cluster.close()


async def test_flight_clients_read_followers_first(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            await made(cluster, client, 100)
            flight = {
                i: cluster.running[n].description.flight_address
                for n, i in cluster.ids.items()
                if n != "master"
            }
            of_leader = {tablet: flight[node] for tablet, node in leaders(cluster).items()}

            def plan(**fields: object) -> fl.FlightInfo:
                command = b"\1" + json.dumps({"table": "t", **fields}).encode()
                with fl.connect(f"grpc+tcp://{cluster.master_address}") as master:
                    return master.get_flight_info(fl.FlightDescriptor.for_command(command))

            def read(info: fl.FlightInfo) -> int:
                count = 0
                for endpoint in info.endpoints:
                    ticket = json.loads(endpoint.ticket.ticket[1:])
                    where = [str(each.uri.decode()) for each in endpoint.locations]
                    assert of_leader[ticket["tablet"]] in where[-1] and len(where) == 3
                    with fl.connect(endpoint.locations[0]) as node:
                        count += node.do_get(endpoint.ticket).read_all().num_rows
                return count

            assert await asyncio.to_thread(read, await asyncio.to_thread(plan, max_staleness_ms=0)) == 100
            for bad, why in [(900_001, "keeps 900000 ms of history"), (-1, "max_staleness_ms")]:
                with pytest.raises(REFUSED, match=why):
                    await asyncio.to_thread(plan, max_staleness_ms=bad)
            with pytest.raises(REFUSED, match="either a snapshot"):
                await asyncio.to_thread(plan, max_staleness_ms=5, snapshot=client.now())
    finally:
        await cluster.close()


async def test_a_row_of_a_snapshot_comes_from_any_replica(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA)
            await table.put({"id": 1, "name": "old"})
            snapshot = client.now()
            await table.put({"id": 1, "name": "new"})
            assert await table.get(1, ["name"], snapshot=snapshot) == {"name": "old"}
            assert await table.get_many([1, 2], ["name"], snapshot=snapshot) == [{"name": "old"}, None]
            hour = 3_600_000_000 << 12
            for at, code in ((snapshot - hour, Code.SNAPSHOT_TOO_OLD), (snapshot + hour, Code.CLOCK_AHEAD)):
                with pytest.raises(SteleError) as refused:
                    await table.get(1, snapshot=at)
                assert refused.value.code is code
    finally:
        await cluster.close()


async def test_times_that_cannot_be_are_refused_before_any_node_is_asked(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA)
            for bad, why in [
                (-1.0, "max_staleness -1.0: expected a number of seconds, 0 or above 0"),
                ("5", "max_staleness '5'"),
                (float("nan"), "max_staleness nan"),
                (901.0, "max_staleness of 901 s: table t keeps 900 s of history; give at most that"),
            ]:
                for read in (
                    lambda bad=bad: table.get(1, max_staleness=bad),
                    lambda bad=bad: table.get_many([1], max_staleness=bad),
                ):
                    with pytest.raises(Rejected, match=why.replace("(", r"\(")):
                        await read()
                with pytest.raises(Rejected):
                    table.scan(max_staleness=bad)  # type: ignore[arg-type]
            with pytest.raises(Rejected, match="either a snapshot or max_staleness"):
                table.scan(max_staleness=5.0, snapshot=client.now())
            with pytest.raises(Rejected, match="either a snapshot or max_staleness"):
                await table.reads.get(1, None, 5.0, client.now())
    finally:
        await cluster.close()
