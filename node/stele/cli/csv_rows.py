"""CSV files to record batches, value by value. Called by load.py.

Values are read as bytes and cast by column; where a column does not cast, its bad values are found by halving. Invariant:
a bad value or a line with too few or too many values costs its own row, and every such row is told with its line. What
`table scan --format csv` wrote is read as it was: text in quotes is never null, and null is written without any.
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

from stele.model.column import Column
from stele.model.errors import Rejected
from stele.model.schema import Schema

_VALUE_BYTES_MAX = 32 << 20
"""Arrow reads no line that is longer than a block. A row has 8 MiB at most, and quotes are written twice."""
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
    """Which line of the file a row came from, and which lines hold none. Lines count from 1, the header's.

    A line here is one to CSV: in quotes it may be several of the file (`spans`).
    """

    errors: list[tuple[int, str]] = field(default_factory=list)
    """(line, why) of the lines that became no row."""
    _unread: list[int] = field(default_factory=list)
    """Lines with a wrong number of values, ascending."""
    _dropped: list[int] = field(default_factory=list)
    """Rows, counted over those read, that were blank or held a bad value, ascending."""
    _rows_read: int = 0

    def line_of(self, position: int) -> int:
        """The line of a row, by its position among the rows that were given out."""
        return self._line_of_read(_nth_absent(self._dropped, position))

    def take(self, rows: int, faults: dict[int, str], blank: Sequence[int]) -> None:
        """`rows` more were read; those with faults and those without any value are not given out."""
        for row in sorted({*faults, *blank}):
            self._dropped.append(self._rows_read + row)
            if row in faults:
                self.errors.append((self._line_of_read(self._rows_read + row), faults[row]))
        self._rows_read += rows

    def skip(self, row: pa_csv.InvalidRow) -> str:
        """Called by Arrow for a line with a wrong number of values."""
        self._unread.append(row.number)
        self.errors.append((row.number, f"{row.actual_columns} values; expected {row.expected_columns}"))
        return "skip"

    def _line_of_read(self, row: int) -> int:
        return _nth_absent(self._unread, row + 2)


@dataclass(frozen=True, slots=True)
class Form:
    """How a file of CSV is written. `nulls`: what null is; `delimiter`: one character."""

    nulls: Sequence[str] = ("", "NA")
    delimiter: str = ","

    def parsing(self, lines: Lines) -> pa_csv.ParseOptions:
        """What Arrow is told; lines with a wrong number of values go to `lines`."""
        return pa_csv.ParseOptions(
            delimiter=self.delimiter,
            ignore_empty_lines=False,
            newlines_in_values=True,
            invalid_row_handler=lines.skip,
        )

    def converting(self, types: dict[str, pa.DataType]) -> pa_csv.ConvertOptions:
        """What Arrow is told; columns that `types` does not name are of the type that their values look like."""
        return pa_csv.ConvertOptions(
            column_types=types,
            null_values=list(self.nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )


def read_csv(source: Any, name: str, schema: Schema, form: Form, lines: Lines) -> Iterator[pa.RecordBatch]:
    """The good rows of CSV with a header; `lines` gets to know the others. A line without any value is no row. `source`: a path or
    a file; `name`: what messages call it.

    Raises:
        pa.ArrowInvalid: no CSV at all.
        Rejected: the first line names other columns than the table's, as where it is no header; or a line that is not
            UTF-8 has a wrong number of values.
    """
    with _undecoded_lines_refused(name):
        reader = pa_csv.open_csv(
            source,
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
    """Arrow hands a line with a wrong number of values to `Lines.skip` as text. Where the line is not UTF-8, Arrow does not
    reach `skip`: it gives the error to `sys.unraisablehook`, which would print a traceback, and stops reading."""
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


def spans(path: str, wanted: Collection[int], form: Form) -> dict[int, Span]:
    """Where each of the lines of CSV stands in a file: a value in quotes may hold ends of lines. Reads it up to the last of them.
    A line that is not there is at its own number."""
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
        else:  # the last row has no end
            if row in found:
                found[row] = Span(first, last, start, len(text))
    return found


def _quoted_or_end(delimiter: str) -> re.Pattern[bytes]:
    sign = re.escape(delimiter.encode())
    begins = rb'(?<=[%b\r\n]")|(?<=\A")|(?<=\A\xef\xbb\xbf")' % sign  # a quote elsewhere is text
    return re.compile(rb'"(?:%b)(?:[^"]++|"")*+"?|\r\n?|\n' % begins)


def schema_of_csv(path: str, form: Form) -> pa.Schema:
    """What the columns of a file look like, by its first _LOOK_BYTES. Numbers with leading zeros are text, as zip codes are, and so is
    what has no type of ours.

    Raises:
        pa.ArrowInvalid: no CSV at all.
        Rejected: a line that is not UTF-8 has a wrong number of values.
    """
    with _undecoded_lines_refused(path):
        with pa_csv.open_csv(
            path, _reading(_LOOK_BYTES), form.parsing(Lines()), form.converting({})
        ) as looked:
            guessed = looked.schema
        integers = [field.name for field in guessed if pa.types.is_integer(field.type)]
        texts = form.converting(dict.fromkeys(guessed.names, pa.binary()))
        with pa_csv.open_csv(path, _reading(_LOOK_BYTES), form.parsing(Lines()), texts) as reader:
            first = next(iter(reader), None)
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


def _is_no_column(type_: pa.DataType) -> bool:
    return bool(pa.types.is_null(type_) or pa.types.is_time(type_) or pa.types.is_duration(type_))


def _check_header(path: str, reader: pa_csv.CSVStreamingReader, schema: Schema) -> None:
    try:
        unknown = [name for name in reader.schema.names if name not in schema.by_name]
    except UnicodeDecodeError as exc:
        raise Rejected(f"{path}: line 1, which is the header, is not UTF-8") from exc
    if twice := [name for name, count in Counter(reader.schema.names).items() if count > 1]:
        raise Rejected(
            f"{path}: column{'s' if len(twice) > 1 else ''} {', '.join(map(repr, twice))} "
            f"stand{'' if len(twice) > 1 else 's'} twice in line 1, which is the header"
        )
    if unknown:
        raise Rejected(
            f"{path}: the table has no column{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))} of line 1, "
            f"which is the header; expected {', '.join(schema.by_name)}"
        )


def _convert(batch: pa.RecordBatch, schema: Schema, nulls: pa.Array, lines: Lines) -> pa.RecordBatch:
    faults: dict[int, str] = {}
    empty = pa.array([True] * batch.num_rows)
    arrays = []
    for name, values in zip(batch.schema.names, batch.columns):
        empty = pc.and_(empty, pc.is_null(values))
        column = schema.by_name[name]
        if not _is_text(column):  # programs that quote all values quote null as well
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
    """`values` in the column's type, null where they do not fit. `first`: the row of the first one."""
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
    # Arrow reads times with a zone or times without, never both; of the latter it makes UTC.
    return pc.cast(pc.cast(text, pa.timestamp(arrow.unit)), arrow)


def _moment(text: bytes, arrow: pa.DataType) -> pa.Array | None:
    """The date or time that a number with a sign stands for, in days or microseconds since 1970: those that no date is
    written for. Without a sign it is more likely a date without its hyphens."""
    if not pa.types.is_temporal(arrow) or not _NUMBER.match(text):
        return None
    try:
        return pa.array([int(text)], arrow)
    except (pa.ArrowException, OverflowError):
        return None


def _nth_absent(numbers: Sequence[int], n: int) -> int:
    """The n-th natural number, counted from 0, that is not among `numbers` (ascending)."""
    return n + bisect_right(range(len(numbers)), n, key=lambda i: numbers[i] - i)
