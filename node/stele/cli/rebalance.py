"""`stele rebalance`: shows which replicas balance would move, waits for it, or drives it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from stele.cli.health import names_of_nodes
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import say, short, show_json, show_table
from stele.cli.replicas import WAIT_S, driver_of, follow
from stele.model.amounts import byte_size, plural

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.driver.progress import Progress
    from stele.driver.replica_balance import Move
    from stele.rpc.proto import master_pb2


@click.command()
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only show the moves, with bytes and reasons, and leaders that would move.",
)
@click.option(
    "--wait-for",
    "wait_s",
    type=click.FloatRange(min=1, max=86_400),
    default=WAIT_S,
    show_default=True,
    help="While another driver works: give up after this many seconds.",
)
@masters_option
@json_option
def rebalance(dry_run: bool, wait_s: float, masters: str, as_json: bool) -> None:
    """Spread replicas evenly: over zones first, then by number and bytes over nodes, for each table too.

    A working driver does so by itself, and this command shows its progress. If no driver is at work, this
    command drives until nothing is left to do; it heals first. Tablets placed by hand stay where they are. Leaders are
    exchanged for their load only where nodes differ by 200 requests a second, and by a fifth of the mean.

    Example: stele rebalance --dry-run
    """

    async def look(client: AsyncClient) -> tuple[list[Move], str, master_pb2.GetClusterViewResponse]:
        from stele.client.admin import cluster_view

        view = await cluster_view(client.masters)
        moves, why = await asyncio.to_thread(_moves, view)
        return moves, why, view

    moves, why, view = with_client(masters, look)
    if dry_run:
        _show(moves, _leaders(view), why, view, as_json)
        return
    holder = driver_of(view)
    steps = 0
    if holder:
        say(f"{holder} drives; waiting for it", err=as_json)
        with_client(masters, lambda client: follow(client, _far, wait_s, err=as_json))
    elif not moves and not why:
        say("nothing needs to move", err=as_json)
    else:
        say("no driver is at work, so this command drives until nothing is left to do", err=as_json)
        steps = asyncio.run(_drive(masters, as_json))
    if as_json:
        show_json({"done": True, "steps": steps, "driver": holder or None}, one_line=True)


def _moves(view: master_pb2.GetClusterViewResponse) -> tuple[list[Move], str]:
    from stele.driver.policy import Policy
    from stele.driver.rebalancing import rebalancing
    from stele.driver.wire import view_from_pb

    return rebalancing(view_from_pb(view), Policy(rebalance=True))


@dataclass(frozen=True, slots=True)
class _Leader:
    """A leader that would move."""

    tablet_id: str
    table_name: str
    source: str
    target: str
    reason: str


def _leaders(view: master_pb2.GetClusterViewResponse) -> list[_Leader]:
    from stele.driver.policy import Policy
    from stele.driver.rebalancing import leaders_to_move
    from stele.driver.wire import view_from_pb

    seen = view_from_pb(view)
    found = ((step, seen.tablet(step.tablet_id)) for step in leaders_to_move(seen, Policy()))
    return [
        _Leader(t.tablet_id, t.table_name, t.leader_node, step.target_node, step.reason)
        for step, t in found
        if t is not None
    ]


def _show(
    moves: list[Move],
    leaders: list[_Leader],
    why: str,
    view: master_pb2.GetClusterViewResponse,
    as_json: bool,
) -> None:
    from stele.client.health import examine
    from stele.driver.progress import with_names

    if as_json:
        show_json(
            {
                "waits": why,
                "moves": [
                    {
                        "tablet": m.tablet_id,
                        "table": m.table_name,
                        "replica": m.replica_id,
                        "from": m.source,
                        "to": m.target,
                        "bytes": m.bytes,
                        "reason": m.reason,
                    }
                    for m in moves
                ],
                "leaders": [
                    {
                        "tablet": m.tablet_id,
                        "table": m.table_name,
                        "from": m.source,
                        "to": m.target,
                        "reason": m.reason,
                    }
                    for m in leaders
                ],
            }
        )
        return
    names = names_of_nodes(examine(view))
    by_digits = {node_id[:8]: name for node_id, name in names.items()}
    if leaders:
        show_table(
            ("tablet", "table", "leader", "to", "why"),
            [
                (
                    short(m.tablet_id),
                    m.table_name,
                    names.get(m.source, short(m.source)),
                    names.get(m.target, short(m.target)),
                    with_names(m.reason, by_digits),
                )
                for m in leaders
            ],
            all_shown_by="--json, or a pipe,",
        )
        say(f"{plural(len(leaders), 'leader')} would move")
    if moves:
        show_table(
            ("tablet", "table", "from", "to", "bytes", "why"),
            [
                (
                    short(m.tablet_id),
                    m.table_name,
                    names.get(m.source, short(m.source)),
                    names.get(m.target, short(m.target)),
                    f"{m.bytes:,}",
                    with_names(m.reason, by_digits),
                )
                for m in moves
            ],
            all_shown_by="--json, or a pipe,",
        )
    total = sum(m.bytes for m in moves)
    say(
        f"{len(moves)} replicas would be moved, {byte_size(total)} in all"
        if moves
        else "no replica needs to move"
        if leaders
        else "nothing needs to move"
    )
    if why:
        say(f"not now: {with_names(why, by_digits)}")


def _far(view: master_pb2.GetClusterViewResponse) -> tuple[bool, str]:
    moves, why = _moves(view)
    under_way = sum(i.kind.startswith("move") for i in view.intents)
    if not moves and not under_way:
        return True, "balanced: nothing is left to move"
    waits = f"; waits: {why}" if why else ""
    return False, f"{under_way} moves under way, {len(moves)} more to come{waits}"


async def _drive(masters: str, as_json: bool) -> int:
    """Drive until nothing is left to do. Returns the number of steps."""
    from stele.cli.driver import show_step
    from stele.driver.main import run
    from stele.driver.policy import Policy
    from stele.rpc.logging import setup
    from stele.rpc.masters import parse_masters

    setup(level="warning")  # each step is printed to standard output already
    steps = 0

    def show(progress: Progress) -> None:
        nonlocal steps
        steps += 1
        show_step(progress, as_json)

    await run(parse_masters(masters), Policy(rebalance=True), until_healthy=True, on_progress=show)
    say(f"balanced after {plural(steps, 'step')}", err=as_json)
    return steps
