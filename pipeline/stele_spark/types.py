"""Converts between Stele's column types and Spark's. Called by source.py; does no I/O.

Invariant: each Stele type maps to exactly one Spark type, whose Arrow type is that of Stele's rows. If a user
asks for another type, no value changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from pyspark.sql import types as T

from stele.model.errors import Code, Rejected
from stele.model.nearest import in_any_case
from stele.model.schema import Schema

_FROM_ARROW: dict[pa.DataType, T.DataType] = {
    pa.bool_(): T.BooleanType(),
    pa.int8(): T.ByteType(),
    pa.int16(): T.ShortType(),
    pa.int32(): T.IntegerType(),
    pa.int64(): T.LongType(),
    pa.float32(): T.FloatType(),
    pa.float64(): T.DoubleType(),
    pa.string(): T.StringType(),
    pa.binary(): T.BinaryType(),
    pa.date32(): T.DateType(),
    pa.timestamp("us", tz="UTC"): T.TimestampType(),
}


def spark_schema(schema: Schema) -> T.StructType:
    """The Spark schema of a Stele table, with columns in the table's order."""
    arrow = schema.to_arrow()
    return T.StructType([T.StructField(f.name, spark_type(f.name, f.type), f.nullable) for f in arrow])


def spark_type(name: str, arrow: pa.DataType) -> T.DataType:
    """The Spark type for a column's Arrow type. `name`: the column, for the error.

    Raises:
        Rejected: SCHEMA_MISMATCH, Spark has no such type.
    """
    if pa.types.is_decimal(arrow):
        return T.DecimalType(arrow.precision, arrow.scale)
    try:
        return _FROM_ARROW[arrow]
    except KeyError:
        raise Rejected(f"column {name!r}: Spark has no type for {arrow}", code=Code.SCHEMA_MISMATCH) from None


_WIDER: dict[T.DataType, tuple[T.DataType, ...]] = {
    T.ByteType(): (T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType(), T.DoubleType()),
    T.ShortType(): (T.IntegerType(), T.LongType(), T.FloatType(), T.DoubleType()),
    T.IntegerType(): (T.LongType(), T.DoubleType()),
    T.FloatType(): (T.DoubleType(),),
}
_DIGITS: dict[T.DataType, int] = {
    T.ByteType(): 3,
    T.ShortType(): 5,
    T.IntegerType(): 10,
    T.LongType(): 20,
}
"""How many digits before the point Spark wants a decimal to have, to hold every value of an integer type."""


def widens(narrow: T.DataType, wide: T.DataType) -> bool:
    """Whether the type `wide` holds each value of the type `narrow` exactly.

    False from date to timestamp, because that takes a time zone. False from long to double, unlike in Spark,
    because digits are lost.
    """
    if narrow == wide:
        return True
    if isinstance(wide, T.DecimalType):
        whole = wide.precision - wide.scale
        if isinstance(narrow, T.DecimalType):
            return wide.scale >= narrow.scale and whole >= narrow.precision - narrow.scale
        return narrow in _DIGITS and whole >= _DIGITS[narrow]
    return wide in _WIDER.get(narrow, ())


OP, TIME, VERSION = "_op", "_ts", "_schema"
_OF_CHANGES = (
    T.StructField(OP, T.StringType(), False),
    T.StructField(TIME, T.LongType(), False),
    T.StructField(VERSION, T.IntegerType(), False),
)


def stream_schema(schema: Schema) -> T.StructType:
    """The Spark schema of a table's changes: the table's columns, then those that describe the change.

    In a delete, all columns of the table except the key are null.

    Raises:
        Rejected: SCHEMA_MISMATCH, the table has a column with the name of one that describes the change.
    """
    keys = {column.name for column in schema.key_columns}
    fields = [T.StructField(f.name, f.dataType, f.name not in keys) for f in spark_schema(schema)]
    if taken := [field.name for field in _OF_CHANGES if field.name in schema.by_name]:
        raise Rejected(
            f"the table has a column {taken[0]}, and a stream adds one of that name; rename the column",
            code=Code.SCHEMA_MISMATCH,
        )
    return T.StructType([*fields, *_OF_CHANGES])


