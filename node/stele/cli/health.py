"""The leader master's view of the cluster, asked for and shown. Used by ksck, tables and tablets.

Invariant: what is shown of a replica whose node is silent is never shown as if it were so now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stele.cli.output import say, short

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.health import ClusterHealth, TabletHealth


async def cluster_health(client: AsyncClient, *, timeout_s: float = 10.0) -> ClusterHealth:
    """How the cluster is. Raises SteleError if no master leads within `timeout_s`."""
    from stele.client.admin import cluster_view
    from stele.client.health import examine

    return examine(await cluster_view(client.masters, timeout_s=timeout_s))


def names_of_nodes(health: ClusterHealth) -> dict[str, str]:
    """What people know each node and master by: the name of its pod, else the first digits of its id."""
    return {node.node_id: node.name or short(node.node_id) for node in health.nodes}


def tell_unsettled(health: ClusterHealth) -> None:
    """One line if what is told of nodes and tablets may still be wrong."""
    if not health.settled:
        say("the leader master is new and has not heard from all nodes yet; ask again in a second")


def show_ailing(tablets: Iterable[TabletHealth]) -> None:
    """A line for each tablet that is not healthy, with the reasons."""
    for tablet in tablets:
        if tablet.state != "healthy":
            say(
                f"tablet {short(tablet.tablet_id)} of {tablet.table_name} is {tablet.state}: "
                f"{'; '.join(tablet.reasons)}"
            )
