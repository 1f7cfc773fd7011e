"""What tests of nodes share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.tserver.local import LocalCluster


@pytest.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    """A master and three nodes, or as many as NODES of the test's module says."""
    made = LocalCluster(tmp_path, nodes=getattr(request.module, "NODES", 3))
    try:
        yield await made.start()
    finally:
        await made.close()
