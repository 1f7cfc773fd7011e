"""`stele table drop`, `stele table recall`, `stele cluster keep-dropped`; and what `stele table list --dropped` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import confirm, short, show_done, show_json, show_table
from stele.cli.wanted import seconds_of
from stele.model.amounts import duration

if TYPE_CHECKING:
    from stele.client import AsyncClient, DroppedTable, TableInfo


@click.command()
@click.argument("name")
@click.option(
    "--keep",
    "keep_s",
    metavar="TIME",
    callback=seconds_of,
    help="How long it can be recalled: 90s, 30m, 2h, 1d [default: the cluster's setting].",
)
@click.option("--now", is_flag=True, help="Delete it for good at once, as `stele table delete` does.")
@click.option("--yes", is_flag=True, help="Do not ask before it is deleted for good.")
@masters_option
@json_option
def drop(name: str, keep_s: float | None, now: bool, yes: bool, masters: str, as_json: bool) -> None:
    """Drop a table or key space. It serves nobody from now on, and can be recalled for a time.

    Its name is free at once. Its replicas stay until the time is over: they use disk, and are healed. `stele table recall`
    brings it back. The time is 24 h, unless `stele cluster keep-dropped` has set another.

    \b
    Examples:
      stele table drop users
      stele table drop users --keep 7d
    """
    if now:
        if keep_s is not None:
            raise click.UsageError("--now and --keep exclude each other; give one of them")
        delete_for_good(name, yes, masters, as_json)
        return

    async def work(client: AsyncClient) -> DroppedTable:
        return await client.drop_table(name, keep_s=keep_s)

    gone = with_client(masters, work)
    show_done(
        f"dropped {name}; for {duration(gone.left_s)} `stele table recall {short(gone.table_id)}` brings it back, "
        "and until then it uses disk",
        as_json,
        _as_json(gone),
    )


def delete_for_good(name: str, yes: bool, masters: str, as_json: bool) -> None:
    """Delete a table after the user has confirmed it. Refused if the name means another table by then."""
    from stele.client.dropping import deletable

    asked = "" if yes else _asked_to_delete(with_client(masters, lambda client: deletable(client, name)))

    async def work(client: AsyncClient) -> None:
        await client.delete_table(name, table_id=asked)

    with_client(masters, work)
    show_done(f"deleted {name}", as_json, {"deleted": name})


def _asked_to_delete(found: TableInfo | DroppedTable) -> str:
    """Ask whether to delete this table. Returns its id."""
    kind = "key space" if found.kind == "keyspace" else "table"
    confirm(
        f"Delete {kind} {found.name} ({found.table_id}) with all its rows for good?", f"delete {found.name}"
    )
    return found.table_id


@click.command()
@click.argument("name", metavar="NAME|ID")
@click.option("--as", "new_name", metavar="NAME", help="Its new name, if another table has the old one.")
@masters_option
@json_option
def recall(name: str, new_name: str | None, masters: str, as_json: bool) -> None:
    """Bring a dropped table or key space back, with all its rows.

    `stele table list --dropped` shows those that can be recalled, with their ids. Programs open it again.

    \b
    Examples:
      stele table recall users
      stele table recall 9f3c21aa --as users_of_before
    """

    async def work(client: AsyncClient) -> TableInfo:
        return await client.recall_table(name, new_name=new_name)

    found = with_client(masters, work)
    show_done(
        f"recalled {found.name}", as_json, {"name": found.name, "id": found.table_id, "kind": found.kind}
    )


@click.command()
@click.argument("time_s", metavar="[TIME]", required=False, callback=seconds_of)
@masters_option
@json_option
def keep_dropped(time_s: float | None, masters: str, as_json: bool) -> None:
    """Show or set for how long dropped tables can be recalled: 90s, 30m, 2h, 1d.

    It holds for tables that are dropped from then on without --keep, and for those of TabletGroups.

    Example: stele cluster keep-dropped 3d
    """
    from stele.client.dropping import keep_dropped_s, set_keep_dropped

    async def ask(client: AsyncClient) -> float:
        return await keep_dropped_s(client.masters)

    if time_s is None:
        now_s = with_client(masters, ask)
        show_done(f"dropped tables can be recalled for {duration(now_s)}", as_json, {"keepSeconds": now_s})
        return
    wanted_s = time_s

    async def work(client: AsyncClient) -> float:
        return await set_keep_dropped(client.masters, wanted_s)

    before_s = with_client(masters, work)
    show_done(
        f"dropped tables can be recalled for {duration(wanted_s)}; it was {duration(before_s)}",
        as_json,
        {"keepSeconds": wanted_s, "before": before_s},
    )


def show_dropped(masters: str, as_json: bool) -> None:
    """List the tables that can be recalled."""

    async def work(client: AsyncClient) -> list[DroppedTable]:
        return await client.dropped_tables()

    tables = with_client(masters, work)
    if as_json:
        show_json([_as_json(t) for t in tables])
        return
    show_table(
        ("name", "kind", "tablets", "replicas", "dropped", "left", "id"),
        [
            (
                *(t.name, t.kind, t.tablets, t.replication_factor, f"{t.dropped:%Y-%m-%d %H:%M:%S}Z"),
                *(duration(t.left_s), short(t.table_id)),
            )
            for t in tables
        ],
    )


def _as_json(t: DroppedTable) -> dict[str, Any]:
    return {
        "name": t.name,
        "id": t.table_id,
        "kind": t.kind,
        "tablets": t.tablets,
        "replicationFactor": t.replication_factor,
        "dropped": t.dropped.isoformat(),
        "leftSeconds": t.left_s,
    }
