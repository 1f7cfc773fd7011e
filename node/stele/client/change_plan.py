"""What a scan of changes asks for. Pure; used by table.py.

Invariant: the key columns are always among the columns. So a reader knows what was deleted, and a scan that broke off goes on
after its last row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stele.client import arguments
from stele.client.tablet_scan import ScanPlan
from stele.model.clock import ahead_of, physical_us, utc
from stele.model.errors import Code, Rejected
from stele.model.predicate import Changes

_AFTER, _UPTO = "the time after which to read changes,", "the time up to which to read them,"


def change_times(after: Any, upto: Any, now: Callable[[], int]) -> tuple[int, int]:
    """Return both times as hybrid times. `now` is called if `upto` is None."""
    begin = arguments.snapshot(after, "after", _AFTER)
    if not begin:
        raise arguments.refusal("after", after, "the snapshot of a scan, or the time after which to read")
    given = arguments.snapshot(upto, "upto", _UPTO)
    end = given or now()
    if begin > end:
        if not given:
            ahead = ahead_of(_AFTER, begin, physical_us(end), arguments.THIS_CLOCK)
            raise Rejected(f"{ahead}; give an earlier time", code=Code.CLOCK_AHEAD)
        raise Rejected(
            f"{_AFTER} {utc(physical_us(begin))} is later than {_UPTO} {utc(physical_us(end))}; "
            "expected the earlier time first"
        )
    return begin, end


def change_plan(planned: ScanPlan, after: int, *, every: bool) -> ScanPlan:
    """Turn the plan of a scan into one that reads the changes after this time, up to its snapshot. Key columns that the plan
    lacks are added in front.

    Raises:
        Rejected: a column is called `_op` or `_ts`: changes have columns of these names.
    """
    wanted = planned.spec.column_ids
    keys = tuple(int(i) for i in planned.schema.key_column_ids if i not in wanted)
    spec = replace(
        planned.spec, column_ids=(*keys, *wanted), ordered=True, changes=Changes(after, every=every)
    )
    spec.arrow_schema(planned.schema)
    return replace(planned, spec=spec)
