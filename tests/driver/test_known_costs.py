"""What a driver keeps between its passes saves work: a pass costs what changed, and not what there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stele.driver.known import Known
from stele.driver.planner import plan
from stele.driver.steps import Blocked, Step
from stele.driver.view import ClusterView, CopyView, DataState, Intent, ReplicaView
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import ReplicaId
from tests.driver.test_known import POLICY, cluster_of, node_id, with_report
from tests.operator.test_large import instructions


def cost_of_a_pass(tablets: int, change: Callable[[ClusterView], ClusterView]) -> int:
    """Instructions of a plan after a change, in a cluster where nothing was to be done before."""
    known, view = Known(), cluster_of(tablets)
    for _ in range(60):
        steps = plan(view, POLICY, known=known)
        if not steps:
            break
        view = moved(view, steps)
    assert not steps
    view = change(view)
    return instructions(lambda: plan(view, POLICY, known=known))


def turns(tablets: int) -> ClusterView:
    """A node of six is lost. All tablets that were on it have a witness, and all but three wait for their turn to copy."""
    view, lost = cluster_of(tablets), node_id(1)
    nodes = tuple(replace(n, heartbeat_age_ms=60_000) if n.node_id == lost else n for n in view.nodes)
    found, intents = [], []
    for t in view.tablets:
        gone = t.config.peer_on(lost)
        if gone is not None:
            rest = [p for p in t.config.peers if p is not gone]
            target = next(n.node_id for n in nodes if t.config.peer_on(n.node_id) is None)
            demoted = replace(gone, member_type=MemberType.NON_VOTER)
            witness = Peer(target, ReplicaId(4), "x:1", MemberType.WITNESS)
            copy = CopyView("Fetching" if len(intents) < 3 else "Waiting", 0, 100, rest[0].node_id)
            new = ReplicaView(target, ReplicaId(4), data_state=DataState.COPYING, has_data=False, copy=copy)
            reports = (*(r for r in t.replicas if r.node_id != lost), new)
            config = Configuration(9, (demoted, *rest, witness))
            t = replace(t, config=config, leader_node=rest[0].node_id, replicas=reports)
            intents.append(Intent(t.tablet_id, ReplicaId(4), target, "replace", 1, "", 1, True))
        found.append(t)
    return replace(view, nodes=nodes, tablets=tuple(found), intents=tuple(intents))


def test_a_plan_hardly_grows_with_the_tablets_that_wait_for_their_turn() -> None:
    """After the loss of a node there are thousands, and a plan every second: each looked at all of them."""

    def cost(tablets: int) -> tuple[int, int]:
        known, view = Known(), turns(tablets)
        plan(view, POLICY, known=known)
        arrived = with_report(view, 0, 2, copy=CopyView("Fetching", 50, 100, view.tablets[0].leader_node))
        steps: list[Step] = []
        done = instructions(lambda: steps.extend(plan(arrived, POLICY, known=known)))
        return len([s for s in steps if isinstance(s, Blocked)]), done

    (few, small), (many, large) = cost(60), cost(240)
    assert few == 27 and many == 117
    assert large - small < (many - few) * 250  # to look at one takes 1,500


def moved(view: ClusterView, steps: tuple[Step, ...]) -> ClusterView:
    """The view after leaders moved."""
    to = {s.tablet_id: s.target_node for s in steps if hasattr(s, "removes")}
    tablets = (replace(t, leader_node=to.get(t.tablet_id, t.leader_node)) for t in view.tablets)
    return replace(view, tablets=tuple(tablets))


def heartbeats(view: ClusterView) -> ClusterView:
    """All nodes were heard again, and wrote something meanwhile."""
    return replace(
        view, nodes=tuple(replace(n, heartbeat_age_ms=400, disk_free_bytes=1 << 39) for n in view.nodes)
    )


def test_a_pass_over_a_cluster_at_rest_hardly_grows_with_the_tablets() -> None:
    few, many = cost_of_a_pass(60, heartbeats), cost_of_a_pass(240, heartbeats)
    assert many - few < 180 * 1
