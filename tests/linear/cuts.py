"""Is a scan at a snapshot a cut of the history? Judged in hybrid time, by the same checker.

Each acknowledged write stands at the one hybrid time that it was acknowledged with, each scan at its snapshot, behind
all writes of that time. So a scan must show exactly what was written at or below its snapshot, whichever replicas it
was read from, and timestamps must tell the order in which writes took effect. A write of unknown outcome may stand
anywhere from the time that it began at; one that a flush of many was told of, up to the highest time of the flush.

Invariant: a refused write has no timestamp and is left out; clients' and nodes' clocks are those of one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stele.model.clock import from_physical_us
from tests.linear.history import NEVER, Kind, Operation, State, Told

_BEHIND = 0.5
"""Hybrid times are whole numbers; a scan at one sees what was written at it."""
_DRIFT_US = 100_000
"""How far the wall clock may be moved against the monotonic one during a run."""


@dataclass(frozen=True, slots=True)
class Scan:
    """All rows at `snapshot`, which was taken at the monotonic second `taken`; a row that is not there is left out."""

    snapshot: int
    taken: float
    ended: float
    rows: Mapping[str, State]
    client: str


def in_hybrid_time(
    operations: Iterable[Operation], scans: Sequence[Scan], wall_us: float
) -> dict[str, list[Operation]]:
    """The history of each row of the table, reads and refused writes left out, each scan a read of every row.

    `wall_us`: what the wall clock said, in µs since 1970, at second 0 of the monotonic clock.
    """
    base = from_physical_us(int(wall_us))

    def place(hybrid: int) -> float:
        return float(hybrid - base)  # floats are exact up to 2**53: 2**12 steps to a µs, for half an hour

    histories: dict[str, list[Operation]] = {}
    for o in operations:
        if o.observes:
            continue
        began = place(from_physical_us(int(wall_us + o.begun * 1e6) - _DRIFT_US))
        if o.told is Told.UNKNOWN:
            moved = replace(o, begun=began, ended=NEVER)
        else:
            moved = replace(o, begun=began if o.one_of_many else place(o.timestamp), ended=place(o.timestamp))
        histories.setdefault(o.key, []).append(moved)
    for scan in scans:
        at = place(scan.snapshot) + _BEHIND
        for key, history in histories.items():
            note = f"scan at {scan.snapshot}, seconds {scan.taken:.3f} to {scan.ended:.3f}"
            read = Operation(key, Kind.READ, scan.rows.get(key), at, at, Told.DONE, scan.client, note=note)
            history.append(read)
    return histories


def strangers(operations: Iterable[Operation], scans: Sequence[Scan]) -> list[str]:
    """Rows in scans that nobody wrote."""
    known = {o.key for o in operations}
    return sorted({key for scan in scans for key in scan.rows if key not in known})


def unlike(scans: Sequence[Scan]) -> list[tuple[Scan, Scan]]:
    """Scans at one snapshot that show different rows."""
    first: dict[int, Scan] = {}
    return [
        (first[scan.snapshot], scan)
        for scan in scans
        if first.setdefault(scan.snapshot, scan).rows != scan.rows
    ]


def behind(operations: Iterable[Operation], scans: Sequence[Scan]) -> list[tuple[Operation, Scan]]:
    """Writes that were acknowledged before a snapshot at the present was taken, with a time above it."""
    acknowledged = [o for o in operations if o.timestamp and not o.one_of_many]
    return [(o, s) for s in scans for o in acknowledged if o.ended < s.taken and o.timestamp > s.snapshot]
