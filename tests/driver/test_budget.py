"""Who holds the change budget stands in the catalog: drains and moves wait for nodes that it says are away, heals do not."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.budget import taken_over
from stele.driver.planner import plan
from stele.driver.policy import HOLDERS_MAX, Policy
from stele.driver.steps import BeginIntent, Blocked, Step
from stele.driver.view import Away, ClusterView, Holder, NodeState, Wanted
from stele.model.by_hand import ByHand
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, node_name

PATIENT = replace(POLICY, dead_after_ms=120_000)
"""A node that is silent in the model is not lost yet."""
AWAY, DRAINED = node_name(1), node_name(4)


def world() -> Cluster:
    """Tablets on the nodes 1, 2, 3 and 2, 3, 4. Node 1 is made again, and somebody wants node 4 drained."""
    cluster = Cluster(8, 1, 2, 3)
    cluster.nodes[AWAY].alive = False
    cluster.nodes[DRAINED].state, cluster.nodes[DRAINED].wanted = NodeState.DRAINING, Wanted.DRAINED
    cluster.advance()
    return cluster


def rolled(cluster: Cluster, starts: int = 0) -> ClusterView:
    """The view while the catalog says who made node 1 go, after so many starts of it."""
    view = cluster.view()
    nodes = tuple(replace(n, incarnation=starts) if n.node_id == AWAY else n for n in view.nodes)
    return replace(view, nodes=nodes, holding=(Holder("upgrade", (Away(AWAY),)),))


def of(steps: tuple[Step, ...], cluster: Cluster, ordinal: int) -> list[Step]:
    """The steps of one of the two tablets."""
    tablet_id = list(cluster.tablets)[ordinal]
    return [s for s in steps if s.tablet_id == tablet_id]


def test_a_drain_begins_once_the_node_that_is_made_again_is_back() -> None:
    cluster = world()
    assert isinstance(of(plan(cluster.view(), PATIENT), cluster, 1)[0], BeginIntent), (
        "nobody holds the budget"
    )
    (waits,) = of(plan(rolled(cluster), PATIENT), cluster, 1)
    assert isinstance(waits, Blocked) and waits.code == "BudgetHeld"
    assert waits.reason.endswith(f"waits, as upgrade has node {AWAY[:8]} away")
    cluster.nodes[AWAY].alive = True
    cluster.advance()
    assert isinstance(of(plan(rolled(cluster, 1), PATIENT), cluster, 1)[0], BeginIntent)


def test_a_node_that_is_to_go_and_is_still_there_counts_as_away() -> None:
    """Its pod is deleted a moment later, and it is silent for seconds before anybody says so."""
    cluster = world()
    cluster.nodes[AWAY].alive = True
    cluster.advance()
    view = replace(cluster.view(), holding=(Holder("upgrade", (Away(AWAY, 7),)),))
    for incarnation, code in ((7, "BudgetHeld"), (8, "")):
        seen = replace(view, nodes=tuple(replace(n, incarnation=incarnation) for n in view.nodes))
        (step,) = of(plan(seen, PATIENT), cluster, 1)
        assert (step.code if isinstance(step, Blocked) else "") == code


def test_heals_wait_for_nobody_and_once_it_is_replaced_nobody_waits_for_the_node() -> None:
    cluster = world()
    for _ in range(60):
        steps = plan(rolled(cluster), POLICY)
        named = any(t.config.peer_on(AWAY) for t in cluster.tablets.values())
        begun = [s for s in of(steps, cluster, 1) if isinstance(s, BeginIntent)]
        assert not (named and begun), "the drain does not begin before the heal has ended"
        for step in steps:
            if not isinstance(step, Blocked):
                cluster.apply(step)
        cluster.advance()
    assert not any(t.config.peer_on(n) for t in cluster.tablets.values() for n in (AWAY, DRAINED))


def test_a_move_by_hand_waits_too() -> None:
    cluster = world()
    cluster.nodes[DRAINED].state, cluster.nodes[DRAINED].wanted = NodeState.ACTIVE, None
    second = list(cluster.tablets.values())[1]
    second.by_hand = ByHand(pinned=(node_name(7),), avoided=(DRAINED,))
    (waits,) = of(plan(rolled(cluster), PATIENT), cluster, 1)
    assert isinstance(waits, Blocked) and waits.code == "BudgetHeld" and "placed by hand" in waits.reason
    cluster.nodes[AWAY].alive = True
    cluster.advance()
    assert isinstance(of(plan(rolled(cluster, 1), PATIENT), cluster, 1)[0], BeginIntent)


def counted(view: ClusterView) -> ClusterView:
    """The view with the number of replicas of each node, as masters tell it."""
    held = {n.node_id: sum(t.config.peer_on(n.node_id) is not None for t in view.tablets) for n in view.nodes}
    return replace(view, nodes=tuple(replace(n, replicas=held[n.node_id]) for n in view.nodes))


def over(
    view: ClusterView, policy: Policy, waiting: tuple[str, ...] = ()
) -> tuple[tuple[Holder, ...], tuple[str, ...]]:
    """Who holds and who waits while another drives."""
    return taken_over(counted(view), policy, waiting, {AWAY: "a", DRAINED: "d", node_name(8): "p"})


def test_whoever_drives_instead_keeps_what_is_written_down() -> None:
    cluster = world()
    cluster.nodes[node_name(8)].wanted = Wanted.PARKED
    roll = Holder("upgrade", (Away(AWAY),))
    view = replace(cluster.view(), holding=(Holder("park/old"), roll))
    assert over(view, PATIENT, ("park/x",)) == ((Holder("drain/d"), Holder("park/p"), roll), ("park/x",))
    lost = (Holder("heal/a"), Holder("drain/d"), Holder("park/p"), roll)
    assert over(view, POLICY, ("park/x",)) == (lost, ("park/x",))
    cluster.nodes[AWAY].alive = True
    cluster.advance()
    back = replace(cluster.view(), holding=view.holding)
    assert over(back, PATIENT, ("park/x",)) == ((Holder("drain/d"), Holder("park/p")), ("upgrade", "park/x"))
    again = replace(back, holding=())
    assert over(again, PATIENT, ("upgrade", "park/x"))[1] == ("upgrade", "park/x"), "until its driver is back"


def test_a_new_leader_master_that_has_not_heard_the_node_yet_takes_it_for_away() -> None:
    cluster = world()
    cluster.new_leader_rounds = 9
    roll = Holder("upgrade", (Away(AWAY),))
    assert roll in over(rolled(cluster), PATIENT)[0]


def test_however_many_nodes_are_parked_what_is_away_stays_written_down() -> None:
    """The catalog names few holders. The roll was left out, and a drain began beside it."""
    cluster = Cluster(HOLDERS_MAX + 4, 1, 2, 3)
    cluster.nodes[AWAY].alive = False
    for number in range(5, HOLDERS_MAX + 5):
        cluster.nodes[node_name(number)].wanted = Wanted.PARKED
    cluster.advance()
    roll = Holder("upgrade", (Away(AWAY),))
    holding, _ = over(rolled(cluster), PATIENT)
    assert len(holding) == HOLDERS_MAX and holding[-1] == roll
    cluster.nodes[DRAINED].state, cluster.nodes[DRAINED].wanted = NodeState.DRAINING, Wanted.DRAINED
    view = replace(rolled(cluster), holding=holding)
    (waits,) = of(plan(view, PATIENT), cluster, 1)
    assert isinstance(waits, Blocked) and waits.code == "BudgetHeld"
