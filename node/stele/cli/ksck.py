"""`stele ksck`: is every tablet as it should be?"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from stele.cli.errors import UNHEALTHY
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import short, show_json, show_table

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.health import ClusterHealth


@click.command()
@masters_option
@json_option
@click.option(
    "--timeout", "timeout_s", default=10.0, show_default=True, help="Wait so long for a master to lead."
)
def ksck(masters: str, as_json: bool, timeout_s: float) -> None:
    """Check the cluster: masters, nodes, tablets, changes under way. Exit 1 if a tablet is not as it should be.

    Example: stele ksck --masters 10.0.0.1:7051
    """
    from stele.client.admin import cluster_view
    from stele.client.health import examine

    async def work(client: AsyncClient) -> ClusterHealth:
        return examine(await cluster_view(client.masters, timeout_s=timeout_s))

    health = with_client(masters, work)
    if as_json:
        show_json({"healthy": health.healthy, **asdict(health)})
    else:
        _print(health)
    if not health.healthy:
        sys.exit(UNHEALTHY)


def _print(health: ClusterHealth) -> None:
    click.echo(f"cluster {health.cluster_id}, leader master {short(health.leader_master)}")
    if not health.settled:
        click.echo("the leader master is new and has not heard from all nodes yet; ask again in a second")
    show_table(
        ("node", "role", "state", "heard", "replicas", "address", "machine", "zone"),
        [
            (
                short(node.node_id),
                node.role,
                node.state,
                f"{node.heartbeat_age_ms / 1_000:.1f} s ago",
                node.replicas,
                node.address,
                node.machine or "-",
                node.zone or "-",
            )
            for node in health.nodes
            if node.state != "retired"
        ],
    )
    for tablet in health.tablets:
        if tablet.state != "healthy":
            click.echo(
                f"tablet {short(tablet.tablet_id)} of {tablet.table_name} is {tablet.state}: "
                f"{'; '.join(tablet.reasons)}"
            )
    for intent in health.intents:
        click.echo(f"under way: {intent}")
    states = ("healthy", "under-replicated", "unavailable", "creating")
    counts = ", ".join(f"{health.count(s)} {s}" for s in states if health.count(s) or s == "healthy")
    click.echo(f"{len(health.tablets)} tablets: {counts}")
    click.echo("OK" if health.healthy else "NOT HEALTHY")
