"""`import stele`: every public name is there, each is loaded when it is used, and a wrong argument is told in plain words."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stele
from tests.client.small import small_cluster


def test_type_checkers_and_programs_see_the_same_names() -> None:
    tree = ast.parse(Path(stele.__file__).read_text())
    imported = {
        alias.name: node.module
        for top in tree.body
        if isinstance(top, ast.If)
        for node in top.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == stele._MODULE_OF
    assert sorted([*imported, "__version__"]) == sorted(stele.__all__)


@pytest.mark.parametrize("name", sorted(stele._MODULE_OF))
def test_each_name_is_what_its_module_defines(name: str) -> None:
    found = getattr(stele, name)
    assert found is getattr(import_module(stele._MODULE_OF[name]), name)
    assert found.__module__ == stele._MODULE_OF[name]
    assert name in dir(stele)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stele' has no attribute 'conect'"):
        stele.conect  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("program", "not_loaded"),
    [
        ("import stele", ("stele.", "pyarrow", "grpc", "numpy", "asyncio")),
        ("import stele; stele.Rejected", ("stele.client", "stele.rpc", "pyarrow", "grpc")),
        ("import stele.tserver.node, stele.master", ("stele.client.blocking", "stele.client.async_client")),
        ("import stele.cli.app", ("stele.client.blocking", "stele.client.async_client", "pyarrow", "grpc")),
    ],
)
def test_nothing_is_loaded_that_is_not_used(program: str, not_loaded: tuple[str, ...]) -> None:
    code = f"{program}\nimport sys\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [m for m in loaded.stdout.split() if m.startswith(not_loaded)] == []


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: stele.hash(buckets=4), "hash of no columns: expected names of key columns"),
        (lambda: stele.hash(0, buckets=4), "hash of 0: expected names of key columns"),  # type: ignore[arg-type]
        (lambda: stele.hash(["a"], buckets=4), "hash of ['a']: expected names"),  # type: ignore[arg-type]
        (lambda: stele.hash("a", buckets=1), "buckets 1: expected a whole number, 2 or more"),
        (lambda: stele.hash("a", buckets=2, seed=-1), "seed -1: expected a whole number, 0 to 4294967295"),
        (lambda: stele.range("a", split_at="xy"), "split_at 'xy': expected a list of values"),
        (lambda: stele.range("a", split_at=7), "split_at 7: expected a list of values"),  # type: ignore[arg-type]
        (lambda: stele.range(split_at=[1]), "range of no columns: expected names"),
        (lambda: stele.connect("h:x"), "h:x"),
        (lambda: stele.connect("h:1", timeout_s=0), "timeout_s 0: expected a number of seconds above 0"),
    ],
)
def test_a_wrong_argument_is_told(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(stele.Rejected) as caught:
        call()
    assert told in str(caught.value)


def test_a_column_has_its_default_as_a_value() -> None:
    """It was JSON text, in which a text has two pairs of quotes, at the fourth place of a tuple."""
    at, naive = datetime(2024, 5, 1, 12, tzinfo=UTC), datetime(2024, 5, 1, 12)
    columns = [
        ("n", "int64", 5),
        ("i", "int8", np.int8(-1)),
        ("s", "string", '"°C"'),
        ("b", "bool", False),
        ("f", "double", 0.1),
        ("d", "decimal(9,2)", Decimal("1.50")),
        ("raw", "binary", b"\x00\xff"),
        ("day", "date", date(2024, 5, 1)),
        ("at", "timestamp", at),
        ("naive", "timestamp", naive),
    ]
    key = stele.column("k", "string")
    schema = stele.Schema.make(
        [
            key,
            stele.column("none", "string", nullable=True),
            *(stele.column(n, t, default=v) for n, t, v in columns),
        ],
        key=["k"],
    )
    assert key == ("k", "string", False, None) and schema.by_name["none"].nullable
    found = {name: schema.by_name[name].default_scalar().as_py() for name, _, _ in columns}
    assert found == {name: value for name, _, value in columns} | {"naive": at}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: stele.column("n", "int64", default="5"), "column n: '5' is not an int64 (it is of type str"),
        (lambda: stele.column("n", "int8", default=300), "column n: 300 is not an int8 (it is out of range)"),
        (
            lambda: stele.column("d", "decimal(3,1)", default=Decimal("0.25")),
            "column d: Decimal('0.25') is not",
        ),
        (lambda: stele.column("day", "date", default=5), "column day: the default 5 is not a date"),
        (lambda: stele.column("s", "string", default=[1]), "default of column s [1]: expected a value"),
        (lambda: stele.column("n", "int65", default=1), "type 'int65' is unknown"),
        (
            lambda: stele.column("n", "int64", nullable="yes"),
            "nullable of column n 'yes': expected True or False",
        ),  # type: ignore[arg-type]
        (lambda: stele.column(5, "int64"), "column name 5: expected a name"),  # type: ignore[arg-type]
    ],
)
def test_a_default_that_does_not_fit_is_refused_at_once(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(stele.Rejected) as caught:
        call()
    assert told in str(caught.value)


async def test_partitionings_by_name_are_created_and_described(tmp_path: Path) -> None:
    schema = stele.Schema.make([("day", "date"), ("name", "string")], key=["day", "name"])
    parts = (
        stele.hash("name", buckets=3, seed=7),
        stele.range("day", split_at=[date(2024, 1, 1), date(2024, 7, 1)]),
    )
    async with (
        small_cluster(tmp_path, nodes=1) as (cluster, _),
        stele.connect_async(cluster.master_address) as client,
    ):
        for name, given, tablets in (
            ("both", list(parts), 9),
            ("hashed", parts[0], 3),
            ("ranged", parts[1:], 3),
            ("whole", None, 1),
            ("none", [], 1),
        ):
            await client.create_table(name, schema, given, replication_factor=1)
            info = await client.describe(name)
            expected = (given,) if isinstance(given, stele.HashPartitioning) else tuple(given or ())
            assert (info.partitioning, info.tablets) == (expected, tablets)
            assert (await client.open_table(name)).partitioning == expected
        for wrong, told in (
            ("name", "partitioning: 'name': expected stele.hash(...), stele.range(...), or a list of these"),
            ([parts[0], 4], "partitioning: 4: expected stele.hash(...)"),
            (
                stele.hash("nam", buckets=2),
                "partitioning: hash: the table has no column 'nam'; did you mean 'name'?",
            ),
        ):
            with pytest.raises(stele.Rejected) as caught:
                await client.create_table("wrong", schema, wrong)  # type: ignore[arg-type]
            assert told in str(caught.value)
