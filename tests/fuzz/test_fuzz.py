"""The bounded share of the fuzzer: `make fuzz MINUTES=60` is the rest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz import hunt, parsers
from tests.fuzz.__main__ import besiege
from tests.fuzz.draw import Draw

_ROUNDS = 250
_LONGEST_WAIT_MS = 10_000
"""Of a bystander's write. Twenty times what `make fuzz` allows, since other tests run meanwhile."""
_TABLE = parsers.table()


@pytest.mark.parametrize("parser", _TABLE, ids=[p.name for p in _TABLE])
def test_spoiled_input_is_a_value_or_a_refusal(parser: hunt.Parser) -> None:
    hunt.check_seeds([parser])
    rounds = _ROUNDS // 10 if parser.costly else _ROUNDS
    counts = hunt.hunt(Draw(random.Random(2_211)), [parser], rounds=rounds)
    assert counts[parser.name] >= rounds


def test_a_parser_that_lets_an_error_through_is_found() -> None:
    """The fuzzer itself: planted faults of three kinds are seen."""

    def raises(data: bytes) -> object:
        if len(data) > 5:
            raise KeyError("planted")
        return None

    for planted in (
        hunt.Parser("raises", [b"abcd"], raises),
        hunt.Parser("unicode", [b'{"a":"b"}'], lambda data: data.decode(), json_from=0),
    ):
        with pytest.raises(hunt.Finding, match=planted.name):
            hunt.hunt(Draw(random.Random(1)), [planted], rounds=2_000)


def test_the_same_seed_gives_the_same_inputs() -> None:
    drawn = []
    for _ in range(2):
        seen: list[bytes] = []
        parser = hunt.Parser("keeps", [b'{"a":[1,2]}'], seen.append, json_from=0)
        hunt.hunt(Draw(random.Random(7)), [parser], rounds=50)
        drawn.append(seen)
    assert drawn[0] == drawn[1]


async def test_hostile_ports_harm_nobody_else(tmp_path: Path) -> None:
    report = await besiege(tmp_path / "cluster", 15.0, random.Random(2_212))
    print("\n".join(report.lines()))
    assert report.bystander["acknowledged"] > 0
    assert report.attacks.total() > 50
    assert report.bystander["longest_gap_ms"] <= _LONGEST_WAIT_MS
