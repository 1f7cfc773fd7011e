"""`python -m bench.predicates [--rows 4000000]`: measures the processor time of scans with a predicate on a
column outside the key.

The rows of `python -m bench` are written as one tablet in four ways: as one file or as eight that overlap, in
format 1 or in format 2. Format 1 has no bounds of groups. Each scan wants 1,000 rows by `amount`, which rises
with the key. The four ways take turns, in this process, without a cluster.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench import rows
from stele.model import keys
from stele.model.ids import OpId
from stele.model.predicate import Predicate, ScanSpec
from stele.tablet.colfile import ColumnFile
from stele.tablet.colwriter import Format, write_column_file
from stele.tablet.files import FILES
from stele.tablet.masks import MASKS, LiveMasks
from stele.tablet.sorted_runs import Run
from stele.tablet.view import View

_WANTED = 1_000
_FILES = 8
_TIME = 1 << 60
_RUN_ROWS = 500_000
_TURNS = 5


def _runs(batches: Sequence[pa.RecordBatch]) -> Iterator[Run]:
    """Yield these rows as runs in key order."""
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    encoded = keys.encode_keys(batch, rows.SCHEMA)
    order = pa.array(keys.sort_order(encoded))
    batch, encoded = batch.take(order), encoded.take(order)
    times = np.full(batch.num_rows, _TIME, np.uint64)
    whole = Run(batch, encoded, times, None)
    for start in range(0, batch.num_rows, _RUN_ROWS):
        yield whole.slice(start, min(_RUN_ROWS, batch.num_rows - start))


class Tablet:
    """Files of one tablet, newest first. `took_s`: the processor time of each scan of them, in seconds."""

    def __init__(self, parts: Sequence[Sequence[pa.RecordBatch]], wanted: Format, home: Path) -> None:
        files = []
        for number, part in enumerate(parts):
            path = home / f"rows-{number:08x}"
            write_column_file(FILES, path, rows.SCHEMA, _runs(part), wanted)
            files.append(ColumnFile(path))
            files[-1].verify()
        self._view = View(rows.SCHEMA, _TIME, [], files, OpId(1, 1), LiveMasks(MASKS), 0)
        self.took_s: list[float] = []

    def scan(self, first: int) -> None:
        """Scan for the wanted rows once, and record the time. The rows begin with id `first`."""
        (amount,) = (int(c.id) for c in rows.SCHEMA.columns if c.name == "amount")
        between = Predicate(amount, ">=", first * 0.5), Predicate(amount, "<", (first + _WANTED) * 0.5)
        began = time.process_time()
        found = sum(batch.num_rows for batch in self._view.scan(ScanSpec(predicates=between)))
        self.took_s.append(time.process_time() - began)
        if found != _WANTED:
            raise SystemExit(f"bench.predicates: {found} rows instead of {_WANTED}")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.predicates", description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    given = parser.parse_args()
    pa.set_cpu_count(1)
    every = rows.batches(given.rows, max(_WANTED, given.rows // 64))
    eighth = -(-len(every) // _FILES)
    several = [every[start : start + eighth] for start in range(0, len(every), eighth)]
    with tempfile.TemporaryDirectory(prefix="stele-bench-") as folder:
        ways: dict[str, tuple[Sequence[Sequence[pa.RecordBatch]], Format]] = {
            "one file of format 1": ([every], Format(1)),
            "one file of format 2": ([every], Format(2, compress=True)),
            "eight of format 1 that overlap": (several, Format(1)),
            "eight of format 2 that overlap": (several, Format(2)),
        }
        tablets = {}
        for way, (parts, wanted) in ways.items():
            home = Path(folder) / str(len(tablets))
            home.mkdir()
            tablets[way] = Tablet(parts, wanted, home)
        for turn in range(2 * _TURNS):  # each place twice
            for tablet in tablets.values():
                tablet.scan((given.rows - _WANTED) * (turn % _TURNS) // _TURNS)
    for way, tablet in tablets.items():
        first, again = tablet.took_s[0] * 1e3, min(tablet.took_s[_TURNS:]) * 1e3
        print(f"{way:32} first {first:7.1f} ms   again {again:7.2f} ms")


if __name__ == "__main__":
    main()
