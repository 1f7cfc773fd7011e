"""Every block of docs/spark.md, and README's Spark, run on a real cluster."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, run
from tests.docs.test_python import HEADING, masters, names

__all__ = ["masters", "names"]  # fixtures
pytestmark = pytest.mark.spark


@pytest.mark.filterwarnings("default")
def test_the_guide(names: dict[str, object]) -> None:
    run(blocks("docs/spark.md"), names)


@pytest.mark.filterwarnings("default")
def test_readme(names: dict[str, object], masters: str) -> None:
    run(blocks("README.md", heading=HEADING)[1:], {**names, "masters": masters})["spark"].stop()  # type: ignore[attr-defined]
