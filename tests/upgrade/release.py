"""An earlier release, unpacked beside this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TAG = "v0.1.0"
"""The release before this one."""


def unpacked(directory: Path, tag: str = TAG) -> Path:
    """The folder with that release's package `stele`. Skips the test where the clone has no such tag."""
    known = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}"], capture_output=True
    )
    if known.returncode:
        pytest.skip(f"the tag {tag} is not in this clone; `git fetch --tags` brings it")
    directory.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", tag, "node/stele"], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    return directory / "node"
