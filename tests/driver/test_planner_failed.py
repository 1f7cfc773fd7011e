"""A replica had FAILED, and its node is restarted. Nobody gives it up before the node has reported its
state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.planner import plan
from stele.driver.steps import BeginIntent, Blocked
from stele.driver.view import ClusterView, ReplicaState, ReplicaView
from stele.model.ids import ReplicaId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelTablet
from tests.driver.stories import REPLACED, node_of, one, reported, story


def started_again(begun: list[str]) -> tuple[Cluster, ModelTablet]:
    """Replica 3 had FAILED, and its replacement had begun this far. Its node is restarted, and opens its
    replicas."""
    cluster, t = one()
    t.replicas[3].failed = True
    cluster.advance()
    for title in begun:
        (step,) = plan(cluster.view(), POLICY)
        assert type(step).__name__ == title
        cluster.apply(step)
        cluster.advance()
    node_of(cluster, t, 2).opening = True
    return cluster, t


def says(cluster: Cluster, state: ReplicaState) -> ClusterView:
    """The view in which replica 3 is the first to be reported again; its leader has not heard it yet."""
    view = cluster.view()
    (tablet,) = view.tablets
    node_id = cluster.tablets[tablet.tablet_id].replicas[3].node_id
    report = ReplicaView(node_id, ReplicaId(3), state)
    return replace(view, tablets=(replace(tablet, replicas=(*tablet.replicas, report)),))


@pytest.mark.parametrize("begun", [[], ["BeginIntent", "StartCopy"]], ids=["none", "copy"])
def test_a_failed_replica_whose_node_was_started_again_is_waited_for(begun: list[str]) -> None:
    """It may be well, but its leader cannot know: it was demoted, and copied again. The replacement is not
    cancelled yet either."""
    cluster, t = started_again(begun)
    t.replicas[3].failed = False
    before = t.config
    opening = (ReplicaState.BOOTSTRAPPING, ReplicaState.CONFIGURING)
    for view in (cluster.view(), *(says(cluster, state) for state in opening)):
        (step,) = plan(view, POLICY)
        assert isinstance(step, Blocked) and step.code == "NotHeard" and "replica 3" in step.reason
    node_of(cluster, t, 2).opening = False
    cluster.advance()
    assert story(cluster) == (["CancelCopy"] if begun else [])
    assert [(p.replica_id, p.member_type) for p in t.config.peers] == [
        (p.replica_id, p.member_type) for p in before.peers
    ]


@pytest.mark.parametrize("begun", [[], ["BeginIntent", "StartCopy"]], ids=["none", "copy"])
def test_one_that_is_told_of_as_failed_again_is_replaced(begun: list[str]) -> None:
    cluster, t = started_again(begun)
    assert story(cluster) == ["Blocked:NotHeard"]
    for state in (ReplicaState.FAILED, ReplicaState.UNKNOWN, ReplicaState.RUNNING):
        (step,) = plan(says(cluster, state), POLICY)
        assert not isinstance(step, Blocked), state
    node_of(cluster, t, 2).opening = False
    assert story(cluster) == REPLACED[len(begun) :]
    assert cluster.healthy()


@pytest.mark.parametrize("begun", [[], ["BeginIntent", "StartCopy"]], ids=["none", "copy"])
@pytest.mark.parametrize("silent", ["leader", "masters"])
def test_one_that_nothing_is_heard_of_is_replaced(begun: list[str], silent: str) -> None:
    """Its node restarts again and again without reporting a replica; or it does not restart any more."""
    cluster, t = started_again(begun)
    node = node_of(cluster, t, 2)
    assert story(cluster) == ["Blocked:NotHeard"]
    if silent == "leader":
        node.cut = True
    else:
        node.alive = False
    assert story(cluster) == REPLACED[len(begun) :]
    assert cluster.healthy()


def test_one_that_was_demoted_is_given_up() -> None:
    """The tablet tolerates no fault until the new replica votes."""
    cluster, _ = started_again(["BeginIntent", "StartCopy", "DemotePeer"])
    assert story(cluster) == REPLACED[3:]
    assert cluster.healthy()


def test_what_the_leaders_log_no_longer_has_is_not_waited_for() -> None:
    """No restart brings it back."""
    cluster, _ = started_again([])
    view = reported(cluster.view(), lambda r: replace(r, lacking_peers=r.failed_peers))
    (step,) = plan(view, POLICY)
    assert isinstance(step, BeginIntent) and step.replaces_replica == 3
