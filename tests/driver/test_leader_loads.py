"""Which leaders are exchanged for their load: counts stay, exchanges end, and none is undone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from stele.driver.leader_balance import Group, Move, Sites, choose_moves
from stele.driver.leader_loads import STEP_MIN, STEP_SHARE, choose_exchanges
from stele.driver.leader_trials import CALM_MS, LOADS_EVERY_MS, LOADS_REST_MS, LeaderMemory, LeaderTrials
from stele.driver.planner import plan
from stele.driver.progress import leader_records
from stele.driver.steps import MoveLeader
from stele.driver.trials import Trials
from stele.driver.view import ClusterView
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, node_name
from tests.driver.test_leader_balance import SEEDS, groups_of, measure, moved

SPREAD = replace(POLICY, balance_leaders=True)
A, B, C = (node_name(i) for i in (1, 2, 3))


def exchanges(
    groups: Sequence[Group],
    loads: Mapping[str, int],
    most: int = 8,
    sites: Sites | None = None,
    calm: frozenset[str] = frozenset(),
) -> tuple[Move, ...]:
    nodes = {n for g in groups for n in g.places}
    own = Sites({}, {n: n for n in nodes})
    return choose_exchanges({g.tablet_id: g for g in groups}, loads, most, sites or own, calm)


def by_node(groups: Sequence[Group], loads: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for g in groups:
        found[g.leader] += loads.get(g.tablet_id, 0)
    return found


def test_a_busy_leader_and_a_quiet_one_are_exchanged() -> None:
    groups = groups_of("aabbcc")
    loads = {"t000": 4_000, "t001": 3_000, "t002": 100}
    back, move = exchanges(groups, loads)
    assert (move.tablet_id, move.source, move.loads) == ("t000", "a", (7_000, 0))
    assert (back.source, back.target, back.returns, move.returns) == (move.target, "a", True, False)
    end = moved(groups, (back, move))
    assert Counter(g.leader for g in end) == Counter(a=2, b=2, c=2)
    assert max(by_node(end, loads).values()) == 4_000
    assert exchanges(end, loads) == ()


def test_a_cluster_with_little_to_do_stays_as_it_is() -> None:
    groups = groups_of("aabbcc")
    half = STEP_MIN - 1
    assert exchanges(groups, {"t000": half, "t001": half}) == ()
    assert exchanges(groups, {"t000": STEP_MIN, "t001": STEP_MIN}) != ()


def test_less_than_a_step_moves_nothing() -> None:
    """The mean is 10,000, so a step is 2,000. The fuller node would have 1,900 less."""
    groups = groups_of("aabbcc")
    loads = {"t000": 10_000, "t001": 2_000, "t002": 8_100, "t003": 0, "t004": 9_900, "t005": 0}
    assert exchanges(groups, loads) == ()
    assert exchanges(groups, loads | {"t001": 2_500, "t002": 7_500}) != ()
    too_much = {"t000": 10_000, "t001": 3_000, "t002": 8_800, "t004": 8_200}
    assert exchanges(groups, too_much) == (), "13,000 and 8,200 would become 10,000 and 11,200"


def test_one_busy_leader_is_not_passed_around() -> None:
    """Wherever it goes, its node has the most to do."""
    assert exchanges(groups_of("aabbcc"), {"t000": 50_000}) == ()


def test_two_tables_exchange_only_if_each_stays_as_even() -> None:
    x = [Group("x0", "x", "a", ("a", "b"))]
    y = [Group("y0", "y", "b", ("a", "b"))]
    more = [Group("x1", "x", "a", ("a",)), Group("y1", "y", "b", ("b",))]
    loads = {"x0": 3_000, "x1": 3_000}
    back, move = exchanges([*x, *y, *more], loads)
    assert (back.tablet_id, move.tablet_id) == ("y0", "x0")
    even = [Group("x2", "x", "b", ("b",)), Group("y2", "y", "a", ("a",))]
    assert exchanges([*x, *y, *more, *even], loads) != (), "x has two and one: the nodes change places"
    even += [Group("x3", "x", "b", ("b",)), Group("y3", "y", "a", ("a",))]
    assert exchanges([*x, *y, *more, *even], loads) == (), "each node has two of each"


def test_of_two_exchanges_the_one_that_evens_a_table_is_chosen() -> None:
    groups = [*groups_of("aabb", table="x", places="ab"), *groups_of("aabb", table="y", places="ab")]
    loads = {"x000": 2_000, "x001": 2_000, "y000": 2_000, "y002": 2_000}
    assert {m.tablet_id for m in exchanges(groups, loads)} & {"x000", "x001"}
    assert by_node(moved(groups, exchanges(groups, loads)), loads) == Counter(a=4_000, b=4_000)


def test_a_leader_moves_alone_where_two_nodes_then_change_places() -> None:
    groups = groups_of("aabc")
    loads = {"t000": 3_000, "t001": 3_000, "t002": 3_000, "t003": 1}
    only = [
        replace(g, places=("a", "c")) if g.leader == "a" else replace(g, places=(g.leader,)) for g in groups
    ]
    (move,) = exchanges(only, loads)
    assert (move.source, move.target) == ("a", "c") and not move.returns
    assert choose_moves(moved(only, [move]), 8) == ()


def test_zones_and_machines_have_alike_where_nodes_nearly_do() -> None:
    groups = groups_of("aabbccdd", places="abcd")
    loads = {f"t00{i}": n for i, n in enumerate((900, 400, 900, 400, 800, 100, 800, 100))}
    assert exchanges(groups, loads) == ()
    machines = {n: n for n in "abcd"}
    for sites, kind in (
        (Sites({"a": "x", "b": "x", "c": "y", "d": "y"}, machines), "zone"),
        (Sites({}, {"a": "m", "b": "m", "c": "n", "d": "n"}), "machine"),
    ):
        move = exchanges(groups, loads, 2, sites)[-1]
        assert (move.evens, move.loads) == (kind, (2_600, 1_800))
        now = by_node(moved(groups, exchanges(groups, loads, 2, sites)), loads)
        assert now["a"] + now["b"] <= 2_600 - STEP_MIN and max(now.values()) <= 1_300


def test_calm_leaders_and_those_kept_by_hand_stay() -> None:
    groups = groups_of("aabbcc")
    loads = {"t000": 4_000, "t001": 3_000}
    assert exchanges(groups, loads, calm=frozenset({"t000", "t001"})) == ()
    kept = [replace(g, places=("a",)) if g.leader == "a" else g for g in groups]
    assert exchanges(kept, loads) == ()


def squares(groups: Sequence[Group], loads: Mapping[str, int], sites: Sites) -> tuple[int, ...]:
    """What exchanges lower, the first number first."""
    own = by_node(groups, loads)
    found = [sum(n * n for n in own.values())]
    for place in (sites.zone, sites.machine):
        of: Counter[str] = Counter()
        for node, load in own.items():
            of[place(node)] += load
        found.append(sum(n * n for n in of.values()))
    return tuple(found)


def test_exchanges_end_and_counts_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """Random clusters: first the counts, then the loads. Each exchange lowers its measure by a step. One of two tables may let
    the counts of machines become more even than they were, so both go on until nothing is left."""
    total, again, before, after = 0, 0, 0.0, 0.0
    for seed in range(SEEDS // 2):
        rng = random.Random(seed)
        nodes = "abcdef"[: rng.randint(2, 6)]
        groups = []
        for number in range(rng.randint(2, 40)):
            places = rng.sample(nodes, min(len(nodes), rng.choice((1, 2, 3, 3, 3))))
            groups.append(Group(f"{number:02}", rng.choice("xyz"), rng.choice(places), tuple(sorted(places))))
        sites = Sites({n: rng.choice("uv") for n in nodes}, {n: rng.choice("1234") for n in nodes})
        while found := choose_moves(groups, 50, sites):
            groups = moved(groups, found)
        loads = {g.tablet_id: int(rng.paretovariate(1.1) * 100) for g in groups if rng.random() < 0.7}
        counts, values = measure(groups, sites), squares(groups, loads, sites)
        places_of = len({n for g in groups for n in g.places})
        step = max(STEP_SHARE * sum(loads.values()) / places_of, STEP_MIN)
        before += max(by_node(groups, loads).values()) * places_of / max(sum(loads.values()), 1)
        seen = {tuple(g.leader for g in groups)}
        for _ in range(200):
            if found := choose_moves(groups, 8, sites):
                groups, again = moved(groups, found), again + len(found)
                assert measure(groups, sites) < counts, f"seed {seed}"
                counts, values = measure(groups, sites), squares(groups, loads, sites)
                continue
            found = exchanges(groups, loads, rng.choice((2, 3, 8)), sites)
            if not found:
                break
            assert len({m.tablet_id for m in found}) == len(found)
            groups = moved(groups, found)
            lower = squares(groups, loads, sites)
            fell = max(was - now for now, was in zip(lower, values))
            assert lower < values and fell >= 2 * step * step * 0.99, f"seed {seed}"
            values = lower
            assert measure(groups, sites) <= counts, f"seed {seed}: counts are less even"
            leaders = tuple(g.leader for g in groups)
            assert leaders not in seen, f"seed {seed}: to and fro"
            seen.add(leaders)
            total += len(found)
        else:
            raise AssertionError(f"seed {seed}: no end")
        after += max(by_node(groups, loads).values()) * places_of / max(sum(loads.values()), 1)
    with capsys.disabled():
        worlds = SEEDS // 2
        print(
            f"\n{worlds} clusters: {total} moves for load, {again} for counts after them; the fullest node had "
            f"{before / worlds:.2f} of the mean, then {after / worlds:.2f}"
        )
    assert after < before


# --- planner and memory


def view_of(loads: Mapping[int, int], *, tells: bool = True, former: str = "") -> ClusterView:
    """Six tablets on three nodes: the first two are led by A, the next by B, then C. Their leaders have these loads. `former`:
    the load of the first tablet is told by this node, which led it before."""
    cluster = Cluster(3, 1, 6, 3)
    order = list(cluster.tablets.values())
    for number, t in enumerate(order):
        t.leader = (A, A, B, B, C, C)[number]
    view = cluster.view()
    tablets = []
    for number, t in enumerate(view.tablets):
        teller = former if former and number == 0 else t.leader_node
        load = loads.get(number, 0)
        told = (replace(r, load=load) if r.node_id == teller else r for r in t.replicas)
        tablets.append(replace(t, replicas=tuple(told)))
    nodes = tuple(replace(n, load=0 if tells else None) for n in view.nodes)
    return replace(view, tablets=tuple(tablets), nodes=nodes)


def steps(view: ClusterView, trials: LeaderTrials | None = None) -> list[MoveLeader]:
    found = plan(view, SPREAD, Trials(leaders=trials) if trials is not None else Trials())
    assert all(isinstance(s, MoveLeader) and not s.removes for s in found)
    return [s for s in found if isinstance(s, MoveLeader)]


def test_the_planner_exchanges_and_says_why() -> None:
    view = view_of({0: 4_000, 1: 3_000})
    back, move = steps(view)
    assert move.reason == f"the load of the leaders of node {A[:8]} is 7,000/s, that of node {B[:8]} 0/s"
    assert back.reason.startswith("in exchange for a busier leader: ") and back.target_node == A
    records = leader_records(
        [(s, None) for s in (back, move)], {t.tablet_id: t.leader_node for t in view.tablets}
    )
    assert [r.leaders.moved for r in records if r.leaders] == [1, 1]


def test_nodes_of_an_earlier_release_are_spread_by_count_alone() -> None:
    assert steps(view_of({0: 4_000, 1: 3_000}, tells=False)) == []
    view = view_of({0: 4_000, 1: 3_000})
    one = tuple(replace(n, load=None) if n.node_id == C else n for n in view.nodes)
    assert steps(replace(view, nodes=one)) == []


def test_a_leader_that_has_just_moved_has_the_load_that_the_one_before_tells() -> None:
    """Otherwise its node would look idle, and get another busy one."""
    assert steps(view_of({0: 4_000, 1: 3_000}, former=C)) == steps(view_of({0: 4_000, 1: 3_000}))


def test_nothing_moves_for_load_while_the_memory_says_so() -> None:
    view = view_of({0: 4_000, 1: 3_000})
    assert steps(view, LeaderTrials(loads=False)) == []
    ids = frozenset(str(t.tablet_id) for t in view.tablets[:2])
    assert steps(view, LeaderTrials(calm=ids)) == []
    assert steps(view, LeaderTrials(left=1)) == [], "half an exchange would change the counts"


def test_a_driver_waits_before_it_moves_leaders_for_their_load() -> None:
    view, memory = view_of({}), LeaderMemory()
    memory.begins(0)
    assert not memory.look(view, 480, LOADS_REST_MS - 1).loads
    assert memory.look(view, 480, LOADS_REST_MS).loads
    assert not memory.look(view, 480, LOADS_REST_MS + LOADS_EVERY_MS - 1).loads
    now = 2 * LOADS_REST_MS
    assert memory.look(view, 480, now).loads
    tablet = view.tablets[0].tablet_id
    memory.note(MoveLeader(tablet, -1, "", B, False), None, now)
    known = memory.look(view, 480, now + LOADS_REST_MS - 1)
    assert not known.loads and known.calm == {tablet}
    assert memory.look(view, 480, now + CALM_MS - 1).calm == {tablet}
    assert not memory.look(view, 480, now + CALM_MS).calm
