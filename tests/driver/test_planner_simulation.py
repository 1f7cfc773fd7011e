"""The planner against the model of a cluster: every prefix of every plan, crashes, deaths, returns, late
orders.

At each change of a configuration, the model asserts the rules that must never be broken.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stele.driver.planner import plan
from stele.driver.steps import MEMBERSHIP_STEPS, WAITS, Blocked, Step
from stele.driver.trials import CopyMemory
from stele.driver.view import NodeState, Wanted
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, Refused, node_name

EVENTS = (
    "die",
    "return",
    "gone",
    "cut",
    "mend",
    "fail",
    "restart",
    "opened",
    "drain",
    "undrain",
    "drain and stay",
    "park",
    "unpark",
    "give up",
    "crash",
    "new node",
    "late",
    "advance",
    "rf",
    "new master",
)


def one_round(cluster: Cluster, prefix: int, late: list[Step], keep_late: bool) -> None:
    """Plan, carry out the first `prefix` steps (the next one is sent and arrives late), let time pass."""
    steps = plan(cluster.view(), POLICY)
    tablets = [s.tablet_id for s in steps if s.tablet_id]
    assert len(set(tablets)) == len(tablets), "at most one step per tablet"
    for step in steps[:prefix]:
        attempt(cluster, step)
    if keep_late:
        late.extend(s for s in steps[prefix : prefix + 1] if isinstance(s, MEMBERSHIP_STEPS))
    cluster.advance()


def attempt(cluster: Cluster, step: Step) -> None:
    """Carry one step out; a refusal is an answer, not a failure."""
    try:
        cluster.apply(step)
    except Refused as refusal:
        cluster.history.append(f"refused {type(step).__name__}: {refusal}")


def happen(cluster: Cluster, event: str, pick: int, late: list[Step]) -> None:
    """One fault or wanted state, if it leaves every group a majority."""
    nodes = list(cluster.nodes.values())
    node: ModelNode = nodes[pick % len(nodes)]
    tablets = list(cluster.tablets.values())
    t = tablets[pick % len(tablets)]
    match event:
        case "die" if cluster.may_die(node.node_id):
            node.alive = False
        case "gone" if cluster.may_die(node.node_id):
            node.alive, node.gone = False, True
        case "cut" if cluster.may_die(node.node_id):
            node.cut = True
        case "mend":
            node.cut = False
        case "return" if not node.gone:
            node.alive = True
        case "fail":
            peer = t.config.peers[pick % len(t.config.peers)]
            if peer.replica_id in t.replicas and cluster.may_fail(t, peer.replica_id):
                t.replicas[peer.replica_id].failed = True
        case "restart" if node.alive and cluster.may_die(node.node_id):
            node.opening = True
            for replica in (r for o in tablets for r in o.replicas.values() if r.node_id == node.node_id):
                replica.failed = replica.failed and bool(pick % 2)
        case "opened":
            node.opening = False
        case "drain" if node.state is NodeState.ACTIVE:
            node.state, node.wanted, node.wanted_by = NodeState.DRAINING, Wanted.RETIRED, "administrator"
        case "drain and stay" if node.state is NodeState.ACTIVE:
            node.state, node.wanted, node.wanted_by = NodeState.DRAINING, Wanted.DRAINED, "administrator"
        case "park" if node.state is NodeState.ACTIVE:
            node.wanted, node.wanted_by = Wanted.PARKED, "administrator"
        case "unpark" if node.parked:
            node.wanted, node.wanted_by = None, ""
        case "give up" if node.state is NodeState.ACTIVE and not node.alive:
            node.state, node.given_up, node.wanted, node.wanted_by = NodeState.DRAINING, True, None, ""
        case "undrain" if node.state is NodeState.DRAINING:
            node.state, node.given_up, node.wanted, node.wanted_by = NodeState.ACTIVE, False, None, ""
        case "new master":
            cluster.new_leader_rounds = 2
        case "crash":
            cluster.epoch += 1
        case "new node":
            name = node_name(len(nodes) + 1)
            cluster.nodes[name] = ModelNode(
                name, node.machine if pick % 2 else f"m{len(nodes) + 1}", node.zone
            )
        case "late" if late:
            attempt(cluster, late.pop(pick % len(late)))
        case "rf":
            t.rf = (1, 3, 5)[pick % 3] if len(nodes) > 6 else 3
        case _:
            cluster.advance()


def heal(cluster: Cluster) -> None:
    """No more faults. There are enough new machines, and every node that can return does; then the cluster
    must converge."""
    for node in cluster.nodes.values():
        node.opening = False
        in_time = node.state is NodeState.DRAINING and node.alive and not node.given_up
        if in_time or node.parked:
            node.state, node.wanted, node.wanted_by = NodeState.ACTIVE, None, ""
    for _ in range(5):
        name = node_name(len(cluster.nodes) + 1)
        cluster.nodes[name] = ModelNode(name, f"m{len(cluster.nodes) + 1}", "z9")
    memory = CopyMemory()
    for number in range(150):
        view = cluster.view()
        steps = plan(view, POLICY, memory.look(view, number * 1_000))
        for step in steps:
            attempt(cluster, step)
        cluster.advance()
        if cluster.healthy() and not plan(cluster.view(), POLICY):
            return
    story = "\n".join(cluster.history[-40:])
    raise AssertionError(f"did not converge; last plan {plan(cluster.view(), POLICY)}\n{story}")


faults = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, 30), st.integers(0, 3), st.booleans()), max_size=25
)


@given(machines=st.integers(3, 7), zones=st.integers(1, 3), tablets=st.integers(1, 3), script=faults)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_prefix_then_crash_then_plan_again(
    machines: int, zones: int, tablets: int, script: list[tuple[str, int, int, bool]]
) -> None:
    cluster = Cluster(machines, zones, tablets, 3)
    late: list[Step] = []
    for event, pick, prefix, keep_late in script:
        happen(cluster, event, pick, late)
        one_round(cluster, prefix, late, keep_late)
    heal(cluster)


@given(machines=st.integers(6, 8), rf=st.sampled_from([1, 3, 5]), script=faults)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_other_replication_factors(machines: int, rf: int, script: list[tuple[str, int, int, bool]]) -> None:
    cluster = Cluster(machines, 2, 1, rf)
    late: list[Step] = []
    for event, pick, prefix, keep_late in script:
        happen(cluster, event, pick, late)
        one_round(cluster, prefix, late, keep_late)
    heal(cluster)


def test_tolerance_is_back_after_two_changes_and_no_data() -> None:
    cluster = Cluster(5, 1, 1, 3)
    (t,) = cluster.tablets.values()
    cluster.nodes[t.config.peers[0].node_id].alive = False
    cluster.advance()
    before = t.config.opid_index
    changes: list[str] = []
    for _ in range(20):
        (step,) = plan(cluster.view(), POLICY)
        if isinstance(step, MEMBERSHIP_STEPS):
            changes.append(type(step).__name__)
        if not isinstance(step, WAITS):
            cluster.apply(step)
        if cluster.spare(t) == 1:
            break
    assert before == -1 and changes == ["DemotePeer", "AddWitness"]
    assert not any(r.has_data and rid == 4 for rid, r in t.replicas.items())


def test_nothing_is_touched_while_too_many_are_silent() -> None:
    cluster = Cluster(7, 1, 7, 3)
    names = list(cluster.nodes)
    for name in (names[0], names[3]):
        cluster.nodes[name].alive = False
    cluster.advance()
    strict = type(POLICY)(dead_after_ms=10_000, max_lost_nodes=1)
    steps = plan(cluster.view(), strict)
    assert steps and {type(s) for s in steps} == {Blocked}
    assert {s.code for s in steps if isinstance(s, Blocked)} == {"TooManyLost"}
    told = type(POLICY)(dead_after_ms=10_000, max_lost_nodes=1, lost=frozenset({names[0]}))
    codes = {s.code for s in plan(cluster.view(), told) if isinstance(s, Blocked)}
    assert codes <= {"CopyLimit"}
