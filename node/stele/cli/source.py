"""The inputs of `table load`: CSV, Parquet and Arrow files, gzip and standard input.

Writes only temporary copies of inputs that cannot be read twice. Invariant: each row has a place by which it
can be found again: its line in CSV, its number in other formats.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from stele.cli.csv_rows import CsvFormat, Lines, Span, read_csv, schema_of_csv, spans
from stele.model.errors import Rejected

if TYPE_CHECKING:
    import pyarrow as pa

    from stele.model.schema import Schema

STANDARD_INPUT = "-"
FORMATS = ("csv", "parquet", "arrow")
_SUFFIXES = {
    ".csv": "csv",
    ".csv.gz": "csv",
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow"),
}
_GZIP = b"\x1f\x8b"
"""The first bytes of gzip. No CSV of UTF-8 begins with them."""
_ARROW_FILE = b"ARROW1"
"""The first bytes of an Arrow file. An Arrow stream never begins with them."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file to read, or standard input. `name`: for messages; `path`: of the file, "" for standard input."""

    name: str
    path: str
    form: str

    @staticmethod
    def of(path: str, form: str = "") -> Input:
        """An input of format `form`, which defaults to the one of the suffix, or to CSV for standard input.

        Raises:
            Rejected: the suffix is unknown, or there is no such file.
        """
        if path == STANDARD_INPUT:
            return Input("standard input", "", form or "csv")
        found = form or next((f for suffix, f in _SUFFIXES.items() if path.endswith(suffix)), "")
        if not found:
            raise Rejected(
                f"{path}: expected .csv, .csv.gz, .parquet, or .arrow (a file or a stream); or give --format"
            )
        if not os.path.isfile(path) and not os.path.exists(path):
            raise Rejected(f"{path}: no such file")
        return Input(path, path, found)

    @property
    def packed(self) -> bool:
        """Whether it is gzip."""
        return self.path.endswith(".gz")

    @contextmanager
    def stream(self) -> Iterator[Any]:
        """The CSV text as a path or file for Arrow."""
        if not self.path:
            yield sys.stdin.buffer
        elif self.packed:
            with gzip.open(self.path, "rb") as file:
                yield file
        else:
            yield self.path

    @contextmanager
    def plain(self) -> Iterator[str]:
        """Return the path of a file with the plain text, or "" if the input cannot be read again. The text of
        a broken gzip file ends at the break."""
        if not self.packed:
            yield self.path if os.path.isfile(self.path) else ""
            return
        with self.stream() as file, _copied(file) as path:
            yield path


@contextmanager
def opened(paths: Sequence[str], form: str, *, again: bool) -> Iterator[list[Input]]:
    """The inputs. Standard input is copied to a file first if it is read more than once (`again`) or is not
    CSV. The other formats are not read from front to back.

    Raises:
        Rejected: an unknown suffix, no such file, standard input given twice, or gzip on standard input.
    """
    if paths.count(STANDARD_INPUT) > 1:
        raise Rejected("standard input (-) is named twice; name it once")
    if STANDARD_INPUT in paths and _begins_as_gzip(sys.stdin.buffer):
        raise Rejected("standard input is gzip; unpack it first: zcat FILE | stele table load TABLE -")
    inputs = [Input.of(path, form) for path in paths]
    with ExitStack() as stack:
        for n, each in enumerate(inputs):
            if not each.path and (again or each.form != "csv"):
                copy = stack.enter_context(_copied(sys.stdin.buffer))
                inputs[n] = Input(each.name, copy, each.form)
        yield inputs


def _begins_as_gzip(file: BinaryIO) -> bool:
    """Whether a stream begins as gzip does. Consumes no bytes. False for a stream that cannot be peeked into."""
    return isinstance(file, io.BufferedReader) and file.peek(2).startswith(_GZIP)


