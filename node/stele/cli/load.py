"""`stele table load`: files into a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stele.cli.options import json_option, masters_option, replication_option, timeout_option, with_client
from stele.cli.output import say, show_done
from stele.model.amounts import plural

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.progress import Progress, TaskID

    from stele.cli.csv_rows import CsvFormat
    from stele.cli.schema_file import TableDefinition
    from stele.cli.source import Input, Source
    from stele.client import AsyncClient, AsyncTable
    from stele.model.block import RowError

_TAB = ("tab", "\\t")


@click.command()
@click.argument("name")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--op", type=click.Choice(("upsert", "insert", "insert_ignore")), default="upsert", show_default=True
)
@click.option(
    "--format",
    "form",
    type=click.Choice(("csv", "parquet", "arrow")),
    default=None,
    help="Format of the files [default: by suffix; CSV for standard input].",
)
@click.option(
    "--delimiter", default=",", show_default=True, help="Separator of CSV values: one character, or tab."
)
@click.option(
    "--null",
    "nulls",
    multiple=True,
    default=("", "NA"),
    show_default=True,
    help="A spelling of null in CSV. In text columns it must stand without quotes.",
)
@click.option(
    "--rejects",
    type=click.Path(dir_okay=False),
    default=None,
    help="A new file for the refused rows.",
)
@click.option(
    "--durability",
    type=click.Choice(("synced", "memory")),
    default="synced",
    show_default=True,
    help="When a row counts as written: a majority has synced it, or every voter has it in memory.",
)
@click.option("--create", is_flag=True, help="Create the table first, with the columns of the first file.")
@click.option("--key", default="", metavar="NAME,...", help="With --create: columns of the primary key.")
@click.option(
    "--hash",
    "hashes",
    multiple=True,
    metavar="NAME,...:BUCKETS",
    help="With --create: hash partitions [default: the masters choose].",
)
@replication_option(default=None)
@masters_option
@timeout_option
@json_option
def load(
    name: str,
    files: tuple[str, ...],
    op: str,
    form: str | None,
    delimiter: str,
    nulls: tuple[str, ...],
    rejects: str | None,
    durability: str,
    create: bool,
    key: str,
    hashes: tuple[str, ...],
    replication_factor: int | None,
    masters: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Write CSV (also .csv.gz), Parquet or Arrow files into a table. Columns are matched by name; - is standard input.

    A row with a bad value is reported with its line. The others are written, and the exit code is 2. With
    --rejects each refused row and the reason go to a file, one JSON object a line.

    \b
    Examples:
      stele table load flights flights.parquet
      stele table load users users.csv.gz --op insert --rejects refused.json
      psql -c "COPY users TO STDOUT CSV HEADER" | stele table load users - --create --key id
    """
    from stele.cli.csv_rows import CsvFormat
    from stele.cli.new_file import check_new, new_file
    from stele.cli.progress import rows_progress
    from stele.cli.source import opened

    if not create and (key or hashes or replication_factor is not None):
        raise click.UsageError("--key, --hash and --replication-factor need --create")
    if create and not key:
        raise click.UsageError("--create needs --key")
    csv = CsvFormat(nulls, _delimiter(delimiter))
    if rejects is not None:
        check_new(rejects, otherwise="name another file")
    with ExitStack() as stack:
        inputs = stack.enter_context(opened(files, form or "", again=create or rejects is not None))
        table = _definition(name, inputs[0], csv, key, hashes, replication_factor) if create else None
        job = _Load(inputs, csv, op, durability, timeout_s, as_json)
        if rejects is not None:
            # A load that ends early has refused these rows all the same.
            job.faults.keep_in(stack.enter_context(new_file(rejects, keep=lambda: bool(job.faults.count))))
        try:
            with rows_progress() as job.progress:
                with_client(masters, lambda client: job.run(client, name, table), timeout_s)
        except BaseException:  # Ctrl-C, a later file that cannot be read, no leader
            job.report(complete=False, kept_in=rejects)
            raise
        job.report()
    job.faults.refuse(job.written, rejects)


def _delimiter(given: str) -> str:
    found = "\t" if given in _TAB else given
    if len(found) != 1 or not found.isascii() or found in '"\r\n':
        raise click.UsageError(f"--delimiter {given}: expected one ASCII character, or tab")
    return found


