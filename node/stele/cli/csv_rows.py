"""CSV files to record batches. Called by load.py.

Values are read as bytes and cast column by column. If a column does not cast, halving finds its bad values.
Invariants: a bad value, or a wrong number of values, costs only its own row, which is reported with its line.
What `table scan --format csv` wrote reads back unchanged: text in quotes is never null, and null has no
quotes.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from stele.cli.csv_quotes import CheckedQuotes
from stele.model.column import Column
from stele.model.errors import Rejected
from stele.model.schema import Schema

_VALUE_BYTES_MAX = 32 << 20
"""Arrow's block size. Arrow cannot read a longer line. A row has at most 8 MiB, and CSV writes each quote twice."""
_LOOK_BYTES = 16 << 20
_VALUE_CHARS_SHOWN = 40
_END = re.compile(rb"\r\n?|\n")
_ARROW_LINE = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_NUMBER = re.compile(rb"[+-][0-9]{1,19}\Z")
_EXPECTED = {
    "timestamp": "; expected ISO 8601 down to microseconds, like 2026-01-31T12:00:00Z; without a zone it is UTC",
    "date": "; expected YYYY-MM-DD",
}


@dataclass(slots=True)
class Lines:
    """Maps rows to lines of CSV, and collects the errors of lines that gave no row. The header is line 1.

    A line of CSV may be several lines of the file, because quoted values may contain line ends (see `spans`).
    """

    errors: list[tuple[int, str]] = field(default_factory=list)
    """(line, reason) of each line that gave no row."""
    _unread: list[int] = field(default_factory=list)
    """Lines with a wrong number of values, ascending."""
    _dropped: list[int] = field(default_factory=list)
    """Rows that were blank or held a bad value, ascending. Counted over all rows that Arrow read."""
    _rows_read: int = 0

    def line_of(self, position: int) -> int:
        """The line of a row, given its position among the rows that `read_csv` yielded."""
        return self._line_of_read(_nth_absent(self._dropped, position))

    def take(self, rows: int, faults: dict[int, str], blank: Sequence[int]) -> None:
        """Record that `rows` more were read, of which those with faults and the blank ones are dropped."""
        for row in sorted({*faults, *blank}):
            self._dropped.append(self._rows_read + row)
            if row in faults:
                self.errors.append((self._line_of_read(self._rows_read + row), faults[row]))
        self._rows_read += rows

    def skip(self, row: pa_csv.InvalidRow) -> str:
        """Record a line with a wrong number of values. Called by Arrow."""
        self._unread.append(row.number)
        self.errors.append((row.number, f"{row.actual_columns} values; expected {row.expected_columns}"))
        return "skip"

    def _line_of_read(self, row: int) -> int:
        return _nth_absent(self._unread, row + 2)


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """The dialect of a CSV file. `nulls`: the spellings of null; `delimiter`: one character."""

    nulls: Sequence[str] = ("", "NA")
    delimiter: str = ","

    def checked(self, source: Any, name: str) -> pa.PythonFile:
        """A file, or the file at a path, for Arrow to read. It is refused if its quotes do not match."""
        file = pa.input_stream(source) if isinstance(source, str) else source
        return pa.PythonFile(CheckedQuotes(file, name, self.delimiter), mode="r")

    def parsing(self, lines: Lines) -> pa_csv.ParseOptions:
        """Arrow's options for parsing; lines with a wrong number of values go to `lines`."""
        return pa_csv.ParseOptions(
            delimiter=self.delimiter,
            ignore_empty_lines=False,
            newlines_in_values=True,
            invalid_row_handler=lines.skip,
        )

    def converting(self, types: dict[str, pa.DataType]) -> pa_csv.ConvertOptions:
        """Arrow's options for converting; the types of columns that `types` does not name are inferred."""
        return pa_csv.ConvertOptions(
            column_types=types,
            null_values=list(self.nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )


def read_csv(
    source: Any, name: str, schema: Schema, form: CsvFormat, lines: Lines
) -> Iterator[pa.RecordBatch]:
    """The good rows of CSV with a header; errors of other lines go to `lines`. Blank lines are skipped.

    `source`: a path or a file; `name`: what messages call it.

    Raises:
        pa.ArrowInvalid: not CSV at all.
        Rejected: the header names columns that the table does not have. Or a line that is not UTF-8 has a
            wrong number of values. Or a quote is not closed, or has text after it.
    """
    with _undecoded_lines_refused(name):
        reader = pa_csv.open_csv(
            form.checked(source, name),
            read_options=_reading(_VALUE_BYTES_MAX),
            parse_options=form.parsing(lines),
            convert_options=form.converting(dict.fromkeys(schema.by_name, pa.binary())),
        )
    _check_header(name, reader, schema)
    spelt = pa.array([word.encode() for word in form.nulls], pa.binary())
    while True:
        with _undecoded_lines_refused(name):
            batch = next(reader, None)
        if batch is None:
            return
        yield _convert(batch, schema, spelt, lines)


@contextmanager
def _undecoded_lines_refused(name: str) -> Iterator[None]:
    """Refuse a line that is not UTF-8 and has a wrong number of values, instead of printing a traceback.

    Arrow gives such lines to `Lines.skip` as text. If it cannot decode one, it stops reading, and gives the error to
    `sys.unraisablehook`."""
    undecoded = False

    def note(raised: Any) -> None:
        nonlocal undecoded
        if isinstance(raised.exc_value, UnicodeDecodeError):
            undecoded = True
        else:
            before(raised)

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield
    except pa.ArrowInvalid as exc:
        if not undecoded:
            raise
        found = _ARROW_LINE.search(str(exc))
        place = f"line {found[1]} has {found[3]} values, expected {found[2]}, and" if found else "a line"
        raise Rejected(f"{name}: {place} is not UTF-8; save the file as UTF-8, or remove the line") from None
    finally:
        sys.unraisablehook = before


def _reading(block_bytes: int) -> pa_csv.ReadOptions:
    return pa_csv.ReadOptions(
        use_threads=False,  # else bad lines come without their number
        block_size=block_bytes,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Where a line of CSV stands: its first and last line of the file, and its bytes."""

    first: int
    last: int
    start: int
    end: int


def spans(path: str, wanted: Collection[int], form: CsvFormat) -> dict[int, Span]:
    """The position in the file of each wanted line of CSV. A quoted value may contain line ends, so the two
    differ.

    Reads the file up to the last wanted line. A line past the end gets its own number.
    """
    found = {line: Span(line, line, 0, 0) for line in wanted}
    if not wanted or not os.path.getsize(path):
        return found
    quoted_or_end = _quoted_or_end(form.delimiter)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        row, first, last, start, rows = 1, 1, 1, 0, max(wanted)
        for token in quoted_or_end.finditer(text):
            if token[0].startswith(b'"'):
                last += len(_END.findall(token[0]))
                continue
            if row in found:
                found[row] = Span(first, last, start, token.start())
            if row == rows:
                break
            row, first, last, start = row + 1, last + 1, last + 1, token.end()
        else:  # the last row has no line end
            if row in found:
                found[row] = Span(first, last, start, len(text))
    return found


def _quoted_or_end(delimiter: str) -> re.Pattern[bytes]:
    sign = re.escape(delimiter.encode())
    begins = rb'(?<=[%b\r\n]")|(?<=\A")|(?<=\A\xef\xbb\xbf")' % sign  # a quote elsewhere is plain text
    return re.compile(rb'"(?:%b)(?:[^"]++|"")*+"?|\r\n?|\n' % begins)


def schema_of_csv(path: str, form: CsvFormat) -> pa.Schema:
    """The column types inferred from the first _LOOK_BYTES of a file.

    Numbers with leading zeros, such as zip codes, become text. So do types that Stele does not have.

    Raises:
        pa.ArrowInvalid: not CSV at all.
        Rejected: text that is not UTF-8; a quote that is not closed, or has text after it.
    """
    with _undecoded_lines_refused(path):
        with pa_csv.open_csv(
            form.checked(path, path), _reading(_LOOK_BYTES), form.parsing(Lines()), form.converting({})
        ) as looked:
            guessed = looked.schema
        integers = [field.name for field in guessed if pa.types.is_integer(field.type)]
        texts = form.converting(dict.fromkeys(guessed.names, pa.binary()))
        with pa_csv.open_csv(
            form.checked(path, path), _reading(_LOOK_BYTES), form.parsing(Lines()), texts
        ) as reader:
            first = next(iter(reader), None)
    for found in guessed:
        if pa.types.is_binary(found.type):  # as Arrow guesses where text is not UTF-8
            _refuse_undecoded(path, found.name, first)
    padded = set()
    for name in integers:
        if first is not None and pc.any(pc.match_substring_regex(first[name], "^[+-]?0[0-9]")).as_py():
            padded.add(name)
    return pa.schema(
        [
            pa.field(f.name, pa.string() if f.name in padded or _is_no_column(f.type) else f.type)
            for f in guessed
        ]
    )


def _refuse_undecoded(path: str, name: str, first: pa.RecordBatch | None) -> None:
    values = [] if first is None else first[name].to_pylist()
    for row, value in enumerate(values):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            shown = value[:_VALUE_CHARS_SHOWN].decode("utf-8", "backslashreplace")
            raise Rejected(
                f'{path}: column {name}: "{shown}", row {row + 1} below the header, is not UTF-8; save the file as UTF-8, '
                "or create the table first with a column of the type binary"
            ) from None


def _is_no_column(type_: pa.DataType) -> bool:
    return bool(pa.types.is_null(type_) or pa.types.is_time(type_) or pa.types.is_duration(type_))


def _check_header(path: str, reader: pa_csv.CSVStreamingReader, schema: Schema) -> None:
    try:
        unknown = [name for name in reader.schema.names if name not in schema.by_name]
    except UnicodeDecodeError as exc:
        raise Rejected(f"{path}: line 1, which is the header, is not UTF-8; save the file as UTF-8") from exc
    if twice := [name for name, count in Counter(reader.schema.names).items() if count > 1]:
        raise Rejected(
            f"{path}: column{'s' if len(twice) > 1 else ''} {', '.join(map(repr, twice))} "
            f"appear{'' if len(twice) > 1 else 's'} twice in line 1, which is the header; give each column its own name"
        )
    if unknown:
        raise Rejected(
            f"{path}: the table has no column{'s' if len(unknown) > 1 else ''} "
            f"{', '.join(map(repr, unknown))} of line 1, which is the header; expected "
            f"{', '.join(schema.by_name)}{_delimiter_hint(reader.schema.names, schema)}"
        )


def _delimiter_hint(header: Sequence[str], schema: Schema) -> str:
    """Name the option to add if the header has the table's columns with another delimiter."""
    for sign, option in ((";", "';'"), ("\t", "tab"), ("|", "'|'"), (",", "','")):
        names = [part for name in header for part in name.split(sign)]
        if len(names) > len(header) and all(name in schema.by_name for name in names):
            return f". Add --delimiter {option}"
    return ""


def _convert(batch: pa.RecordBatch, schema: Schema, nulls: pa.Array, lines: Lines) -> pa.RecordBatch:
    faults: dict[int, str] = {}
    empty = pa.array([True] * batch.num_rows)
    arrays = []
    for name, values in zip(batch.schema.names, batch.columns):
        empty = pc.and_(empty, pc.is_null(values))
        column = schema.by_name[name]
        if not _is_text(column):  # some programs quote every value, null too
            values = pc.if_else(pc.is_in(values, nulls), pa.scalar(None, values.type), values)
        arrays.append(_cast(values, column, 0, faults))
    blank = pc.indices_nonzero(empty).to_pylist()
    lines.take(batch.num_rows, faults, blank)
    converted = pa.record_batch(arrays, names=batch.schema.names)
    if not faults and not blank:
        return converted
    bad = {*faults, *blank}
    return converted.filter(pa.array([row not in bad for row in range(batch.num_rows)]))


def _is_text(column: Column) -> bool:
    return bool(pa.types.is_string(column.arrow) or pa.types.is_binary(column.arrow))


def _cast(values: pa.Array, column: Column, first: int, faults: dict[int, str]) -> pa.Array:
    """Cast `values` to the column's type. Bad values become null and go to `faults`. `first`: the row of the
    first value."""
    arrow = column.arrow
    if pa.types.is_binary(arrow):
        return values
    try:
        text = pc.cast(values, pa.string())
        return text if pa.types.is_string(arrow) else _read(pc.utf8_trim_whitespace(text), arrow)
    except pa.ArrowInvalid:
        pass
    if len(values) == 1:
        if (moment := _moment(values[0].as_py(), arrow)) is not None:
            return moment
        shown = values[0].as_py()[:_VALUE_CHARS_SHOWN].decode("utf-8", "backslashreplace")
        said = "is not UTF-8"
        if not pa.types.is_string(arrow):
            said = f"is not {column.a_type}{_EXPECTED.get(column.type, '')}"
        faults.setdefault(first, f"column {column.name}: {shown!r} {said}")
        return pa.nulls(1, arrow)
    half = len(values) // 2
    return pa.concat_arrays(
        [
            _cast(values.slice(0, half), column, first, faults),
            _cast(values.slice(half), column, first + half, faults),
        ]
    )


def _read(text: pa.Array, arrow: pa.DataType) -> pa.Array:
    try:
        return pc.cast(text, arrow)
    except pa.ArrowInvalid:
        if not pa.types.is_timestamp(arrow):
            raise
    # Arrow casts either times with a zone or times without, never both in one column. Times without one
    # become UTC.
    return pc.cast(pc.cast(text, pa.timestamp(arrow.unit)), arrow)


def _moment(text: bytes, arrow: pa.DataType) -> pa.Array | None:
    """Return the date or time that a signed number means. The number counts days or microseconds since 1970.

    `table scan` writes dates outside the years 1 to 9999 in this form. An unsigned number is more likely a
    date without hyphens.
    """
    if not pa.types.is_temporal(arrow) or not _NUMBER.match(text):
        return None
    try:
        return pa.array([int(text)], arrow)
    except (pa.ArrowException, OverflowError):
        return None


def _nth_absent(numbers: Sequence[int], n: int) -> int:
    """Return the n-th natural number, both counted from 0, that is not among `numbers` (ascending)."""
    return n + bisect_right(range(len(numbers)), n, key=lambda i: numbers[i] - i)
