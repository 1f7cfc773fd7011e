"""`python -m bench.files [--only DATA,...] [--rounds 3]`: measures what column files take on disk, and what
writing and reading them costs.

Each kind of rows is written as one tablet's file in format 1, in format 2 as a flush does, and as a merge does. These take
turns, in this process, without a cluster. The figures are processor time. Other work on the machine changes it less than
elapsed time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml

from bench import rows
from stele.model import keys
from stele.model.hashing import hash_bytes
from stele.model.partition import HashPartition, PartitionSchema, assign
from stele.model.schema import Schema
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import PART_KEYS
from stele.tablet.colwriter import Format, write_column_file
from stele.tablet.files import FILES
from stele.tablet.sorted_runs import Run

WAYS = {"format 1": Format(1), "flushed": Format(2), "merged": Format(2, compress=True)}
_TABLETS = 8
_ROWS = 320_000
_ENTRY_ROWS = 4_096
_GETS = 200
_AGAIN = 2
_ROOT = Path(__file__).parents[1]
_WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "order",
    "customer",
    "price",
    "status",
    "shipped",
    "pending",
    "city",
    "London",
    "Paris",
    "Rome",
]


@dataclass(frozen=True)
class Data:
    """Rows of one tablet, in key order. `narrow`: the names of two columns of few bytes."""

    schema: Schema
    run: Run
    narrow: tuple[str, str]


def flights() -> Data:
    """The flights of the tutorial."""
    sys.path.insert(0, str(_ROOT))
    from examples.demo.flights import load

    spec = yaml.safe_load((_ROOT / "examples" / "flights.yaml").read_text())["spec"]
    columns = [(c["name"], c["type"], c.get("nullable", False)) for c in spec["columns"]]
    schema = Schema.make(columns, spec["primaryKey"])
    table = load(schema.to_arrow())
    ids = tuple(int(schema.by_name[name].id) for name in spec["primaryKey"])
    return _one_tablet(schema, table, HashPartition(ids, _TABLETS), ("dep_delay", "carrier"))


def own() -> Data:
    """The rows of `python -m bench`."""
    table = pa.Table.from_batches(rows.batches(_ROWS, 65_536))
    return _one_tablet(rows.SCHEMA, table, HashPartition((0,), _TABLETS), ("amount", "kind"))


def binary() -> Data:
    """An id, and 100 random bytes."""
    chosen = np.random.default_rng(1)
    schema = Schema.make([("id", "int64"), ("blob", "binary")], ["id"])
    values = [chosen.bytes(100) for _ in range(_ROWS // _TABLETS)]
    return _numbered(schema, pa.array(values, pa.binary()), ("id", "blob"))


def text() -> Data:
    """An id, and text of few words."""
    chosen = np.random.default_rng(1)
    schema = Schema.make([("id", "int64"), ("doc", "string")], ["id"])
    words = [[_WORDS[i] for i in chosen.integers(0, len(_WORDS), 12)] for _ in range(_ROWS // _TABLETS)]
    values = ['{"' + '","'.join(each) + f'":{chosen.integers(0, 10**6)}}}' for each in words]
    return _numbered(schema, pa.array(values), ("id", "doc"))


DATA: dict[str, Callable[[], Data]] = {"flights": flights, "bench": own, "binary": binary, "text": text}


def _numbered(schema: Schema, values: pa.Array, narrow: tuple[str, str]) -> Data:
    batch = pa.RecordBatch.from_arrays([pa.array(np.arange(len(values))), values], schema=schema.to_arrow())
    return _sorted(schema, batch, narrow)


def _one_tablet(schema: Schema, table: pa.Table, hashed: HashPartition, narrow: tuple[str, str]) -> Data:
    """Return the rows of `table` that belong to the first tablet."""
    (batch,) = table.combine_chunks().to_batches()
    mine = assign(batch, schema, PartitionSchema((hashed,))) == 0
    return _sorted(schema, batch.filter(pa.array(mine)), narrow)


def _sorted(schema: Schema, batch: pa.RecordBatch, narrow: tuple[str, str]) -> Data:
    encoded = keys.encode_keys(batch, schema)
    order = pa.array(keys.sort_order(encoded))
    entries = np.arange(batch.num_rows, dtype=np.uint64) // np.uint64(_ENTRY_ROWS)
    times = np.random.default_rng(2).permutation(entries * np.uint64(1 << 12) + np.uint64(1 << 60))
    return Data(schema, Run(batch.take(order), encoded.take(order), times, None), narrow)


class Measured:
    """The result for one kind of rows in one format. `share`: bytes on disk for each byte of rows.
    `lowest_s`: the lowest processor time of each step."""

    def __init__(self, data: Data, wanted: Format, path: Path) -> None:
        self._data, self._wanted, self._path = data, wanted, path
        chosen = np.random.default_rng(3).integers(0, data.run.rows, _GETS)
        self._asked: list[bytes] = data.run.keys.take(pa.array(chosen)).to_pylist()
        self.share = 0.0
        self.lowest_s: dict[str, float] = {}

    def once(self) -> None:
        """Write the file, and read it in each way."""
        count, names = self._data.run.rows, [c.name for c in self._data.schema.columns]
        self._timed("write", count, self._write)
        file = ColumnFile(self._path)
        file.verify()
        self.share = file.size / self._data.run.batch.nbytes
        self._timed("scan", count, lambda: self._scan(file, names))
        self._timed("two columns", count, lambda: self._scan(file, self._data.narrow))
        self._timed("get", _GETS, lambda: self._get(file, let_go=False))
        self._timed("first get", _GETS, lambda: self._get(file, let_go=True))

    def _timed(self, what: str, count: int, do: Callable[[], None]) -> None:
        for _ in range(_AGAIN):
            began = time.process_time()
            do()
            took = (time.process_time() - began) / count
            self.lowest_s[what] = min(took, self.lowest_s.get(what, took))

    def _write(self) -> None:
        write_column_file(FILES, self._path, self._data.schema, iter([self._data.run]), self._wanted)

    def _scan(self, file: ColumnFile, names: Sequence[str]) -> None:
        columns = tuple(self._data.schema.by_name[name] for name in names)
        arrow = self._data.schema.to_arrow(tuple(int(c.id) for c in columns))
        for group in range(len(file.groups)):
            file.batch(group, columns, arrow)

    def _get(self, file: ColumnFile, *, let_go: bool) -> None:
        """Get all columns of some rows. `let_go`: forget what each get has decoded, so that every get decodes
        anew."""
        schema, arrow = self._data.schema, self._data.schema.to_arrow()
        for key in self._asked:
            found = file.find_one(key, hash_bytes(key))
            assert found is not None
            file.row(*found, schema.columns, arrow)
            if let_go:
                for part in (PART_KEYS, *schema.column_ids):
                    file.let_go((part, found[0]))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.files", description=__doc__)
    parser.add_argument("--only", default=",".join(DATA), help=f"of {', '.join(DATA)}")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    pa.set_cpu_count(1)
    lines = [["rows", "way", "disk to raw", "write", "scan", "two columns", "get", "first get"]]
    for name in given.only.split(","):
        data = DATA[name]()
        with tempfile.TemporaryDirectory(prefix="stele-bench-") as folder:
            ways = {
                way: Measured(data, wanted, Path(folder) / "rows-00000001") for way, wanted in WAYS.items()
            }
            for _ in range(given.rounds):
                for each in ways.values():
                    each.once()
        for way, each in ways.items():
            a_row = [f"{each.lowest_s[what] * 1e9:.1f} ns" for what in ("write", "scan", "two columns")]
            a_get = [f"{each.lowest_s[what] * 1e6:.0f} us" for what in ("get", "first get")]
            lines.append([name, way, f"{each.share:.2f}", *a_row, *a_get])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())


if __name__ == "__main__":
    main()
