"""Which columns tasks read and write, and what the driver refuses, without Spark around them: processes of a real cluster."""

from __future__ import annotations

import decimal
import re
import struct
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
from tests.spark.flushed import flush

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


def test_types_are_widened_only_where_no_value_changes(masters: str) -> None:
    narrow = {"id": 2**63 - 1, "tiny": -128, "ratio": 0.1, "price": decimal.Decimal("12.34")}
    schema = Schema.make(
        [("id", "int64"), ("tiny", "int8", True), ("ratio", "float", True), ("price", "decimal(9,2)", True)],
        ["id"],
    )
    with Client(masters) as client:
        table = client.create_table("narrow", schema)
        table.write_arrow(pa.Table.from_pylist([narrow], schema=table.arrow_schema))
    given = options(masters, "narrow")
    asked = T.StructType().add("RATIO", "double").add("tiny", "integer").add("price", "decimal(12,3)")
    reader = Reader(given, asked.add("id", "decimal(20,0)"))
    (batch,) = (batch for part in reader.partitions() for batch in reader.read(part))
    assert batch.to_pylist() == [
        {
            "RATIO": struct.unpack("f", struct.pack("f", 0.1))[0],
            "tiny": -128,
            "price": decimal.Decimal("12.340"),
            "id": decimal.Decimal(2**63 - 1),
        }
    ]
    assert batch.schema.types == [pa.float64(), pa.int32(), pa.decimal128(12, 3), pa.decimal128(20, 0)]
    for name, kind in (("id", "double"), ("ratio", "decimal(9,2)"), ("price", "decimal(9,3)")):
        with pytest.raises(Rejected, match=f"'{name}' is .* in the table, not "):
            Reader(given, T.StructType().add(name, kind))
    for name, kind in (("tiny", "short"), ("ratio", "double"), ("price", "decimal(9,3)")):
        with pytest.raises(Rejected, match=f"'{name}' is .* in the table, not "):
            Writer(given, T.StructType().add("id", "long").add(name, kind))


def test_a_tablet_is_cut_as_the_option_says(masters: str) -> None:
    with Client(masters) as client:
        table = client.create_table("cut", Schema.make([("id", "int64")], ["id"]))
        table.write_arrow(pa.table({"id": range(100_000)}))
        flush(client, table)
    asked = T.StructType().add("id", "long")
    assert len(Reader(options(masters, "cut"), asked).partitions()) == 1
    reader = Reader(options(masters, "cut", splitBytes="65536"), asked)
    parts = [[batch.num_rows for batch in reader.read(part)] for part in reader.partitions()]
    assert len(parts) > 1 and sum(map(sum, parts)) == 100_000 and all(map(sum, parts))
