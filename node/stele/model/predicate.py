"""What a scan asks for: projection, predicates, key range, limit, order, resume key. Reads no rows itself.

Clients build it, it travels in tickets as JSON, and the store evaluates it. Invariant: a predicate keeps a
row only if it is true for it. A comparison with null is never true.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stele.model.bounds import BATCH_ROWS_MAX, COLUMNS_MAX, ROWS_MAX, TIME_MAX
from stele.model.column import shown
from stele.model.errors import Rejected
from stele.model.foreign import read_batch
from stele.model.jsons import parse_json, whole_number
from stele.model.rows import python_values
from stele.model.schema import Schema

OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in", "is_null", "is_not_null")
NULL_TESTS = ("is_null", "is_not_null")


@dataclass(frozen=True, slots=True)
class Predicate:
    """`column op value`. `value` is a Python value that fits the column. None for the null tests.

    For "in" it is a list, tuple, set or array of values, kept as a tuple. A datetime without a time zone is
    UTC."""

    column_id: int
    op: str
    value: Any = None

    def __post_init__(self) -> None:
        if self.op == "in" and isinstance(self.value, Iterable) and not isinstance(self.value, _ONE_VALUE):
            object.__setattr__(self, "value", tuple(self.value))

    def array(self, schema: Schema) -> pa.Array:
        """The value or values as an Arrow array of the column's type.

        Raises:
            Rejected: an unknown column or operator, or a value that does not fit.
        """
        column = schema.by_id.get(self.column_id)
        if column is None:
            raise Rejected(
                f"predicate: schema version {schema.version} has no column with id {self.column_id}"
            )
        where = f"predicate on {column.name}"
        if self.op not in OPERATORS:
            raise Rejected(
                f"{where}: operator {shown(self.op)} is unknown; expected one of {', '.join(OPERATORS)}"
            )
        if self.op in NULL_TESTS:
            if self.value is not None:
                raise Rejected(f"{where}: {self.op} takes no value, got {shown(self.value)}")
            return pa.array([], column.arrow)
        if self.op != "in":
            values: tuple[Any, ...] = (self.value,)
        elif isinstance(self.value, tuple):
            values = self.value
        else:
            raise Rejected(f'{where}: "in" takes a list of values, got {shown(self.value)}; write it in []')
        if any(v is None for v in values):
            raise Rejected(f"{where}: a comparison with null is never true; use is_null or is_not_null")
        try:
            return column.array(values)
        except Rejected as exc:
            raise Rejected(f"predicate on {exc.args[0]}") from exc


_ONE_VALUE = (str, bytes, bytearray, memoryview, Mapping)
"""Types that Python can iterate over but that are not lists of values."""


UPSERT, DELETE = "upsert", "delete"
CHANGE_FIELDS = (pa.field("_op", pa.string(), nullable=False), pa.field("_ts", pa.uint64(), nullable=False))
"""The columns that a scan of changes adds after the table's own: UPSERT or DELETE, and the write's hybrid time."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Asks for writes after the hybrid time `after`, up to the scan's snapshot. Deletes are included. In key order.

    `every`: all versions of a row, oldest first; else only the newest. `seen`: of the key `ScanSpec.lower_key`, the
    reader already has all versions up to this time."""

    after: int
    every: bool = False
    seen: int = 0


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """One scan of one tablet.

    `column_ids` empty: all columns, in schema order. `lower_key` (inclusive) and `upper_key` (exclusive) are
    encoded keys; b"" means unbounded. `resume_after`: the encoded key of the last row already seen; it
    implies key order. `limit`: in rows; None: unlimited. `ordered`: rows come in key order. `changes`: return
    changes instead of rows; then there may be no predicates.
    """

    column_ids: tuple[int, ...] = ()
    predicates: tuple[Predicate, ...] = ()
    lower_key: bytes = b""
    upper_key: bytes = b""
    limit: int | None = None
    ordered: bool = False
    resume_after: bytes = b""
    batch_rows: int = 32_768
    changes: Changes | None = None

    def arrow_schema(self, schema: Schema) -> pa.Schema:
        """Return the Arrow schema of the scan's rows. For changes, all columns but those of the key are nullable.

        Raises:
            Rejected: a column is unknown, or has the name of a column that a scan of changes adds.
        """
        arrow = schema.to_arrow(self.column_ids or None)
        if self.changes is None:
            return arrow
        taken = [field.name for field in CHANGE_FIELDS if field.name in arrow.names]
        if taken:
            raise Rejected(
                f"changes: the table's column {taken[0]} has the name of a column that a scan of changes adds; "
                "leave it out of the scan"
            )
        keys = {column.name for column in schema.key_columns}
        fields = [field if field.name in keys else field.with_nullable(True) for field in arrow]
        return pa.schema([*fields, *CHANGE_FIELDS])

    def to_json(self, schema: Schema) -> str:
        """JSON text. Predicate values are in Arrow's own bytes, so that no value changes."""
        return json.dumps(
            {
                "columns": list(self.column_ids),
                "predicates": [[p.column_id, p.op, _pack(p.array(schema))] for p in self.predicates],
                "lower": self.lower_key.hex(),
                "upper": self.upper_key.hex(),
                "limit": self.limit,
                "ordered": self.ordered,
                "resume_after": self.resume_after.hex(),
                "batch_rows": self.batch_rows,
                **({} if self.changes is None else {"changes": _listed(self.changes)}),
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str | bytes, schema: Schema) -> ScanSpec:
        """The inverse of `to_json`.

        Raises:
            Rejected: not a scan, or it names columns that the schema does not have.
        """
        try:
            raw = parse_json(text)
            if max(len(raw["columns"]), len(raw["predicates"])) > COLUMNS_MAX:
                raise ValueError(f"more than {COLUMNS_MAX} columns, or more than {COLUMNS_MAX} predicates")
            predicates = tuple(
                _predicate(int(c), str(op), packed, schema) for c, op, packed in raw["predicates"]
            )
            spec = ScanSpec(
                tuple(int(c) for c in raw["columns"]),
                predicates,
                bytes.fromhex(raw["lower"]),
                bytes.fromhex(raw["upper"]),
                None if raw["limit"] is None else whole_number(raw["limit"], ROWS_MAX),
                bool(raw["ordered"]),
                bytes.fromhex(raw["resume_after"]),
                whole_number(raw["batch_rows"], BATCH_ROWS_MAX, 1),
                _changes(raw["changes"]) if "changes" in raw else None,
            )
            if spec.changes is not None and predicates:
                raise ValueError("a scan of changes takes no predicates; filter its rows instead")
        except (ValueError, TypeError, KeyError, pa.ArrowException, OSError, EOFError) as exc:
            raise Rejected(f"not a scan: {exc!r}; docs/flight.md describes the format") from exc
        schema.to_arrow(spec.column_ids)
        return spec


def _listed(changes: Changes) -> list[int]:
    return [changes.after, int(changes.every), changes.seen]


def _changes(raw: Any) -> Changes:
    after, every, seen = raw
    return Changes(whole_number(after, TIME_MAX), bool(whole_number(every, 1)), whole_number(seen, TIME_MAX))


def _pack(values: pa.Array) -> str:
    batch = pa.record_batch([values], names=["v"])
    return base64.b64encode(batch.serialize().to_pybytes()).decode()


def _predicate(column_id: int, op: str, packed: str, schema: Schema) -> Predicate:
    column = schema.by_id.get(column_id)
    if column is None:
        raise Rejected(f"predicate: schema version {schema.version} has no column with id {column_id}")
    raw = base64.b64decode(packed, validate=True)
    batch = read_batch(raw, pa.schema([pa.field("v", column.arrow)]), f"predicate on {column.name}")
    values = python_values(batch.column(0))
    if op == "in":
        return Predicate(column_id, op, tuple(values))
    if op in NULL_TESTS:
        return Predicate(column_id, op)
    if len(values) != 1:
        raise Rejected(f"predicate on {column.name}: {len(values)} values for {op!r}; expected one")
    return Predicate(column_id, op, values[0])
