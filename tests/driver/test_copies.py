"""Copies that fail: they are restarted from another source, and in the end made on another node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.steps import BeginIntent, CancelCopy, RemovePeer, StartCopy, Step, WaitCopy
from stele.driver.trials import NO_TRIALS, STALL_MS, TRIES, CopyMemory, Trials
from stele.driver.view import ClusterView, CopyView
from stele.model.copies import CopyRecord
from stele.model.ids import NodeId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelTablet, node_name
from tests.driver.stories import reported

MINUTE_MS = 60_000


class Copying:
    """Replica 3 is dead. The new one is being copied in the state `copy`."""

    def __init__(self, machines: int = 6, *, begun: int = 2, replicas: int = 3) -> None:
        self.cluster = Cluster(machines, 1, 1, replicas)
        self.tablet: ModelTablet = next(iter(self.cluster.tablets.values()))
        self.cluster.nodes[self.tablet.config.peers[2].node_id].alive = False
        self.cluster.advance()
        for _ in range(begun):
            self.cluster.apply(plan(self.cluster.view(), POLICY)[0])
        intent = self.cluster.intents[self.tablet.tablet_id]
        self.target, self.replica_id = intent.target_node, intent.replica_id
        self.leader = NodeId(self.tablet.leader)
        self.other = next(p.node_id for p in self.tablet.config.peers[:2] if p.node_id != self.tablet.leader)
        self.memory = CopyMemory()
        self.now_ms = 0
        self.copy = CopyView("Starting", 0, 0, self.leader)

    def view(self) -> ClusterView:
        return reported(
            self.cluster.view(),
            lambda r: replace(r, copy=self.copy) if r.replica_id == self.replica_id else r,
        )

    def trials(self) -> Trials:
        return self.memory.look(self.view(), self.now_ms)

    def step(self) -> Step:
        return plan(self.view(), POLICY, self.trials())[0]

    def after(self, passed_ms: int) -> Step:
        self.now_ms += passed_ms
        return self.step()


def test_a_copy_that_stands_still_is_begun_anew_from_another_source_then_made_elsewhere() -> None:
    world = Copying(begun=4)
    assert isinstance(world.step(), WaitCopy) and isinstance(world.after(STALL_MS - 1), WaitCopy)
    again = world.after(1)
    assert isinstance(again, StartCopy) and again.source_node == world.other
    world.copy = replace(world.copy, source_node=world.other)
    assert isinstance(world.step(), WaitCopy), "once for each time that it stalled"
    back = world.after(STALL_MS)
    assert isinstance(back, StartCopy) and back.source_node == world.leader
    world.copy = replace(world.copy, source_node=world.leader)
    gone = world.after(STALL_MS)
    assert isinstance(gone, RemovePeer) and gone.node_id == world.target and "3 times" in gone.reason


def test_a_copy_that_fails_again_and_again_is_made_elsewhere() -> None:
    world = Copying()
    sources = []
    world.copy = CopyView("Failed", 0, 0, world.leader, "INTERNAL: unreadable")
    for _ in range(40):
        step = world.after(1_000)
        if not isinstance(step, StartCopy):
            break
        sources.append(step.source_node)
    assert isinstance(step, CancelCopy) and "INTERNAL" in step.reason
    assert set(sources) == {world.leader, world.other} and len(sources) >= 20
    world.cluster.apply(step)
    begun = world.after(1_000)
    assert isinstance(begun, BeginIntent) and begun.target_node != world.target
    assert world.target in world.trials().avoid
    world.now_ms += 11 * MINUTE_MS
    assert not world.trials().avoid, "not for ever"


def test_a_copy_that_gets_further_is_not_given_up() -> None:
    world = Copying()
    for done in range(1, 20):
        world.copy = CopyView("Failed", done, 100, world.leader, "UNAVAILABLE")
        assert isinstance(world.after(MINUTE_MS), StartCopy)
    world.copy = CopyView("Installing", 100, 100, world.leader)
    assert not isinstance(world.after(100 * MINUTE_MS), StartCopy | CancelCopy)


def test_the_only_node_there_is_stays_the_target() -> None:
    world = Copying(machines=4)
    world.copy = CopyView("Failed", 0, 0, world.leader, "INTERNAL")
    for _ in range(2 * TRIES):
        assert isinstance(world.after(MINUTE_MS), StartCopy)
    assert world.trials().avoid == {world.target}
    world.cluster.nodes[node_name(9)] = replace(
        world.cluster.nodes[world.target], node_id=node_name(9), machine="m9"
    )
    assert isinstance(world.step(), CancelCopy)


def test_a_copy_whose_source_died_is_begun_anew_from_one_that_lives() -> None:
    world = Copying(begun=4)
    world.copy = CopyView("Fetching", 10, 20, node_name(3))
    step = plan(world.view(), POLICY, NO_TRIALS)[0]
    assert isinstance(step, StartCopy) and step.source_node == world.leader and "silent" in step.reason
    world.copy = CopyView("Installing", 20, 20, node_name(3))
    assert isinstance(plan(world.view(), POLICY, NO_TRIALS)[0], WaitCopy)


@pytest.mark.parametrize(
    ("begun", "replicas"), [(2, 5), (4, 3)], ids=["before it is a member", "as a witness"]
)
def test_a_copy_that_runs_takes_a_budget_that_was_changed(begun: int, replicas: int) -> None:
    """It may have hours to go, and the tablet cannot spare a voter meanwhile."""
    world = Copying(begun=begun, replicas=replicas)
    fast = replace(POLICY, bytes_per_second=100 << 20)

    def step(copy: CopyView, policy: Policy = fast) -> Step:
        world.copy = copy
        return plan(world.view(), policy)[0]

    slow = CopyView("Fetching", 10, 1 << 40, world.leader, bytes_per_second=1 << 20)
    again = step(slow)
    assert isinstance(again, StartCopy) and "104,857,600 bytes/s" in again.reason
    assert again.source_node == world.leader, "another source would begin it again"
    assert (again.target_node, again.replica_id) == (world.target, world.replica_id)
    for copy in (
        replace(slow, bytes_per_second=100 << 20),
        replace(slow, bytes_per_second=None),
        replace(slow, state="Installing"),
    ):
        assert not isinstance(step(copy), StartCopy), copy
    assert isinstance(step(slow, POLICY), WaitCopy), "a driver without a budget leaves it as it is"
    other = step(replace(slow, source_node=world.other))
    assert isinstance(other, StartCopy) and other.source_node == world.other


def test_a_copy_that_is_being_installed_does_not_stand_still() -> None:
    """All its bytes have arrived; the replica waits for its log."""
    world = Copying(begun=4)
    world.copy = replace(world.copy, state="Installing", bytes_done=20, bytes_total=20)
    for _ in range(TRIES + 1):
        assert isinstance(world.after(STALL_MS), WaitCopy)
    assert world.trials() == NO_TRIALS


def test_what_failed_is_not_forgotten_where_one_look_finds_no_report() -> None:
    world = Copying(begun=4)
    world.copy = replace(world.copy, state="Failed", error="no route")
    for _ in range(TRIES - 1):
        world.trials()
        world.now_ms += MINUTE_MS
    view = world.view()
    (tablet,) = view.tablets
    without = tuple(r for r in tablet.replicas if r.replica_id != world.replica_id)
    world.memory.look(replace(view, tablets=(replace(tablet, replicas=without),)), world.now_ms)
    assert world.trials().of(tablet.tablet_id, world.replica_id) == TRIES


def test_no_copy_is_made_from_a_replica_that_holds_other_rows() -> None:
    world = Copying(begun=1)

    def source(*doubted: str) -> NodeId:
        view = world.view()
        peers = [world.tablet.config.peer_on(node_id) for node_id in doubted]
        copies = tuple(CopyRecord(p.replica_id, other_id=9, rows=1) for p in peers if p is not None)
        (tablet,) = view.tablets
        step = plan(replace(view, tablets=(replace(tablet, copies=copies),)), POLICY)[0]
        assert isinstance(step, StartCopy)
        return step.source_node

    assert source() == source(world.other) == world.leader
    assert source(world.leader) == world.other
    assert source(world.leader, world.other) == world.leader, "nobody knows which one is right"
