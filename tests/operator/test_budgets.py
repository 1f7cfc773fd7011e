"""How many pods may be evicted, and what the status says of it."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.view import ReplicaState, ReplicaView
from tests.operator.worlds import made


def test_while_no_master_leads_no_more_pods_may_be_evicted_than_before() -> None:
    """A drain takes the leader master first: what is then not known of the tablets must not let a node go."""
    world = made()

    def least() -> int:
        return int(world.objects["PodDisruptionBudget", "flights-nodes"]["spec"]["minAvailable"])

    assert least() == 4
    tablet = world.tablets[0]
    peer = tablet.config.peers[1]
    failed = ReplicaView(peer.node_id, peer.replica_id, ReplicaState.FAILED)
    world.tablets[0] = replace(tablet, replicas=(failed,))
    world.step()
    assert least() == 5
    confirmed, world.confirmed = world.confirmed, set()
    world.step()
    assert least() == 5
    world.tablets[0], world.confirmed = tablet, confirmed
    world.step()
    assert least() == 4
