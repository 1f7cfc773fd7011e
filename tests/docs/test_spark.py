"""Every block of docs/spark.md, run on a real cluster."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, run
from tests.docs.test_python import masters, names

__all__ = ["masters", "names"]  # fixtures
pytestmark = pytest.mark.spark


@pytest.mark.filterwarnings("default")
def test_the_guide(names: dict[str, object]) -> None:
    run(blocks("docs/spark.md"), names)
