"""`stele table load`: files into a table."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stele.cli.options import masters_option, timeout_option, with_client
from stele.cli.output import say

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.progress import TaskID

    from stele.client import AsyncClient, AsyncTable
    from stele.model.block import RowError
    from stele.model.schema import Schema

_ERRORS_SHOWN = 20
_SUFFIXES = (".csv", ".parquet", ".arrow", ".arrows", ".feather", ".ipc")
_ARROW_FILE = b"ARROW1"
"""An Arrow file begins with it, a stream never."""


@click.command()
@click.argument("name")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--op", type=click.Choice(("upsert", "insert", "insert_ignore")), default="upsert", show_default=True
)
@click.option(
    "--null",
    "nulls",
    multiple=True,
    default=("", "NA"),
    show_default=True,
    help="What null is in CSV; in columns of text only where it stands without quotes.",
)
@masters_option
@timeout_option
def load(
    name: str, files: tuple[str, ...], op: str, nulls: tuple[str, ...], masters: str, timeout_s: float
) -> None:
    """Write CSV, Parquet or Arrow files (by their suffix) into a table; columns are found by name.

    A row with a bad value is told with its line, the others are written; then the exit code is 2.

    \b
    Examples:
      stele table load flights flights.parquet
      stele table load users users.csv --op insert
    """
    from stele.cli.progress import rows_progress

    _check_suffixes(files)
    started = time.monotonic()
    faults = Faults()
    written = 0
    opened = False

    async def work(client: AsyncClient) -> None:
        nonlocal opened
        table = await client.open_table(name)
        opened = True
        for path in files:
            await write(
                table,
                Source(path, table.schema, nulls),
                progress.add_task(Path(path).name, total=_rows(path)),
            )

    async def write(table: AsyncTable, source: Source, task: TaskID) -> None:
        def acknowledged(rows: int) -> None:
            nonlocal written
            written += rows
            progress.advance(task, rows)

        refused: Sequence[RowError] = ()
        try:
            result = await table.write_arrow(
                source.batches(), op, timeout_s=timeout_s, on_rows=acknowledged, raise_row_errors=False
            )
            refused = result.row_errors
        finally:  # a file that breaks off has bad lines before that
            faults.add(source, refused)

    try:
        with rows_progress() as progress:
            with_client(masters, work, timeout_s)
    finally:  # also of what was written before a file could not be read, or no leader be found
        if opened:  # else nothing was tried
            seconds = time.monotonic() - started
            say(f"{written} rows written in {seconds:.1f} s ({written / seconds:,.0f} rows/s)")
        faults.tell()
    faults.refuse(written)


class Faults:
    """Why rows were not written, file by file."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self._count = 0

    def add(self, source: Source, row_errors: Sequence[RowError]) -> None:
        """What became of one file."""
        from stele.model.errors import Code

        refused = [(source.place(e.row), f"{e.code.name} {e.message}") for e in row_errors]
        refused += [(line, f"{Code.INVALID_ARGUMENT} {why}") for line, why in source.lines.errors]
        shown = sorted(refused)[: _ERRORS_SHOWN - len(self._told)]
        unread = {line for line, _ in source.lines.errors}
        found = source.lines_of_file({place for place, _ in shown})
        for place, why in shown:
            first, last = found[place]
            hint = f" (lines {first} to {last} are one row by their quotes: is one not closed?)"
            also = hint if last > first and place in unread else ""
            self._told.append(f"{Path(source.path).name} {source.unit} {first}: {why}{also}")
        self._count += len(refused)

    def tell(self) -> None:
        """One line for each of the first rows."""
        for line in self._told:
            say(line, err=True)
        if self._count > len(self._told):
            say(f"... and {self._count - len(self._told)} more", err=True)

    def refuse(self, written: int) -> None:
        """Raises Rejected if there was one; with their number."""
        from stele.model.errors import Rejected

        if not self._count:
            return
        raise Rejected(f"{self._count} of {written + self._count} rows were refused, the others are written")


class Source:
    """A file of rows."""

    def __init__(self, path: str, schema: Schema, nulls: Sequence[str]) -> None:
        from stele.cli.csv_rows import Lines

        self.path = path
        self.lines = Lines()
        self._csv = path.endswith(".csv")
        self.unit = "line" if self._csv else "row"
        self._schema = schema
        self._nulls = nulls

    def place(self, row: int) -> int:
        """Where a row stands, by its position among those given out: its line of CSV, its number from 1 elsewhere."""
        return self.lines.line_of(row) if self._csv else row + 1

    def lines_of_file(self, places: Collection[int]) -> dict[int, tuple[int, int]]:
        """(first, last) line of the file for each place in CSV; elsewhere a place is what it is."""
        from stele.cli.csv_rows import lines_of_file

        return lines_of_file(self.path, places) if self._csv else {place: (place, place) for place in places}

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Record batches of the file.

        Raises:
            Rejected: a file that is not what its suffix says.
        """
        import pyarrow as pa

        from stele.cli.csv_rows import read_csv
        from stele.model.errors import Rejected

        try:
            if self._csv:
                yield from read_csv(self.path, self._schema, self._nulls, self.lines)
            else:
                yield from _batches(self.path)
        except (pa.ArrowException, OSError) as exc:
            raise Rejected(f"{self.path}: {str(exc).splitlines()[0]}") from exc


def _check_suffixes(paths: Sequence[str]) -> None:
    """Before anything is written, or anybody asked.

    Raises:
        Rejected: a suffix that is not known.
    """
    from stele.model.errors import Rejected

    for path in paths:
        if Path(path).suffix not in _SUFFIXES:
            raise Rejected(f"{path}: expected .csv, .parquet, or .arrow (a file or a stream)")


def _rows(path: str) -> int | None:
    """How many rows a file has, where it says so.

    Raises:
        Rejected: a file that is not what its suffix says.
    """
    if not path.endswith(".parquet"):
        return None
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from stele.model.errors import Rejected

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as exc:
        raise Rejected(f"{path}: {str(exc).splitlines()[0]}") from exc


def _batches(path: str) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    if path.endswith(".parquet"):
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(65_536)
    else:
        with pa.memory_map(path) as source:
            yield from _arrow_batches(source)


def _arrow_batches(source: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """Of an Arrow file or stream: `table scan` writes a stream, other programs files, both under any of the suffixes."""
    import pyarrow as pa

    from stele.model.foreign import ensure_safe

    is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    try:
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    except pa.ArrowException as exc:
        raise pa.ArrowInvalid(f"neither an Arrow file nor an Arrow stream ({exc})") from exc
    batches = (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        ensure_safe(batch)  # values that are none of their columns are refused by their rows
        yield batch
