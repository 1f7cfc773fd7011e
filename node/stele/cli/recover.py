"""`stele tablet recover`, `promote`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import say, short, show_done, show_json, show_table
from stele.cli.placing import owner
from stele.model.amounts import byte_size, plural
from stele.model.incarnation import shown

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.recovery import Recovery
    from stele.rpc.proto import master_pb2

FLAG = "--accept-data-loss"
_LOOK_S = 0.3
_VIEW_TIMEOUT_S = 10.0


@click.command()
@click.argument("tablet", required=False, default="")
@click.option("--table", default="", help="All tablets of this table that lost their majority.")
@click.option("--all-lost", is_flag=True, help="All tablets of the cluster that lost their majority.")
@click.option(FLAG, "accepted", is_flag=True, help="Do it. Without this option nothing is changed.")
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays on record with the tablet.")
@click.option(
    "--wait-for",
    "wait_s",
    type=click.FloatRange(min=1, max=3_600),
    default=120.0,
    show_default=True,
    help="How many seconds to wait until the tablets serve again.",
)
@masters_option
@json_option
def recover(
    tablet: str,
    table: str,
    all_lost: bool,
    accepted: bool,
    reason: str,
    wait_s: float,
    masters: str,
    as_json: bool,
) -> None:
    """Recover a tablet that lost its majority for good, with one survivor.

    Without --accept-data-loss it changes nothing. It asks all nodes what they have, names the most advanced
    survivor, and says what may be lost and since when. With it the survivor becomes the only voter, and
    serves. A driver then brings the tablet back to its replication factor. Replicas that return later are
    refused, removed and copied again.

    Refused while a majority answers. First try to bring the lost nodes back: that loses nothing.

    Example: stele tablet recover 9a2e41c0
    """
    if bool(tablet) + bool(table) + all_lost != 1:
        raise click.UsageError("give exactly one of TABLET, --table and --all-lost")

    async def work(client: AsyncClient) -> None:
        from stele.client.recovery import recover as ask

        found = await _found(client, tablet, table)
        able = [r for r in found if not r.refused]
        if as_json:
            show_json([_as_json(r) for r in found])
        else:
            _show(found)
        if not accepted or not found:
            _say_next(found, able, tablet, table, err=as_json)
            return
        for one in able:
            done = await ask(client.masters, one, owner=owner(), reason=reason)
            say(
                f"tablet {short(one.tablet_id)}: replica {done.survivor_replica} is made its only voter, "
                f"incarnation {shown(done.tablet_incarnation)}",
                err=as_json,
            )
        await _serving(client, [r.tablet_id for r in able], wait_s, err=as_json)

    with_client(masters, work)


@click.command()
@click.argument("tablet")
@click.option(
    "--to",
    metavar="NAME|UUID",
    default="",
    help="The node to lead; without it, the voter whose log ends last.",
)
@click.option("--reason", default="", metavar="TEXT", help="Why; the node logs it.")
@masters_option
@timeout_option
@json_option
def promote(tablet: str, to: str, reason: str, masters: str, timeout_s: float, as_json: bool) -> None:
    """Make a voter stand for election if a majority answers but nobody leads.

    This is a repair by hand for a case that should not happen: replicas elect a leader by themselves. The
    others vote as in every election, so no acknowledged row is lost. Refused while there is a leader, and
    while no majority answers.

    Example: stele tablet promote 9a2e41c0
    """
    from stele.client.promotion import Promoted
    from stele.client.promotion import promote as ask

    async def work(client: AsyncClient) -> Promoted:
        return await ask(
            client.masters, client.pool, tablet, to, reason=f"{owner()} {reason}", timeout_s=timeout_s
        )

    done = with_client(masters, work, timeout_s)
    show_done(
        f"tablet {done.tablet_id[:8]} of {done.table_name}: replica {done.replica_id} on {done.node} leads in "
        f"term {done.term}",
        as_json,
        {
            "tablet": done.tablet_id,
            "table": done.table_name,
            "replica": done.replica_id,
            "leader": done.node,
            "term": done.term,
        },
    )


async def _found(client: AsyncClient, tablet: str, table: str) -> list[Recovery]:
    """Return what recoveries of these tablets would do. Of several tablets, only those that lost their
    majority are returned."""
    from stele.client.admin import cluster_view, tablet_called
    from stele.client.health import examine
    from stele.client.recovery import look_for_survivors
    from stele.model.errors import Advice, Code, Rejected

    view = await cluster_view(client.masters)
    if tablet:
        chosen = [tablet_called(tablet, view).tablet_id]
    else:
        if table and not any(t.table_name == table for t in view.tablets):
            raise Rejected(f"no table {table}", code=Code.NOT_FOUND, advice=Advice.LIST_TABLES)
        broken = {t.tablet_id for t in examine(view).tablets if t.state == "unavailable"}
        chosen = [
            t.tablet_id
            for t in view.tablets
            if t.tablet_id.hex() in broken and table in ("", t.table_name) and t.tablet_id.strip(b"\0")
        ]
    found = await look_for_survivors(client.pool, view, chosen)
    if tablet and found[0].refused:
        raise Rejected(
            f"tablet {short(found[0].tablet_id)} of {found[0].table_name}: {found[0].refused}",
            code=Code.UNSAFE_CHANGE,
        )
    return found


def _show(found: Sequence[Recovery]) -> None:
    for one in found:
        if one.refused:
            say(f"tablet {short(one.tablet_id)} of {one.table_name} is left alone: {one.refused}")
            continue
        best = one.survivors[0]
        say(
            f"tablet {one.tablet_id[:8]} of {one.table_name}: {len(one.lost)} of {len(one.voters)} voters are "
            f"lost, incarnation {shown(one.incarnation)}"
        )
        show_table(("replica", "node", ""), [(m.replica_id, m.node, m.state) for m in one.voters])
        for s in one.survivors:
            say(
                f"  survivor: replica {s.replica_id} on {s.node}: log ends at {s.last_logged}, committed up "
                f"to {s.committed} at least, about {plural(s.rows, 'row')}, {byte_size(s.bytes_on_disk)}"
            )
        say(f"  may be lost: {one.may_lose}")
        others = ", ".join(str(s.replica_id) for s in one.survivors[1:])
        then = f"; then replica {others} is removed and copied anew" if others else ""
        say(
            f"  the command would do this: replica {best.replica_id} on {best.node} becomes the only voter, "
            f"in a new incarnation{then}; a driver brings the tablet to {one.replication_factor} replicas"
        )


def _say_next(
    found: Sequence[Recovery], able: Sequence[Recovery], tablet: str, table: str, *, err: bool
) -> None:
    if not found:
        say("no tablet has lost its majority", err=err)
    elif able:
        which = tablet or (f"--table {table}" if table else "--all-lost")
        say(f"nothing was changed; to do it, run: stele tablet recover {which} {FLAG}", err=err)


async def _serving(client: AsyncClient, tablet_ids: Sequence[str], wait_s: float, *, err: bool) -> None:
    """Wait until all recovered tablets have a leader again.

    Raises:
        Retryable: TIMED_OUT.
    """
    from stele.client.health import examine
    from stele.driver.keeping import WholeView, pages_of
    from stele.model.errors import Code, Retryable

    deadline = time.monotonic() + wait_s
    whole = WholeView(pages_of(client.masters, timeout_s=_VIEW_TIMEOUT_S))
    while True:
        health = examine(await whole.look())
        waiting = [t for t in health.tablets if t.tablet_id in tablet_ids and not t.led]
        if not waiting:
            if tablet_ids:
                say(
                    f"{len(tablet_ids)} tablets serve again; `stele ksck` shows how far they have healed",
                    err=err,
                )
            return
        if time.monotonic() >= deadline:
            why = "; ".join(f"{short(t.tablet_id)}: {', '.join(t.reasons)}" for t in waiting[:3])
            raise Retryable(
                f"{len(waiting)} tablets do not serve yet after {wait_s:.0f} s ({why}); the masters keep "
                f"trying",
                code=Code.TIMED_OUT,
            )
        await asyncio.sleep(_LOOK_S)


def _as_json(found: Recovery) -> dict[str, object]:
    told = asdict(found)
    for survivor in told["survivors"]:
        for name in ("last_logged", "committed"):
            survivor[name] = list(survivor[name])
    return told


def recovered_in_words(done: master_pb2.RecoveryPB) -> str:
    """Describe a recovery on record, for people who look at the tablet."""
    from stele.model.clock import utc

    who = f" by {done.owner}" if done.owner else ""
    why = f" ({done.reason})" if done.reason else ""
    return (
        f"recovered at {utc(done.since_us)}{who}{why}: incarnation {shown(done.tablet_incarnation)} from replica "
        f"{done.survivor_replica}, whose log ended at {done.last_logged.term}.{done.last_logged.index}; "
        f"{done.told}"
    )
