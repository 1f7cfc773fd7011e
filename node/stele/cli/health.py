"""Fetches and prints the leading master's view of the cluster. Used by ksck, tables and tablets.

Invariant: the old state of a replica on a silent node is never shown as current.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stele.cli.output import say, short

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.health import ClusterHealth, TabletHealth


async def cluster_health(client: AsyncClient, *, timeout_s: float = 10.0) -> ClusterHealth:
    """The health of the cluster. Raises SteleError if no master leads within `timeout_s`."""
    from stele.client.admin import cluster_view
    from stele.client.health import examine

    return examine(await cluster_view(client.masters, timeout_s=timeout_s))


def names_of_nodes(health: ClusterHealth) -> dict[str, str]:
    """The short name of each node and master: its pod's name, else the first digits of its id."""
    return {node.node_id: node.name or short(node.node_id) for node in health.nodes}


def warn_unsettled(health: ClusterHealth) -> None:
    """Print a warning if the leading master is too new to know the state of nodes and tablets."""
    if not health.settled:
        say(
            "the leading master is new and has not heard from all nodes yet; run the command again in a second"
        )


def show_unhealthy(tablets: Iterable[TabletHealth]) -> None:
    """Print a line with the reasons for each tablet that is not healthy."""
    for tablet in tablets:
        if tablet.state != "healthy":
            say(
                f"tablet {short(tablet.tablet_id)} of {tablet.table_name} is {tablet.state}: "
                f"{'; '.join(tablet.reasons)}"
            )
