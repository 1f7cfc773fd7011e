"""A bounded share of `make chaos`: a few rounds of a fixed seed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.chaos.__main__ import run


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_killed_at_random_moments_it_heals_and_loses_nothing(tmp_path: Path) -> None:
    # 4945: a master; then, while a machine is healed, the operator. Both are played, however busy this machine is.
    # Fewer rows than `make chaos` writes: 400 a second take most of a processor, and each kill meets some of 100, too.
    assert run(tmp_path, rounds=2, seconds=math.inf, seed=4945, rows_per_s=100) == 2
