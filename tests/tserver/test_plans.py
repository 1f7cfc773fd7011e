"""What any Flight client gets: plans of whole tables from masters and nodes, and scans that resume at another replica."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.model.clock import from_physical_us
from stele.model.errors import Code, SteleError
from stele.model.ids import new_id
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.errors import error_from_json
from stele.rpc.identity import Identity
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub
from stele.rpc.ticket import COMMAND_BYTES_MAX, TICKET_VERSION, ScanCommand, decode_ticket
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, fill

ROWS = 200
REFUSED = (fl.FlightError, pa.ArrowException)  # as a gRPC status is told by pyarrow


@pytest.fixture
async def cluster(cluster: LocalCluster) -> LocalCluster:
    """With a table of four tablets."""
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, ROWS)
    return cluster


def planned(address: str, command: ScanCommand | str) -> fl.FlightInfo:
    """As a program of somebody else asks, which knows Arrow Flight alone."""
    if isinstance(command, str):
        descriptor = fl.FlightDescriptor.for_path(command)
    else:
        descriptor = fl.FlightDescriptor.for_command(command.encode())
    with fl.connect(f"grpc+tcp://{address}") as client:
        return client.get_flight_info(descriptor, fl.FlightCallOptions(timeout=20))


def read(info: fl.FlightInfo) -> pa.Table:
    parts = []
    for endpoint in info.endpoints:
        with fl.connect(endpoint.locations[0]) as client:
            parts.append(client.do_get(endpoint.ticket).read_all())
    return pa.concat_tables(parts)


def addresses(cluster: LocalCluster) -> list[str]:
    """Of every port that answers: gRPC and Flight, of the master and of a node."""
    described = [cluster.running[name].description for name in ("master", "node-1")]
    return [a for d in described for a in (d.address, d.flight_address)]


async def test_every_port_plans_a_whole_table_and_its_tickets_are_read_anywhere(
    cluster: LocalCluster,
) -> None:
    def check(address: str) -> None:
        info = planned(address, "t")
        about = json.loads(info.app_metadata)
        assert len(info.endpoints) == 4 and all(len(e.locations) == 3 for e in info.endpoints)
        assert {decode_ticket(e.ticket.ticket).snapshot for e in info.endpoints} == {about["snapshot"]}
        assert (about["key"], about["partitioning"]) == (
            ["id"],
            [{"kind": "hash", "columns": ["id"], "buckets": 4}],
        )
        there = {location.uri.decode().partition("//")[2] for e in info.endpoints for location in e.locations}
        assert set(about["zones"]) == there and len(set(about["zones"].values())) == 3
        rows = read(info)
        assert rows.schema == info.schema and sorted(rows["id"].to_pylist()) == list(range(ROWS))

    for address in addresses(cluster):
        await asyncio.to_thread(check, address)


async def test_columns_conditions_limit_and_statistics(cluster: LocalCluster) -> None:
    address = cluster.running["master"].description.address

    def check() -> None:
        few = planned(address, ScanCommand("t", columns=("name",), where="id IN (7, 8) AND name != 'n8'"))
        assert len(few.endpoints) <= 2, "tablets that can hold no wanted row are left out"
        assert read(few).to_pydict() == {"name": ["n7"]}
        one_each = read(planned(address, ScanCommand("t", limit=1)))
        assert one_each.num_rows == 4
        counted = planned(address, ScanCommand("t", statistics=True))
        assert counted.total_records == ROWS and counted.total_bytes >= 0
        assert planned(address, ScanCommand("t")).total_records == -1
        long_ago = planned(address, ScanCommand("t", snapshot=int(from_physical_us(1))))
        with pytest.raises(fl.FlightError, match="snapshot"):
            read(long_ago)

    await asyncio.to_thread(check)


async def test_a_scan_resumes_behind_the_key_beside_its_last_batch(cluster: LocalCluster) -> None:
    """The columns asked for do not have the key."""
    address = cluster.running["node-0"].description.address

    def check() -> None:
        info = planned(address, ScanCommand("t", columns=("name",), resumable=True))
        whole = sorted(read(info)["name"].to_pylist())
        found: list[str] = []
        for endpoint in info.endpoints:
            fields = json.loads(endpoint.ticket.ticket[1:])
            fields["scan"]["batch_rows"] = 7
            here = 0
            while True:  # one batch of each node by turns
                with fl.connect(endpoint.locations[here % 3]) as client:
                    raw = bytes([TICKET_VERSION]) + json.dumps(fields).encode()
                    try:
                        chunk = client.do_get(fl.Ticket(raw)).read_chunk()
                    except StopIteration:
                        break
                    except fl.FlightUnavailableError:  # a follower that does not have the snapshot yet
                        here += 1
                        continue
                found += chunk.data["name"].to_pylist()
                fields["scan"]["lower"] = bytes(chunk.app_metadata).hex()
                here += 1
        assert sorted(found) == whole and len(whole) == ROWS

    await asyncio.to_thread(check)


async def test_a_prepared_plan_is_read_from_any_replica_at_once(cluster: LocalCluster) -> None:
    """A follower knows by the ticket's index that it has the snapshot, which it has not heard of."""
    address = cluster.running["master"].description.address

    def check(number: int) -> None:
        info = planned(address, ScanCommand("t", prepare=True))
        assert all(decode_ticket(endpoint.ticket.ticket).prepared for endpoint in info.endpoints)
        found: list[int] = []
        for endpoint in info.endpoints:
            with fl.connect(endpoint.locations[number]) as client:
                found += client.do_get(endpoint.ticket).read_all()["id"].to_pylist()
        assert sorted(found) == list(range(ROWS))

    for number in range(3):
        await asyncio.to_thread(check, number)


