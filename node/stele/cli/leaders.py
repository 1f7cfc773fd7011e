"""`stele tablet step-down`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import show_done

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.step_down import Moved


@click.command(name="step-down")
@click.argument("tablet")
@click.option("--to", metavar="NAME|UUID", default="", help="The node to lead; without it, the best voter.")
@click.option(
    "--keep",
    "kept_s",
    type=click.IntRange(min=0, max=7 * 86_400),
    default=3_600,
    show_default=True,
    metavar="SECONDS",
    help="Seconds for which no driver moves the leader away; 0: it may at once.",
)
@masters_option
@timeout_option
@json_option
def step_down(tablet: str, to: str, kept_s: int, masters: str, timeout_s: float, as_json: bool) -> None:
    """Move the leader of a tablet to another of its voters. The first digits of its id are enough.

    Writes wait for some milliseconds. A node that lacks much of the log is refused. If the node leads already,
    nothing moves. The tablet of the catalog works too: another master leads then.

    Example: stele tablet step-down 9a2e41 --to flights-node-2
    """
    from stele.client.step_down import step_down as order

    async def work(client: AsyncClient) -> Moved:
        return await order(client.masters, client.pool, tablet, to=to, kept_s=kept_s, timeout_s=timeout_s)

    moved = with_client(masters, work, timeout_s)
    what = "leads already" if moved.before == moved.after else f"leads now; {moved.before} led before"
    kept = f"; no driver moves it for {moved.kept_s} s" if moved.kept_s else ""
    show_done(
        f"tablet {moved.tablet_id[:8]} of {moved.table_name}: {moved.after} {what}{kept}",
        as_json,
        {
            "tablet": moved.tablet_id,
            "table": moved.table_name,
            "before": moved.before,
            "leader": moved.after,
            "keptSeconds": moved.kept_s,
        },
    )
