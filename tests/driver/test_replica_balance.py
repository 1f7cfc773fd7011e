"""Balance of replicas over zones and nodes: which move, which stay, and that the moves end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from stele.driver.planner import plan
from stele.driver.rebalancing import rebalancing
from stele.driver.steps import BeginIntent
from stele.driver.view import MOVE, NodeState
from stele.model.by_hand import ByHand
from stele.model.config import Configuration, Peer
from stele.model.ids import ReplicaId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, ModelReplica, node_name
from tests.driver.moves_world import never_back
from tests.driver.stories import story

BALANCED = replace(POLICY, rebalance=True)


def replicas(cluster: Cluster) -> Counter[str]:
    """How many replicas each node has."""
    found = Counter({n: 0 for n, node in cluster.nodes.items() if node.alive})
    found.update(p.node_id for t in cluster.tablets.values() for p in t.config.peers)
    return found


def settle(cluster: Cluster) -> int:
    """Run until nothing is left to do. Returns the number of moves. No tablet is on the same set of nodes
    twice."""
    before = len(cluster.moves)
    for _ in range(600):
        steps = plan(cluster.view(), BALANCED)
        if not steps:
            break
        for step in steps:
            cluster.apply(step)
        cluster.advance()
    else:
        raise AssertionError("no end")
    never_back(cluster.moves[before:])
    return len(cluster.moves) - before


def place(cluster: Cluster, nodes: list[int], tablet: int, size: int = 20, table: int = 0) -> None:
    """Put a tablet's replicas onto these nodes."""
    t = list(cluster.tablets.values())[tablet]
    peers = tuple(Peer(node_name(n), ReplicaId(i + 1), f"{n}:1") for i, n in enumerate(nodes))
    t.config, t.size, t.table = Configuration(-1, peers), size, table
    t.replicas = {p.replica_id: ModelReplica(p.node_id, has_data=True) for p in peers}
    t.leader = peers[0].node_id


def test_a_new_node_fills() -> None:
    cluster = Cluster(3, 1, 12, 3)
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    assert settle(cluster) == 9
    assert set(replicas(cluster).values()) == {9}


def test_a_cluster_that_is_placed_evenly_moves_nothing() -> None:
    assert settle(Cluster(6, 3, 12, 3)) == 0


def test_a_difference_of_one_is_left() -> None:
    cluster = Cluster(5, 1, 4, 3)
    settle(cluster)
    found = replicas(cluster)
    assert max(found.values()) - min(found.values()) <= 1 and settle(cluster) == 0


def test_zones_are_repaired_before_nodes_are_balanced() -> None:
    """z1 has nodes 1, 4, 7; z2 has 2, 5; z0 has 3, 6."""
    cluster = Cluster(7, 3, 1, 3)
    place(cluster, [1, 4, 2], 0)
    moves, why = rebalancing(cluster.view(), BALANCED)
    assert not why and len(moves) == 1
    assert moves[0].source == node_name(4) and moves[0].target in (node_name(3), node_name(6))
    assert "zone z0 has fewer" in moves[0].reason
    assert settle(cluster) == 1


def test_two_zones_keep_two_and_one() -> None:
    cluster = Cluster(6, 2, 6, 3)
    for tablet in range(6):
        place(cluster, [1, 3, 2] if tablet % 2 else [2, 4, 1], tablet)
    settle(cluster)
    for t in cluster.tablets.values():
        zones = Counter(cluster.nodes[p.node_id].zone for p in t.config.peers)
        assert sorted(zones.values()) == [1, 2]


def test_each_table_is_spread_too() -> None:
    """All nodes have equally many replicas. But one table is only on nodes 1 to 3, and the other only on 4 to
    6."""
    cluster = Cluster(6, 1, 12, 3)
    for tablet in range(12):
        place(cluster, [1, 2, 3] if tablet < 6 else [4, 5, 6], tablet, table=1 if tablet < 6 else 2)
    settle(cluster)
    for table in (1, 2):
        of = Counter(p.node_id for t in cluster.tablets.values() if t.table == table for p in t.config.peers)
        counts = [of[node_name(n)] for n in range(1, 7)]
        assert max(counts) - min(counts) <= 2, counts


