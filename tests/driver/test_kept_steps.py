"""The steps of tablets of which nothing has changed are kept, and looked for anew once anything else could change them."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.executor import _to_ask
from stele.driver.known import Known
from stele.driver.planner import plan
from stele.driver.steps import (
    BeginIntent,
    Blocked,
    RemovePeer,
    StartCopy,
    Step,
    TakeOverIntent,
    WaitPromotion,
)
from stele.driver.trials import NO_TRIALS, Trials
from stele.driver.view import Claim, ClusterView, CopyView, DataState, Intent, ReplicaView
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import ReplicaId
from tests.driver.test_known import POLICY, Twin, cluster_of, node_id, with_report
from tests.driver.test_known_costs import turns


def lost(view: ClusterView) -> ClusterView:
    """The view after a node fell silent for good."""
    return replace(view, nodes=(replace(view.nodes[0], heartbeat_age_ms=60_000), *view.nodes[1:]))


def test_the_next_witness_copies_once_there_is_a_slot() -> None:
    view, twin = turns(24), Twin()
    before = {s.tablet_id for s in twin(view, POLICY) if isinstance(s, Blocked)}
    assert len(before) == 9
    arrived = with_report(
        view, 0, 2, copy=CopyView("Done", 100, 100), has_data=True, data_state=DataState.READY
    )
    steps = twin(arrived, POLICY)
    (started,) = [s for s in steps if isinstance(s, StartCopy)]
    assert {s.tablet_id for s in steps if isinstance(s, Blocked)} == before - {started.tablet_id}


def test_a_target_is_chosen_anew_in_each_plan() -> None:
    """Its disk may be full by now, and that is no change of the tablet."""
    view, twin = lost(cluster_of(6)), Twin()
    targets = {s.tablet_id: s.target_node for s in twin(view, POLICY) if isinstance(s, BeginIntent)}
    full = min(targets.values())
    nodes = (
        replace(n, disk_free_bytes=1 << 20, disk_used_bytes=1 << 40) if n.node_id == full else n
        for n in view.nodes
    )
    again = {
        s.tablet_id: s.target_node
        for s in twin(replace(view, nodes=tuple(nodes)), POLICY)
        if isinstance(s, BeginIntent)
    }
    assert again.keys() == targets.keys() and full not in again.values()


def test_another_driver_takes_all_intents_over() -> None:
    view, twin = turns(24), Twin()
    assert not any(isinstance(s, TakeOverIntent) for s in twin(view, POLICY))
    steps = twin(replace(view, claim=Claim("other", 2, 0)), POLICY)
    assert steps and all(isinstance(s, TakeOverIntent) for s in steps)


def test_nothing_is_taken_from_anybody_once_too_many_nodes_are_silent() -> None:
    """The tablets that wait are on other nodes than those that have fallen silent."""
    view, twin = turns(24), Twin()
    policy = replace(POLICY, max_lost_nodes=1)
    elsewhere = {t.tablet_id for t in view.tablets if t.config.peer_on(node_id(5)) is None}
    waiting = {s.tablet_id for s in twin(view, policy) if isinstance(s, Blocked)} & elsewhere
    nodes = (replace(n, heartbeat_age_ms=60_000) if n.node_id == node_id(5) else n for n in view.nodes)
    steps = twin(replace(view, nodes=tuple(nodes)), policy)
    codes = {s.tablet_id: s.code for s in steps if isinstance(s, Blocked)}
    assert waiting and {codes[t] for t in waiting} == {"TooManyLost"}


def test_a_promotion_that_does_not_come_is_told_although_nothing_has_changed() -> None:
    view, twin = cluster_of(6), Twin()
    first = view.tablets[0]
    target = next(n.node_id for n in view.nodes if first.config.peer_on(n.node_id) is None)
    gone, *rest = first.config.peers
    new = Peer(target, ReplicaId(4), "x:1", MemberType.NON_VOTER, promote=True)
    first = replace(
        first,
        config=Configuration(9, (replace(gone, member_type=MemberType.NON_VOTER), *rest, new)),
        leader_node=rest[0].node_id,
        replicas=(*first.replicas, ReplicaView(target, ReplicaId(4), copy=CopyView("Done", 9, 9))),
    )
    intent = Intent(first.tablet_id, ReplicaId(4), target, "replace", 1, "", int(gone.replica_id))
    view = lost(replace(view, tablets=(first, *view.tablets[1:]), intents=(intent,)))

    def step(trials: Trials = NO_TRIALS) -> object:
        return next(s for s in twin(view, POLICY, trials) if s.tablet_id == first.tablet_id)

    assert isinstance(step(), WaitPromotion) and isinstance(step(), WaitPromotion)
    late = step(Trials(late=frozenset({(first.tablet_id, 4)})))
    assert not isinstance(late, WaitPromotion)
    assert isinstance(step(), WaitPromotion)


def test_nodes_are_asked_until_the_masters_know_what_came_of_the_last_order() -> None:
    """They know if they know of a later configuration. Of a copy that was started they know only by a report."""
    view, known = turns(24), Known()
    waits = next(s for s in plan(view, POLICY, known=known) if isinstance(s, Blocked))
    at = (waits.tablet_id, waits.cas, "", ReplicaId(1), node_id(1))

    def is_asked(ordered: Step | None) -> bool:
        lately = {} if ordered is None else {waits.tablet_id: ordered}
        return any(waits.tablet_id in of for of in _to_ask(view, POLICY, known, lately).values())

    assert not is_asked(None)
    assert is_asked(RemovePeer(*at)) and not is_asked(replace(RemovePeer(*at), cas=waits.cas - 1))
    assert is_asked(StartCopy(*at, node_id(2), True))
