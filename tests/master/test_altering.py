"""Tables that are altered: one batch, orders until all replicas follow, and a leader that dies between any two steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stele.master.altering import leader_to_alter
from stele.master.background import Background
from stele.master.orders import Orders
from stele.master.port import put
from stele.master.records import TableRecord
from stele.master.row_encoding import decode, encode
from stele.model.errors import Code
from stele.model.ids import new_id
from stele.model.schema import Schema
from stele.model.steps import AddColumn, DropColumn, RenameColumn, Step
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import schema_from_pb, steps_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto import tserver_pb2
from tests.master.harness import (
    MASTERS,
    SCHEMA,
    World,
    create_request,
    hex_of,
    made,
    ordered,
    ready,
    ready_again,
    refused,
    until,
    world,
)

ADDED = AddColumn("stars", "int8", False, "0")


def alter_request(
    *steps: Step, name: str = "t", new_name: str = "", alter_id: str = ""
) -> pb.AlterTableRequest:
    """A request as clients send it."""
    return pb.AlterTableRequest(
        name=name, alter_id=id_to_pb(alter_id or new_id()), steps=steps_to_pb(steps), new_name=new_name
    )


async def info(w: World, name: str = "t") -> pb.TableInfoPB:
    """A table as clients see it."""
    return (await w.leader.GetTable(pb.GetTableRequest(name=name), None)).table


def columns(table: pb.TableInfoPB) -> list[str]:
    return [column.name for column in table.schema.columns]


def follow(w: World, table_id: str, tablets: int | None = None, *, leaders_only: bool = False) -> None:
    """What AlterTablet orders, and then the tablets' logs, would have done to so many tablets."""
    rows = w.catalog.current_tablets(table_id)
    version = w.catalog.altering[table_id]
    for row in rows[:tablets]:
        for node in w.nodes.values():
            for (tablet_id, _), leads in node.replicas.items():
                if tablet_id == row.tablet_id and (leads or not leaders_only):
                    node.versions[tablet_id] = version


