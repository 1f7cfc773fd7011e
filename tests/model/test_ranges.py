"""Ranges that are added and dropped: against a dumb twin, and every row goes where it went before."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from stele.model.errors import Rejected
from stele.model.keys import encode_tuple
from stele.model.partition import (
    OUTSIDE,
    HashPartition,
    PartitionSchema,
    RangePartition,
    assign,
    assign_few,
    may_be_outside,
    numbered,
    prune,
)
from stele.model.partitioning import RangePartitioning, by_ids, by_names
from stele.model.predicate import Predicate
from stele.model.ranges import AddRange, DropRange, RangeStep, of_ranges, with_steps
from stele.model.schema import Schema
from stele.rpc.convert_schema import partitioning_from_pb, partitioning_to_pb, steps_from_pb, steps_to_pb

SCHEMA = Schema.make([("n", "int64"), ("k", "int64")], ["n", "k"])
KEYS = range(40)


def key(n: int | None) -> bytes:
    return b"" if n is None else encode_tuple([n], [pa.int64()])


def drawn(rng: random.Random) -> tuple[int | None, int | None]:
    start, end = sorted(rng.sample(range(42), 2))
    return (None if start == 0 else start), (None if end == 41 else end)


def within(n: int, bounds: tuple[int | None, int | None]) -> bool:
    return (bounds[0] is None or n >= bounds[0]) and (bounds[1] is None or n < bounds[1])


@pytest.mark.parametrize("seed", range(60))
def test_random_changes_against_a_set_of_pairs(seed: int) -> None:
    rng = random.Random(seed)
    hashes = tuple(HashPartition((1,), b, b) for b in rng.choice([(), (3,), (2,)]))
    splits = sorted(rng.sample(KEYS[1:], rng.randrange(3)))
    part = RangePartition((0,), tuple(map(key, splits)))
    twin = dict(enumerate(zip([None, *splits], [*splits, None])))
    rows = [(n, rng.randrange(99)) for n in KEYS]
    batch = pa.record_batch([[n for n, _ in rows], [k for _, k in rows]], names=["n", "k"])
    homes: dict[tuple[int, tuple[int, int]], int] = {}
    for _ in range(12):
        steps: list[RangeStep] = []
        wanted, fails = dict(twin), False
        next_number = part.next_number or len(twin)
        for number in rng.sample(sorted(wanted), rng.randrange(min(len(wanted), 2) + 1)):
            a, b = wanted.pop(number)
            steps.append(DropRange(key(a), key(b)))
        if rng.random() < 0.8:
            new = drawn(rng)
            fails = any(within(n, new) and within(n, old) for n in range(-1, 43) for old in wanted.values())
            wanted[next_number] = new
            steps.append(AddRange(key(new[0]), key(new[1])))
        rng.shuffle(steps)
        if not steps:
            continue
        if fails or not wanted:
            with pytest.raises(Rejected, match=r"overlap|no range would be left"):
                with_steps(part, steps)
            continue
        part, twin = with_steps(part, steps), wanted
        whole = PartitionSchema(hashes, part)
        assert whole.faults(SCHEMA) == [] and part.ranges == len(twin)
        assert PartitionSchema.from_json(whole.to_json()) == whole
        assert partitioning_from_pb(partitioning_to_pb(whole)) == whole
        ordinals = assign(batch, SCHEMA, whole).tolist()
        assert ordinals == assign_few({0: [n for n, _ in rows], 1: [k for _, k in rows]}, SCHEMA, whole)
        tablets = dict(numbered(whole))
        assert len(tablets) == whole.tablets and list(tablets) == sorted(tablets)
        for (n, k), ordinal in zip(rows, ordinals):
            number = next((i for i, bounds in twin.items() if within(n, bounds)), None)
            assert (ordinal == OUTSIDE) == (number is None)
            if number is not None:
                tablet = tablets[ordinal]
                assert tablet.range_start <= key(n) and (not tablet.range_end or key(n) < tablet.range_end)
                assert homes.setdefault((number, (n, k)), ordinal) == ordinal, "a row never moves"
        low, high = sorted(rng.sample(KEYS, 2))
        predicates = [Predicate(0, ">=", low), Predicate(0, "<", high)]
        kept = set(prune(whole, SCHEMA, predicates))
        hit = {o for (n, _), o in zip(rows, ordinals) if low <= n < high}
        assert hit - {OUTSIDE} <= kept
        assert OUTSIDE not in hit or may_be_outside(whole, SCHEMA, predicates)
    assert len(set(homes.values())) >= 1


def test_ordinals_of_two_ranges_are_never_the_same() -> None:
    part = RangePartition((0,), (key(10),))
    seen: dict[int, tuple[bytes, bytes]] = {}
    for n in range(10):
        whole = PartitionSchema((HashPartition((1,), 3),), part)
        for ordinal, tablet in numbered(whole):
            bounds = (tablet.range_start, tablet.range_end)
            assert seen.setdefault(ordinal, bounds) == bounds
        _, end, _ = part.covered[-1]
        part = with_steps(part, [DropRange(part.covered[-1][0], end), AddRange(key(100 + n), end)])
    assert len(seen) == 3 * 11


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([AddRange(key(5), key(12))], "overlaps"),
        ([AddRange(key(30), key(30))], "is empty"),
        ([DropRange(key(0), key(5))], "there is no range .*; there is"),
        ([DropRange(key(0), key(10)), DropRange(key(0), key(10))], "there is no range"),
        ([DropRange(key(0), key(10)), DropRange(key(10), key(20))], "no range would be left"),
        ([], "0 changes of ranges"),
    ],
)
def test_refused(steps: list[RangeStep], why: str) -> None:
    part = of_ranges((0,), [(key(0), key(10)), (key(10), key(20))])
    with pytest.raises(Rejected, match=why):
        with_steps(part, steps)


def test_ranges_of_a_new_table() -> None:
    assert of_ranges((0,), [(key(5), b""), (b"", key(5))]) == RangePartition((0,), (key(5),))
    with pytest.raises(Rejected, match="overlap"):
        of_ranges((0,), [(key(0), key(10)), (key(9), key(20))])
    with pytest.raises(Rejected, match="no ranges"):
        of_ranges((0,), [])
    said = RangePartitioning(("n",), (), ((0, 10), (20, None)))
    assert by_names(by_ids([said], SCHEMA), SCHEMA) == (said,)
    with pytest.raises(Rejected, match=r"bound .x.*expected two bounds"):
        by_ids([RangePartitioning(("n",), (), (("x", 1), (3,)))], SCHEMA)
    steps: list[RangeStep] = [AddRange(key(1), b""), DropRange(b"", key(1))]
    assert steps_from_pb(steps_to_pb(steps)) == ([], steps)


def test_rows_written_by_the_version_before() -> None:
    old = '{"hash":[],"range":[[0],["8000000000000005"]]}'
    assert PartitionSchema.from_json(old).to_json() == old
