"""`stele table alter`, `rename`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import confirm, show_done
from stele.cli.wanted import seconds_of
from stele.model.amounts import plural
from stele.model.errors import Rejected

if TYPE_CHECKING:
    from stele.client import AsyncClient, AsyncTable

Added = tuple[str, str, bool, str | None]
F = TypeVar("F", bound=Callable[..., Any])


def _history_of(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    return 0.0 if value == "default" else seconds_of(ctx, param, value)


def history_option(command: F) -> F:
    """Add the option --history to a command. It gives seconds; 0 for the default."""
    return click.option(
        "--history",
        "history_s",
        metavar="TIME",
        callback=_history_of,
        help="How long replaced and deleted rows stay readable: 30m, 2h, 7d, or default (15 min).",
    )(command)


@click.command()
@click.argument("name")
@click.option(
    "--add", "added", multiple=True, metavar="NAME:TYPE[?]", help="A new column; ? makes it nullable."
)
@click.option(
    "--default",
    "defaults",
    multiple=True,
    metavar="NAME=JSON",
    help="Default of a new or an existing column, as JSON. A text is written '\"LHR\"'.",
)
@click.option("--no-default", "undefaults", multiple=True, metavar="NAME", help="Remove a column's default.")
@click.option("--rename", "renamed", multiple=True, metavar="OLD=NEW", help="Rename a column.")
@click.option("--drop", "dropped", multiple=True, metavar="NAME", help="Drop a column with its values.")
@click.option(
    "--add-range",
    "added_ranges",
    multiple=True,
    metavar="FROM..TO",
    help="A new range partition, from inclusive, to exclusive.",
)
@click.option(
    "--drop-range",
    "dropped_ranges",
    multiple=True,
    metavar="FROM..TO",
    help="Drop a range partition with its rows.",
)
@click.option("--owner", default=None, help="Who the table belongs to, for people.")
@click.option("--no-owner", "unowned", is_flag=True, help="Remove the owner.")
@click.option("--comment", default=None, help="What the table is for.")
@click.option("--no-comment", "uncommented", is_flag=True, help="Remove the comment.")
@history_option
@click.option("--yes", is_flag=True, help="Do not ask before columns or ranges are dropped.")
@masters_option
@timeout_option
@json_option
def alter(
    name: str,
    added: tuple[str, ...],
    defaults: tuple[str, ...],
    undefaults: tuple[str, ...],
    renamed: tuple[str, ...],
    dropped: tuple[str, ...],
    added_ranges: tuple[str, ...],
    dropped_ranges: tuple[str, ...],
    owner: str | None,
    unowned: bool,
    comment: str | None,
    uncommented: bool,
    history_s: float | None,
    yes: bool,
    masters: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Change columns, ranges and notes of a table while it is in use. All changes of one call are made together.

    Rows that are stored already get the default of a new column, else null. A changed default counts for later
    rows. Drops come first, new columns last. A longer history does not bring back rows that are gone.

    \b
    Examples:
      stele table alter flights --add gate:string? --add stops:int8 --default stops=0
      stele table alter flights --rename dest=destination --drop tailnum --yes
      stele table alter flights --owner ops --comment "flights since 2013" --history 7d
      stele table alter events --add-range 2024-02-01..2024-03-01 --drop-range 2023-02-01..2023-03-01 --yes
    """
    from stele.cli.range_text import bounds_for, parse_ranges
    from stele.client.checks import check_alter

    new_ranges = parse_ranges("--add-range", added_ranges)
    old_ranges = parse_ranges("--drop-range", dropped_ranges)
    given = _pairs("--default", defaults, "NAME=JSON, like stops=0")
    columns = [_added(text, given) for text in added]
    if both := [column for column in undefaults if column in given]:
        raise click.UsageError(f"column {both[0]} has both --default and --no-default; give one of them")
    changed: dict[str, str | None] = {**given, **dict.fromkeys(undefaults)}
    renames = _pairs("--rename", renamed, "OLD=NEW")
    owner, comment = _note("owner", owner, unowned), _note("comment", comment, uncommented)
    noted = owner is not None or comment is not None or history_s is not None
    if not (columns or changed or renames or dropped or new_ranges or old_ranges or noted):
        raise click.UsageError(
            "nothing to change; give --add, --drop, --rename, --default, --no-default, --add-range, --drop-range, "
            "--owner, --no-owner, --comment, --no-comment or --history"
        )

    async def opened(client: AsyncClient) -> tuple[AsyncTable, dict[str, Any]]:
        table = await client.open_table(name)
        part = table.partition_schema.range
        if part is None and (new_ranges or old_ranges):
            raise Rejected(
                f"table {name} has no range partitions; ranges can be added to a table that was made with "
                f"some"
            )
        ids = () if part is None else part.column_ids
        return table, {
            "add": columns,
            "drop": dropped,
            "rename": renames,
            "defaults": changed,
            "add_ranges": bounds_for(table.schema, ids, "--add-range", new_ranges),
            "drop_ranges": bounds_for(table.schema, ids, "--drop-range", old_ranges),
        }

    async def look(client: AsyncClient) -> str:
        table, changes = await opened(client)
        check_alter(table, **changes)
        return table.info.table_id

    asked = ""
    if (dropped or old_ranges) and not yes:
        asked = with_client(masters, look, timeout_s)
        kinds = [("column", dropped), ("range", dropped_ranges)]
        told = [f"{kind}{'s' * (len(which) > 1)} {', '.join(which)}" for kind, which in kinds if which]
        what = f"{' and '.join(told)} of {name}"
        confirm(
            f"Drop {' and '.join(told)} of table {name} ({asked}) with all values for good?", f"drop {what}"
        )

    async def work(client: AsyncClient) -> AsyncTable:
        table, changes = await opened(client)
        if asked and table.info.table_id != asked:
            raise Rejected(f"{name} now names another table than when you were asked; run the command again")
        await table.alter(**changes, owner=owner, comment=comment, history_s=history_s, timeout_s=timeout_s)
        return table

    table = with_client(masters, work, timeout_s)
    ranges = f", {plural(table.partition_schema.ranges, 'range')}" if new_ranges or old_ranges else ""
    show_done(
        f"altered table {name}: schema version {table.schema.version}, "
        f"{plural(len(table.schema.columns), 'column')}{ranges}",
        as_json,
        {
            "name": name,
            "schemaVersion": int(table.schema.version),
            "columns": len(table.schema.columns),
            "ranges": table.partition_schema.ranges,
        },
    )