async def test_a_table_has_its_old_schema_until_all_replicas_have_the_new_one(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        answer = await w.leader.AlterTable(alter_request(ADDED, RenameColumn("name", "title")), None)
        assert (hex_of(answer.table_id), answer.schema_version) == (table_id, 2)
        found = await info(w)
        assert (found.state, columns(found), found.schema.version) == ("ALTERING", ["id", "name"], 1)
        assert [c.name for c in found.newest_schema.columns] == ["id", "title", "stars"]
        follow(w, table_id, 3)
        for _ in range(3):
            await w.beat()
        await asyncio.sleep(0.1)
        assert (await info(w)).state == "ALTERING"
        follow(w, table_id, leaders_only=True)
        for _ in range(3):
            await w.beat()
        await asyncio.sleep(0.1)
        assert (await info(w)).state == "ALTERING"
        follow(w, table_id)
        await w.beat_until(lambda: not w.catalog.altering)
        found = await info(w)
        assert (found.state, columns(found)) == ("RUNNING", ["id", "title", "stars"])
        assert not found.HasField("newest_schema") and w.catalog.tables[table_id].fully_applied_schema == ""


async def test_a_silent_node_holds_up_no_change(tmp_path: Path) -> None:
    """The change is in the log of each tablet; a node that comes back gets it there."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        followers = [n for n in w.nodes.values() if not any(n.replicas.values())]
        silent = followers[0].node_id if followers else next(iter(w.nodes))
        await w.leader.AlterTable(alter_request(ADDED), None)
        follow(w, table_id)
        w.nodes[silent].versions.clear()
        if any(w.nodes[silent].replicas.values()):
            pytest.skip("each node leads a tablet")
        w.shift_ms += w.lead.options.alive_ms + 1
        await w.beat_until(lambda: not w.catalog.altering, silent=(silent,))


async def test_orders_go_to_leaders_that_lack_the_schema_and_again_until_they_have_it(tmp_path: Path) -> None:
    class Nodes(ChannelPool):
        async def unary(self, address: str, stub: Any, method: str, request: Any, **how: Any) -> Any:
            assert method == "AlterTablet"
            sent.append((hex_of(request.tablet_id), how["to_node"], request))
            return tserver_pb2.AlterTabletResponse()

    sent: list[tuple[str, str, tserver_pb2.AlterTabletRequest]] = []
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        leaders = {t: n.node_id for n in w.nodes.values() for (t, _), leads in n.replicas.items() if leads}
        await w.leader.AlterTable(alter_request(ADDED), None)
        orders = Orders(w.lead, Nodes(Identity()))
        rows = w.catalog.current_tablets(table_id)
        for _ in range(2):
            for row in rows:
                orders.consider(row)
            await asyncio.sleep(0.02)
        assert {(t, n) for t, n, _ in sent} == {(t.tablet_id, leaders[t.tablet_id]) for t in rows}
        assert len(sent) == len(rows)
        request = sent[0][2]
        assert schema_from_pb(request.schema).by_name["stars"].read_default == "0"
        assert request.catalog_opid.term == w.lead.term
        await asyncio.sleep(w.lead.options.order_retry_ms / 1000)
        orders.consider(rows[0])
        await asyncio.sleep(0.02)
        assert len(sent) == len(rows) + 1
        follow(w, table_id, leaders_only=True)
        await w.beat()
        assert all(leader_to_alter(w.lead, row) is None for row in rows)
        await orders.close()


@pytest.mark.parametrize("fate", ["lost", "unknown"])
async def test_a_leader_dies_with_the_first_batch(tmp_path: Path, fate: str) -> None:
    """The caller sends the same request again, to the next leader: the column is added once."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        request = alter_request(ADDED)
        w.group.lose_next = fate
        assert (await refused(w.leader.AlterTable(request, None))).code is Code.UNKNOWN_OUTCOME
        await w.elect(MASTERS[1])
        await ready_again(w)
        assert (table_id in w.catalog.altering) == (fate == "unknown")
        assert (await w.leader.AlterTable(request, None)).schema_version == 2
        follow(w, table_id)
        await w.beat_until(lambda: not w.catalog.altering)
        assert (await w.leader.AlterTable(request, None)).schema_version == 2
        assert columns(await info(w)) == ["id", "name", "stars"]


@pytest.mark.parametrize("followed", [0, 2, 4])
async def test_a_leader_dies_after_some_tablets_have_followed(tmp_path: Path, followed: int) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.leader.AlterTable(alter_request(ADDED), None)
        follow(w, table_id, followed)
        await w.elect(MASTERS[2])
        await ready_again(w)
        rows = w.catalog.current_tablets(table_id)
        if followed < len(rows):
            due = {r.tablet_id for r in rows if leader_to_alter(w.lead, r) is not None}
            assert due == {r.tablet_id for r in rows[followed:]}
            follow(w, table_id)
        await w.beat_until(lambda: not w.catalog.altering)
        assert (await info(w)).state == "RUNNING"


@pytest.mark.parametrize("fate", ["lost", "unknown"])
async def test_a_leader_dies_with_the_last_batch(tmp_path: Path, fate: str) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.leader.AlterTable(alter_request(ADDED), None)
        w.group.lose_next = fate
        follow(w, table_id)
        await w.beat()
        await until(lambda: not w.group.leader)
        await w.elect(MASTERS[1])
        await ready_again(w)
        await w.beat_until(lambda: not w.catalog.altering)
        found = await info(w)
        assert (found.state, found.schema.version) == ("RUNNING", 2)


async def test_one_change_after_another(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.leader.AlterTable(alter_request(ADDED), None)
        error = await refused(w.leader.AlterTable(alter_request(DropColumn("name")), None))
        assert error.code is Code.NOT_READY and "an earlier change has not reached all tablets yet" in str(
            error
        )
        follow(w, table_id)
        await w.beat_until(lambda: not w.catalog.altering)
        await w.leader.AlterTable(alter_request(DropColumn("name")), None)
        follow(w, table_id)
        await w.beat_until(lambda: not w.catalog.altering)
        assert columns(await info(w)) == ["id", "stars"]


async def test_a_table_that_is_being_created_is_not_altered(tmp_path: Path) -> None:
    """Its last replicas would begin with the new schema, and their logs with entries of the old one."""
    async with world(tmp_path) as w:
        await ready(w)
        await ordered(w)
        error = await refused(w.leader.AlterTable(alter_request(ADDED), None))
        assert error.code is Code.NOT_READY and "being created" in str(error)
        await w.leader.AlterTable(alter_request(new_name="other"), None)
        assert (await info(w, "other")).state == "PREPARING"


async def test_renaming_a_table(tmp_path: Path) -> None:
    """One batch; its tablets are not asked. The old name is free at once."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await made(w, "u", buckets=0)
        error = await refused(w.leader.AlterTable(alter_request(new_name="u"), None))
        assert error.code is Code.ALREADY_PRESENT
        request = alter_request(new_name="v")
        for _ in range(2):  # repeated, under a name that is gone
            request.table_id = id_to_pb(table_id)
            await w.leader.AlterTable(request, None)
        assert (await info(w, "v")).state == "RUNNING" and not w.catalog.altering
        assert (await refused(info(w, "t"))).code is Code.NOT_FOUND
        await w.leader.CreateTable(create_request("t"), None)


async def test_a_request_that_is_repeated_after_another_one_changes_nothing(tmp_path: Path) -> None:
    """Its answer was lost, and somebody else took back meanwhile what it did."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        first = alter_request(new_name="v")
        first.table_id = id_to_pb(table_id)
        await w.leader.AlterTable(first, None)
        for name in ("w", "x", "y"):
            back = alter_request(new_name=name)
            back.table_id = id_to_pb(table_id)
            await w.leader.AlterTable(back, None)
            await w.leader.AlterTable(first, None)
            assert (await info(w, name)).state == "RUNNING"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (alter_request(), "it changes nothing"),
        (alter_request(DropColumn("id"), new_name=" "), "column id is in the primary key"),
        (alter_request(DropColumn("id"), new_name=" "), "new name of 1 characters"),
        (alter_request(DropColumn("naem")), "did you mean 'name'"),
        (pb.AlterTableRequest(name="t", steps=[pb.AlterStepPB()]), "a kind that this program does not know"),
        (alter_request(ADDED, name="k"), "a key space has no columns"),
    ],
)
async def test_what_is_refused(tmp_path: Path, request_: pb.AlterTableRequest, why: str) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w, buckets=0)
        await w.leader.CreateTable(pb.CreateTableRequest(name="k", kind="keyspace"), None)
        before = dict(w.catalog.tables)
        error = await refused(w.leader.AlterTable(request_, None))
        assert error.code is Code.INVALID_ARGUMENT and why in str(error)
        assert w.catalog.tables == before


