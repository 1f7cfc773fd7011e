"""`stele backup restore`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from stele.cli.backup import note
from stele.cli.options import masters_option, replication_option, timeout_option, with_client
from stele.cli.output import say
from stele.cli.verify import table_names
from stele.model.amounts import plural
from stele.model.errors import Rejected

if TYPE_CHECKING:
    from stele.backup import Restored
    from stele.client import AsyncClient
    from stele.model.partitioning import Partitioning


@click.command()
@click.argument("folder")
@click.argument("backup", required=False)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME[=NEW]",
    help="Only this table, under its name or a new one; may be given several times.",
)
@click.option("--hash", "hashes", multiple=True, metavar="NAME,...:BUCKETS", help="Other hash partitions.")
@click.option(
    "--partitioning",
    "like",
    metavar="FILE",
    help="The partitioning of this file: a TabletGroup, or output of `stele table describe --json`.",
)
@replication_option(default=None)
@masters_option
@timeout_option
def restore(
    folder: str,
    backup: str | None,
    tables: tuple[str, ...],
    hashes: tuple[str, ...],
    like: str | None,
    replication_factor: int | None,
    masters: str,
    timeout_s: float,
) -> None:
    """Make tables from a backup, as new ones: a table that exists is never changed. FOLDER is a path or URI.

    BACKUP is an id, or its first digits [default: the newest]. A table gets its name once it has all its rows; until then it
    is called NAME.restoring-... Partitions and replication factor are those of the backup, unless others are given.

    \b
    Examples:
      stele backup restore /backups
      stele backup restore s3://bucket/stele 20260501 --table flights=flights_of_may --hash id:16
    """
    from stele.backup import restore_async
    from stele.cli.progress import rows_progress

    names = table_names(tables)
    partitioning = _partitioning(hashes, like)
    started = time.monotonic()
    with rows_progress() as progress:
        shown: dict[str, Any] = {}

        def tell(table: str, rows: int) -> None:
            if table not in shown:
                shown[table] = progress.add_task(table, total=None)
            progress.advance(shown[table], rows)

        async def work(client: AsyncClient) -> list[Restored]:
            return await restore_async(
                client,
                folder,
                backup,
                tables=names,
                partitioning=partitioning,
                replication_factor=replication_factor,
                on_rows=tell,
                on_note=note,
            )

        made = with_client(masters, work, timeout_s)
    for each in made:
        of = "" if each.table == each.name else f" from {each.table}"
        say(f"restored table {each.name}{of}: {each.rows:,} rows")
    say(f"{plural(len(made), 'table')} in {time.monotonic() - started:.1f} s")


def _partitioning(hashes: tuple[str, ...], like: str | None) -> list[Partitioning] | None:
    """The partitioning that was asked for; None: that of the backup."""
    from stele.cli.schema_file import table_from_file
    from stele.model.partitioning import HashPartitioning, by_names

    if hashes and like:
        raise click.UsageError("--hash and --partitioning exclude each other")
    if like:
        given = table_from_file(like)
        return list(by_names(given.partitioning, given.schema))
    found: list[Partitioning] = []
    for text in hashes:
        names, _, buckets = text.rpartition(":")
        if not names or not buckets.isdecimal() or int(buckets) < 2:
            raise Rejected(f"--hash {text}: expected NAME,...:BUCKETS with 2 buckets or more, like id:8")
        found.append(HashPartitioning(tuple(names.split(",")), int(buckets)))
    return found or None
