"""Every scenario file must happen as it is written (`python -m tests.raft.scenario --rewrite` writes them anew)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.raft.scenario import Scenario, scenario_files


@pytest.mark.parametrize("path", scenario_files(), ids=lambda p: p.stem)
def test_scenarios(path: Path) -> None:
    text = path.read_text()
    assert Scenario().run(text, rewrite=False) == text
