"""The load of the leaders here: the requests of clients per second at each. Services and scans count;
heartbeats send it.

One request counts 1, and each 4 KiB that it brings counts 1 more. A key that is read counts 1. A scan counts
1 for each 16 KiB that it gives. On a leader's node each of these takes some 30 to 40 us of processor time. So
loads are comparable, whatever the clients do.

The load is a mean that forgets half of itself in HALF_MS. A replica that no longer leads still reports its
last load for CARRIED_MS. Meanwhile its successor counts from 0, and masters take the higher one.

Invariant: while clients ask nothing, nothing is reported. A load is reported again only when it has changed
by a step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stele.consensus.replica import Replica
from stele.model.bounds import LOAD_MAX

EVERY_MS = 5_000
"""How often loads are computed."""
HALF_MS = 20_000
"""The half-life of the mean: in this time a load forgets half of what came before."""
CARRIED_MS = 60_000
"""How long a replica that no longer leads still reports its last load. By then its successor has counted
seven eighths of that load.
"""
STEP, STEP_MIN = 0.25, 5
"""A load is reported again when it differs from the last report by at least this share and this number."""
TOLD_MAX = 32
"""The most loads in one report. Those that changed most go first."""
_SIZE_SHIFT, _SCAN_SHIFT = 12, 14


def write_units(size_bytes: int) -> int:
    """The load of a write request of this many bytes."""
    return 1 + (size_bytes >> _SIZE_SHIFT)


def scan_units(size_bytes: int) -> int:
    """The load of a scan's answer of this many bytes."""
    return size_bytes >> _SCAN_SHIFT


@dataclass(slots=True)
class _Rate:
    """The load of one replica, as `level`. `lost_ms`: when it was first seen not to lead; None: it leads."""

    level: float = 0.0
    lost_ms: int | None = None


class LeaderLoad:
    """Computes the loads of the replicas here, on the event loop. Sets `Replica.load`, which reports show."""

    def __init__(self) -> None:
        self.total = 0
        """The load of all leaders here."""
        self._work: defaultdict[Replica, int] = defaultdict(int)  # since the last look
        self._rates: dict[Replica, _Rate] = {}
        self._looked_ms: int | None = None

    def add(self, replica: Replica, units: int) -> None:
        """Count a client's request that was accepted."""
        self._work[replica] += units

    def look(self, now_ms: int) -> list[Replica]:
        """Compute the loads, if it is time. Returns the replicas to report."""
        if self._looked_ms is None:
            self._looked_ms = now_ms
        passed_ms = now_ms - self._looked_ms
        if passed_ms < EVERY_MS:
            return []
        self._looked_ms = now_ms
        work, self._work = self._work, defaultdict(int)
        for replica in work:
            if replica.is_leader:
                self._rates.setdefault(replica, _Rate())
        kept = 0.5 ** (passed_ms / HALF_MS)
        changed: list[tuple[float, Replica, float]] = []
        for replica, rate in list(self._rates.items()):
            if replica.is_leader:
                rate.lost_ms = None
                rate.level = rate.level * kept + work.get(replica, 0) * 1_000 / passed_ms * (1 - kept)
                if rate.level < 1:
                    rate.level = 0.0
            elif rate.lost_ms is None:
                rate.lost_ms = now_ms
            elif now_ms - rate.lost_ms >= CARRIED_MS or not replica.running:
                rate.level = 0.0
            differs = abs(rate.level - replica.load)
            if differs >= max(STEP_MIN, replica.load * STEP) or (replica.load and not rate.level):
                changed.append((differs, replica, rate.level))
            elif not rate.level:
                del self._rates[replica]
        changed.sort(key=lambda c: -c[0])
        told = changed[:TOLD_MAX]
        for _, replica, level in told:
            replica.load = min(int(level), LOAD_MAX)
        levels = (r.level for replica, r in self._rates.items() if replica.is_leader)
        self.total = min(int(sum(levels)), LOAD_MAX)
        return [replica for _, replica, _ in told if replica.running]