def _definition(
    name: str, first: Input, csv: CsvFormat, key: str, hashes: Sequence[str], replication_factor: int | None
) -> TableDefinition:
    """The table that --create asks for.

    Raises:
        Rejected: a column of the file has no type in Stele, or --key or --hash names an unknown column.
    """
    from stele.cli.schema_file import TableDefinition, hash_options
    from stele.cli.source import columns_of
    from stele.model.errors import Rejected
    from stele.model.partitioning import HashPartitioning, by_ids
    from stele.model.schema import Schema

    try:
        schema = Schema.from_arrow(columns_of(first, csv), [part for part in key.split(",") if part])
    except Rejected as exc:
        raise Rejected(f"{first.name}: {str(exc.args[0]).removeprefix(f'{first.name}: ')}") from None
    faults: list[str] = []
    parts = hash_options(hashes, set(schema.by_name), faults)
    if faults:
        raise Rejected("; ".join(faults))
    hashed = by_ids([HashPartitioning(tuple(part["columns"]), part["buckets"]) for part in parts], schema)
    return TableDefinition(name, schema, hashed, replication_factor or 3)


class _Load:
    """One load and its result so far."""

    def __init__(
        self,
        inputs: Sequence[Input],
        csv: CsvFormat,
        op: str,
        durability: str,
        timeout_s: float,
        as_json: bool,
    ) -> None:
        from stele.cli.faults import Faults

        self.faults = Faults()
        self.written = 0
        self.progress: Progress
        self._inputs = inputs
        self._csv = csv
        self._op = op
        self._enough = durability
        self._got = "synced"
        self._timeout_s = timeout_s
        self._as_json = as_json
        self._started = time.monotonic()
        self._opened = False
        self._note = ""
        self._taken = 0
        """Rows that were read from the files and given to the client, which may send them."""
        self._settled = 0
        """Of these, how many are known to be written or refused."""

    async def run(self, client: AsyncClient, name: str, definition: TableDefinition | None) -> None:
        """Create the table if a definition is given, then write the inputs one after another."""
        from stele.cli.source import Source, rows_of

        if definition is None:
            table = await client.open_table(name)
        else:
            table = await self._made(client, name, definition)
        self._opened = True
        for each in self._inputs:
            task = self.progress.add_task(Path(each.name).name, total=rows_of(each))
            await self._write(table, Source(each, table.schema, self._csv), task)

    async def _made(self, client: AsyncClient, name: str, definition: TableDefinition) -> AsyncTable:
        from stele.model.errors import Code, Rejected

        try:
            made = await client.create_table(
                name,
                definition.schema,
                definition.partitioning if definition.partitioning.hash else None,
                replication_factor=definition.replication_factor,
                timeout_s=self._timeout_s,
            )
        except Rejected as exc:
            if exc.code is not Code.ALREADY_PRESENT:
                raise
            what = "leave out --create and --key to write into it, or give another name"
            raise Rejected(f"{exc.args[0]}; {what}", code=exc.code) from None
        self._note = made.chosen
        return made

    async def _write(self, table: AsyncTable, source: Source, task: TaskID) -> None:
        def acknowledged(rows: int) -> None:
            self.written += rows
            self._settled += rows
            self.progress.advance(task, rows)

        def taken() -> Iterator[pa.RecordBatch]:
            for batch in source.batches():
                self._taken += batch.num_rows
                yield batch

        from stele.client.arrow_input import UnfitColumns

        refused: Sequence[RowError] = ()
        taken_before = self._taken
        try:
            result = await table.write_arrow(
                taken(),
                self._op,
                timeout_s=self._timeout_s,
                on_rows=acknowledged,
                raise_row_errors=False,
                durability=self._enough,
            )
            if result.durability != "synced":
                self._got = str(result.durability)
            refused = result.row_errors
            self._settled = self._taken
        except UnfitColumns:
            self._taken = taken_before
            raise
        finally:  # a file that breaks off may have had bad lines before the break
            self.faults.add(source, refused)

    def report(self, *, complete: bool = True, kept_in: str | None = None) -> None:
        """Print how many rows were written, and the first refused ones. If the load is not complete, some
        written rows may not be acknowledged yet. `kept_in`: the file of the refused rows, if nothing else names it."""
        if self._note:
            say(f"note: {self._note}", err=True)
        if self._opened:  # otherwise no row was tried
            done = {"written": self.written, "refused": self.faults.count, "complete": complete}
            unsure = self._settled < self._taken  # some of these rows may be written
            told = {**done, "moreMayBeWritten": unsure, "durability": self._got}
            show_done(self._told(complete), self._as_json, told)
        self.faults.report(kept_in)

    def _told(self, complete: bool) -> str:
        if not complete and not self._taken:
            return "no row was written"
        seconds = time.monotonic() - self._started
        told = (
            f"{plural(self.written, 'row')} written in {seconds:.1f} s ({self.written / seconds:,.0f} rows/s)"
        )
        if complete:
            return told
        more = ", and more rows may be written than were acknowledged" if self._settled < self._taken else ""
        return f"{told}; the load is not complete{more}"