async def test_a_full_catalog_takes_no_more_columns(tmp_path: Path) -> None:
    async with world(tmp_path, bytes_max=24_000) as w:
        await ready(w)
        await made(w, buckets=0)
        wide = [AddColumn(f"c{n:03}" + "x" * 100, "string", True) for n in range(100)]
        error = await refused(w.leader.AlterTable(alter_request(*wide), None))
        assert error.code is Code.TOO_LARGE and "more than the catalog has room for" in str(error)
        await w.leader.AlterTable(alter_request(DropColumn("name")), None)


async def test_a_deleted_table_is_altered_no_more(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.leader.AlterTable(alter_request(ADDED), None)
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        assert not w.catalog.altering
        request = alter_request(DropColumn("name"))
        request.table_id = id_to_pb(table_id)
        assert (await refused(w.leader.AlterTable(request, None))).code is Code.NOT_FOUND
        await Background(w.lead, Orders(w.lead, w.pool)).look()


def test_rows_of_the_release_before() -> None:
    row = TableRecord("a" * 32, "t", "RUNNING", SCHEMA.to_json(), "", 3, "table", 1)
    values = encode(row)
    short = values.replace(b',"","",0,0,"","","",""]', b"]")
    assert short != values and decode(TableRecord, short) == row
    assert put(decode(TableRecord, values)).value == values
    assert Schema.from_json(row.schema) == SCHEMA
