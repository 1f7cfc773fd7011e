"""A server process does without pandas and rich; importing Stele's model and store never brings pandas in."""

from __future__ import annotations

import subprocess
import sys

import pytest

_MODEL = """
import sys
import stele.model.partition, stele.model.rows, stele.tablet.store, stele.tablet.keyspace
assert "pandas" not in sys.modules, "imported by a module of ours"
from stele.model.no_pandas import keep_pandas_out
keep_pandas_out()
import pyarrow as pa
assert pa.array([1, 2]).to_pylist() == [1, 2]
assert "pandas" not in sys.modules, "imported by pyarrow"
"""
_PROCESS = """
import sys
from stele.cli import main
sys.argv = "stele node run --data-dir there --node-id none --cluster-id none".split()
try:
    main()
except SystemExit as exc:
    assert exc.code == 2
assert "structlog" in sys.modules and "rich" not in sys.modules, "imported by structlog"
import stele.cli.progress
"""


@pytest.mark.parametrize("program", [_MODEL, _PROCESS], ids=["model", "process"])
def test_what_nobody_uses_stays_out_of_a_server_process(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
