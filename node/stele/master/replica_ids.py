"""Chooses unused replica ids. Called by driving and background; pure.

An id names one replica for ever. The catalog assigns ids, but an administrator may also add a replica without
an intent. So a new id is above every id that the catalog, a configuration or a report names.

Invariant: a new id was never named by anything that this master knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stele.master.liveness import Report
from stele.master.records import TabletRecord
from stele.model.config import Configuration

ID_STEP_MAX = 1 << 20
"""Ids further above the counter than this are wrong or forged. They are ignored, so that the counter does not
run out.
"""


def raised(row: TabletRecord, config: Configuration) -> int:
    """The row's id counter, raised above all ids in a committed configuration."""
    return _above(row.next_replica_id, (p.replica_id for p in config.peers))


def free_id(row: TabletRecord, config: Configuration, reports: Iterable[Report]) -> int:
    """An id for a new replica, above all ids in `config` (committed) and in the nodes' reports.

    Reports include tombstones, copies, and configurations both committed and pending.
    """
    return _above(raised(row, config), _reported(reports))


def _reported(reports: Iterable[Report]) -> Iterator[int]:
    for report in reports:
        status = report.status
        yield report.replica_id
        for config in (status.committed_config, status.pending_config):
            yield from (p.replica_id for p in config.peers)


def _above(counter: int, ids: Iterable[int]) -> int:
    return max((n + 1 for n in ids if counter <= n < counter + ID_STEP_MAX), default=counter)