@contextmanager
def _copied(file: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="stele-load-") as copy:
        with suppress(EOFError, gzip.BadGzipFile, zlib.error):  # reading the rows reports it
            shutil.copyfileobj(file, copy, 64 << 10)
        copy.flush()
        yield copy.name


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turns Arrow's errors within the block into one line that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError, zlib.error) as exc:
        raise Rejected(f"{name}: {(str(exc).splitlines() or [type(exc).__name__])[0]}") from exc


def columns_of(source: Input, form: CsvFormat) -> pa.Schema:
    """The Arrow schema of a file; for CSV, an inferred one.

    Raises:
        Rejected: the content is not what the suffix says.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with _naming(source.name):
        if source.form == "csv":
            with source.plain() as path:
                return schema_of_csv(path, form)
        if source.form == "parquet":
            return parquet.read_schema(source.path)
        with pa.memory_map(source.path) as file:
            return _arrow_reader(file)[0].schema


def rows_of(source: Input) -> int | None:
    """The number of rows of a file, or None if the format does not record it.

    Raises:
        Rejected: the content is not what the suffix says.
    """
    if source.form != "parquet":
        return None
    import pyarrow.parquet as parquet

    with _naming(source.name):
        return int(parquet.read_metadata(source.path).num_rows)


class Source:
    """The rows of one input for a table."""

    def __init__(self, source: Input, schema: Schema, form: CsvFormat) -> None:
        self.input = source
        self.lines = Lines()
        self._csv = source.form == "csv"
        self.unit = "line" if self._csv else "row"
        self._schema = schema
        self._form = form

    def place(self, row: int) -> int:
        """The place of a row, given its position among those yielded: its CSV line, or its number from 1."""
        return self.lines.line_of(row) if self._csv else row + 1

    def spans(self, places: Collection[int]) -> dict[int, Span]:
        """Return the lines of the file for each place of CSV; for other inputs the place itself."""
        if self._csv:
            with self.input.plain() as path:
                if path:
                    return spans(path, places, self._form)
        return {place: Span(place, place, 0, 0) for place in places}

    def rows(self, places: Collection[int]) -> dict[int, Any]:
        """Return the content at each place: the text of a CSV line, or the values by column."""
        if not self._csv:
            return self._values(places)
        with self.input.plain() as path:
            found = spans(path, places, self._form)
            with open(path, "rb") as file:
                texts = {}
                for place in sorted(found):
                    file.seek(found[place].start)
                    raw = file.read(found[place].end - found[place].start)
                    texts[place] = raw.decode("utf-8", "backslashreplace")
                return texts

    def _values(self, places: Collection[int]) -> dict[int, Any]:
        from stele.model.json_values import json_value
        from stele.model.rows import python_rows

        found, before, wanted = {}, 0, sorted(places)
        for batch in self.batches():
            here = [p for p in wanted if before < p <= before + batch.num_rows]
            for place in here:
                (row,) = python_rows(batch.slice(place - 1 - before, 1))
                found[place] = {name: json_value(value) for name, value in row.items()}
            before += batch.num_rows
        return found

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Record batches of the input.

        Raises:
            Rejected: the content is not what the suffix says.
        """
        with _naming(self.input.name):
            if self._csv:
                with self.input.stream() as stream:
                    yield from read_csv(stream, self.input.name, self._schema, self._form, self.lines)
            else:
                yield from _batches(self.input)


def _batches(source: Input) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    if source.form == "parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(source.path) as file:
            yield from file.iter_batches(65_536)
    else:
        with pa.memory_map(source.path) as mapped:
            yield from _arrow_batches(mapped)


def _arrow_batches(source: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    from stele.model.foreign import ensure_safe

    reader, is_file = _arrow_reader(source)
    batches = (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        ensure_safe(batch)  # values that do not fit their column are refused row by row later
        yield batch


def _arrow_reader(source: pa.MemoryMappedFile) -> tuple[Any, bool]:
    """A reader, and whether it reads a stream. `table scan` writes Arrow streams, other programs write
    Arrow files."""
    import pyarrow as pa

    is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    try:
        return (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)), is_file
    except pa.ArrowException as exc:
        raise pa.ArrowInvalid(f"neither an Arrow file nor an Arrow stream ({exc})") from exc
