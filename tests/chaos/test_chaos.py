"""A bounded share of `make chaos`: a few rounds of a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import run


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_killed_at_random_moments_it_heals_and_loses_nothing(tmp_path: Path) -> None:
    # 4945: a master; then, each while a machine is healed, the operator and, if there is time for it, a node.
    played = run(tmp_path, rounds=3, seconds=150, seed=4945)
    assert played >= 2
