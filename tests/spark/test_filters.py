"""Which of Spark's filters a scan takes, and that NaN is Spark's to order."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

ds = pytest.importorskip("pyspark.sql.datasource")

from stele_spark.filters import Pushed, push  # noqa: E402

COLUMNS = {"id": pa.int64(), "delay": pa.float64(), "name": pa.string()}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (ds.EqualTo(("id",), 3), Pushed("id", "=", 3)),
        (ds.GreaterThan(("id",), 3), Pushed("id", ">", 3)),
        (ds.LessThan(("delay",), 3.0), Pushed("delay", "<", 3.0)),
        (ds.In(("name",), ("a", "b")), Pushed("name", "in", ["a", "b"])),
        (ds.IsNull(("name",)), Pushed("name", "is_null")),
        (ds.Not(ds.IsNull(("name",))), Pushed("name", "is_not_null")),
        (ds.Not(ds.EqualTo(("name",), "a")), Pushed("name", "!=", "a")),
        (ds.GreaterThan(("delay",), 3.0), None),  # Spark keeps NaN here, Arrow does not
        (ds.EqualTo(("delay",), math.nan), None),
        (ds.In(("delay",), (1.0,)), None),
        (ds.EqualTo(("id",), None), None),
        (ds.EqualTo(("address", "city"), "x"), None),
        (ds.EqualTo(("unknown",), 1), None),
        (ds.Not(ds.GreaterThan(("id",), 3)), None),
        (ds.StringStartsWith(("name",), "a"), None),
    ],
)
def test_taken_or_left(given: ds.Filter, taken: Pushed | None) -> None:
    assert push([given], COLUMNS) == (([taken], []) if taken else ([], [given]))
