"""A node as a process: what it asks of the system."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

ASK = """
import resource
from stele.tserver.process import raise_file_limit
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "then"), [(256, 4_096, 4_096), (256, 256, 256)])
def test_a_node_takes_as_many_files_as_it_may(soft: int, hard: int, then: int) -> None:
    """With 1,024, as a shell gives, some hundred tablets could not be opened."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.split() == [str(then), str(hard)]
