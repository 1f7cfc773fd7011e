"""Every block of docs/spark.md, run on a real cluster."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, run
from tests.docs.test_python import bare, masters
from tests.harness.spark_python import spark_python

__all__ = ["bare", "masters"]  # fixtures
pytestmark = pytest.mark.spark


@pytest.mark.filterwarnings("default")
def test_the_guide(masters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader has who pasted the demo's export line."""
    monkeypatch.setenv("STELE_MASTERS", masters)
    monkeypatch.setenv("PYSPARK_PYTHON", spark_python())
    run(blocks("docs/spark.md"), {"__name__": "__main__"})
