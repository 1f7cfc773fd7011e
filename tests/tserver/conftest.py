"""What tests of nodes share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.tserver.local import LocalCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """A master and three nodes."""
    made = LocalCluster(tmp_path)
    try:
        yield await made.start()
    finally:
        await made.close()
