"""Which columns tasks read and write, and what the driver refuses, without Spark around them: processes of a real cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T

from stele.client import Client
from stele.model.errors import Rejected
from stele.model.schema import Schema
from stele_spark.options import Options
from stele_spark.sink import Writer
from stele_spark.source import Reader

NAMES = Schema.make([("id", "int64"), ("Name", "string", True)], ["id"])


def options(masters: str, table: str, **more: str) -> Options:
    return Options.parse({"masters": masters, "table": table, **more})


def test_a_frame_names_its_columns_in_any_case(masters: str, tmp_path: Path) -> None:
    """The refused rows of a task are in one file, under the table's names, whoever refused them."""
    frame = T.StructType().add("OP", "string").add("NAME", "string").add("ID", "long")
    with Client(masters) as client:
        client.create_table("any case", NAMES)
        given = options(masters, "any case", op_column="op", rejects=str(tmp_path))
        rows = {"OP": ["upsert", "merge", "update"], "NAME": ["a", "b", "c"], "ID": [1, 2, 3]}
        writer = Writer(given, frame)
        written = writer.write(iter(pa.table(rows).to_batches()))
        writer.commit([written])
        assert client.open_table("any case").scan().to_table().to_pylist() == [{"id": 1, "Name": "a"}]
    (file,) = tmp_path.iterdir()
    refused = sorted((row["id"], row["Name"], row["_code"]) for row in pq.read_table(file).to_pylist())
    assert refused == [(2, "b", "INVALID_ARGUMENT"), (3, "c", "NOT_FOUND")]


def test_columns_are_named_in_one_place(masters: str) -> None:
    with Client(masters) as client:
        client.create_table("one place", NAMES)
    asked = T.StructType().add("NAME", "string").add("id", "long")
    Reader(options(masters, "one place", columns="name,ID"), asked)
    for other in ("id", "id,name"):
        with pytest.raises(Rejected, match=re.escape(".schema(...) names Name, id; give one of them")):
            Reader(options(masters, "one place", columns=other), asked)
