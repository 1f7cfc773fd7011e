"""Three masters on the in-memory port: tables are made, listed, located and removed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from stele.model.errors import Code
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import schema_from_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import MASTERS, OPTIONS, create_request, hex_of, made, ready, refused, world


async def test_a_table_is_made_listed_located_and_removed(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        located = await w.leader.GetTableLocations(pb.GetTableLocationsRequest(name="t"), None)
        assert [list(t.partition.hash_buckets) for t in located.tablets] == [[0], [1], [2], [3]]
        assert all(len({r.machine for r in t.replicas}) == 3 for t in located.tablets)
        assert all(sum(r.role == common_pb2.LEADER for r in t.replicas) == 1 for t in located.tablets)
        assert located.table.tablets_running == 4 and located.table.state == "RUNNING"
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        await w.leader.DeleteTable(pb.DeleteTableRequest(table_id=id_to_pb(table_id)), None)
        assert not (await w.leader.ListTables(pb.ListTablesRequest(), None)).tables
        kept = await w.leader.ListTables(pb.ListTablesRequest(include_removed=True), None)
        assert [t.state for t in kept.tables] == ["REMOVED"]
        assert {t.state for t in w.catalog.tablets_of_table(table_id)} == {"DELETED"}
        await made(w, "t")  # the name is free again


async def test_create_is_idempotent_by_table_id(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        answers = await asyncio.gather(*(w.leader.CreateTable(request, None) for _ in range(5)))
        assert {hex_of(a.table_id) for a in answers} == {"d" * 32}
        assert len(w.catalog.tablets_of_table("d" * 32)) == 1
        other = await refused(w.leader.CreateTable(create_request("u", table_id="d" * 32), None))
        assert other.code is Code.ALREADY_PRESENT
        again = await refused(w.leader.CreateTable(create_request("t"), None))
        assert again.code is Code.ALREADY_PRESENT and again.args[0] == "table 't' exists already"
        await w.leader.CreateTable(pb.CreateTableRequest(name="k", kind="keyspace"), None)
        again = await refused(w.leader.CreateTable(create_request("k"), None))
        assert again.code is Code.ALREADY_PRESENT and again.args[0] == "key space 'k' exists already"


async def test_a_create_that_is_tried_again_after_the_table_was_deleted_is_not_told_that_it_was_never_done(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        await w.leader.CreateTable(request, None)
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        again = await refused(w.leader.CreateTable(request, None))
        assert again.code is Code.TABLET_DELETED
        other = await refused(w.leader.CreateTable(create_request("u", table_id="d" * 32), None))
        assert other.code is Code.ALREADY_PRESENT


async def test_bad_tables_are_refused_with_every_fault(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 3)
        for rf, words in ((2, "expected 1, 3, 5 or 7"), (9, "expected 1, 3, 5 or 7"), (5, "machines")):
            error = await refused(w.leader.CreateTable(create_request("t", rf=rf), None))
            assert error.code is Code.INVALID_ARGUMENT and words in str(error)
        bad = create_request("", buckets=1)
        bad.kind = "heap"
        error = await refused(w.leader.CreateTable(bad, None))
        assert "name" in str(error) and "heap" in str(error)
        one_bucket = await refused(w.leader.CreateTable(create_request("t", buckets=1), None))
        assert "buckets" in str(one_bucket)
        many = await refused(w.leader.CreateTable(create_request("t", buckets=5_000), None))
        assert many.code is Code.INVALID_ARGUMENT and "at most 2000 each" in str(many)
        large = create_request("t")
        large.schema.columns[0].default_value = b"x" * (9 << 20)
        assert (await refused(w.leader.CreateTable(large, None))).code is Code.TOO_LARGE
        assert not w.catalog.tables


async def test_a_new_table_has_no_long_defaults_but_one_that_has_them_is_still_known(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        column = next(c for c in request.schema.columns if c.type == "string")
        column.default_value = b'"' + b"x" * 4_094 + b'"'
        await w.leader.CreateTable(request, None)
        longer = create_request("u")
        column = next(c for c in longer.schema.columns if c.type == "string")
        column.default_value = b'"' + b"x" * 4_095 + b'"'
        error = await refused(w.leader.CreateTable(longer, None))
        assert error.code is Code.INVALID_ARGUMENT and "a default of 4097 bytes; at most 4096" in str(error)
        older = w.catalog.tables["d" * 32]
        w.catalog.tables["d" * 32] = replace(older, schema=older.schema.replace("x" * 4_094, "x" * 9_000))
        next(c for c in request.schema.columns if c.default_value).default_value = b'"' + b"x" * 9_000 + b'"'
        again = await w.leader.CreateTable(request, None)
        assert hex_of(again.table_id) == "d" * 32


async def test_a_new_table_has_no_default_that_is_rounded_but_one_that_has_it_is_still_known(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        for name, kind, default in (
            ("p", "decimal(38,20)", b'"0.1234567890123456789"'),
            ("m", "timestamp", b'"2024-01-01T00:00:00.123456"'),
            ("x", "double", b"1e300"),
        ):
            column_id = request.schema.next_column_id
            request.schema.columns.add(id=column_id, name=name, type=kind, default_value=default)
            request.schema.next_column_id += 1
        await w.leader.CreateTable(request, None)
        bad = create_request("u")
        bad.schema.CopyFrom(request.schema)
        for column, default in zip(
            bad.schema.columns[-3:],
            (b"0.1234567890123456789", b'"2024-01-01T00:00:00.1234567"', b"1e400"),
            strict=True,
        ):
            column.default_value = default
        error = await refused(w.leader.CreateTable(bad, None))
        assert error.code is Code.INVALID_ARGUMENT
        for words in (
            "p: the default 0.1234567890123456789 is not a decimal(38,20) (",
            'm: the default "2024-01-01T00:00:00.1234567" is not a timestamp (it is finer',
            "x: the default 1e400 is not a double (it is too large)",
        ):
            assert words in str(error), words
        older = w.catalog.tables["d" * 32]
        stored = schema_from_pb(bad.schema).to_json()
        w.catalog.tables["d" * 32] = replace(older, schema=stored)
        request.schema.CopyFrom(bad.schema)
        again = await w.leader.CreateTable(request, None)
        assert hex_of(again.table_id) == "d" * 32


async def test_a_table_with_too_many_tablets_for_one_batch_is_refused_whole(tmp_path: Path) -> None:
    async with world(tmp_path, replace(OPTIONS, create_bytes_max=10_000)) as w:
        await ready(w)
        error = await refused(w.leader.CreateTable(create_request("t", buckets=100), None))
        assert error.code is Code.TOO_LARGE and "too many tablets" in str(error)
        assert not w.catalog.tables and set(w.catalog.tablets) <= {CATALOG_TABLET_ID}
        await made(w, "t", buckets=10)


async def test_tables_are_made_in_half_of_the_catalog_and_deleted_in_all_of_it(tmp_path: Path) -> None:
    """What becomes of tables and nodes has to be written however many tables there are."""
    async with world(tmp_path) as w:
        await ready(w)
        await made(w, "first")
        space = w.group.members[w.group.leader].key_space
        assert space is not None
        space.bytes_max = 2 * space.held_bytes
        error = await refused(w.leader.CreateTable(create_request("t"), None))
        assert error.code is Code.TOO_LARGE and "the catalog would grow to" in str(error)
        assert [t.name for t in w.catalog.tables.values()] == ["first"]
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="first"), None)
        assert {t.state for t in w.catalog.tables.values()} == {"REMOVED"}


async def test_the_view_shows_the_catalog_itself(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w)
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        catalog = next(t for t in view.tablets if hex_of(t.tablet_id) == CATALOG_TABLET_ID)
        assert catalog.replication_factor == 3 and hex_of(catalog.leader_node) == MASTERS[0]
        assert [hex_of(p.node_id) for p in catalog.committed_config.peers] == MASTERS
        assert {n.registration.role for n in view.nodes} == {"master", "node"}
        assert len(view.tablets) == 5 and view.settled
