"""Every measure of `bench large` is taken, on a small cluster."""

from __future__ import annotations

import subprocess
import sys

from bench import large


def test_every_measure_is_taken() -> None:
    command = [
        sys.executable,
        "-m",
        "bench",
        "large",
        "--rows",
        "20000",
        "--tablets",
        "6",
        "--seconds",
        "0.5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 17 and all(line.count("|") == 3 for line in lines), done.stdout


def test_keys_differ() -> None:
    keys = [*large.keys_of(0, 50_000), *large.keys_of(50_000, 50_000)]
    assert len(set(keys)) == 100_000 and keys != sorted(keys)
