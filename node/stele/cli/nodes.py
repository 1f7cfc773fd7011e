"""`stele node list`, `stele node forget`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import confirm, short, show_done, show_json, show_table
from stele.model.amounts import byte_size, duration

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.admin import NodeStatus


@click.command(name="list")
@masters_option
@json_option
def list_nodes(masters: str, as_json: bool) -> None:
    """List nodes and masters with their state seen and wanted.

    `seen`: live, silent and for how long, or never if it has not started yet. `wanted`: in service, or what
    somebody asked for. `left`: how long that lasts. `load`: requests of clients per second at its leaders.

    Example: stele node list
    """
    from stele.client.admin import list_nodes as nodes_of

    async def work(client: AsyncClient) -> list[NodeStatus]:
        return await nodes_of(client.masters)

    nodes = with_client(masters, work)
    if as_json:
        show_json([node_as_json(n) for n in nodes])
        return
    show_table(
        (
            *("name", "id", "role", "machine", "zone", "address", "seen", "wanted", "left", "by"),
            *("replicas", "leaders", "load", "used", "free", "reason"),
        ),
        [_row(n) for n in nodes],
        all_shown_by="stele node list --json",
    )


def _row(n: NodeStatus) -> tuple[object, ...]:
    left = duration(n.wanted_left_s) if n.wanted_left_s is not None else ""
    disk = [byte_size(b) if b is not None else "-" for b in (n.disk_used_bytes, n.disk_free_bytes)]
    place = (n.name or "-", short(n.node_id), n.role, n.machine or "-", n.zone or "-", n.address or "-")
    wanted = (in_words(n), left, n.wanted_by)
    leaders = (n.leaders, f"{n.load:,}/s" if n.load is not None else "-")
    return (*place, seen_in_words(n), *wanted, n.replicas, *leaders, *disk, n.wanted_reason)


def seen_in_words(n: NodeStatus) -> str:
    """Whether the masters hear it; if not, for how long they have not."""
    return n.seen if n.seen in ("live", "never") else f"{n.seen} ({n.heard})"


def node_as_json(n: NodeStatus) -> dict[str, Any]:
    """A node for programs."""
    return {**dataclasses.asdict(n), "wanted": n.wanted.name}


def in_full(n: NodeStatus) -> str:
    """A node as a question names it: with its whole id."""
    return f"{n.role} {n.name} ({n.node_id})" if n.name else f"{n.role} {n.node_id}"


def in_words(n: NodeStatus) -> str:
    """The wanted state of a node, as commands print it."""
    from stele.driver.view import Wanted

    match n.wanted:
        case Wanted.DRAINED:
            return "drained" if n.empty else "draining"
        case Wanted.RETIRED:
            return "retired" if n.seen == "retired" else "retiring"
        case Wanted.PARKED:
            return "parked"
        case Wanted.FENCED:
            return "fenced"
        case _:
            return "in service"


@click.command()
@click.argument("node", metavar="NAME|UUID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@masters_option
@json_option
def forget(node: str, yes: bool, masters: str, as_json: bool) -> None:
    """Forget a node or master that is gone for good. It is no longer shown, and nothing waits for it.

    Refused while the node sends heartbeats, or while a tablet's configuration or a change under way names it.
    Then heal first, with `stele driver run` or the operator. The operator forgets its own nodes by itself.
    This cannot be undone: a node that returns under this UUID holds nothing.

    Example: stele node forget 6f1c0d7e
    """
    from stele.client.admin import forget_node
    from stele.client.checks import check_forget

    async def look(client: AsyncClient) -> NodeStatus:
        return await check_forget(client.masters, node)

    if not yes:
        found = with_client(masters, look)
        confirm(f"Forget {in_full(found)} for good?", f"forget {found.label}")
        node = found.node_id

    async def work(client: AsyncClient) -> str:
        return await forget_node(client.masters, node)

    forgotten = with_client(masters, work)
    who = short(forgotten) if len(forgotten) == 32 else forgotten  # a node without a name
    show_done(f"forgot {who}", as_json, {"forgot": forgotten})
