"""`stele tablet move`, `add-replica`, `remove-replica`, `release`."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from stele.cli.health import names_of_nodes
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import say, short, show_json
from stele.cli.replicas import follow, wait_option

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.placing import Placed
    from stele.rpc.proto import master_pb2

F = TypeVar("F", bound=Callable[..., None])


def _reason_option(command: F) -> F:
    return click.option("--reason", default="", metavar="TEXT", help="Why; it is shown with the tablet.")(
        command
    )


@click.command()
@click.argument("tablet")
@click.option("--from", "source", required=True, metavar="NODE", help="The node that has the replica.")
@click.option("--to", "target", required=True, metavar="NODE", help="The node that gets it.")
@_reason_option
@wait_option
@masters_option
@json_option
def move(
    tablet: str, source: str, target: str, reason: str, wait: bool, wait_s: float, masters: str, as_json: bool
) -> None:
    """Move a tablet's replica from one node to another. The first digits of ids are enough.

    The new replica gets its rows and votes before the old one is removed. It is recorded, so any driver carries it
    out, and balance does not undo it; `stele tablet release` cancels it. Refused if the target cannot hold it.

    Example: stele tablet move 9a2e41c0 --from flights-node-1 --to flights-node-4 --wait
    """
    from stele.client.placing import move_replica

    async def ask(client: AsyncClient) -> Placed:
        return await move_replica(client.masters, tablet, source, target, owner=owner(), reason=reason)

    _run(masters, ask, f"moves from {source} to {target}", wait, wait_s, as_json)


@click.command("add-replica")
@click.argument("tablet")
@click.option("--to", "target", default="", metavar="NODE", help="Its node [default: the best one].")
@_reason_option
@wait_option
@masters_option
@json_option
def add_replica(
    tablet: str, target: str, reason: str, wait: bool, wait_s: float, masters: str, as_json: bool
) -> None:
    """Add a replica to one tablet, beyond the replication factor of its table.

    It stays until `stele tablet remove-replica` or `stele tablet release` cancels it.

    Example: stele tablet add-replica 9a2e41c0 --to flights-node-4
    """
    from stele.client.placing import add_replica as add

    async def ask(client: AsyncClient) -> Placed:
        return await add(client.masters, tablet, target, owner=owner(), reason=reason)

    _run(masters, ask, f"gets one more replica{f' on {target}' if target else ''}", wait, wait_s, as_json)


@click.command("remove-replica")
@click.argument("tablet")
@click.option("--from", "source", required=True, metavar="NODE", help="The node that has the replica.")
@_reason_option
@wait_option
@masters_option
@json_option
def remove_replica(
    tablet: str, source: str, reason: str, wait: bool, wait_s: float, masters: str, as_json: bool
) -> None:
    """Remove a replica of a tablet that has more than the replication factor of its table.

    Refused at the factor, since a missing replica would be replaced. To have fewer, use `stele table set-rf`.

    Example: stele tablet remove-replica 9a2e41c0 --from flights-node-4
    """
    from stele.client.placing import remove_replica as remove

    async def ask(client: AsyncClient) -> Placed:
        return await remove(client.masters, tablet, source, owner=owner(), reason=reason)

    _run(masters, ask, f"loses its replica on {source}", wait, wait_s, as_json)


@click.command()
@click.argument("tablet")
@wait_option
@masters_option
@json_option
def release(tablet: str, wait: bool, wait_s: float, masters: str, as_json: bool) -> None:
    """Cancel everything that was asked for a tablet by hand. It is then placed like all others.

    A move under way is given up, and a replica beyond the table's factor is removed.

    Example: stele tablet release 9a2e41c0
    """
    from stele.client.placing import release_tablet

    async def ask(client: AsyncClient) -> Placed:
        return await release_tablet(client.masters, tablet)

    _run(masters, ask, "is no longer placed by hand", wait, wait_s, as_json)


def _run(
    masters: str,
    ask: Callable[[AsyncClient], Awaitable[Placed]],
    what: str,
    wait: bool,
    wait_s: float,
    as_json: bool,
) -> None:
    async def work(client: AsyncClient) -> None:
        placed = await ask(client)
        say(f"tablet {short(placed.tablet_id)} of {placed.table_name} {what}", err=as_json)
        so_far = await follow(client, lambda view: _far(view, placed), wait_s if wait else 0.0, err=as_json)
        if as_json:
            told = {"tablet": placed.tablet_id, "table": placed.table_name, "replicas": placed.replicas}
            show_json({**told, **so_far.as_json()})

    with_client(masters, work)


def _far(view: master_pb2.GetClusterViewResponse, placed: Placed) -> tuple[bool, str]:
    """Return whether the tablet has the placement that was asked for, and the progress as text."""
    from stele.client.health import examine
    from stele.driver.progress import with_names
    from stele.rpc.proto import common_pb2

    health = examine(view)
    names = names_of_nodes(health)
    tablet = next((t for t in view.tablets if t.tablet_id.hex() == placed.tablet_id), None)
    if tablet is None:
        return True, "the tablet is gone"
    peers = tablet.committed_config.peers
    voters = {p.node_id.hex() for p in peers if p.member_type == common_pb2.VOTER}
    where = ", ".join(names.get(n, short(n)) for n in sorted(voters))
    intent = next((i for i in view.intents if i.tablet_id == tablet.tablet_id), None)
    asked = set(placed.by_hand.pinned) <= voters and not voters.intersection(placed.by_hand.avoided)
    if intent is None and len(peers) == len(voters) == tablet.replication_factor and asked:
        return True, f"done: replicas on {where}"
    if intent is None:
        return False, f"replicas on {where}; the change has not begun, or waits"
    copy = next((r.status.copy for r in tablet.replicas if r.status.replica_id == intent.replica_id), None)
    copied = f", {copy.bytes_done:,} of {copy.bytes_total:,} bytes" if copy and copy.bytes_total else ""
    short_names = {node_id[:8]: name for node_id, name in names.items()}
    return False, f"replicas on {where}; under way: {with_names(intent.reason, short_names)}{copied}"


def owner() -> str:
    """Return the user and machine of this command. They are shown to people who look at the tablet later."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user on this machine
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
