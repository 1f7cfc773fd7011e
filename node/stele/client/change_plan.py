"""What a scan of changes asks for. Pure; used by table.py.

Invariant: the key columns are always among the columns. So a reader knows what was deleted, and a broken scan goes on behind
its last row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stele.client import arguments
from stele.client.tablet_scan import ScanPlan
from stele.model.errors import Rejected
from stele.model.predicate import Changes


def change_times(after: Any, upto: Any, now: Callable[[], int]) -> tuple[int, int]:
    """Both times as hybrid times. `now` is called if `upto` is none."""
    begin = arguments.snapshot(after, "after")
    if not begin:
        raise arguments.refusal("after", after, "the snapshot of a scan, or the time after which to read")
    end = arguments.snapshot(upto, "upto") or now()
    if begin > end:
        raise Rejected(f"changes: after {begin} is later than upto {end}; expected the earlier time first")
    return begin, end


def change_plan(planned: ScanPlan, after: int, *, every: bool) -> ScanPlan:
    """The plan of a scan as one of changes after this time, up to its snapshot. Key columns that it lacks come first.

    Raises:
        Rejected: a column is called `_op` or `_ts`, as those that changes add.
    """
    wanted = planned.spec.column_ids
    keys = tuple(int(i) for i in planned.schema.key_column_ids if i not in wanted)
    spec = replace(
        planned.spec, column_ids=(*keys, *wanted), ordered=True, changes=Changes(after, every=every)
    )
    spec.arrow_schema(planned.schema)
    return replace(planned, spec=spec)