@click.command()
@click.argument("name")
@click.argument("new_name")
@masters_option
@timeout_option
@json_option
def rename(name: str, new_name: str, masters: str, timeout_s: float, as_json: bool) -> None:
    """Rename a table. Programs that have it open continue; the old name is free at once.

    Example: stele table rename flights flights_2024
    """

    async def work(client: AsyncClient) -> None:
        table = await client.open_table(name)
        await table.alter(rename_to=new_name, timeout_s=timeout_s)

    with_client(masters, work, timeout_s)
    show_done(f"renamed table {name} to {new_name}", as_json, {"name": new_name, "before": name})


def _note(name: str, given: str | None, removed: bool) -> str | None:
    """Return the new note, "" to remove it, or None to leave it unchanged."""
    if removed and given is not None:
        raise click.UsageError(f"--{name} and --no-{name} exclude each other; give one of them")
    return "" if removed else given


def _added(text: str, defaults: dict[str, str]) -> Added:
    """A column of --add. Takes its default out of `defaults`."""
    name, separator, kind = text.partition(":")
    if not separator or not name or not kind:
        raise click.UsageError(f"--add {text}: expected NAME:TYPE, like stops:int8 or gate:string?")
    return name, kind.removesuffix("?"), kind.endswith("?"), defaults.pop(name, None)


def _pairs(option: str, texts: Iterable[str], expected: str) -> dict[str, str]:
    """The values of an option by name."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise click.UsageError(f"{option} {text}: expected {expected}")
        if name in found:
            raise click.UsageError(f"{option} {text}: {name} is given twice; give it once")
        found[name] = value
    return found
