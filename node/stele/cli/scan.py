"""`stele table scan`: rows to the terminal or a file."""

from __future__ import annotations

import datetime
import json
import sys
import time
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from stele.cli.new_file import check_new, new_file
from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import raw_output, say, show_done, show_json, show_table
from stele.model.amounts import byte_size, plural
from stele.model.json_values import json_value

if TYPE_CHECKING:
    import pyarrow as pa

    from stele.client import AsyncClient
    from stele.client.scan import AsyncScanner

_TABLE_ROWS_MAX = 1_000


@click.command()
@click.argument("name")
@click.option("--columns", default="", metavar="NAME,...", help="Only these columns.")
@click.option(
    "--where",
    default="",
    metavar="CONDITION",
    help="Only rows for which this is true. Give it once; join conditions with AND.",
)
@click.option("--limit", type=click.IntRange(0), default=None, help="At most this many rows.")
@click.option("--ordered", is_flag=True, help="In key order.")
@click.option(
    "--snapshot",
    default="",
    metavar="TIME",
    help="Read as of this hybrid time or ISO 8601 time (UTC unless it has a zone); 0 is now [default: now].",
)
@click.option(
    "--max-staleness",
    type=click.FloatRange(0.0),
    default=None,
    metavar="SECONDS",
    help="Read at followers; the rows may be this many seconds old.",
)
@click.option(
    "--since",
    default="",
    metavar="TIME",
    help="Print what changed after this time, up to the snapshot: the newest change of each row, deletes too.",
)
@click.option("--every", is_flag=True, help="With --since: all changes, oldest first.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("table", "csv", "json", "arrow", "parquet")),
    default=None,
    help="Output format [default: by the suffix of --output, else table].",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False),
    default=None,
    help="Write to a file: .csv, .json, .arrow (a stream) or .parquet. It appears when it is complete.",
)
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--count", "only_count", is_flag=True, help="Print only how many rows there are.")
@masters_option
@timeout_option
@json_option
def scan(
    name: str,
    columns: str,
    where: str,
    limit: int | None,
    ordered: bool,
    snapshot: str,
    max_staleness: float | None,
    since: str,
    every: bool,
    form: str | None,
    output: str | None,
    force: bool,
    only_count: bool,
    masters: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Print rows of a table at one snapshot, or with --since what changed up to it.

    \b
    Examples:
      stele table scan flights --where "carrier = 'UA' AND arr_delay > 120" --columns flight,arr_delay --limit 10
      stele table scan flights -o flights.parquet
      stele table scan flights --count
      stele table scan flights --since "2026-05-01 12:00" -o changes.parquet
    """
    from stele.model.where import parse_where

    if as_json and form not in (None, "json") and not output:
        raise click.UsageError(f"--json and --format {form} exclude each other; give one of them")
    form = form or ("json" if as_json and not output else _form_of(output))
    if output and only_count:
        raise click.UsageError("--count prints a number and cannot be used with --output; give one of them")
    if output and form == "table":
        raise click.UsageError(
            "--output expects .csv, .json, .arrow or .parquet; for another suffix add --format"
        )
    if form == "parquet" and not output:
        raise click.UsageError("Parquet needs a file; add --output")
    if form == "arrow" and not output and not only_count and sys.stdout.isatty():
        raise click.UsageError("Arrow is binary, and standard output is a terminal; add -o FILE, or a pipe")
    if force and not output:
        raise click.UsageError("--force needs --output")
    if output and not force:
        check_new(output, otherwise="--force replaces it")
    if since and (where or limit is not None or ordered):
        raise click.UsageError("--since prints all changes; leave out --where, --limit and --ordered")
    if max_staleness is not None and (since or snapshot):
        raise click.UsageError("--max-staleness chooses the snapshot; leave out --snapshot and --since")
    if every and not since:
        raise click.UsageError("--every needs --since")
    at, after = _time("--snapshot", snapshot), _time("--since", since)
    names = [column.strip() for column in columns.split(",")] if columns else None
    if twice := next((name for name in names or () if (names or []).count(name) > 1), None):
        raise click.UsageError(f"--columns {columns}: {twice!r} is named twice; name each column once")

    async def work(client: AsyncClient) -> None:
        table = await client.open_table(name)
        if after is None:
            scanner = table.scan(
                names,
                parse_where(where, table.schema) if where else (),
                limit=limit,
                ordered=ordered,
                snapshot=at,
                max_staleness=max_staleness,
                timeout_s=timeout_s,
            )
        else:
            scanner = table.changes(after, at, names, every=every, timeout_s=timeout_s)
        await show(scanner)
        if max_staleness is not None:
            say(f"these are the rows of {scanner.age_s:.1f} s ago", err=True)
        if after is not None:
            say(
                f"these are the changes up to {scanner.snapshot}; for the next ones use it as --since",
                err=True,
            )

    async def show(scanner: AsyncScanner) -> None:
        if only_count:
            rows = await scanner.count()
            show_done(str(rows), as_json, {"rows": rows})
            return
        if form == "table":
            _print_table(await _head(scanner))
            return
        rows, begun = 0, time.monotonic()
        with new_file(output) if output else nullcontext(raw_output()) as sink:
            write = _writer(form, sink, scanner.plan.arrow_schema)
            async with aclosing(scanner.batches()) as batches:
                async for batch in batches:
                    write(batch)
                    rows += batch.num_rows
            write(None)
        if output:
            _tell_written(output, rows, time.monotonic() - begun, scanner.snapshot, as_json)

    with_client(masters, work, timeout_s)


def _tell_written(output: str, rows: int, seconds: float, snapshot: int, as_json: bool) -> None:
    """Print what was written to a file: on standard error for people, because the file may be standard
    output."""
    written = Path(output).stat().st_size if Path(output).is_file() else None  # a pipe has no size
    if as_json:
        done = {"file": output, "rows": rows, "bytes": written, "seconds": round(seconds, 3)}
        show_json({**done, "snapshot": str(snapshot)})
        return
    size = "" if written is None else f", {byte_size(written)}"
    say(f"{plural(rows, 'row')}{size}, in {seconds:.1f} s, written to {output}", err=True)


def _form_of(output: str | None) -> str:
    """The format that a file's suffix names."""
    suffixes = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    arrow = dict.fromkeys((".arrow", ".arrows", ".ipc"), "arrow")
    return (suffixes | arrow).get(Path(output).suffix, "table") if output else "table"


async def _head(scanner: Any) -> list[pa.RecordBatch]:
    found, rows = [], 0
    async with aclosing(scanner.batches()) as batches:
        async for batch in batches:
            found.append(batch.slice(0, _TABLE_ROWS_MAX - rows))
            rows += batch.num_rows
            if rows >= _TABLE_ROWS_MAX:
                say(f"these are the first {_TABLE_ROWS_MAX} rows; --format csv prints all", err=True)
                break
    return found


def _print_table(batches: list[pa.RecordBatch]) -> None:
    if not batches:
        say("no rows")
        return
    from stele.model.rows import python_rows

    rows = [[_cell(value) for value in row.values()] for batch in batches for row in python_rows(batch)]
    show_table(batches[0].schema.names, rows, all_shown_by="--format csv")


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return str(value)


def _writer(form: str, sink: BinaryIO, schema: pa.Schema) -> Any:
    """Return a function that writes a batch. Called with None, it ends the file."""
    from stele.model.rows import python_rows

    if form == "json":

        def write_json(batch: pa.RecordBatch | None) -> None:
            for row in python_rows(batch) if batch is not None else ():
                values = {name: json_value(value) for name, value in row.items()}
                sink.write(json.dumps(values, allow_nan=False).encode() + b"\n")

        return write_json
    makers = {"arrow": _arrow_writer, "parquet": _parquet_writer, "csv": _csv_writer}
    return makers[form](sink, schema)


def _arrow_writer(sink: BinaryIO, schema: pa.Schema) -> Any:
    import pyarrow as pa

    writer = pa.ipc.new_stream(sink, schema)
    return lambda batch: writer.close() if batch is None else writer.write_batch(batch)


def _parquet_writer(sink: BinaryIO, schema: pa.Schema) -> Any:
    from stele.backup.row_files import ParquetRows

    rows = ParquetRows(sink, schema)
    return lambda batch: rows.close() if batch is None else rows.write(batch)


def _csv_writer(sink: BinaryIO, schema: pa.Schema) -> Any:
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    bare = pa_csv.WriteOptions(include_header=False)
    pa_csv.write_csv(_bytes_as_they_are(pa.RecordBatch.from_pylist([], schema)), sink)

    def write(batch: pa.RecordBatch | None) -> None:
        if batch is not None:
            pa_csv.write_csv(_times_as_they_are(_bytes_as_they_are(batch)), sink, bare)

    return write


def _bytes_as_they_are(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with binary columns relabelled as text, because Arrow refuses to write bytes that are
    not UTF-8 to CSV."""
    import pyarrow as pa

    arrays = [
        pa.Array.from_buffers(pa.string(), len(array), array.buffers(), offset=array.offset)
        if pa.types.is_binary(array.type)
        else array
        for array in batch.columns
    ]
    return pa.record_batch(arrays, names=batch.schema.names)


def _times_as_they_are(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with dates and times outside the years 1 to 9999 as signed numbers, in columns of
    text.

    `table load` recognizes them by the sign.
    """
    import pyarrow as pa

    arrays = [_as_text(array) if pa.types.is_temporal(array.type) else array for array in batch.columns]
    return pa.record_batch(arrays, names=batch.schema.names)


def _as_text(array: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = array.view(pa.int32() if pa.types.is_date(array.type) else pa.int64())
    first, last = (
        pa.scalar(day, pa.date32()).cast(array.type) for day in (datetime.date.min, datetime.date.max)
    )
    end = last.value + (1 if pa.types.is_date(array.type) else 86_400_000_000)
    beyond = pc.or_(pc.less(numbers, first.value), pc.greater_equal(numbers, end))
    if not pc.any(beyond).as_py():
        return array
    texts = pc.cast(numbers, pa.string())
    signed = pc.if_else(pc.less(numbers, 0), texts, pc.binary_join_element_wise("+", texts, ""))
    return pc.if_else(beyond, signed, pc.cast(array, pa.string()))


def _time(option: str, text: str) -> int | None:
    from stele.model import texts
    from stele.model.errors import Rejected

    try:
        return texts.snapshot(text) if text else None
    except ValueError as exc:
        raise Rejected(f"{option} {text}: expected a hybrid time or an ISO 8601 time ({exc})") from exc
