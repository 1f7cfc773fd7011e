"""A server process does without pandas; importing Stele's model and store never brings it in."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
import stele.model.partition, stele.model.rows, stele.tablet.store, stele.tablet.keyspace
assert "pandas" not in sys.modules, "imported by a module of ours"
from stele.model.lean import keep_pandas_out
keep_pandas_out()
import pyarrow as pa
assert pa.array([1, 2]).to_pylist() == [1, 2]
assert "pandas" not in sys.modules, "imported by pyarrow"
"""


def test_pandas_stays_out_of_a_server_process() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
