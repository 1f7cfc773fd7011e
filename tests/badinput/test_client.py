"""What a user of the Python client gets wrong: understood where it can be, else told what was expected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncKeySpace, AsyncTable, Client
from stele.model.errors import Rejected
from stele.model.schema import Schema
from tests.client.small import small_cluster

ONE = Schema.make([("id", "int64"), ("n", "int32", True)], ["id"])
TWO = Schema.make([("a", "int64"), ("b", "string"), ("n", "int32", True)], ["a", "b"])


async def test_predicates_and_keys_as_people_write_them(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        one = await client.create_table("one", ONE)
        two = await client.create_table("two", TWO)
        for i in range(4):
            await one.put({"id": i, "n": i})
            await two.put({"a": i, "b": "x", "n": i})
        for predicates in (
            "id > 1",
            ("id", ">", 1),
            [("id", ">", 1)],
            ["id > 1", ("n", "is_not_null")],
            ("id > 1", "n >= 2 AND id < 9"),
        ):
            assert await one.scan(predicates=predicates).count() == 2, predicates
        assert (await one.scan("n", "id = 3").to_table()).to_pylist() == [{"n": 3}]
        assert await one.scan(predicates=None).count() == 4
        assert await one.scan(lower=2, limit=np.int64(9)).count() == 2
        assert await two.scan(lower=(2, "x"), upper={"a": np.int64(3)}).count() == 1
        for key in (3, (3,), [3], {"id": 3}):
            assert await one.get(key) == {"id": 3, "n": 3}
        for pair in ((3, "x"), {"b": "x", "a": 3}):
            assert await two.get(pair, "n") == {"n": 3}

        async def refused(call: Any) -> str:
            with pytest.raises(Rejected) as caught:
                await call
            return str(caught.value)

        assert "key 3: expected values of a, b, or a mapping" in await refused(two.get(3))
        assert "'three' is not an int64" in await refused(one.get("three"))
        for wrong, words in (
            ("id > ", "ends too early"),
            ("id > 1 OR n > 1", "there is no OR"),
            ([("id",)], "predicate ('id',): expected (column, operator, value), or text like 'id > 1'"),
            (("id", "=", 1, 2), "predicate ('id', '=', 1, 2): expected (column, operator, value), or text"),
            (("id", "="), "predicate ('id', '='): '=' needs a value; expected (column, operator, value)"),
            (
                ("id", 5),
                "operator 5 is unknown; expected one of =, !=, <, <=, >, >=, in, is_null, is_not_null",
            ),
            (
                ("id", "~", 1),
                "operator '~' is unknown; expected one of =, !=, <, <=, >, >=, in, is_null, is_not_null",
            ),
            ([("id", "==", 1)], "operator '==' is unknown; expected one of =,"),
            (
                ("colour", "=", 1),
                "predicate ('colour', '=', 1): the table has no column 'colour'; expected one of id, n",
            ),
            ([(1, "=", 1)], "no column 1; expected one of id, n"),
            (("n", "is_null", True), "is_null takes no value, got True"),
            ([("n", "in", "12")], "\"in\" takes a list of values, got '12'; write it in []"),
            ({"id": 1}, "predicate {'id': 1}: expected (column, operator, value), or text"),
            (5, "predicate 5: expected (column, operator, value), or text"),
        ):
            with pytest.raises(Rejected, match="INVALID_ARGUMENT") as caught:
                one.scan(predicates=wrong)  # type: ignore[arg-type]
            assert words in str(caught.value)


WRONG: list[tuple[Callable[[AsyncClient, AsyncTable, AsyncKeySpace], Any], str]] = [
    (
        lambda c, t, k: t.put([1, 2]),
        "row [1, 2]: expected a mapping of column names to values, like {'id': 1}, got list",
    ),
    (lambda c, t, k: t.update(5), "row 5: expected a mapping"),
    (lambda c, t, k: t.delete(5), "row 5: expected a mapping"),
    (
        lambda c, t, k: t.apply("replace", {"id": 1}),
        "op 'replace': expected one of insert, insert_ignore, upsert",
    ),
    (lambda c, t, k: t.new_session().upsert("id"), "row 'id': expected a mapping"),
    (
        lambda c, t, k: t.new_session(flush_interval_s=-1),
        "flush_interval_s -1: expected a number of seconds, 0 or above",
    ),
    (lambda c, t, k: t.new_session(buffer_bytes=0), "buffer_bytes 0: expected a whole number, 1 or more"),
    (lambda c, t, k: t.write_arrow([{"id": 1}]), "dict is not Arrow data; pass pyarrow.Table.from_pylist"),
    (lambda c, t, k: t.write_arrow("rows"), "str is not Arrow data; expected a pyarrow Table, a DataFrame"),
    (lambda c, t, k: t.write_arrow(pa.table({"id": [1]}), "put"), "op 'put': expected one of insert"),
    (
        lambda c, t, k: t.write_arrow(pa.table({"id": [1]}), timeout_s="10"),
        "timeout_s '10': expected a number of seconds",
    ),
    (lambda c, t, k: t.get(1, 5), "columns 5: expected a list of names"),
    (lambda c, t, k: t.get(None), "key None: column id is null; expected an int64"),
    (lambda c, t, k: t.get(1.5), "table one: key 1.5: column id: 1.5 is not an int64"),
    (lambda c, t, k: t.scan([1]), "columns [1]: expected a list of names"),
    (lambda c, t, k: t.scan([["n"]]), "expected a list of names"),
    (lambda c, t, k: t.scan([]), "columns []: expected columns of table one: id, n"),
    (lambda c, t, k: t.scan("carrier"), "columns 'carrier': expected columns of table one: id, n"),
    (lambda c, t, k: t.scan(limit="ten"), "limit 'ten': expected a whole number, 0 or more"),
    (lambda c, t, k: t.scan(limit=-1), "limit -1: expected a whole number, 0 or more"),
    (lambda c, t, k: t.scan(limit=2.5), "limit 2.5: expected a whole number"),
    (
        lambda c, t, k: t.scan(snapshot="now"),
        "snapshot 'now': expected a hybrid time (a whole number, as now() of a client gives) or a datetime",
    ),
    (lambda c, t, k: t.scan(timeout_s=0), "timeout_s 0: expected a number of seconds above 0"),
    (lambda c, t, k: t.scan(lower="UA"), "lower: column id: 'UA' is not an int64"),
    (lambda c, t, k: t.scan(upper=(1, 2)), "upper is (1, 2), with 2 values; expected values of id"),
    (lambda c, t, k: t.scan(lower=(None,)), "lower: column id is None; expected an int64"),
    (lambda c, t, k: c.open_table(None), "table name None: expected a name, as text"),
    (lambda c, t, k: c.open_table(""), "table name '': expected a name"),
    (lambda c, t, k: c.describe(5), "table name 5: expected a name"),
    (lambda c, t, k: c.delete_table(b"t"), "table name b't': expected a name"),
    (lambda c, t, k: c.keyspace(5), "key space name 5: expected a name"),
    (lambda c, t, k: c.create_table("x", {"id": "int64"}), "schema {'id': 'int64'}: expected a Schema"),
    (lambda c, t, k: c.create_table("x", ONE, 8), "partitioning: 8: expected stele.hash(...)"),
    (
        lambda c, t, k: c.create_table("x", ONE, replication_factor="3"),
        "replication_factor '3': expected a whole number",
    ),
    (lambda c, t, k: c.create_keyspace(None), "key space name None: expected a name"),
    (lambda c, t, k: c.observe("now"), "timestamp 'now': expected a whole number"),
    (lambda c, t, k: k.replace(5, "x"), "key 5: expected bytes or str"),
    (lambda c, t, k: k.insert("x", None), "value None: expected bytes or str"),
    (lambda c, t, k: k.list(None), "key None: expected bytes or str"),
    (lambda c, t, k: k.changed("a", 5), "known 5: expected bytes or str"),
    (
        lambda c, t, k: AsyncClient(None),
        "masters None: expected text like 'HOST:PORT,HOST:PORT', or a list of such",
    ),
    (lambda c, t, k: AsyncClient(7051), "masters 7051: expected text"),
    (lambda c, t, k: AsyncClient([7051]), "masters [7051]: expected text"),
    (lambda c, t, k: AsyncClient(b"h:1"), "masters b'h:1': expected text"),
    (lambda c, t, k: AsyncClient("h:1", timeout_s=None), "timeout_s None: expected a number of seconds"),
    (lambda c, t, k: Client(None), "masters None: expected text"),
    (
        lambda c, t, k: Schema.make([("id",)], ["id"]),
        "column ('id',): expected (name, type[, nullable[, default]])",
    ),
    (lambda c, t, k: Schema.make([(1, "int64")], ["id"]), "column (1, 'int64'): expected (name, type"),
    (lambda c, t, k: Schema.make(["id"], ["id"]), "column 'id': expected (name, type"),
    (lambda c, t, k: Schema.make([("id", "int64")], [1]), "key names [1], which are not columns"),
]


async def test_an_argument_of_a_wrong_kind_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table, space = await client.create_table("one", ONE), await client.create_keyspace("s")
        for call, words in WRONG:
            with pytest.raises(Rejected, match="INVALID_ARGUMENT") as caught:
                answer = call(client, table, space)
                if isinstance(answer, Awaitable):
                    await answer
                raise AssertionError(words)
            assert words in str(caught.value)
        assert await table.scan().count() == 0
        await table.write_arrow(pa.table({"id": [1]}).to_reader())
        await table.write_arrow(b for b in pa.table({"id": [2]}).to_batches())
        await space.replace(bytearray(b"a"), memoryview(b"1"))
        assert await space.changed("a", "0") == b"1"
        assert Schema.make([("id", "int64")], "id") == Schema.make([("id", "int64")], ["id"])


async def test_a_name_that_is_not_there_comes_with_the_next_step(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        for call, words in (
            (client.open_table("t"), "no table t; list_tables() shows the existing ones"),
            (client.describe("t"), "no table t; list_tables() shows the existing ones"),
            (client.delete_table("t"), "no table t; list_tables() shows the existing ones"),
            (client.keyspace("k"), "no key space k; create it with create_keyspace('k')"),
        ):
            with pytest.raises(Rejected, match="NOT_FOUND") as caught:
                await call
            assert words in str(caught.value)


def test_the_blocking_client_documents_itself() -> None:
    for name, method in vars(Client).items():
        if callable(method) and not name.startswith("_"):
            assert "As Async" not in (method.__doc__ or "As Async"), name