async def test_a_plan_is_made_without_what_no_leader_answers(cluster: LocalCluster) -> None:
    """Its tickets are for leaders then, as those of a plan that asked for nothing."""
    address = cluster.running["master"].description.address
    await cluster.stop("node-0")
    command = ScanCommand("t", prepare=True, part_bytes=1, statistics=True)
    info = await asyncio.to_thread(planned, address, command)
    assert len(info.endpoints) == 4


async def test_tablets_are_cut_into_tickets_of_about_so_many_bytes(cluster: LocalCluster) -> None:
    address = cluster.running["master"].description.address
    count = 100_000
    async with cluster.client() as client:
        table = await client.create_table("large", SCHEMA)
        await table.write_arrow(pa.table({"id": range(count), "name": ["x" * 20] * count}))
        (tablet,) = table.scan().plan.tablets
        flush = tserver_pb2.FlushTabletRequest(tablet_id=id_to_pb(tablet.tablet_id))
        leader = tablet.target().address
        await client.pool.unary(leader, TabletServerAdminServiceStub, "FlushTablet", flush, timeout_s=60)

    def check() -> None:
        assert len(planned(address, ScanCommand("large", part_bytes=1 << 40)).endpoints) == 1
        info = planned(address, ScanCommand("large", part_bytes=1, resumable=True))
        assert len(info.endpoints) == 4, "groups have 32,768 rows"
        assert read(info)["id"].to_pylist() == list(range(count)), "each row is in one part"
        few = planned(address, ScanCommand("large", part_bytes=1, where="id IN (5, 99999)", prepare=True))
        assert len(few.endpoints) == 2 and read(few)["id"].to_pylist() == [5, 99_999]

    await asyncio.to_thread(check)


def refusal(address: str, command: Any) -> SteleError | None:
    try:
        if isinstance(command, bytes):
            with fl.connect(f"grpc+tcp://{address}") as client:
                client.get_flight_info(fl.FlightDescriptor.for_command(command))
        else:
            planned(address, command)
    except fl.FlightError as exc:
        return error_from_json(bytes(exc.extra_info)) or SteleError(str(exc), code=Code.INTERNAL)
    return None


async def test_what_cannot_be_planned_is_refused_with_the_reason(cluster: LocalCluster) -> None:
    address = cluster.running["node-0"].description.flight_address
    async with cluster.client() as client:
        await client.create_keyspace("marks")
    cases: list[tuple[Any, Code, str]] = [
        ("nothing", Code.NOT_FOUND, "no table nothing"),
        ("marks", Code.INVALID_ARGUMENT, "marks is a key space"),
        (ScanCommand("t", columns=("who",)), Code.SCHEMA_MISMATCH, "no column who; it has id, name"),
        (ScanCommand("t", columns=("id", "id")), Code.INVALID_ARGUMENT, "named twice"),
        (ScanCommand("t", where="id LIKE 3"), Code.INVALID_ARGUMENT, "there is no LIKE"),
        (b"\x01{}", Code.INVALID_ARGUMENT, "name either a table or a tablet"),
        (b"\x01" + b" " * COMMAND_BYTES_MAX, Code.TOO_LARGE, "name fewer values"),
        (b'\x01{"table":"t","part_bytes":-1}', Code.INVALID_ARGUMENT, "command: "),
        (b"hello", Code.UNSUPPORTED_VERSION, "version 104 is unknown"),
    ]
    for command, code, said in cases:
        error = await asyncio.to_thread(refusal, address, command)
        assert error is not None and error.code is code and said in str(error), (command, error)


