"""A tablet that is read by several tasks, with both readers: each row comes once, whichever part has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from stele.client import Client
from stele.model.schema import Schema
from tests.spark.flushed import flush

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

SCHEMA = Schema.make([("id", "int64"), ("name", "string")], ["id"])
GROUP_ROWS = 32_768  # the least that is cut
ROWS = 3 * GROUP_ROWS + 1_000


def test_a_tablet_of_several_partitions_gives_each_row_once(read: Callable[..., Any], masters: str) -> None:
    from pyspark.sql import functions as F

    with Client(masters) as client:
        if "parts" not in [info.name for info in client.list_tables()]:
            table = client.create_table("parts", SCHEMA)
            table.write_arrow(pa.table({"id": range(ROWS), "name": [f"name {n}" for n in range(ROWS)]}))
            flush(client, table)
            table.write_arrow(pa.table({"id": [1, ROWS - 1], "name": ["new", "new"]}))  # in no file
    frame = read("parts", splitBytes="65536").load()
    by_part = frame.groupBy(F.spark_partition_id()).count().collect()
    assert frame.rdd.getNumPartitions() == len(by_part) == 4, by_part
    assert all(0 < row["count"] < ROWS / 2 for row in by_part)
    ids = frame.select("id").toArrow()["id"].to_pylist()
    assert sorted(ids) == list(range(ROWS))
    wrong = frame.where("name != concat('name ', id)")
    assert sorted(map(tuple, wrong.collect())) == [(1, "new"), (ROWS - 1, "new")]
    some = read("parts", splitBytes="65536", where=f"id >= {GROUP_ROWS - 1} AND id <= {GROUP_ROWS}").load()
    assert sorted(row.id for row in some.collect()) == [GROUP_ROWS - 1, GROUP_ROWS]

    assert read("parts").load().rdd.getNumPartitions() == 1
    for wrong_bytes in ("1", "64MB", str(1 << 50)):
        with pytest.raises(
            Exception, match=f"\"splitBytes\" is '{wrong_bytes}': expected a whole number from 65536 to"
        ):
            read("parts", splitBytes=wrong_bytes).load()
