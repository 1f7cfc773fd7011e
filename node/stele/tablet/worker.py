"""The compaction worker: `python -m stele.tablet.worker`. Runs jobs and exits when stdin ends or when it was
idle.

It reads one job per line on stdin (file names, never rows) and answers each with one line on stdout. It exits
when idle so that its memory is freed. Invariant: killed at any moment, it leaves the store as it was, and at
most a file that no manifest lists.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys

from stele.model.errors import Code, SteleError
from stele.model.no_pandas import keep_pandas_out

_NICE = 10
"""Nice value. Merges are not urgent: they use the CPU time that serving, replication and copies leave, and
about a tenth of a busy CPU."""


def _answer(line: str) -> str:
    import pyarrow as pa

    from stele.tablet.compaction import CompactionJob, run_job

    try:
        result = run_job(CompactionJob.from_json(line))
        return json.dumps({"files": [m.to_json() for m in result.files]})
    except SteleError as exc:
        return json.dumps({"code": int(exc.code), "message": str(exc.args[0])})
    except (OSError, MemoryError, pa.ArrowException) as exc:
        return json.dumps({"code": int(Code.UNAVAILABLE), "message": repr(exc)})


def main() -> None:
    """Run jobs until stdin ends or nothing came for `--idle-s` seconds."""
    parser = argparse.ArgumentParser(prog="stele.tablet.worker", description=__doc__)
    parser.add_argument("--idle-s", type=float, default=10.0)
    idle_s = parser.parse_args().idle_s
    os.nice(_NICE)  # applies to this thread and its later ones, so set it before Arrow starts threads
    keep_pandas_out()
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], idle_s)
        if not readable:
            return
        line = sys.stdin.readline()
        if not line:
            return
        sys.stdout.write(_answer(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
