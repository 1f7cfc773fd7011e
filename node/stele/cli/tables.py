"""`stele table list`, `describe`, `create`, `delete`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from stele.cli.alter import history_option
from stele.cli.health import cluster_health, names_of_nodes, show_unhealthy, warn_unsettled
from stele.cli.options import (
    json_option,
    masters_option,
    replication_option,
    timeout_option,
    with_client,
)
from stele.cli.output import say, short, show_done, show_json, show_table
from stele.model import durations
from stele.model.amounts import byte_size, duration, plural
from stele.model.json_values import json_value

if TYPE_CHECKING:
    from stele.client import AsyncClient, TableInfo
    from stele.client.copies import ReplicaCopy
    from stele.client.health import ClusterHealth
    from stele.client.sizes import Size
    from stele.model.column import Column
    from stele.model.partition import RangePartition
    from stele.model.schema import Schema


@click.command(name="list")
@click.option("--dropped", is_flag=True, help="List those that were dropped and can be recalled.")
@masters_option
@json_option
def list_tables(dropped: bool, masters: str, as_json: bool) -> None:
    """List tables and key spaces. `ready` counts the tablets that have a leader and a majority now.

    With --dropped: `left` is how long a table can still be recalled.

    Example: stele table list
    """
    if dropped:
        from stele.cli.dropping import show_dropped

        show_dropped(masters, as_json)
        return

    async def work(client: AsyncClient) -> tuple[list[TableInfo], ClusterHealth]:
        return await client.list_tables(), await cluster_health(client)

    tables, health = with_client(masters, work)
    ready = {t.table_id: health.ready(t.table_id) for t in tables}
    if as_json:
        show_json([_as_json(info, ready[info.table_id]) for info in tables])
        return
    warn_unsettled(health)
    show_table(
        ("name", "kind", "state", "tablets", "ready", "replicas", "id"),
        [
            (t.name, t.kind, t.state, t.tablets, ready[t.table_id], t.replication_factor, short(t.table_id))
            for t in tables
        ],
    )


@click.command()
@click.argument("name")
@masters_option
@json_option
def describe(name: str, masters: str, as_json: bool) -> None:
    """Show columns, partitioning, size and tablets of a table.

    The sizes come from the leaders of its tablets. Rows are an estimate: a replaced row counts until its
    versions are merged. The load of a tablet is what clients ask of its leader a second.

    Example: stele table describe flights
    """

    from stele.client.admin import cluster_view
    from stele.client.copies import copies_in, differing, summed_up
    from stele.client.health import examine
    from stele.client.sizes import size_of

    async def work(client: AsyncClient) -> tuple[TableInfo, ClusterHealth, Size, list[ReplicaCopy]]:
        found, view = await client.describe(name), await cluster_view(client.masters, timeout_s=10.0)
        health, compared = examine(view), [c for c in copies_in(view) if c.table_name == name]
        tablets = [tablet for tablet in health.tablets if tablet.table_id == found.table_id]
        size = await size_of(client.pool, tablets, {n.node_id: n for n in health.nodes})
        return found, health, size, compared

    info, health, size, compared = with_client(masters, work)
    ready = health.ready(info.table_id)
    of_table = [tablet for tablet in health.tablets if tablet.table_id == info.table_id]
    if as_json:
        sizes = {
            "rowsEstimate": size.rows,
            "bytesOnDisk": size.bytes_on_disk,
            "tabletsUnknown": size.unknown,
        }
        more = {"size": sizes, "load": sum(tablet.load for tablet in of_table)}
        show_json(_as_json(info, ready) | more | {"copies": [copy.to_json() for copy in compared]})
        return
    warn_unsettled(health)
    say(f"{info.name}: {info.kind}, {info.state}, {info.replication_factor} replicas, id {info.table_id}")
    if info.owner:
        say(f"owner {info.owner}")
    for line in info.comment.splitlines():
        say(f"# {line}")
    if info.schema is not None:
        key = [column.name for column in info.schema.key_columns]
        say(f"schema version {info.schema.version}, key {', '.join(key)}")
        say(f"replaced and deleted rows stay readable for {duration(info.history_s)}")
        show_table(
            ("column", "type", "null", "default"),
            [(c.name, c.type, "yes" if c.nullable else "no", c.default or "") for c in info.schema.columns],
        )
        for part in info.partition_schema.hash:
            names = [info.schema.by_id[i].name for i in part.column_ids]
            say(f"hash of {', '.join(names)} into {part.buckets} buckets")
        if info.partition_schema.range is not None:
            from stele.model.split_json import shown_split

            names, splits = _split(info.schema, info.partition_schema.range)
            if info.partition_schema.has_gaps:
                ranges = _bounds(info.schema, info.partition_schema.range)
                say(f"range of {', '.join(names)}: {', '.join(map(_shown_range, ranges))}")
            else:
                say(f"range of {', '.join(names)}, split at {', '.join(map(shown_split, splits))}")
    if info.schema is not None:  # the keys of a key space are not counted
        say(_shown_size(size))
    say(f"{ready} of {info.tablets} tablets have a leader and a majority")
    counts = health.replicas_of(info.table_id)
    if not counts.done:
        say(f"replication factor {info.replication_factor}: {counts}")
    address = {node.node_id: node.address for node in health.nodes}
    called = names_of_nodes(health)
    if compared:
        say(summed_up(compared))
    for copy in differing(compared):
        say(f"tablet {short(copy.tablet_id)}: {copy.in_words(called)}")
    show_table(
        ("tablet", "leader", "load", "replicas"),
        [
            (
                short(tablet.tablet_id),
                called.get(tablet.leader, short(tablet.leader)) if tablet.led else "-",
                f"{tablet.load:,}/s",
                " ".join(
                    f"{called.get(node, short(node))}@{address.get(node, '')}" for node in tablet.members
                ),
            )
            for tablet in of_table
        ],
        all_shown_by="--json, or a pipe,",
    )
    show_unhealthy(of_table)


@click.command()
@click.argument("source", metavar="NAME|FILE")
@click.option(
    "--column", "columns", multiple=True, metavar="NAME:TYPE[?]", help="A column; ? makes it nullable."
)
@click.option("--key", default="", metavar="NAME,...", help="Columns of the primary key.")
@click.option("--hash", "hashes", multiple=True, metavar="NAME,...:BUCKETS", help="Hash partitions.")
@replication_option(default=None)
@click.option("--name", "named", default="", help="Name of the table [default: the name in the file].")
@click.option("--owner", default=None, help="Who the table belongs to, for people.")
@click.option("--comment", default=None, help="What the table is for.")
@history_option
@masters_option
@timeout_option
@json_option
def create(
    source: str,
    columns: tuple[str, ...],
    key: str,
    hashes: tuple[str, ...],
    replication_factor: int | None,
    named: str,
    owner: str | None,
    comment: str | None,
    history_s: float | None,
    masters: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Create a table from a YAML or JSON file (such as a TabletGroup) or from options.

    \b
    Examples:
      stele table create examples/flights.yaml
      stele table create users --column id:int64 --column name:string? --key id --hash id:8
    """
    from stele.cli.schema_file import table_from_file, table_from_options

    if columns:
        table = table_from_options(source, columns, key, hashes)
    elif key or hashes:
        raise click.UsageError(
            "--key and --hash need --column; a file has primaryKey and partitioning instead"
        )
    else:
        table = table_from_file(source)
    table.name = named or table.name
    if replication_factor is not None:
        table.replication_factor = replication_factor
    table.owner = table.owner if owner is None else owner
    table.comment = table.comment if comment is None else comment
    table.history_s = table.history_s if history_s is None else history_s or None

    # A file without partitioning says one tablet, as the operator reads it.
    named_parts = table.partitioning if not columns or hashes else None

    async def work(client: AsyncClient) -> tuple[int, str]:
        made = await client.create_table(
            table.name,
            table.schema,
            named_parts,
            replication_factor=table.replication_factor,
            owner=table.owner,
            comment=table.comment,
            history_s=table.history_s,
            timeout_s=timeout_s,
        )
        return made.partition_schema.tablets, made.chosen

    tablets, why = with_client(masters, work, timeout_s)
    if why:
        say(f"note: {why}", err=True)
    if table.unused:
        say(f"note: {source}: only the operator reads {' and '.join(table.unused)}; not used here", err=True)
    show_done(
        f"created table {table.name}: {plural(tablets, 'tablet')}",
        as_json,
        {
            "name": table.name,
            "tablets": tablets,
            "replicationFactor": table.replication_factor,
            **({"why": why} if why else {}),
        },
    )