async def test_actions_list_create_and_drop_tables(cluster: LocalCluster) -> None:
    address = cluster.running["master"].description.address

    def act(name: str, body: dict[str, Any]) -> Any:
        with fl.connect(f"grpc+tcp://{address}") as client:
            (result,) = client.do_action(fl.Action(name, json.dumps(body).encode()))
            return json.loads(result.body.to_pybytes())

    assert await asyncio.to_thread(act, "list-tables", {}) == {"tables": ["t"]}
    with pytest.raises(REFUSED, match="there is no action"):
        await asyncio.to_thread(act, "burn-table", {})
    with pytest.raises(REFUSED, match="field table is missing"):
        await asyncio.to_thread(act, "drop-table", {})
    with pytest.raises(REFUSED, match="no table u"):
        await asyncio.to_thread(act, "drop-table", {"table": "u"})
    columns = [["a", "int64", False], ["b", "string", True], ["c", "int8", False, "7"]]
    columns += [["d", "timestamp", True, '"20240501T1200+02"'], ["e", "date", True, '"2024-W01-1"']]
    new = {"table": "u", "columns": columns, "key": ["a"], "history_s": 3_600}
    hashed = {"hash": [{"columns": ["a"], "buckets": 2}], "replication_factor": 1, "comment": "who waits"}
    named = {"table_id": new_id()}
    for _ in range(2):
        assert await asyncio.to_thread(act, "create-table", {**new, **hashed, **named}) == named
    async with cluster.client() as client:
        info = await client.describe("u")
        assert (info.tablets, info.replication_factor, info.comment) == (2, 1, "who waits")
        made = Schema.make([tuple(column) for column in columns], ["a"])
        assert info.schema == replace(made, history_ms=3_600_000)
        about = json.loads(
            (
                await asyncio.to_thread(planned, cluster.running["master"].description.address, "u")
            ).app_metadata
        )
        told = [default for *_, default in about["columns"]]
        assert told == [None, None, "7", '"2024-05-01T10:00:00+00:00"', '"2024-01-01"'], "in one form"
        assert about["history_s"] == 3_600
        await client.delete_table("u")
    for wrong, said in (
        ({**new, "table": "t"}, "already"),
        ({**new, "key": ["f"]}, "which are not columns"),
        ({**new, "history_s": 5}, "expected 1 minute to 10 years"),
        ({**new, "history_s": 1.5}, "history_s: 1.5; expected a whole number"),
        ({**new, "columns": [["a", "int8", False, "x"]]}, "default"),
        ({**new, "columns": [["a", "int8", False, 7]]}, r"columns\[0\]: .*expected .NAME, TYPE, NULLABLE"),
        ({**new, "columns": [["a", "int65", False]]}, "int65"),
        ({**new, "hash": [{"columns": ["b"], "buckets": 2}]}, "b"),
        ({**new, "hash": [{"columns": ["a"], "buckets": 1}]}, "expected 2 to"),
        ({"table": "u"}, "field key is missing; field columns is missing"),
        ({**new, "replication": 1}, "unknown field .replication.; did you mean 'replication_factor'"),
        ({**new, "replication_factor": 1.5}, "replication_factor: 1.5; expected a whole number, 1 to 7"),
        ({**new, "table": ["u"]}, r"table: .*; expected a text"),
        ({**new, "key": "a"}, "key: .a.; expected a list"),
        ({**new, "columns": [["a", "int64", "false"]]}, r"columns\[0\]: .*expected .NAME, TYPE, NULLABLE"),
        ({**new, "columns": ["abc"]}, r"columns\[0\]: .abc.; expected .NAME"),
        (
            {**new, "hash": [{"columns": ["a"], "bucket": 2}]},
            "unknown field .bucket.; did you mean 'buckets'",
        ),
        (
            {**new, "hash": [{"columns": ["a"], "buckets": True}]},
            r"hash\[0\].buckets: true; expected a whole",
        ),
    ):
        with pytest.raises(REFUSED, match=said):
            await asyncio.to_thread(act, "create-table", wrong)
    async with cluster.client() as client:
        named = {"table_id": (await client.describe("t")).table_id}
        again = {"table": "t", **named, "drop_id": new_id()}
        for _ in range(2):
            assert await asyncio.to_thread(act, "drop-table", again) == named
        await client.recall_table("t")
        with pytest.raises(REFUSED, match="was dropped, and somebody recalled it since"):
            await asyncio.to_thread(act, "drop-table", again)
        with pytest.raises(REFUSED, match=r"drop_id: .x.; expected 32 hex digits"):
            await asyncio.to_thread(act, "drop-table", {**again, "drop_id": "x"})
    await asyncio.to_thread(act, "drop-table", {"table": "t"})
    assert await asyncio.to_thread(act, "list-tables", {}) == {"tables": []}
    async with cluster.client() as client:
        assert [each.name for each in await client.dropped_tables()] == ["t"]


