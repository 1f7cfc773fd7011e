"""Keeps pandas out of processes that never use it. Servers call it first; the client never does.

If pandas is installed, pyarrow imports it with the first Python sequence: 50 MB in every node. pyarrow checks
only once. So this module shows it a stand-in for pandas, with a version that pyarrow does not support. From
then on, pyarrow does without pandas in this process.

Invariant: `import pandas` works afterwards as before. Only pyarrow's own conversions to and from pandas do
not.
"""

from __future__ import annotations

import sys
import types
import warnings


def keep_pandas_out() -> None:
    """Make pyarrow work without pandas in this process. No effect if pandas is already imported."""
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    stand_in = types.ModuleType("pandas")
    stand_in.__dict__["__version__"] = "0.0.0"
    sys.modules["pandas"] = stand_in
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pa.array([0])
    finally:
        del sys.modules["pandas"]