@click.command()
@click.argument("name", metavar="NAME|ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@masters_option
@json_option
def delete(name: str, yes: bool, masters: str, as_json: bool) -> None:
    """Delete a table or key space permanently. One that was dropped is named by its id.

    `stele table drop` deletes it later, so that it can be recalled until then.

    Example: stele table delete users --yes
    """
    from stele.cli.dropping import delete_for_good

    delete_for_good(name, yes, masters, as_json)


def _split(schema: Schema, part: RangePartition) -> tuple[list[str], list[list[Any] | dict[str, str]]]:
    """Names of the range columns, and the JSON of the first key of each range except the first."""
    from stele.model.split_json import split_values

    columns = [schema.by_id[i] for i in part.column_ids]
    return [column.name for column in columns], [split_values(key, columns) for key in part.split_keys]


def _bounds(schema: Schema, part: RangePartition) -> list[dict[str, Any]]:
    """The ranges, as a file has them."""
    from stele.model.split_json import split_values

    columns = [schema.by_id[i] for i in part.column_ids]
    return [
        {
            name: split_values(key, columns)
            for name, key in zip(("from", "to"), (start, end), strict=True)
            if key
        }
        for start, end, _ in part.covered
    ]


def _shown_range(bounds: dict[str, Any]) -> str:
    from stele.model.split_json import shown_split

    return "..".join(shown_split(bounds[end]) if end in bounds else "" for end in ("from", "to"))


def _shown_size(size: Size) -> str:
    missing = f"; {plural(size.unknown, 'tablet')} gave no answer" if size.unknown else ""
    return f"about {plural(size.rows, 'row')} now, and {byte_size(size.bytes_on_disk)} of files in each replica{missing}"


def _column(column: Column) -> dict[str, Any]:
    """A column in the form that `table create` reads."""
    described: dict[str, Any] = {
        "name": column.name,
        "type": column.type,
        "nullable": column.nullable,
        "id": int(column.id),
    }
    if column.default is not None:
        described["default"] = json_value(json.loads(column.default))
    return described


def _as_json(info: TableInfo, ready: int) -> dict[str, Any]:
    schema, ranged = info.schema, info.partition_schema.range
    described: dict[str, Any] | None = None
    if schema and ranged:
        names, splits = _split(schema, ranged)
        described = {"columns": names}
        described |= {"ranges": _bounds(schema, ranged)} if ranged.has_gaps else {"splitAt": splits}
    return {
        "name": info.name,
        "id": info.table_id,
        "kind": info.kind,
        "state": info.state,
        "replicationFactor": info.replication_factor,
        "owner": info.owner,
        "comment": info.comment,
        **({"historyRetention": durations.text(round(info.history_s * 1000))} if schema else {}),
        "tablets": info.tablets,
        "tabletsRunning": info.tablets_running,
        "tabletsReady": ready,
        "columns": [_column(c) for c in (schema.columns if schema else ())],
        "primaryKey": [c.name for c in (schema.key_columns if schema else ())],
        "partitioning": {
            "hash": [
                {"columns": [schema.by_id[i].name for i in part.column_ids], "buckets": part.buckets}
                | ({"seed": part.seed} if part.seed else {})
                for part in info.partition_schema.hash
                if schema
            ],
            "range": described,
        },
    }
