"""Tables to back up, and how to compare them to the last bit."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

import stele
from stele.backup.folder import Folder
from stele.backup.manifest import Manifest, TableEntry, TabletEntry, new_backup_id
from stele.backup.row_files import RowFile
from stele.backup.unfinished import Done, Unfinished
from stele.model import keys
from stele.model.clock import from_physical_us
from stele.model.ids import new_id
from stele.model.partition import assign
from stele.model.partitioning import by_ids

NUMBERS = stele.Schema.make([("id", "int64"), ("name", "string", True)], key=["id"])
TYPES = [
    ("bool", [True, False]),
    ("int8", [-128, 127]),
    ("int16", [-32_768, 32_767]),
    ("int32", [-(2**31), 2**31 - 1]),
    ("int64", [-(2**63), 2**63 - 1]),
    ("float", [math.nan, -0.0]),
    ("double", [-0.0, math.nan]),
    (
        "decimal(38,10)",
        [decimal.Decimal("-9999999999999999999999999999.9999999999"), decimal.Decimal("1e-10")],
    ),
    ("string", ["", "über\n\x00"]),
    ("binary", [b"", b"\x00\xff"]),
    ("date", [datetime.date(1, 1, 1), 2**31 - 1]),
    ("timestamp", [-(2**63), 2**63 - 1]),
]
"""Column types, each with two values at its ends."""
EVERY_TYPE = stele.Schema.make(
    [("id", "int64"), *((f"c{n}", type_, True) for n, (type_, _) in enumerate(TYPES))], key=["id"]
)


def every_type() -> pa.RecordBatch:
    """Three rows: the low ends, the high ends, nulls."""
    columns = [pa.array([0, 1, 2], pa.int64())]
    columns += [
        column.array([*values, None])
        for column, (_, values) in zip(EVERY_TYPE.columns[1:], TYPES, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=EVERY_TYPE.to_arrow())


def numbered(client: stele.Client, name: str, rows: int, *, buckets: int = 4) -> stele.Table:
    """A table of NUMBERS with ids from 0."""
    parts = stele.hash("id", buckets=buckets) if buckets > 1 else None
    table = client.create_table(name, NUMBERS, parts)
    ids = np.arange(rows)
    table.write_arrow(pa.table({"id": ids, "name": [f"n{i}" for i in ids]}))
    return table


def bits(table: pa.Table) -> list[list[bytes]]:
    """The values of an Arrow table, rows in order, as bytes: NaN equals NaN, and -0.0 is not 0.0."""
    found = []
    for column in table.combine_chunks().columns:
        array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        if pa.types.is_floating(array.type):
            array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
        elif pa.types.is_temporal(array.type):
            array = array.view(pa.int32() if pa.types.is_date(array.type) else pa.int64())
        found.append([repr(value).encode() for value in array.to_pylist()])
    return found


def rows(table: stele.Table) -> list[list[bytes]]:
    """All rows of a table now, in key order, to the last bit."""
    return bits(table.scan(ordered=True).to_table())


def data_files(folder: Path, backup_id: str) -> list[Path]:
    """The Parquet files of a backup."""
    return sorted((folder / backup_id).rglob("*.parquet"))


def made_by_hand(
    folder: Path | Folder,
    name: str = "t",
    *,
    rows: int = 300,
    snapshot: int = 0,
    finished: bool = True,
    run: str = "0000aaaa",
) -> Manifest:
    """A backup of one table with four tablets and two files each, as `create` writes one. Needs no cluster."""
    place = Folder.at(folder)
    partitioning = by_ids([stele.hash("id", buckets=4)], NUMBERS)
    tablets = tuple(TabletEntry(f"{n:032x}", n) for n in range(4))
    entry = TableEntry(name, "f" * 32, f"{name}-ffffffff", NUMBERS, partitioning, 3, tablets)
    at = snapshot or int(from_physical_us(time.time_ns() // 1_000))
    begun = datetime.datetime.now(datetime.UTC)
    plan = Manifest(new_backup_id(at, new_id()), "c" * 32, at, begun, None, "test", (entry,))
    work = Unfinished(place, plan, run)
    work.begin()
    batch = pa.record_batch({"id": pa.array(range(rows)), "name": [f"n{i}" for i in range(rows)]})
    batch = pa.RecordBatch.from_arrays(batch.columns, schema=NUMBERS.to_arrow())
    ordinals = assign(batch, NUMBERS, partitioning)
    done = []
    for tablet in tablets:
        its = batch.filter(pa.array(ordinals == tablet.ordinal))
        there = Done()
        for part in (its.slice(0, 20), its.slice(20)):
            file = RowFile(place, work.file_name(entry, tablet, there.next_number), NUMBERS.to_arrow())
            file.write(part)
            last_key = keys.encode_keys(part.slice(part.num_rows - 1), NUMBERS)[0].as_py()
            there = work.record(tablet, there, file.finish(), last_key, whole=bool(there.files))
        done.append(dataclasses.replace(tablet, files=there.files))
    if not finished:
        return plan
    whole = dataclasses.replace(
        plan, finished=begun, tables=(dataclasses.replace(entry, tablets=tuple(done)),)
    )
    work.publish(whole)
    return whole
