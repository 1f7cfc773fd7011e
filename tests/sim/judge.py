"""Checks a whole world: the state of its nodes at any moment, and whether the group has recovered once all
faults are healed.

Reads the world; changes nothing but its counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stele.model.errors import ensure
from stele.model.ids import OPID_NONE
from stele.raft.invariants import check_group

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

UNLED_MS_MAX = 2_500
_LAG_MAX = 40
"""Number of entries that a peer which has come back may still lack."""


def check_nodes(world: World) -> None:
    """Check the group at any moment. Also check that a leader believes of its peers what it has reported of
    them."""
    for history in world.histories:
        check_group([n.core for n in world.all_nodes() if n.core is not None and n.history is history])
    for node in world.all_nodes():
        core = node.core
        if core is not None and node.leads:
            peers = core.status().peers
            failed = [peer.replica_id for peer in peers if peer.failed]
            told = [peer.replica_id for peer in peers if peer.replica_id in node.told_failed]
            ensure(
                failed == told,
                f"leader {node.replica_id} believes that {failed} FAILED, but has reported {told}",
            )


def check_rests(world: World) -> None:
    """Check that no replica rests for long without a leader that leads."""
    for node in world.all_nodes():
        if node.resting:
            world.met["a group at rest"] += 1
        if not node.resting or world.now < node.stalled_until or _is_led(world, node):
            node.unled_since = world.now
        ensure(
            world.now - node.unled_since < UNLED_MS_MAX,
            f"replica {node.replica_id} has been at rest without a leader for {UNLED_MS_MAX} ms",
        )


def _is_led(world: World, node: SimNode) -> bool:
    core = node.core
    if core is None or core.leader is None:
        return False
    leader = world.nodes[core.leader]
    return leader.leads and leader.core is not None and leader.core.term == core.term


def converged(world: World, acknowledged: int) -> bool:
    """Check for one leader, one more write than `acknowledged`, peers that have all that the leader
    committed, and a planner with nothing to do. A node that stays dead or deaf to the end need not come back:
    it is replaced."""
    if len(world.history.acknowledged) <= acknowledged:
        return False
    leaders = [node.core for node in _current(world) if node.core is not None and node.leads]
    if len(leaders) != 1:
        return False
    leader = leaders[0]
    if leader.pending_change_index is not None or leader.status().transferring_to is not None:
        return False
    for peer in leader.config.peers:
        node = world.nodes[peer.replica_id]
        core = node.core
        if node.failed or world.faults.lost_for_good(node):
            continue
        if core is None or core.term != leader.term or core.leader != leader.self_replica:
            return False
        if core.log.handed_index < leader.commit_index - _LAG_MAX or core.config != leader.config:
            return False
        if not core.term_committed:
            return False
    return world.healer.content() and (world.masters is None or world.masters.content())


def hopeless(world: World) -> bool:
    """Whether too many voters of the configuration in force are FAILED, need a copy, or stay dead or deaf."""
    nodes = _current(world)
    lost = [
        node for node in nodes if node.failed or world.faults.lost_for_good(node) or lacks_log(world, node)
    ]
    return not have_majority(world, lost)


def _current(world: World) -> list[SimNode]:
    """The nodes that no recovery gave up."""
    return [node for node in world.all_nodes() if not world.recovery.outdated(node)]


def lacks_log(world: World, node: SimNode) -> bool:
    """Whether its log does not meet the start of another's log, so that it cannot continue without a copy. It
    ends before that start, or has another entry there."""
    if not node.formed:
        return True
    starts = [other.core.log.start for other in _current(world) if other.core is not None]
    latest = max(starts, key=lambda opid: opid.index, default=OPID_NONE)
    log = node.twin.durable
    return log.start.index < latest.index and log.opid_at(latest.index) != latest


def have_majority(world: World, without: list[SimNode]) -> bool:
    """Whether the last committed configuration, and each one in force at a node, has a majority without
    those."""
    configs = [
        world.history.config,
        *(node.core.config for node in _current(world) if node.core is not None),
    ]
    return all(
        sum(world.nodes[peer.replica_id] not in without for peer in config.voters) >= config.majority
        for config in configs
        if config.voters
    )


def state(world: World) -> str:
    """The state of all nodes as text."""
    return "; ".join(_node_state(node) for node in world.all_nodes())


def _node_state(node: SimNode) -> str:
    core = node.core
    if core is None:
        return f"{node.replica_id} {'retired' if node.retired else 'up' if node.up else 'down'}"
    log = core.log
    return (
        f"{node.replica_id} {core.role.value} term {core.term} leader {core.leader} commit "
        f"{core.commit_index} "
        f"log {log.start}..{log.last_opid} config {core.config.opid_index}"
        f"[{','.join(f'{p.replica_id}{p.member_type.name[0]}' for p in core.config.peers)}]"
        f"{' FAILED' if node.failed else ''}{'' if node.has_data else ' no rows'}"
    )
