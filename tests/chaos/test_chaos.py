"""A bounded share of `make chaos`: a few rounds of a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import run


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_killed_at_random_moments_it_heals_and_loses_nothing(tmp_path: Path) -> None:
    played = run(
        tmp_path, rounds=4, seconds=40, seed=8
    )  # the operator, then a node, each while a machine is healed
    assert played >= 2
