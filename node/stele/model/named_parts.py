"""Partitionings whose columns are given by name, made into ones by column id. Used where a table is created; servers and files
know ids only.

Invariant: what `with_ids` returns names no column by name, and means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stele.model.column import Column, shown
from stele.model.errors import Rejected
from stele.model.keys import encode_tuple
from stele.model.nearest import meant
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema


def with_ids(partitioning: PartitionSchema, schema: Schema) -> PartitionSchema:
    """The partitioning of a table of `schema`, with column ids for names and split keys for the values of `split_at`.

    Raises:
        Rejected: with every fault of the names and values.
    """
    faults: list[str] = []
    hashes = tuple(_hash(part, schema, faults) for part in partitioning.hash)
    range_ = None if partitioning.range is None else _range(partitioning.range, schema, faults)
    if faults:
        raise Rejected("; ".join(faults))
    return PartitionSchema(hashes, range_)


def _hash(part: HashPartition, schema: Schema, faults: list[str]) -> HashPartition:
    columns = _columns("hash", part, schema, faults)
    if columns is None:
        return part
    return replace(part, columns=(), column_ids=tuple(int(column.id) for column in columns))


def _range(part: RangePartition, schema: Schema, faults: list[str]) -> RangePartition:
    columns = _columns("range", part, schema, faults)
    if columns is None and not faults:
        columns = [schema.by_id[i] for i in part.column_ids if i in schema.by_id]
    if columns is None or not part.split_at:
        ids = part.column_ids if columns is None else tuple(int(column.id) for column in columns)
        return replace(part, columns=(), column_ids=ids)
    if part.split_keys:
        faults.append("range: split_at and split_keys are both given; give one of them")
        return part
    if isinstance(part.split_at, (str, bytes)) or not hasattr(part.split_at, "__iter__"):
        faults.append(f"range: split_at {shown(part.split_at)}: expected a list of values, like [1000, 2000]")
        return part
    keys = tuple(_split_key(value, columns, faults) for value in part.split_at)
    ids = tuple(int(column.id) for column in columns)
    return RangePartition(ids, keys)


def _columns(
    kind: str, part: HashPartition | RangePartition, schema: Schema, faults: list[str]
) -> list[Column] | None:
    """The columns that a part names; None if it names none, or with a fault."""
    names: Any = part.columns
    if isinstance(names, (tuple, list)) and not names:
        return None
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        faults.append(f"{kind}: columns {shown(names)}: expected a list of names, like [{_example(schema)}]")
        return None
    if part.column_ids:
        faults.append(f"{kind}: columns and column_ids are both given; give one of them")
        return None
    unknown = [name for name in names if name not in schema.by_name]
    faults.extend(
        f"{kind}: no column {shown(name)}{meant(name, schema.by_name) or f'; expected some of {list(schema.by_name)}'}"
        for name in unknown
    )
    return None if unknown else [schema.by_name[name] for name in names]


def _example(schema: Schema) -> str:
    return repr(schema.key_columns[0].name)


def _split_key(value: Any, columns: Sequence[Column], faults: list[str]) -> bytes:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) != len(columns):
        names = ", ".join(column.name for column in columns)
        faults.append(f"range: split at {shown(value)}: expected a value for each of {names}")
        return b""
    found = []
    for column, each in zip(columns, values):
        why = "it is None" if each is None else column.fault(each)
        if why:
            faults.append(f"range: split at {shown(value)}: {why}")
            return b""
        found.append(column.array([each])[0].as_py())
    return encode_tuple(found, [column.arrow for column in columns])
