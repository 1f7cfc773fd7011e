"""`stele table load`: files into a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stele.cli.options import masters_option, timeout_option, with_client

if TYPE_CHECKING:
    import pyarrow as pa

    from stele.client import AsyncClient, WriteResult
    from stele.model.schema import Schema

_ERRORS_SHOWN = 10


@click.command()
@click.argument("name")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--op", type=click.Choice(("upsert", "insert", "insert_ignore")), default="upsert", show_default=True
)
@click.option(
    "--null", "nulls", multiple=True, default=("", "NA"), show_default=True, help="What null is in CSV."
)
@masters_option
@timeout_option
def load(
    name: str, files: tuple[str, ...], op: str, nulls: tuple[str, ...], masters: str, timeout_s: float
) -> None:
    """Write CSV, Parquet or Arrow files (by their suffix) into a table; columns are found by name.

    \b
    Examples:
      stele table load flights flights.parquet
      stele table load users users.csv --op insert
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    started = time.monotonic()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )

    async def work(client: AsyncClient) -> list[WriteResult]:
        table = await client.open_table(name)
        results = []
        for path in files:
            total = _rows(path)
            task = progress.add_task(Path(path).name, total=total)
            results.append(
                await table.write_arrow(
                    _batches(path, table.schema, nulls),
                    op,
                    timeout_s=timeout_s,
                    on_rows=lambda rows, task=task: progress.advance(task, rows),  # type: ignore[misc]
                    raise_row_errors=False,
                )
            )
        return results

    with progress:
        results = with_client(masters, work, timeout_s)
    written = sum(result.rows_written for result in results)
    seconds = time.monotonic() - started
    click.echo(f"{written} rows written in {seconds:.1f} s ({written / seconds:,.0f} rows/s)")
    _report(results)


def _report(results: list[WriteResult]) -> None:
    from stele.client import RowErrors, WriteResult

    errors = [error for result in results for error in result.row_errors]
    for error in errors[:_ERRORS_SHOWN]:
        click.echo(f"row {error.row}: {error.code.name} {error.message}", err=True)
    if errors:
        raise RowErrors(WriteResult(sum(r.rows_written for r in results), errors))


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
    except pa.ArrowInvalid as exc:
        raise Rejected(f"{path}: {str(exc).splitlines()[0]}") from exc


def _batches(path: str, schema: Schema, nulls: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Record batches of a file.

    Raises:
        Rejected: a suffix that is not known, or a file that is not what its suffix says.
    """
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    from stele.model.errors import Rejected

    suffix = Path(path).suffix
    try:
        if suffix == ".csv":
            options = pa_csv.ConvertOptions(
                column_types={column.name: column.arrow for column in schema.columns},
                null_values=list(nulls),
                strings_can_be_null=True,
            )
            yield from pa_csv.open_csv(path, convert_options=options)
        elif suffix == ".parquet":
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(65_536)
        elif suffix in (".arrow", ".feather", ".ipc"):
            with pa.memory_map(path) as source:
                reader = pa.ipc.open_file(source)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
        elif suffix == ".arrows":
            with pa.memory_map(path) as source:
                yield from pa.ipc.open_stream(source)
        else:
            raise Rejected(f"{path}: expected .csv, .parquet, .arrow (a file) or .arrows (a stream)")
    except (pa.ArrowInvalid, pa.ArrowKeyError) as exc:
        raise Rejected(f"{path}: {str(exc).splitlines()[0]}") from exc