def test_bytes_count_beside_numbers() -> None:
    """Each node has two replicas; the two large ones are on one node."""
    cluster = Cluster(4, 1, 8, 1)
    for tablet in range(8):
        place(cluster, [tablet // 2 + 1], tablet, size=1_000 if tablet < 2 else 10)
    settle(cluster)
    held: Counter[str] = Counter()
    for t in cluster.tablets.values():
        held.update({p.node_id: t.size for p in t.config.peers})
    assert max(held.values()) < 2_000
    assert max(replicas(cluster).values()) <= 3


def test_nothing_moves_while_something_heals_is_made_or_is_silent() -> None:
    cluster = Cluster(3, 1, 12, 3)
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    assert plan(cluster.view(), BALANCED)
    view = cluster.view()
    quiet = tuple(
        replace(n, heartbeat_age_ms=7_000 if n.node_id == node_name(1) else 100) for n in view.nodes
    )
    assert plan(replace(view, nodes=quiet), BALANCED) == ()
    new = (replace(view.tablets[0], state="CREATING"), *view.tablets[1:])
    assert plan(replace(view, tablets=new), BALANCED) == ()
    next(iter(cluster.tablets.values())).replicas[3].failed = True
    cluster.advance()
    steps = plan(cluster.view(), BALANCED)
    assert [s.kind for s in steps if isinstance(s, BeginIntent)] == ["replace"]


def test_tablets_that_were_placed_by_hand_stay() -> None:
    cluster = Cluster(3, 1, 12, 3)
    for t in cluster.tablets.values():
        t.by_hand = ByHand(pinned=(t.config.peers[0].node_id,))
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    assert settle(cluster) == 0


def test_nodes_that_drain_or_have_no_room_get_nothing() -> None:
    cluster = Cluster(3, 1, 12, 3)
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    view = cluster.view()
    full = tuple(replace(n, disk_free_bytes=1 if n.node_id == node_name(4) else 1 << 40) for n in view.nodes)
    assert plan(replace(view, nodes=full), BALANCED) == ()
    cluster.nodes[node_name(4)].state = NodeState.DRAINING
    assert not [s for s in plan(cluster.view(), replace(BALANCED, retire=False))]


def test_without_any_node_that_takes_replicas_nothing_moves() -> None:
    """The plan ended with a KeyError (seed 1210 of moves_world), and all healing stopped with it."""
    cluster = Cluster(4, 1, 4, 1)
    view = cluster.view()
    unformed = tuple(replace(n, formed=False) for n in view.nodes)
    assert plan(replace(view, nodes=unformed), BALANCED) == ()


def test_two_nodes_of_one_machine_never_hold_the_same_tablet() -> None:
    cluster = Cluster(3, 1, 12, 3)
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m3", "z0")
    assert settle(cluster) == 0  # each tablet has a replica on machine m3


def test_of_nodes_alike_the_one_whose_machine_has_fewer_gets_one_more() -> None:
    cluster = Cluster(2, 1, 6, 1)
    for number in range(6):
        place(cluster, [1], number)
    for number, machine in ((3, "m2"), (4, "m3")):
        cluster.nodes[node_name(number)] = ModelNode(node_name(number), machine, "z0")
    assert settle(cluster) == 4
    found = replicas(cluster)
    assert [found[node_name(n)] for n in (1, 2, 3, 4)] == [2, 1, 1, 2]


def test_two_nodes_of_a_machine_have_as_many_each_as_others() -> None:
    """Their disks are as large. No replica moves for the sake of the machine."""
    cluster = Cluster(3, 1, 8, 1)
    cluster.nodes[node_name(3)].machine = "m2"
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    settle(cluster)
    assert set(replicas(cluster).values()) == {2} and settle(cluster) == 0


def test_a_new_replica_goes_to_a_machine_with_fewer() -> None:
    cluster = Cluster(4, 1, 2, 3)
    place(cluster, [1, 2, 3], 0)
    place(cluster, [2, 3, 4], 1)
    for number, machine in ((5, "m4"), (6, "m6")):
        cluster.nodes[node_name(number)] = ModelNode(node_name(number), machine, "z0")
    cluster.nodes[node_name(1)].alive = False
    cluster.advance()
    (begin,) = [s for s in plan(cluster.view(), POLICY) if isinstance(s, BeginIntent)]
    assert begin.target_node == node_name(6)


def test_few_moves_at_once() -> None:
    cluster = Cluster(3, 1, 12, 3)
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    policy = replace(BALANCED, max_copies=4)
    for _ in range(40):
        steps = plan(cluster.view(), policy)
        for step in steps:
            cluster.apply(step)
        copying = [i for i in cluster.intents.values() if i.kind == MOVE and i.target_node]
        joined = [i for i in copying if cluster.tablets[i.tablet_id].config.peer(i.replica_id) is None]
        assert len(joined) <= 2
        cluster.advance()


def test_random_layouts_end_even_and_never_go_back() -> None:
    rng = random.Random(7)
    moved = 0
    for _ in range(30):
        machines, zones = rng.randint(3, 8), rng.randint(1, 3)
        cluster = Cluster(machines, zones, rng.randint(1, 14), 3)
        for tablet in range(len(cluster.tablets)):
            nodes = rng.sample(range(1, machines + 1), 3)
            place(cluster, nodes, tablet, rng.choice((10, 20, 40)), rng.choice((1, 2)))
        moved += settle(cluster)
        assert cluster.healthy()
    print(f"moves of 30 random layouts: {moved}")


def test_an_even_cluster_of_many_tablets_costs_little() -> None:
    """1,920 tablets on 48 nodes: if nothing can be improved, no tablet is examined."""
    cluster = Cluster(48, 3, 1_920, 3)
    view = cluster.view()
    moves, _ = rebalancing(view, BALANCED)
    assert not moves


def test_story_of_a_move_for_balance() -> None:
    cluster = Cluster(3, 1, 2, 3)
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    told = story(cluster, policy=BALANCED)
    assert told[:4] == ["BeginIntent", "StartCopy", "AddPreFollower", "RemovePeer"]
