"""Which replica id of a tablet is free. Called by driving and background; pure.

An id names one replica for ever. The catalog gives ids, but it is not the only hand: an administrator may copy a replica
and add it without an intent. So a new id is above every id that the catalog, a configuration or a report names.

Invariant: an id that is given was never named by anything that this master knows of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stele.master.liveness import Report
from stele.master.records import TabletRecord
from stele.model.config import Configuration

ID_STEP_MAX = 1 << 20
"""An id further ahead is a mistake or a lie. It is ignored: the counter must not run out."""


def raised(row: TabletRecord, config: Configuration) -> int:
    """The row's counter, above all ids that a committed configuration names."""
    return _above(row.next_replica_id, (p.replica_id for p in config.peers))


def free_id(row: TabletRecord, config: Configuration, reports: Iterable[Report]) -> int:
    """An id for a new replica: above `config` (committed) and whatever nodes report. Their tombstones and copies count, and so do
    the configurations that they know, committed or pending."""
    return _above(raised(row, config), _reported(reports))


def _reported(reports: Iterable[Report]) -> Iterator[int]:
    for report in reports:
        yield report.status.replica_id
        for config in (report.status.committed_config, report.status.pending_config):
            yield from (p.replica_id for p in config.peers)


def _above(counter: int, ids: Iterable[int]) -> int:
    return max((n + 1 for n in ids if counter <= n < counter + ID_STEP_MAX), default=counter)
