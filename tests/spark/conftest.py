"""What tests of streams share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.spark.streaming import Streams
from tests.tserver.conftest import cluster

__all__ = ["cluster"]


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    """Makes the readers of a test, and stops them at its end."""
    found = Streams()
    yield found
    await asyncio.to_thread(found.stop)
