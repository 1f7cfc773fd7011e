"""The measure of what predicates spare finds its rows in every way that it has."""

from __future__ import annotations

import subprocess
import sys


def test_every_way_finds_the_wanted_rows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.predicates", "--rows", "40000"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.count(" ms   again ") == 4, done.stderr
