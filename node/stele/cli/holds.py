"""`stele table holds`, `hold`, `release`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import say, show_done, show_json, show_table
from stele.cli.wanted import seconds_of
from stele.model import texts
from stele.model.amounts import byte_size
from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Rejected
from stele.model.holds import BYTES_DEFAULT, BYTES_MAX, BYTES_MIN

if TYPE_CHECKING:
    from stele.client import AsyncClient, TableHold


@click.command()
@click.argument("name")
@masters_option
@timeout_option
@json_option
def holds(name: str, masters: str, timeout_s: float, as_json: bool) -> None:
    """List the holds on a table's history: what keeps replaced and deleted rows, since when and until when.

    `keeps` is about how many bytes of old rows a hold keeps in one replica of a tablet, where it keeps most. It is measured
    once a minute. A broken hold keeps nothing.

    Example: stele table holds flights
    """

    async def work(client: AsyncClient) -> list[TableHold]:
        return await (await client.open_table(name)).holds()

    found = with_client(masters, work, timeout_s)
    if as_json:
        show_json([_as_json(hold) for hold in found])
        return
    if not found:
        say(f"no holds on the history of {name}")
        return
    show_table(
        ("hold", "history since", "expires", "keeps", "at most", "tablets", ""),
        [
            (
                hold.name,
                utc(physical_us(hold.since)),
                f"{hold.expires:%Y-%m-%d %H:%M:%S} UTC",
                byte_size(hold.bytes),
                byte_size(hold.max_bytes),
                f"{len(hold.tablets)} of {len(hold.tablets) + hold.tablets_without}",
                f"broken: {hold.broken}" if hold.broken else "",
            )
            for hold in found
        ],
        whole=1,
    )


@click.command()
@click.argument("name")
@click.argument("hold_name", metavar="HOLD")
@click.option(
    "--for",
    "for_s",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=seconds_of,
    help="When it expires, from now: 90s, 30m, 2h, 1d.",
)
@click.option(
    "--since",
    metavar="TIME",
    default="",
    help="Keep history from this hybrid time or ISO 8601 time on (UTC unless it has a zone) [default: now].",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(BYTES_MIN, BYTES_MAX),
    default=BYTES_DEFAULT,
    show_default=True,
    help="Break the hold when it keeps more old rows than this in one replica of a tablet.",
)
@masters_option
@timeout_option
@json_option
def hold(
    name: str,
    hold_name: str,
    for_s: float,
    since: str,
    max_bytes: int,
    masters: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Keep a table's replaced and deleted rows readable from a time on, until the hold expires.

    To make it last longer, run this again with the same --since. Old rows use disk meanwhile: `stele table
    holds` shows how much.

    \b
    Examples:
      stele table hold flights nightly --for 36h
      stele table hold flights nightly --for 36h --since 2024-05-01T12:00:00Z
    """
    try:
        moment = texts.snapshot(since) if since else None
    except ValueError as exc:
        raise Rejected(f"--since {since}: expected a hybrid time or an ISO 8601 time ({exc})") from exc

    async def work(client: AsyncClient) -> TableHold:
        table = await client.open_table(name)
        return await table.hold(hold_name, moment, expires_in_s=for_s, max_bytes=max_bytes)

    found = with_client(masters, work, timeout_s)
    show_done(
        f"hold {found.name} keeps the history of {name} from {utc(physical_us(found.since))} on, hybrid time {found.since}, "
        f"until {found.expires:%Y-%m-%d %H:%M:%S} UTC",
        as_json,
        _as_json(found),
    )


@click.command()
@click.argument("name")
@click.argument("hold_name", metavar="HOLD")
@masters_option
@timeout_option
@json_option
def release(name: str, hold_name: str, masters: str, timeout_s: float, as_json: bool) -> None:
    """End a hold on a table's history. Whoever relied on it must begin again with a scan, or with a full backup.

    Example: stele table release flights nightly
    """

    async def work(client: AsyncClient) -> bool:
        table = await client.open_table(name)
        there = any(each.name == hold_name for each in await table.holds())
        await table.release_hold(hold_name)
        return there

    if not with_client(masters, work, timeout_s):
        raise Rejected(
            f"there is no hold {hold_name} on the history of {name}; `stele table holds {name}` lists them",
            code=Code.NOT_FOUND,
        )
    show_done(f"released hold {hold_name} of {name}", as_json, {"table": name, "released": hold_name})


def _as_json(hold: TableHold) -> dict[str, Any]:
    """A hold for programs. The hybrid time is text, since some readers of JSON round large numbers."""
    return {
        "name": hold.name,
        "since": str(hold.since),
        "expires": hold.expires.isoformat(),
        "bytes": hold.bytes,
        "maxBytes": hold.max_bytes,
        "broken": hold.broken,
        "tablets": len(hold.tablets),
        "tabletsWithout": hold.tablets_without,
    }
