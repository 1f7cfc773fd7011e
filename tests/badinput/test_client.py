"""What a user of the Python client gets wrong: understood where it can be, else told what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stele.client import Client
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
        for key in (3, (3,), [3], {"id": 3}):
            assert await one.get(key) == {"id": 3, "n": 3}
        for pair in ((3, "x"), {"b": "x", "a": 3}):
            assert await two.get(pair, "n") == {"n": 3}

        async def refused(call: Any) -> str:
            with pytest.raises(Rejected) as caught:
                await call
            return str(caught.value)

        assert "key 3: expected values of a, b, or a mapping" in await refused(two.get(3))
        assert "'three' is no int64" in await refused(one.get("three"))
        for wrong, words in (
            ("id > ", "ends too early"),
            ("id > 1 OR n > 1", "OR is not understood"),
            ([("id",)], "expected (column, operator, value), or text"),
            ([("id", "~", 1)], "expected (column, operator, value), or text"),
            (5, "expected"),
        ):
            with pytest.raises(Rejected, match="INVALID_ARGUMENT") as caught:
                one.scan(predicates=wrong)  # type: ignore[arg-type]
            assert words in str(caught.value)


async def test_a_name_that_is_not_there_comes_with_the_next_step(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        for call, words in (
            (client.open_table("t"), "no table t; `stele table list` shows those there are"),
            (client.describe("t"), "no table t; `stele table list` shows those there are"),
            (client.delete_table("t"), "no table t; `stele table list` shows those there are"),
            (client.keyspace("k"), "no key space k; make it with `stele kv create k`"),
        ):
            with pytest.raises(Rejected, match="NOT_FOUND") as caught:
                await call
            assert words in str(caught.value)


def test_the_blocking_client_documents_itself() -> None:
    for name, method in vars(Client).items():
        if callable(method) and not name.startswith("_"):
            assert "As Async" not in (method.__doc__ or "As Async"), name
