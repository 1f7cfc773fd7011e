"""Plans in parts: every row of a scan is in exactly one, and parts that can hold none are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stele.client.locations import ReplicaPlace, TabletPlace
from stele.client.splitting import parts
from stele.client.tablet_scan import FlightPool, Prepared, ScanPlan, TabletScan
from stele.model import keys
from stele.model.errors import Code
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema

SCHEMA = Schema.make([("id", "int8"), ("v", "int32", True)], ["id"])


def _key(n: int) -> bytes:
    return keys.encode_tuple([n], [SCHEMA.by_name["id"].arrow])


@st.composite
def _predicates(draw: Callable[..., Any]) -> tuple[Predicate, ...]:
    number = st.integers(-128, 127)
    one = st.builds(Predicate, st.just(0), st.sampled_from(["=", "<", "<=", ">", ">=", "!="]), number)
    several = st.builds(Predicate, st.just(0), st.just("in"), st.lists(number, max_size=3).map(tuple))
    return tuple(draw(st.lists(one | several, max_size=2)))


@given(st.sets(st.integers(-128, 127), max_size=6), _predicates(), st.data())
def test_each_row_is_in_one_part(
    cuts: set[int], predicates: tuple[Predicate, ...], data: st.DataObject
) -> None:
    low, high = sorted([data.draw(st.integers(-128, 127)), data.draw(st.integers(-128, 127))])
    lower, upper = data.draw(st.sampled_from([(b"", b""), (_key(low), b""), (_key(low), _key(high))]))
    tablet = TabletPlace("t", 0, ())
    plan = ScanPlan("c", SCHEMA, ScanSpec((0,), predicates, lower, upper), 1, (tablet,))
    plan.prepared.update({"t": Prepared(7, 1), "other": Prepared(9, 1)})
    found = parts(plan, tablet, sorted(map(_key, cuts)))
    assert all(part.prepared == {"t": Prepared(7, 1)} and part.tablets == (tablet,) for part in found)
    for n in range(-128, 128):
        key = _key(n)
        wanted = lower <= key and (not upper or key < upper) and all(_true(p, n) for p in predicates)
        within = [
            p for p in found if p.spec.lower_key <= key and (not p.spec.upper_key or key < p.spec.upper_key)
        ]
        assert len(within) <= 1 and (within or not wanted)
    for part in found:
        assert part.spec.predicates == predicates and part.snapshot == 1


def _true(predicate: Predicate, n: int) -> bool:
    value = predicate.value
    if predicate.op == "in":
        return n in value
    tests = {
        "=": n == value,
        "!=": n != value,
        "<": n < value,
        "<=": n <= value,
        ">": n > value,
        ">=": n >= value,
    }
    return tests[predicate.op]


def test_replicas_of_the_readers_zone_come_first_and_each_once() -> None:
    replicas = tuple(ReplicaPlace(f"n{n}", f"h{n}:1", f"h{n}:2", zone) for n, zone in enumerate("abab"))
    tablet = TabletPlace("t", 0, replicas, incarnation=2, leader=3)
    plan = ScanPlan("c", SCHEMA, ScanSpec((0,)), 1, (tablet,))
    scan = TabletScan(FlightPool("b"), plan, tablet, 1.0, lambda: None)
    assert scan._nearby() == [], "not prepared: leaders only"
    plan.prepared["t"] = Prepared(5, 1)
    assert scan._nearby() == [], "prepared before the tablet was recovered"
    plan.prepared["t"] = Prepared(5, 2)
    assert [r.node_id for r in scan._nearby()] == ["n3", "n1"], "its leader first"
    scan._ask_another(replicas[3], Code.NOT_LEADER)
    assert [r.node_id for r in scan._nearby()] == ["n1"] and tablet.leader == 3
    scan._ask_another(replicas[1], Code.UNAVAILABLE)
    assert scan._nearby() == [] and tablet.target().node_id == "n3"
    assert TabletScan(FlightPool(), plan, tablet, 1.0, lambda: None)._nearby() == [], (
        "a reader without a zone"
    )
