"""Columns and primary key of a table. Shared by client, master and store; opens no files.

Invariant: an existing `Schema` is valid and immutable. A column id names one column for ever, so old blocks
and files stay readable after columns come and go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from stele.model.bounds import HISTORY_MAX_MS, HISTORY_MIN_MS
from stele.model.column import Column, arrow_type, shown, type_name
from stele.model.errors import Code, Rejected
from stele.model.ids import ColumnId, SchemaVersion
from stele.model.jsons import parse_json
from stele.model.nearest import did_you_mean

COLUMNS_MAX = 1000
"""A bound that keeps block headers and footers small."""

REPLICATION_FACTORS = (1, 3, 5, 7)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_CHOICES_MAX = 1_024
"""How many Arrow schemas, each for some of the columns, are kept for reuse."""
_COLUMNS_SHOWN = 20
"""The most columns that a schema's repr lists."""
_PARSED_MAX = 256
"""The most parsed schemas to keep, about 4 KB each. So the tablets of a table share one schema and what is derived
from it."""
_RESERVED_PREFIX = "__stele"
_NO_KEY_TYPES = ("float", "double")


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns and primary key of a table. Equality is by value.

    Raises (on construction):
        Rejected: lists all faults, not only the first.

    Example:
        >>> schema = stele.Schema.make([stele.column("day", "date"), stele.column("value", "double")], key=["day"])
        >>> [column.name for column in schema.key_columns]
        ['day']
    """

    version: SchemaVersion
    columns: tuple[Column, ...]
    key_column_ids: tuple[ColumnId, ...]
    next_column_id: int
    history_ms: int = 0  # how long old versions of rows are kept; 0: HISTORY_DEFAULT_MS
    by_id: dict[int, Column] = field(init=False, repr=False, compare=False)
    by_name: dict[str, Column] = field(init=False, repr=False, compare=False)
    key_columns: tuple[Column, ...] = field(init=False, repr=False, compare=False)
    column_ids: tuple[int, ...] = field(init=False, repr=False, compare=False)
    places: dict[int, int] = field(init=False, repr=False, compare=False)  # position of each column id
    key_positions: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _arrow: dict[tuple[int, ...], pa.Schema] = field(init=False, repr=False, compare=False)
    derived: dict[str, Any] = field(init=False, repr=False, compare=False)  # what other modules compute once

    def __post_init__(self) -> None:
        faults = _faults(self)
        if faults:
            raise Rejected("schema: " + "; ".join(faults))
        put = object.__setattr__
        put(self, "by_id", {int(c.id): c for c in self.columns})
        put(self, "by_name", {c.name: c for c in self.columns})
        put(self, "key_columns", tuple(self.by_id[k] for k in self.key_column_ids))
        put(self, "column_ids", tuple(int(c.id) for c in self.columns))
        put(self, "places", {column_id: at for at, column_id in enumerate(self.column_ids)})
        put(self, "key_positions", tuple(self.places[int(k)] for k in self.key_column_ids))
        put(self, "_arrow", {})
        put(self, "derived", {})

    def __repr__(self) -> str:
        """Columns as `stele table create --column` takes them, the key, and the version."""
        shown_columns = [_shown(column) for column in self.columns[:_COLUMNS_SHOWN]]
        more = len(self.columns) - len(shown_columns)
        columns = ", ".join(shown_columns) + (f", and {more} more" if more else "")
        key = ", ".join(column.name for column in self.key_columns)
        return f"<stele.Schema {columns}; key {key}; version {self.version}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema, (
            self.version,
            self.columns,
            self.key_column_ids,
            self.next_column_id,
            self.history_ms,
        )

    @staticmethod
    def make(
        columns: Iterable[tuple[Any, ...]], key: Sequence[str], *, version: int = 1, first_column_id: int = 0
    ) -> Schema:
        """A new schema from columns, as `stele.column` gives them, and key column names.

        A column may also be a bare (name, type[, nullable[, default as JSON text]]). Ids count from
        `first_column_id`.

        Raises:
            Rejected: with every fault found.

        Example:
            >>> columns = [stele.column("n", "int64"), stele.column("price", "decimal(9,2)", nullable=True)]
            >>> [column.type for column in stele.Schema.make(columns, key=["n"]).columns]
            ['int64', 'decimal(9,2)']
        """
        made = []
        for position, column in enumerate(columns):
            parts = len(column) if isinstance(column, (tuple, list)) else 0
            if not 2 <= parts <= 4 or not all(isinstance(part, str) for part in column[:2]):
                raise Rejected(
                    f"schema: column {shown(column)}: expected (name, type[, nullable[, default]])"
                )
            name, type_ = column[0], column[1]
            nullable = column[2] if len(column) > 2 else False
            if not isinstance(nullable, (bool, np.bool_)):
                raise Rejected(f"schema: column {name}: nullable {shown(nullable)}: expected True or False")
            default = column[3] if len(column) > 3 else None
            made.append(Column(ColumnId(first_column_id + position), name, type_, bool(nullable), default))
        ids = {c.name: c.id for c in made}
        key = [key] if isinstance(key, str) else list(key)
        unknown = [name for name in key if name not in ids]
        if unknown:
            hint = did_you_mean(unknown[0], ids) or f"; expected some of {list(ids)}"
            raise Rejected(f"schema: key names {unknown}, which are not columns{hint}")
        return Schema(
            SchemaVersion(version), tuple(made), tuple(ids[n] for n in key), first_column_id + len(made)
        )

    @staticmethod
    def from_arrow(data: Any, key: Sequence[str]) -> Schema:
        """A new schema with the columns of Arrow data, of a data frame, or of an Arrow schema, and this key.

        `data`: a `pyarrow.Schema`, a Table, a RecordBatch or a reader; a pandas or Polars frame; anything
        with an Arrow schema. A column is nullable if Arrow says so, unless it is in the key. An Arrow type that
        Stele lacks becomes the next wider one (`uint8` becomes `int16`). Times become microseconds.

        Raises:
            Rejected: some columns have types that Stele cannot hold; lists them all. See also `make`.

        Example:
            >>> rows = pa.table({"n": [1, 2], "text": ["a", "b"]})
            >>> [(c.name, c.type, c.nullable) for c in stele.Schema.from_arrow(rows, key=["n"]).columns]
            [('n', 'int64', False), ('text', 'string', True)]
        """
        fields, faults, columns = arrow_schema_of(data), [], []
        keys = [key] if isinstance(key, str) else list(key)
        for arrow in fields:
            try:
                columns.append((arrow.name, type_name(arrow.type), arrow.nullable and arrow.name not in keys))
            except Rejected as exc:
                faults.append(f"column {arrow.name}: {exc.args[0]}")
        if faults:
            raise Rejected("schema: " + "; ".join(faults))
        return Schema.make(columns, keys)

    def to_arrow(self, column_ids: Sequence[int] | None = None) -> pa.Schema:
        """The Arrow schema of all columns, or of the given ones, in this order.

        Raises:
            Rejected: an id is not a column.
        """
        wanted = self.column_ids if column_ids is None else tuple(column_ids)
        found = self._arrow.get(wanted)
        if found is None:
            unknown = [i for i in wanted if i not in self.by_id]
            if unknown:
                raise Rejected(f"schema version {self.version} has no columns with ids {unknown}")
            chosen = [self.by_id[i] for i in wanted]
            found = pa.schema([pa.field(c.name, c.arrow, c.nullable) for c in chosen])
            if len(self._arrow) >= _CHOICES_MAX:  # callers choose, so there may be many
                self._arrow.clear()
            self._arrow[wanted] = found
        return found

    def is_key(self, column_id: int) -> bool:
        """Whether the column is in the primary key."""
        return column_id in self.key_column_ids

    def to_json(self) -> str:
        """JSON text. Equal schemas give equal text."""
        history = {"history_ms": self.history_ms} if self.history_ms else {}
        return json.dumps(
            {
                "version": self.version,
                "columns": [
                    [c.id, c.name, c.type, c.nullable, c.default]
                    + ([] if c.read_default is None else [c.read_default])
                    for c in self.columns
                ],
                "key": list(self.key_column_ids),
                "next_column_id": self.next_column_id,
                **history,
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Schema:
        """The inverse of `to_json`. The same text may give the same object.

        Raises:
            Rejected: not a schema. UNSUPPORTED_VERSION: it breaks this program's rules, so another program
                wrote it, such as a later one with more types.
        """
        return _parsed(text)


def _shown(column: Column) -> str:
    """A column in a schema's repr."""
    default = "" if column.default is None else f" = {shown(json.loads(column.default))}"
    return f"{column.name}:{column.type}{'?' if column.nullable else ''}{default}"


