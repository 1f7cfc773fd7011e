"""Keeps pandas out of processes that never use it. Called first thing by server processes; never by the client.

pyarrow imports pandas, where it is installed, as soon as it is given any Python sequence: 50 MB in every node. It
asks once, so a stand-in that is too old for it at that moment settles the matter for the life of the process.

Invariant: `import pandas` works as before afterwards; only pyarrow's own conversions to and from pandas do not.
"""

from __future__ import annotations

import sys
import types
import warnings


def keep_pandas_out() -> None:
    """Make pyarrow do without pandas in this process. No effect if pandas is imported already."""
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
