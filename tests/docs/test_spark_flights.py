"""docs/spark-flights.md, from the top to the end on a real cluster: each block prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import Block, blocks, run
from tests.docs.test_python import bare
from tests.harness.spark_python import spark_python

__all__ = ["bare"]  # a fixture
PAGE = "docs/spark-flights.md"


def steps() -> Iterator[tuple[Block, str]]:
    """(A block, what the page says that it prints), in order."""
    told = {block.line: block.code for block in blocks(PAGE, language="text")}
    programs = blocks(PAGE)
    for block, after in zip(programs, [*(block.line for block in programs[1:]), 10**6]):
        prints = [code for line, code in told.items() if block.line < line < after]
        assert len(prints) <= 1, f"line {block.line}: its output stands in one place"
        yield block, "".join(prints)


@pytest.mark.spark
@pytest.mark.filterwarnings("default")
def test_each_block_prints_what_stands_below_it(
    bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader has after the first section: STELE_MASTERS, and no table."""
    monkeypatch.setenv("STELE_MASTERS", bare)
    monkeypatch.setenv("PYSPARK_PYTHON", spark_python())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    differ = []
    try:
        for block, expected in steps():
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                run([block], names)
            told = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
            if told != expected.strip():
                differ.append(f"{PAGE}: the block at line {block.line} prints:\n{told}")
    finally:
        if "spark" in names:
            names["spark"].stop()
    assert not differ, "\n\n".join(differ)


def test_the_cluster_is_started_as_the_quick_start_does_it() -> None:
    """Which tests/docs/test_quick_start.py runs."""
    ours = blocks(PAGE, language="sh")[0].code.splitlines()
    quick = [
        line.split("  #")[0].rstrip() for line in blocks("README.md", language="sh")[0].code.splitlines()
    ]
    steps = [line for line in ours if line.startswith(("eval", "kubectl", "stele-local", "python3"))]
    assert [line for line in quick if line and not line.startswith("pip")] == steps
