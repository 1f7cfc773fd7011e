"""Groups that rest under the watch of their nodes, and whether they do."""

from __future__ import annotations

from stele.consensus.replica import Replica
from tests.consensus.cluster import Group, TestNode, rows, wait_until
from tests.consensus.conftest import MakeGroup


def resting(replica: Replica) -> bool:
    """Whether it waits for no heartbeat."""
    return replica.runtime is not None and replica.runtime.quiet


async def rests(group: Group) -> None:
    """Wait until all of it does."""
    await wait_until(lambda: all(resting(r) for r in group.replicas() if r.running))


async def at_rest(group_of: MakeGroup) -> tuple[Group, list[TestNode], Replica]:
    """A group that rests, its nodes and its leader."""
    group, nodes = await group_of()
    for node in nodes:
        node.watch_quiet()
    await group.write(rows([1]))
    await rests(group)
    return group, nodes, await group.leader()
