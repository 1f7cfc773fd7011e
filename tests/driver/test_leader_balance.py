"""Which leaders move: shares are compared with all possible assignments, and moves run until none is left."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.driver.leader_balance import Group, Move, Sites, choose_moves, shares

NODES = "abcdef"
NOWHERE = Sites()
SEEDS = int(os.environ.get("STELE_LEADER_SEEDS", "700"))
"""`make sim` has as many as it is asked for."""


def groups_of(leaders: str, *, table: str = "t", places: str = "abc") -> list[Group]:
    """A group for each letter, which is its leader; all have the same places."""
    return [Group(f"{table}{i:03}", table, node, tuple(places)) for i, node in enumerate(leaders)]


def moved(groups: Sequence[Group], moves: Sequence[Move]) -> list[Group]:
    """The groups after the moves."""
    target = {m.tablet_id: m.target for m in moves}
    for move in moves:
        group = next(g for g in groups if g.tablet_id == move.tablet_id)
        assert move.source == group.leader != move.target and move.target in group.places
    return [replace(g, leader=target.get(g.tablet_id, g.leader)) for g in groups]


def until_none(
    groups: Sequence[Group], most: int, sites: Sites = NOWHERE
) -> tuple[list[Group], Counter[str]]:
    """The groups when nothing moves any more, and how often each group moved."""
    now, counts = list(groups), Counter[str]()
    for _ in range(200):
        moves = choose_moves(now, most, sites)
        if not moves:
            return now, counts
        assert len({m.tablet_id for m in moves}) == len(moves) <= most
        counts.update(m.tablet_id for m in moves)
        now = moved(now, moves)
    raise AssertionError(f"no end: {choose_moves(now, most)}")


def loads(groups: Sequence[Group]) -> Counter[str]:
    return Counter(g.leader for g in groups)


def excess(groups: Sequence[Group]) -> int:
    """How many leaders the nodes have above their share plus one."""
    share, load = shares(groups), loads(groups)
    return sum(max(0, load[n] - share[n] - 1) for n in load)


def measure(groups: Sequence[Group], sites: Sites) -> tuple[int, ...]:
    """What moves lower, the first number first."""

    def squares(names: Iterable[object]) -> int:
        return sum(n * n for n in Counter(names).values())

    leaders = [g.leader for g in groups]
    return (
        excess(groups),
        squares((g.table, g.leader) for g in groups),
        squares(leaders),
        squares(map(sites.zone, leaders)),
        squares(map(sites.machine, leaders)),
    )


def test_all_leaders_of_three_nodes_on_one() -> None:
    groups = groups_of("a" * 12)
    assert shares(groups) == Counter(a=4, b=4, c=4)
    moves = choose_moves(groups, 3)
    assert [(m.source, m.leads[0], m.share) for m in moves] == [("a", 12, 4)] * 3
    end, counts = until_none(groups, 3)
    assert loads(end) == Counter(a=4, b=4, c=4)
    assert len(counts) == 8 and set(counts.values()) == {1}


@pytest.mark.parametrize("leaders", ["aaaabbbbcccc", "aaaabbbbccc", "aabbcc", "a", "aabc"])
def test_what_is_spread_stays(leaders: str) -> None:
    assert choose_moves(groups_of(leaders), 8) == ()


def test_each_table_is_spread_although_the_nodes_lead_as_many_in_all() -> None:
    groups = groups_of("aaa", table="x") + groups_of("bbb", table="y") + groups_of("ccc", table="z")
    end, _ = until_none(groups, 8)
    assert set(loads(end).values()) == {3}
    by_table = Counter((g.table, g.leader) for g in end)
    assert set(by_table.values()) == {1}


IN_ZONES = Sites({"a": "x", "b": "x", "c": "y", "d": "y"})


def test_zones_are_spread_where_nodes_lead_alike() -> None:
    """14 leaders on 4 nodes: two of them lead 4. They were both in one zone, which so led 8 of 14."""
    groups = groups_of("aaaabbbbcccddd", places="abcd")
    assert choose_moves(groups, 8) == ()
    end, counts = until_none(groups, 8, IN_ZONES)
    load = loads(end)
    assert load["a"] + load["b"] == 7 == load["c"] + load["d"] and set(load.values()) == {3, 4}
    assert counts.total() == 1
    (move,) = choose_moves(groups, 8, IN_ZONES)
    assert (move.leads, move.of_zone) == ((4, 3), (8, 6))


def test_machines_are_spread_where_nodes_and_zones_lead_alike() -> None:
    groups = groups_of("aaaabbbbcccddd", places="abcd")
    machines = Sites({}, {"a": "m1", "b": "m1", "c": "m2", "d": "m2"})
    end, counts = until_none(groups, 8, machines)
    load = loads(end)
    assert load["a"] + load["b"] == 7 and counts.total() == 1
    zones_first = Sites({"a": "x", "b": "y", "c": "x", "d": "y"}, machines.machines)
    (move,) = choose_moves(groups, 8, zones_first)
    assert move.of_machine == (8, 6), "the zones stay at 7 each, or swap"


def test_no_node_leads_more_for_the_sake_of_its_zone() -> None:
    """A zone of three nodes leads three times as much as one of one node."""
    groups = groups_of("aaabbbcccddd", places="abcd")
    assert choose_moves(groups, 8, Sites({"a": "x", "b": "x", "c": "x", "d": "y"})) == ()


def test_tables_of_one_tablet_are_spread_in_all() -> None:
    groups = [Group(f"{i}", f"t{i}", "a", ("a", "b", "c")) for i in range(9)]
    end, counts = until_none(groups, 8)
    assert loads(end) == Counter(a=3, b=3, c=3) and len(counts) == 6


def test_a_new_node_without_replicas_gets_nothing() -> None:
    assert choose_moves(groups_of("aabbcc"), 8) == ()
    assert shares([*groups_of("aabbcc"), Group("n", "n", "d", ("d",))])["d"] == 1


def test_a_leader_goes_by_a_third_node_where_two_share_no_tablet() -> None:
    """Only a move from b to c makes room at b."""
    groups = [Group(f"u{i}", "t", "a", ("a", "b")) for i in range(4)]
    groups += [Group(f"v{i}", "t", "b", ("b", "c")) for i in range(3)]
    assert set(shares(groups).values()) <= {2, 3}
    end, _ = until_none(groups, 8)
    assert excess(end) == 0 and max(loads(end).values()) <= 3


def test_leaders_that_must_not_move_count_for_their_node() -> None:
    kept = [Group(f"k{i}", "k", "a", ("a",)) for i in range(6)]
    groups = kept + groups_of("aaabbbccc")
    assert shares(groups)["a"] == 6
    end, _ = until_none(groups, 8)
    assert loads(end)["a"] <= 7 and all(g.leader == "a" for g in end[:6])


small = st.lists(
    st.tuples(st.sets(st.sampled_from("abcd"), min_size=1, max_size=3), st.sampled_from("xy")),
    min_size=1,
    max_size=7,
)


@given(drawn=small)
@settings(max_examples=200, deadline=None)
def test_a_share_is_the_most_of_any_best_assignment(drawn: list[tuple[set[str], str]]) -> None:
    places = [tuple(sorted(p)) for p, _ in drawn]
    best: tuple[int, ...] | None = None
    most: Counter[str] = Counter()
    for chosen in itertools.product(*places):
        load = Counter(chosen)
        sizes = tuple(sorted(load.values(), reverse=True))
        cost = (sum(n * n for n in sizes),)
        if best is None or cost < best:
            best, most = cost, Counter()
        if cost == best:
            most |= load
    groups = [Group(f"{i}", t, p[0], p) for i, (p, (_, t)) in enumerate(zip(places, drawn))]
    assert {n: c for n, c in shares(groups).items() if c} == dict(most)


def test_moves_end_and_leave_no_node_above_its_share_plus_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Random clusters, some with very different places. A group moves once, seldom twice."""
    total, again, worst, tablets = 0, 0, 0, 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        nodes = NODES[: rng.randint(2, 6)]
        tables = "xyz"[: rng.randint(1, 3)]
        wide = rng.random() < 0.7
        groups = []
        for number in range(rng.randint(1, 40)):
            table = rng.choice(tables)
            near = nodes if wide else nodes[tables.index(table) :][:3] or nodes
            places = rng.sample(near, min(len(near), rng.choice((1, 2, 3, 3, 3))))
            leader = rng.choice(places) if rng.random() < 0.5 else min(places)
            groups.append(Group(f"{number:02}", table, leader, tuple(sorted(places))))
        sites = Sites({n: rng.choice("uvw") for n in nodes}, {n: rng.choice("12345") for n in nodes})
        sites = sites if seed % 2 else NOWHERE
        end, counts = until_none(groups, rng.choice((1, 2, 8, 50)), sites)
        if len(groups) <= 12:
            best = measure(end, sites)
            for place, group in enumerate(end):
                for node in group.places:
                    other = [*end[:place], replace(group, leader=node), *end[place + 1 :]]
                    assert measure(other, sites) >= best, f"seed {seed}: {group} to {node}"
        assert excess(end) == 0, f"seed {seed}: {loads(end)}, shares {shares(end)}"
        assert shares(end) == shares(groups), f"seed {seed}: shares depend on who leads"
        tablets += len(groups)
        total += counts.total()
        again += sum(n - 1 for n in counts.values())
        worst = max(worst, *counts.values(), 0)
    with capsys.disabled():
        print(
            f"\n{SEEDS} clusters, {tablets} tablets: {total} moves, {again} of them again, at most {worst} of "
            f"one"
        )
    assert worst <= 3 and again * 50 <= total
