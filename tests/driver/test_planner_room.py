"""Room and time of copies: bytes under way count on their target's disk, and a promotion has a time limit."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.planner import plan
from stele.driver.situation import leader_report
from stele.driver.steps import BeginIntent, Blocked, CancelCopy, RemovePeer, StartCopy, WaitPromotion
from stele.driver.trials import PROMOTE_MS, CopyMemory, Trials
from stele.driver.view import ClusterView, CopyView
from stele.model.config import MemberType
from tests.driver.model import Cluster
from tests.driver.model_parts import COPY_ROUNDS, POLICY, ModelTablet, node_name
from tests.driver.stories import reported

GIB = 1 << 30
WIDE = replace(POLICY, max_copies=9)


def large(view: ClusterView, *, free: int, copy: CopyView | None = None) -> ClusterView:
    """Replicas of 40 GiB, on disks with this much free space; the new ones are in the state `copy`."""
    nodes = tuple(replace(n, disk_free_bytes=free, disk_used_bytes=1) for n in view.nodes)
    sized = reported(
        view,
        lambda r: (
            replace(r, copy=copy, bytes_on_disk=0) if r.replica_id > 3 else replace(r, bytes_on_disk=40 * GIB)
        ),
    )
    return replace(sized, nodes=nodes)


def four_lost() -> Cluster:
    """Four tablets have lost a voter each, and only one machine is left for them."""
    cluster = Cluster(4, 1, 4, 3)
    cluster.tablets = {k: t for k, t in cluster.tablets.items() if t.config.peer_on(node_name(3)) is not None}
    while len(cluster.tablets) < 4:
        first = next(iter(cluster.tablets.values()))
        copied = replace(first, tablet_id=f"{0xA0 + len(cluster.tablets):032x}")  # type: ignore[arg-type]
        copied.replicas = {k: replace(r) for k, r in first.replicas.items()}
        cluster.tablets[copied.tablet_id] = copied
    for t in cluster.tablets.values():
        t.config = replace(
            t.config,
            peers=tuple(replace(p, node_id=node_name(i + 1)) for i, p in enumerate(t.config.peers)),
        )
        for i, r in enumerate(t.replicas.values()):
            r.node_id = node_name(i + 1)
    cluster.nodes[node_name(3)].alive = False
    cluster.advance()
    return cluster


def test_what_is_begun_is_counted_on_its_targets_disk() -> None:
    """Four copies of 40 GB began on a node with 60 GB free, so none of them could finish."""
    cluster = four_lost()
    steps = plan(large(cluster.view(), free=60 * GIB), WIDE)
    begun = [s for s in steps if isinstance(s, BeginIntent)]
    blocked = [s for s in steps if isinstance(s, Blocked)]
    assert len(begun) == 1 and {s.code for s in blocked} == {"NoRoom"} and len(blocked) == 3
    assert "enlarge the volumes or add a node" in blocked[0].reason
    cluster.apply(begun[0])
    assert not any(isinstance(s, BeginIntent) for s in plan(large(cluster.view(), free=60 * GIB), WIDE))
    assert sum(isinstance(s, BeginIntent) for s in plan(large(four_lost().view(), free=200 * GIB), WIDE)) == 4


def test_of_what_has_arrived_only_the_rest_is_counted() -> None:
    """This space is no longer free, and must not be counted twice."""
    cluster = four_lost()
    cluster.apply(next(s for s in plan(cluster.view(), WIDE) if isinstance(s, BeginIntent)))
    for step in plan(cluster.view(), WIDE):
        if isinstance(step, StartCopy):
            cluster.apply(step)
    almost = CopyView("Fetching", 39 * GIB, 40 * GIB, node_name(1))
    for free, count in ((41 * GIB, 0), (42 * GIB, 1), (81 * GIB, 1), (83 * GIB, 2)):
        steps = plan(large(cluster.view(), free=free, copy=almost), WIDE)
        assert sum(isinstance(s, BeginIntent) for s in steps) == count, free


def arrived(machines: int) -> tuple[Cluster, ModelTablet, str]:
    """The tablet can spare a voter. The new replica has its rows, but is a PRE_FOLLOWER that is never
    promoted. Returns its node."""
    cluster = Cluster(machines, 1, 1, 5)
    t = next(iter(cluster.tablets.values()))
    cluster.nodes[t.config.peers[4].node_id].alive = False
    cluster.advance()
    while (peer := t.config.peer(6)) is None:
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
        for r in t.replicas.values():
            r.copied, r.has_data = COPY_ROUNDS, True
    return cluster, t, peer.node_id


def test_a_copy_that_waits_for_its_promotion_gives_its_slot_back_in_time() -> None:
    cluster, t, node = arrived(machines=6)
    other = replace(t, tablet_id="f" * 32)  # type: ignore[arg-type]
    other.config = replace(t.config, peers=t.config.peers[:5])
    other.replicas = {k: replace(r) for k, r in t.replicas.items() if k <= 5}
    cluster.tablets["f" * 32] = other
    cluster.nodes[node_name(9)] = replace(cluster.nodes[node_name(1)], node_id=node_name(9), machine="m9")
    one_copy = replace(POLICY, max_copies=1)
    memory = CopyMemory()

    def steps(now_ms: int):  # type: ignore[no-untyped-def]
        view = cluster.view()
        return {s.tablet_id: s for s in plan(view, one_copy, memory.look(view, now_ms))}

    now = steps(0)
    assert isinstance(now[t.tablet_id], WaitPromotion)
    blocked = now[other.tablet_id]
    assert isinstance(blocked, Blocked) and blocked.code == "CopyLimit"
    assert isinstance(steps(PROMOTE_MS - 1)[other.tablet_id], Blocked)
    later = steps(PROMOTE_MS)
    assert isinstance(later[other.tablet_id], BeginIntent)
    assert node in memory.look(cluster.view(), PROMOTE_MS + 1).avoid


def test_a_replica_that_is_never_promoted_is_made_elsewhere_or_else_told_and_left() -> None:
    cluster, _, node = arrived(machines=6)
    memory = CopyMemory()

    def step(now_ms: int):  # type: ignore[no-untyped-def]
        view = cluster.view()
        return plan(view, POLICY, memory.look(view, now_ms))[0]

    step(0)
    told = step(PROMOTE_MS)
    assert isinstance(told, Blocked) and told.code == "NotPromoted", "there is no other machine"
    cluster.nodes[node_name(9)] = replace(cluster.nodes[node_name(1)], node_id=node_name(9), machine="m9")
    gone = step(PROMOTE_MS + 1)
    assert isinstance(gone, RemovePeer) and gone.node_id == node
    cluster.apply(gone)
    cancelled = step(PROMOTE_MS + 2)
    assert isinstance(cancelled, CancelCopy), "and not added again"
    cluster.apply(cancelled)
    again = step(PROMOTE_MS + 3)
    assert isinstance(again, BeginIntent) and again.target_node == node_name(9)


def test_a_witness_that_is_never_promoted_stays() -> None:
    """It votes: without it the tablet could spare no other voter."""
    cluster = Cluster(6, 1, 1, 3)
    t = next(iter(cluster.tablets.values()))
    cluster.nodes[t.config.peers[2].node_id].alive = False
    cluster.advance()
    while t.config.peer(4) is None:
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
    t.replicas[4].copied, t.replicas[4].has_data = COPY_ROUNDS, True
    peer = t.config.peer(4)
    assert peer is not None and peer.member_type is MemberType.WITNESS
    view = cluster.view()
    assert leader_report(view.tablets[0]) is not None
    late = Trials(late=frozenset({(t.tablet_id, 4)}))
    (step,) = plan(view, POLICY, late)
    assert isinstance(step, Blocked) and step.code == "NotPromoted"