async def test_an_action_alters_a_table_once_and_waits_for_its_tablets(cluster: LocalCluster) -> None:
    address = cluster.running["master"].description.address

    def act(body: dict[str, Any]) -> Any:
        with fl.connect(f"grpc+tcp://{address}") as client:
            (result,) = client.do_action(fl.Action("alter-table", json.dumps(body).encode()))
            return json.loads(result.body.to_pybytes())

    change = {
        "table": "t",
        "add": [["gate", "string", True], ["stops", "int8", False, "2"]],
        "rename": [["name", "title"]],
        "defaults": [["title", '"none"']],
        "history_s": 7_200,
        "comment": "who waits",
    }
    async with cluster.client() as client:
        before = await client.describe("t")
        again = {"alter_id": new_id(), "table_id": before.table_id}
        for _ in range(2):  # its answer may be lost
            assert await asyncio.to_thread(act, {**change, **again}) == {"table_id": before.table_id}
            info = await client.describe("t")
            assert info.schema is not None and info.state == "RUNNING"
            assert [(c.name, c.default) for c in info.schema.columns] == [
                ("id", None),
                ("title", '"none"'),
                ("gate", None),
                ("stops", "2"),
            ]
            assert info.history_s == 7_200
            assert (info.comment, info.owner) == ("who waits", "")
        again["alter_id"] = new_id()
        for _ in range(2):
            renamed = {"table": "t", "rename_to": "u", "drop": ["gate"], "comment": "", "history_s": 0}
            renamed["defaults"] = [["title", None]]
            await asyncio.to_thread(act, {**renamed, **again})
        info = await client.describe("u")
        assert info.table_id == before.table_id and info.comment == "" and info.history_s == 900
        assert info.schema is not None and [c.name for c in info.schema.columns] == ["id", "title", "stops"]
    for wrong, said in (
        ({"table": "t", "drop": ["stops"]}, "no table t"),
        ({"table": "u"}, "it changes nothing"),
        ({"drop": ["stops"]}, "field table is missing"),
        ({"table": "u", "defaults": [["stops", 5]]}, r"defaults\[0\]: .*expected .NAME, DEFAULT"),
        ({"table": "u", "defaults": [["stops", "300"]]}, "300"),
        ({"table": "u", "history_s": 5}, "expected 1 minute to 10 years"),
        ({"table": "u", "drop": ["id", "who"]}, "who"),
        ({"table": "u", "drop": "stops"}, "drop: .stops.; expected a list"),
        ({"table": "u", "rename": ["title", "name"]}, r"rename\[0\]: .title.; expected .NAME, NEW NAME"),
        ({"table": "u", "add": [["more", "int64"]]}, r"add\[0\]: .*expected .NAME, TYPE, NULLABLE"),
        ({"table": "u", "add": [["more", "int65", True]]}, "int65"),
        ({"table": "u", "add": [["title", "int64", True]]}, "title"),
        ({"table": "u", "alter_id": "7", "drop": ["stops"]}, "alter_id: .7.; expected 32 hex digits"),
        ({"table": "u", "drops": ["stops"]}, "unknown field .drops.; did you mean 'drop'"),
    ):
        with pytest.raises(REFUSED, match=said):
            await asyncio.to_thread(act, wrong)


async def test_callers_of_ours_are_still_asked_who_they_are(cluster: LocalCluster) -> None:
    """Only callers without our metadata are taken for programs of others."""
    pool = ChannelPool(Identity(cluster.cluster_id, fork_id="another-copy"))

    class Stub:
        def __init__(self, channel: Any) -> None:
            self.plan = channel.unary_unary("/arrow.flight.protocol.FlightService/GetFlightInfo")

    try:
        with pytest.raises(SteleError) as refused:
            address = cluster.running["master"].description.address
            await pool.unary(
                address, Stub, "plan", fl.FlightDescriptor.for_path("t").serialize(), timeout_s=5.0
            )
        assert refused.value.code is Code.WRONG_CLUSTER
    finally:
        await pool.close()
