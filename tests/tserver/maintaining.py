"""What tests of a node's maintenance share: stores with files, and when and with what room it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stele.tablet.store import TabletStore
from stele.tserver.maintenance import Maintenance, room_bytes
from stele.tserver.node import Node
from stele.wal import LogOptions
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster


def log_options(**ours: Any) -> Callable[..., LogOptions]:
    """In the place of `opening.LogOptions`: these values, whatever the flags say."""
    return lambda **flags: LogOptions(**{**flags, **ours})


async def with_files(cluster: LocalCluster, tables: int) -> list[TabletStore]:
    """Stores of four files each, in the order in which the node looks at them."""
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        for number in range(tables):
            table = await client.create_table(f"t{number}", SCHEMA, replication_factor=1)
            for at in range(4):
                await table.put({"id": at, "name": "n"})
                for replica in node.replicas:
                    if replica.machine is not None and replica.machine.applied != replica.machine.flushed:
                        await replica.storage.flush()
    return [r.machine for r in node.replicas if isinstance(r.machine, TabletStore)]


async def anew(node: Node) -> Maintenance:
    """The node's maintenance, with the pauses that hold now."""
    await node.maintenance.close()
    node.maintenance.start()
    return node.maintenance


async def at_rest(node: Node) -> Maintenance:
    """The node's maintenance, which does what it is called for and nothing else."""
    await node.maintenance.close()
    return node.maintenance


async def with_room(node: Node, room: int) -> None:
    """From now on the node's disk has so much room for work in the background."""
    options = node.log.shared.options
    free = options.low_space_bytes + 2 * options.segment_bytes + room
    node.volume.disk_bytes = lambda: (free, 0)  # type: ignore[method-assign]
    await wait_until(lambda: room_bytes(node.log, node.monitor) == room)
