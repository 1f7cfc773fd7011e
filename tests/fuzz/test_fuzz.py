"""The bounded share of the fuzzer: `make fuzz MINUTES=60` is the rest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz import parsers
from tests.fuzz.__main__ import besiege
from tests.fuzz.draw import Draw

_ROUNDS = 250
_TABLE = parsers.table()


@pytest.mark.parametrize("parser", _TABLE, ids=[p.name for p in _TABLE])
def test_spoiled_input_is_a_value_or_a_refusal(parser: parsers.Parser) -> None:
    parsers.check_seeds([parser])
    counts = parsers.hunt(Draw(random.Random(2_211)), [parser], rounds=_ROUNDS)
    assert counts[parser.name] >= _ROUNDS


def test_a_parser_that_lets_an_error_through_is_found() -> None:
    """The fuzzer itself: planted faults of three kinds are seen."""

    def raises(data: bytes) -> object:
        if len(data) > 5:
            raise KeyError("planted")
        return None

    for planted in (
        parsers.Parser("raises", [b"abcd"], raises),
        parsers.Parser("unicode", [b'{"a":"b"}'], lambda data: data.decode(), json_from=0),
    ):
        with pytest.raises(parsers.Finding, match=planted.name):
            parsers.hunt(Draw(random.Random(1)), [planted], rounds=2_000)


def test_the_same_seed_gives_the_same_inputs() -> None:
    drawn = []
    for _ in range(2):
        seen: list[bytes] = []
        parser = parsers.Parser("keeps", [b'{"a":[1,2]}'], seen.append, json_from=0)
        parsers.hunt(Draw(random.Random(7)), [parser], rounds=50)
        drawn.append(seen)
    assert drawn[0] == drawn[1]


async def test_hostile_ports_harm_nobody_else(tmp_path: Path) -> None:
    report = await besiege(tmp_path / "cluster", 15.0, random.Random(2_212))
    assert report.bystander["acknowledged"] > 0
    assert report.attacks.total() > 50