def stream_projection(asked: T.StructType, table: Schema) -> list[str]:
    """Like `projection`, for a stream: names of the table's columns, and of columns that describe the change.

    Raises:
        Rejected: SCHEMA_MISMATCH, as in `projection`, or because `_op` is missing: a delete would look like a
            row.
    """
    have = stream_schema(table)
    columns = _read_columns(asked, have)
    if OP not in columns:
        raise Rejected(
            f"schema: {OP} is missing; without it a delete looks like a row", code=Code.SCHEMA_MISMATCH
        )
    return columns


def chosen(names: Sequence[str], table: Schema) -> T.StructType:
    """The Spark schema of these columns of a table, in this order.

    Raises:
        Rejected: SCHEMA_MISMATCH. It names every column that the table lacks, and every repeated one.
    """
    have = {field.name: field for field in spark_schema(table)}
    columns, faults = _found(names, have)
    _refuse(faults, have, "columns")
    return T.StructType([have[name] for name in columns])


def projection(asked: T.StructType, table: Schema) -> list[str]:
    """The table's names for the columns of the user's schema, in that order. Upper and lower case count as
    equal, as in Spark. The user's types may be wider than the table's.

    Raises:
        Rejected: SCHEMA_MISMATCH. It names every column that the table lacks, every repeated one, and every
            type that does not fit. If there are no such faults, it names every column that may be null in the
            table but not in the schema. Spark would fail at the first null in such a column, or drop it.
    """
    return _read_columns(asked, spark_schema(table))


def written_columns(frame: T.StructType, table: Schema) -> list[str]:
    """The table's names for the columns of a frame that is written. The frame's types may be narrower than
    the table's.

    Raises:
        Rejected: SCHEMA_MISMATCH. It names every column that does not fit.
    """
    have = spark_schema(table)
    return _columns(frame, have, lambda of_frame, of_table: widens(of_frame, of_table))


def _read_columns(asked: T.StructType, there: T.StructType) -> list[str]:
    names = _columns(asked, there, lambda of_frame, of_table: widens(of_table, of_frame))
    have = {field.name: field for field in there}
    _refuse(
        [
            f"{field.name!r} may be null in the table; remove NOT NULL"
            for field, name in zip(asked, names, strict=True)
            if have[name].nullable and not field.nullable
        ],
        have,
    )
    return names


def _columns(
    frame: T.StructType, there: T.StructType, fits: Callable[[T.DataType, T.DataType], bool]
) -> list[str]:
    have = {field.name: field.dataType for field in there}
    names, faults = _found(frame.names, have)
    faults += [
        f"{field.name!r} is {have[name].simpleString()} in the table, not {field.dataType.simpleString()}"
        for field, name in zip(frame, names, strict=True)
        if name and not fits(field.dataType, have[name])
    ]
    _refuse(faults, have)
    return names


def _found(asked: Sequence[str], have: Iterable[str]) -> tuple[list[str], list[str]]:
    """The table's name for each name in `asked` ("" if it has none), and what is wrong."""
    there, faults = list(have), []
    names: list[str] = []
    for name in asked:
        found = in_any_case(name, there)
        if found is None:
            faults.append(f"the table has no column {name!r}")
        elif found in names:
            faults.append(f"{name!r} is given twice")
        names.append(found or "")
    return names, faults


def _refuse(faults: Sequence[str], have: Iterable[str], what: str = "schema") -> None:
    if faults:
        raise Rejected(
            f"{what}: {'; '.join(faults)}; the table has {', '.join(have)}", code=Code.SCHEMA_MISMATCH
        )


def arrow_types(schema: T.StructType) -> dict[str, pa.DataType]:
    """The Arrow type of each column of a Spark schema, by column name."""
    by_spark = {spark: arrow for arrow, spark in _FROM_ARROW.items()}
    return {
        field.name: (
            pa.decimal128(field.dataType.precision, field.dataType.scale)
            if isinstance(field.dataType, T.DecimalType)
            else by_spark[field.dataType]
        )
        for field in schema
    }