def arrow_schema_of(data: Any) -> pa.Schema:
    """The Arrow schema of a schema, of Arrow data, or of a data frame.

    Raises:
        Rejected: `data` is none of these.
    """
    found = data if isinstance(data, pa.Schema) else getattr(data, "schema", None)
    if isinstance(found, pa.Schema):
        return found
    try:
        if hasattr(data, "iloc"):  # a pandas frame; pandas need not be installed
            return pa.Schema.from_pandas(data, preserve_index=False)
        if hasattr(data, "__arrow_c_schema__"):
            return pa.schema(data)
        if hasattr(data, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(data).schema
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise Rejected(f"schema: {type(data).__name__} has no Arrow schema ({exc})") from exc
    raise Rejected(
        f"schema: {shown(data)}: expected a pyarrow.Schema, Arrow data, or a frame of pandas or Polars"
    )


@lru_cache(_PARSED_MAX)
def _parsed(text: str) -> Schema:
    try:
        raw = parse_json(text)
        columns = tuple(
            Column(ColumnId(int(i)), n, t, bool(nullable), d, *read_default)
            for i, n, t, nullable, d, *read_default in raw["columns"]
        )
        key = tuple(ColumnId(int(k)) for k in raw["key"])
        return Schema(
            SchemaVersion(int(raw["version"])),
            columns,
            key,
            int(raw["next_column_id"]),
            int(raw.get("history_ms", 0)),
        )
    except (ValueError, TypeError, KeyError) as exc:
        raise Rejected(f"schema: {exc!r}; the text is not a schema") from exc
    except Rejected as exc:
        raise Rejected(
            f"{exc.args[0]}; a later release wrote this schema; upgrade this program",
            code=Code.UNSUPPORTED_VERSION,
        ) from exc


def _faults(schema: Schema) -> list[str]:
    faults: list[str] = []
    if schema.version < 1:
        faults.append(f"the version is {schema.version}; expected 1 or more")
    if not schema.columns:
        faults.append("it has no columns; expected at least one")
    if len(schema.columns) > COLUMNS_MAX:
        faults.append(f"it has {len(schema.columns)} columns; at most {COLUMNS_MAX} are allowed")
    names: set[str] = set()
    ids: set[int] = set()
    for column in schema.columns:
        faults.extend(column_faults(column, is_key=column.id in schema.key_column_ids))
        if not 0 <= column.id < schema.next_column_id:
            faults.append(
                f"column {column.name}: its id {column.id} is not below next_column_id {schema.next_column_id}"
            )
        if column.name.lower() in names:
            faults.append(f"column {column.name}: the name is used twice (case is ignored)")
        if column.id in ids:
            faults.append(f"column {column.name}: the id {column.id} is used twice")
        names.add(column.name.lower())
        ids.add(column.id)
    if not schema.key_column_ids:
        faults.append("it has no key; expected at least one key column")
    if len(set(schema.key_column_ids)) != len(schema.key_column_ids):
        faults.append(f"key {list(schema.key_column_ids)}: it names a column twice")
    faults.extend(f"key column id {k}: no such column" for k in schema.key_column_ids if k not in ids)
    if schema.history_ms and not HISTORY_MIN_MS <= schema.history_ms <= HISTORY_MAX_MS:
        faults.append(
            f"history retention of {schema.history_ms / 1000:g} s; expected 1 minute to 10 years, or 0 for the default "
            "of 15 minutes"
        )
    return faults


def column_faults(column: Column, *, is_key: bool) -> list[str]:
    """All faults of a column by itself, as messages; empty if there are none."""
    return [said for _, said in column_faults_by_field(column, is_key=is_key)]


def column_faults_by_field(column: Column, *, is_key: bool) -> list[tuple[str, str]]:
    """All faults of a column by itself: (the field that is wrong, message)."""
    faults: list[tuple[str, str]] = []
    where = f"column {column.name}"
    if not _NAME.match(column.name):
        said = f"column name {column.name!r}: expected a letter or _, then letters, digits, _, at most 128"
        faults.append(("name", said))
    elif column.name.lower().startswith(_RESERVED_PREFIX):
        faults.append(("name", f"{where}: names that begin with {_RESERVED_PREFIX} are reserved for Stele"))
    try:
        arrow_type(column.type)
    except Rejected as exc:
        faults.append(("type", f"{where}: {exc.args[0]}"))
    else:
        faults += [("default", said) for said in _default_faults(column)]
    if is_key:
        if column.nullable:
            faults.append(("nullable", f"{where}: a key column cannot be nullable"))
        if column.type in _NO_KEY_TYPES:
            said = f"{where}: {column.a_type} cannot be a key column; use an integer or a decimal"
            faults.append(("type", said))
    return faults


def _default_faults(column: Column) -> list[str]:
    given = ((column.default, column.default_scalar), (column.read_default, column.read_scalar))
    try:
        nulls = [text for text, scalar in given if text is not None and not scalar().is_valid]
    except Rejected as exc:
        return [str(exc.args[0])]
    if nulls and not column.nullable:
        return [f"column {column.name}: its default is null, but the column is not nullable"]
    return []
