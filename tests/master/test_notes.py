"""Owner, comment and history retention of tables in the catalog."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stele.model.errors import Code
from stele.model.ids import new_id
from stele.model.steps import SetHistory
from stele.rpc.convert_schema import schema_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import SCHEMA, create_request, made, ready, refused, world
from tests.master.test_altering import alter_request, follow, info


def asked(name: str = "t", *, history_ms: int = 0, table_id: str = "", **notes: str) -> pb.CreateTableRequest:
    """A create request with notes and a retention."""
    request = create_request(name, table_id=table_id)
    request.schema.CopyFrom(schema_to_pb(replace(SCHEMA, history_ms=history_ms)))
    for field, note in notes.items():
        setattr(request, field, note)
    return request


def noted(**notes: str) -> pb.AlterTableRequest:
    """A request that changes notes alone."""
    request = alter_request()
    for field, note in notes.items():
        setattr(request, field, note)
    return request


async def test_they_are_set_with_the_table_and_changed_without_a_new_schema(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await w.leader.CreateTable(
            asked(owner="ops", comment="flights\nsince 2013", history_ms=3_600_000), None
        )
        found = await info(w)
        assert (found.owner, found.comment, found.schema.history_ms) == (
            "ops",
            "flights\nsince 2013",
            3_600_000,
        )
        await w.leader.AlterTable(noted(owner="data team"), None)
        found = await info(w)
        assert (found.owner, found.comment, found.state) == ("data team", "flights\nsince 2013", "PREPARING")
        assert found.schema.version == 1
        await w.leader.AlterTable(noted(owner="", comment=""), None)
        found = await info(w)
        assert (found.owner, found.comment) == ("", "")


async def test_another_retention_is_altered_when_all_tablets_have_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        answer = await w.leader.AlterTable(alter_request(SetHistory(86_400_000)), None)
        assert answer.schema_version == 2
        found = await info(w)
        assert (found.state, found.schema.history_ms) == ("ALTERING", 0)
        assert found.newest_schema.history_ms == 86_400_000
        follow(w, table_id)
        await w.beat_until(lambda: not w.catalog.altering)
        found = await info(w)
        assert (found.state, found.schema.history_ms, found.schema.version) == ("RUNNING", 86_400_000, 2)


async def test_a_repeated_create_request_finds_its_table_though_the_notes_were_changed(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = asked(table_id=new_id(), owner="a")
        first = await w.leader.CreateTable(request, None)
        await w.leader.AlterTable(noted(owner="b", comment="c"), None)
        assert (await w.leader.CreateTable(request, None)).table_id == first.table_id
        assert (await info(w)).owner == "b"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (asked(owner="x" * 129), "owner of 129 characters; expected at most 128"),
        (asked(owner="a\nb"), "no control characters"),
        (asked(comment="x" * 1_001), "comment of 1001 characters; expected at most 1000"),
        (asked(comment="a\x1b[2J"), "no control characters but line ends"),
        (noted(comment="x" * 1_001), "comment of 1001 characters"),
        (alter_request(), "it changes nothing; name a column"),
        (alter_request(SetHistory(59_999)), "history retention of 59.999 s; expected 1 minute to 10 years"),
        (alter_request(SetHistory(1 << 62)), "expected 1 minute to 10 years"),
    ],
)
async def test_bad_values_are_refused_with_a_clear_text(
    tmp_path: Path, request_: pb.CreateTableRequest | pb.AlterTableRequest, why: str
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w)
        if isinstance(request_, pb.CreateTableRequest):
            error = await refused(w.leader.CreateTable(request_, None))
        else:
            error = await refused(w.leader.AlterTable(request_, None))
        assert error.code is Code.INVALID_ARGUMENT and why in str(error)
        found = await info(w)
        assert (found.owner, found.comment, found.schema.history_ms, found.state) == ("", "", 0, "RUNNING")


async def test_a_bad_retention_of_a_new_table_is_a_fault_of_its_schema(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t")
        request.schema.history_ms = 1_000
        error = await refused(w.leader.CreateTable(request, None))
        assert error.code is Code.INVALID_ARGUMENT and "history retention of 1 s" in str(error)


async def test_a_key_space_has_notes_and_no_retention(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await w.leader.CreateTable(pb.CreateTableRequest(name="t", kind="keyspace", owner="ops"), None)
        assert (await info(w)).owner == "ops"
        error = await refused(w.leader.AlterTable(alter_request(SetHistory(3_600_000)), None))
        assert "a key space has no columns and keeps no old versions" in str(error)
