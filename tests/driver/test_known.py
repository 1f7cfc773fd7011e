"""What a driver keeps between its passes equals what it would work out anew, whatever happens; and it saves the work."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest

from stele.driver.judgements import Judgements
from stele.driver.kept_steps import KeptSteps
from stele.driver.known import Known
from stele.driver.leader_groups import Groups
from stele.driver.leader_trials import LeaderTrials
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.replica_places import Places
from stele.driver.situation import Situation
from stele.driver.steps import BeginIntent, MoveLeader, Step
from stele.driver.trials import NO_TRIALS, Trials
from stele.driver.view import (
    MOVE,
    Claim,
    ClusterView,
    CopyView,
    DataState,
    Intent,
    NodeState,
    NodeView,
    ReplicaState,
    ReplicaView,
    TabletView,
    Wanted,
)
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import NodeId, OpId, ReplicaId, TableId, TabletId
from tests.driver import moves_world
from tests.driver.model import Cluster
from tests.driver.test_leader_simulation import Driver, disturb, settle

POLICY = Policy(dead_after_ms=10_000, max_lost_nodes=2, max_copies=3, rebalance=True)


class Every(Judgements):
    """No tablet is quiet, so that the planner looks at all of them."""

    def restless(self) -> list[Situation]:
        found = (s for t in self._tablets if (s := self.situation(t)) is not None)
        return sorted(found, key=lambda s: (s.spare, s.tablet.tablet_id))


class LookAtAll(Known):
    """Knows nothing from earlier passes."""

    def renew(self, view: ClusterView, policy: Policy) -> None:
        self.judged, self.groups, self.places = Every(policy), Groups(policy), Places()
        self.steps = KeptSteps()
        for tablet_id, situation in self.judged.renew(view):
            self.groups.take(tablet_id, situation)
            self.places.take(tablet_id, situation)


class Twin:
    """A planner that keeps what it knows. At each plan it is compared with one that knows nothing, and with one that
    looks at every tablet: a tablet that is left out must never hide work that is due."""

    def __init__(self) -> None:
        self.known = Known()
        self.plans = 0

    def __call__(self, view: ClusterView, policy: Policy, trials: Trials = NO_TRIALS) -> tuple[Step, ...]:
        self.plans += 1
        steps = plan(view, policy, trials, self.known)
        assert steps == plan(view, policy, trials)
        assert steps == plan(view, policy, trials, LookAtAll())
        if view.settled:
            anew = Known()
            anew.renew(view, policy)
            assert said(self.known) == said(anew)
        return steps


def said(known: Known) -> Any:
    """All that can be asked of it, without the numbers of nodes that change all the time."""
    judged, groups, places = known.judged, known.groups, known.places
    return (
        {t: told(s) for t in judged._tablets if (s := judged.situation(t)) is not None},
        [s.tablet.tablet_id for s in judged.restless()],
        {n: c for n, c in judged.replicas.items() if c},
        {n: c for n, c in judged.leads.items() if c},
        judged.young,
        groups._groups,
        groups._kept,
        groups._loads,
        {t: place.counts_as for t, place in places._places.items()},
        {n: c for n, c in places.replicas.items() if c},
        {n: c for n, c in places.bytes.items() if c},
        {n: dict(of) for n, of in places.of_table.items() if of},
        {
            (n, zones, table): {place.tablet.tablet_id for place in of}
            for n, by_zones in places.resting.items()
            for zones, tables in by_zones.items()
            for table, of in tables.items()
        },
        places.crowded,
    )


def told(s: Situation) -> Any:
    """A situation without these numbers."""
    members = [
        (
            m.peer,
            m.report,
            m.dead,
            m.failed,
            m.in_doubt,
            m.answers,
            m.unreached,
            m.active,
            m.parked,
            m.leaving,
        )
        for m in s.members
    ]
    nodes = [(m.node.state, m.node.zone, m.node.host) if m.node else None for m in s.members]
    return s.tablet, members, nodes, s.intent, s.target_dead, s.target and s.target.takes_replicas


@pytest.mark.parametrize("first", range(0, 30, 15))
def test_random_worlds_with_moves_and_losses(first: int) -> None:
    plans = 0
    for seed in range(first, first + 15):
        twin = Twin()
        moves_world.run(seed, twin)
        plans += twin.plans
    assert plans > 300


def test_random_worlds_whose_leaders_are_spread() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        cluster = Cluster(rng.randint(3, 6), 1, rng.randint(1, 24), 3)
        for t in cluster.tablets.values():
            t.table = rng.randrange(3)
        driver = Driver(cluster, rng, Twin())
        settle(cluster, driver, seed)
        for _ in range(2):
            disturb(cluster, driver, rng)
            settle(cluster, driver, seed)


# --- views that change at random, in each field that a plan reads


def node_id(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def cluster_of(tablets: int, nodes: int = 6, tables: int = 3) -> ClusterView:
    """A healthy cluster whose replicas and leaders are spread."""
    ids = [node_id(n) for n in range(1, nodes + 1)]
    found = []
    for t in range(tablets):
        on = [ids[(t + k) % nodes] for k in range(3)]
        peers = tuple(Peer(n, ReplicaId(k + 1), f"{n[-2:]}:1") for k, n in enumerate(on))
        reports = tuple(ReplicaView(p.node_id, p.replica_id, bytes_on_disk=100) for p in peers)
        table = t // nodes % tables
        found.append(
            TabletView(
                *(TabletId(f"{t + 1:032x}"), TableId(f"{table:032x}"), f"t{table}", "RUNNING"),
                *(Configuration(-1, peers), 1, on[0], 3, reports),
            )
        )
    told = (
        NodeView(n, "node", f"m{n[-2:]}", f"z{i % 3}", f"{n[-2:]}:1", disk_free_bytes=1 << 40)
        for i, n in enumerate(ids)
    )
    return ClusterView(tuple(told), tuple(found), claim=Claim("test", 1, 0))


def changed_node(node: NodeView, rng: random.Random) -> NodeView:
    """One field of a node is another, more often near a limit than not."""
    change: dict[str, Any] = rng.choice(
        (
            {"heartbeat_age_ms": rng.choice((0, 900, 2_999, 3_001, 5_001, 10_001, 60_000))},
            {"heartbeat_age_ms": 0},
            {"state": rng.choice(list(NodeState))},
            {"state": NodeState.ACTIVE, "given_up": False, "wanted": None},
            {"ever_heard": rng.random() < 0.7},
            {"disk_low": rng.random() < 0.3},
            {"disk_free_bytes": rng.choice((1 << 20, 1 << 40)), "disk_used_bytes": rng.choice((0, 5))},
            {"clock_ahead_us": rng.choice((0, 10, 10_000_000))},
            {"given_up": rng.random() < 0.5},
            {"wanted": rng.choice((None, Wanted.PARKED, Wanted.FENCED, Wanted.DRAINED))},
            {"machine": rng.choice((node.machine, "m02"))},
            {"zone": rng.choice(("z0", "z1", "z2"))},
            {"formed": rng.random() < 0.8},
        )
    )
    return replace(node, **change)


def changed_report(r: ReplicaView, rng: random.Random) -> ReplicaView:
    """Likewise of a report."""
    waits = ReplicaState.CONFIGURING
    change: dict[str, Any] = rng.choice(
        (
            {"state": ReplicaState.RUNNING, "unreached_ms": {}, "age_ms": 0},
            {"state": rng.choice(list(ReplicaState))},
            {"state": waits, "age_ms": rng.choice((0, 29_000, 31_000))},
            {"bytes_on_disk": rng.choice((100, 150, 5_000))},
            {"last_committed": OpId(1, rng.randint(1, 9))},
            {"unreached_ms": {ReplicaId(rng.randint(1, 3)): rng.choice((4_000, 61_000, 66_000))}},
            {"failed_peers": (ReplicaId(rng.randint(1, 3)),)},
            {"failed_peers": ()},
        )
    )
    return replace(r, **change)


def changed_tablet(t: TabletView, rng: random.Random) -> TabletView:
    """Likewise of a tablet."""
    nodes = [p.node_id for p in t.config.peers]
    match rng.randrange(7):
        case 0:
            return replace(t, leader_node=rng.choice(("", *nodes)))
        case 1:
            return replace(t, state=rng.choice(("RUNNING", "RUNNING", "CREATING")))
        case 2:
            return replace(t, replication_factor=rng.choice((3, 3, 2, 4)))
        case 3:
            one, all_nodes = rng.choice(nodes), [node_id(n) for n in range(1, 7)]
            asked = ByHand(pinned=(rng.choice(all_nodes),), owner="a"), ByHand(avoided=(one,), owner="a")
            return replace(t, by_hand=rng.choice((NOT_BY_HAND, *asked)))
        case 4:
            return replace(t, leader_kept_until_us=rng.choice((0, 50, 200)))
        case 5 if len(t.replicas) > 2:
            return replace(t, replicas=t.replicas[1:])
        case _:
            return replace(t, replicas=tuple(changed_report(r, rng) for r in t.replicas))


def joined(t: TabletView, target: NodeId, rng: random.Random, witness: bool) -> TabletView:
    """The tablet with the replica of an intent: with its copy, at times as a member."""
    if t.config.peer_on(target) is not None:
        return t
    state = rng.choice(("Waiting", "Waiting", "Fetching", "Failed", "Done"))
    copy = CopyView(state, rng.choice((0, 40)), 100, rng.choice(t.config.peers).node_id)
    data = DataState.READY if state == "Done" else DataState.COPYING
    report = ReplicaView(target, ReplicaId(9), data_state=data, has_data=state == "Done", copy=copy)
    kind = MemberType.WITNESS if witness else MemberType.NON_VOTER
    peers = (*t.config.peers, Peer(target, ReplicaId(9), "x:1", kind, promote=not witness))
    config = Configuration(t.config.opid_index + 1, peers) if rng.random() < 0.7 else t.config
    return replace(t, config=config, replicas=(*t.replicas, report))


def changed(view: ClusterView, rng: random.Random) -> ClusterView:
    """The view after something happened."""
    nodes, tablets = list(view.nodes), list(view.tablets)
    at, of = rng.randrange(len(nodes)), rng.randrange(len(tablets))
    match rng.randrange(10):
        case 0 | 1 | 2:
            nodes[at] = changed_node(nodes[at], rng)
        case 3 | 4 | 5:
            tablets[of] = changed_tablet(tablets[of], rng)
        case 6:
            del tablets[of : of + (len(tablets) > 4)]
        case 7:
            intents = [i for i in view.intents if i.tablet_id != tablets[of].tablet_id]
            if rng.random() < 0.5:
                kind, target = rng.choice(("replace", MOVE)), nodes[at].node_id
                witness = kind != MOVE and rng.random() < 0.7
                intents.append(Intent(tablets[of].tablet_id, ReplicaId(9), target, kind, 1, "", 1, witness))
                if rng.random() < 0.8:
                    tablets[of] = joined(tablets[of], target, rng, witness)
            return replace(view, tablets=tuple(tablets), intents=tuple(intents))
        case 8:
            return replace(view, now_us=rng.choice((0, 100, 300)))
        case _:
            return cluster_of(len(tablets))
    return replace(view, nodes=tuple(nodes), tablets=tuple(tablets))


def remembered(view: ClusterView, rng: random.Random) -> Trials:
    """What a driver may remember of leaders and copies."""
    tablet = rng.choice(view.tablets)
    moved = {tablet.tablet_id: node_id(rng.randint(1, 6))} if rng.random() < 0.2 else {}
    rests = frozenset({tablet.tablet_id} if rng.random() < 0.2 else set())
    refused = frozenset({(tablet.tablet_id, node_id(1))} if rng.random() < 0.2 else set())
    copies = [(i.tablet_id, int(i.replica_id)) for i in view.intents if rng.random() < 0.3]
    return Trials(
        failures={key: rng.randint(1, 4) for key in copies if rng.random() < 0.5},
        stalled=frozenset(key for key in copies if rng.random() < 0.3),
        avoid=frozenset({node_id(rng.randint(1, 6))} if rng.random() < 0.1 else set()),
        late=frozenset(key for key in copies if rng.random() < 0.3),
        leaders=LeaderTrials(moved, rests, refused, rng.choice((0, 3, 100))),
    )


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_views_that_change_at_random(first: int) -> None:
    steps: set[str] = set()
    for seed in range(first, first + 20):
        rng, twin = random.Random(seed), Twin()
        view, policy = cluster_of(rng.randint(5, 14)), POLICY
        for _ in range(60):
            for _ in range(rng.randint(1, 2)):
                view = changed(view, rng)
            if rng.random() < 0.05:
                policy = replace(policy, lost=frozenset({node_id(rng.randint(1, 6))}))
            elif rng.random() < 0.05:
                policy = POLICY
            steps |= {type(s).__name__ for s in twin(view, policy, remembered(view, rng))}
    assert {"BeginIntent", "MoveLeader", "Blocked", "RemovePeer"} <= steps


def test_time_alone_may_change_what_a_leader_says() -> None:
    """What it said of a peer that does not answer counts until its own node was last heard."""
    view, twin = cluster_of(6), Twin()
    (first, *others) = view.tablets
    cut_off = replace(first.replicas[0], unreached_ms={first.replicas[1].replica_id: 61_000})
    first = replace(first, replicas=(cut_off, *first.replicas[1:]))
    view = replace(view, tablets=(first, *others))
    assert any(type(s).__name__ == "BeginIntent" for s in twin(view, POLICY))
    quiet = (replace(n, heartbeat_age_ms=2_000) if n.node_id == first.leader_node else n for n in view.nodes)
    assert not any(type(s).__name__ == "BeginIntent" for s in twin(replace(view, nodes=tuple(quiet)), POLICY))


def with_report(view: ClusterView, at: int, of: int, **change: Any) -> ClusterView:
    """The view in which one report of a tablet is another."""
    tablets = list(view.tablets)
    reports = list(tablets[at].replicas)
    reports[of] = replace(reports[of], **change)
    tablets[at] = replace(tablets[at], replicas=tuple(reports))
    return replace(view, tablets=tuple(tablets))


def test_a_node_that_one_leader_does_not_reach_gets_no_replica_of_any_tablet() -> None:
    """The tablet that knows it is healthy otherwise."""
    view, twin = cluster_of(6), Twin()
    lost = replace(view.nodes[0], heartbeat_age_ms=60_000)
    view = replace(view, nodes=(lost, *view.nodes[1:]))
    target = next(s.target_node for s in twin(view, POLICY) if isinstance(s, BeginIntent))
    at, peer = next(
        (at, p.replica_id)
        for at, t in enumerate(view.tablets)
        for p in t.config.peers[1:]
        if p.node_id == target and t.config.peer_on(lost.node_id) is None
    )
    cut_off = with_report(view, at, 0, unreached_ms={peer: 4_000})
    targets = {s.target_node for s in twin(cut_off, POLICY) if isinstance(s, BeginIntent)}
    assert targets and target not in targets


@pytest.mark.parametrize("change", [None, {"state": ReplicaState.CONFIGURING}])
def test_no_leader_moves_while_a_replica_of_any_tablet_starts(change: dict[str, Any] | None) -> None:
    view, twin = cluster_of(12, nodes=3), Twin()
    view = replace(view, tablets=tuple(replace(t, leader_node=node_id(1)) for t in view.tablets))
    assert {type(s) for s in twin(view, POLICY)} == {MoveLeader}
    at, of = next(
        (at, of)
        for at, t in enumerate(view.tablets)
        for of, r in enumerate(t.replicas)
        if r.node_id != t.leader_node
    )
    if change is None:
        told = view.tablets[at]
        fewer = replace(told, replicas=told.replicas[:of] + told.replicas[of + 1 :])
        starts = replace(view, tablets=(*view.tablets[:at], fewer, *view.tablets[at + 1 :]))
    else:
        starts = with_report(view, at, of, **change)
    assert twin(starts, POLICY) == ()


def test_an_error_in_between_leaves_nothing_half_known() -> None:
    view, twin = cluster_of(6), Twin()
    twin(view, POLICY)
    broken = replace(view, tablets=(*view.tablets[1:], replace(view.tablets[0], config=None)))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        plan(broken, POLICY, NO_TRIALS, twin.known)
    twin(view, POLICY)


def test_each_field_of_a_node_is_either_a_standing_or_a_number_that_plans_read_from_the_view() -> None:
    """A new field is compared at once: only these are left out."""
    left_out = {
        "heartbeat_age_ms",
        "replicas",
        "disk_free_bytes",
        "disk_used_bytes",
        "clock_ahead_us",
        "wanted_left_ms",
    }
    node = cluster_of(1).nodes[0]
    other: dict[type, Any] = {int: 1, bool: True, str: "x"}
    for field in fields(NodeView):
        value = getattr(node, field.name)
        if field.name == "node_id" or type(value) not in other:
            continue
        view, twin = cluster_of(3), Known()
        twin.renew(view, POLICY)
        fresh = not value if isinstance(value, bool) else other[type(value)]
        again = tuple(replace(n, **{field.name: fresh}) for n in view.nodes)
        due = list(twin.judged.renew(replace(view, nodes=again)))
        assert bool(due) == (field.name not in left_out), field.name
