"""Reads one part of a plan in a Spark task. Used by source.py and stream.py.

Invariant: connections are opened here, in the task, and are closed when it ends.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import datasource as ds

from stele.client import Client
from stele.client.tablet_scan import FlightPool, ScanPlan, TabletScan
from stele.model.errors import Code, Rejected, Retryable
from stele_spark.options import Options

SCAN_TIMEOUT_S = 60.0
_LOCATE_TIMEOUT_S = 2.0
_ZONE = "STELE_ZONE"
"""The environment variable with the zone of a task. The option `zone` takes precedence."""


class TabletPartition(ds.InputPartition):
    """One tablet, or a part of it, at one snapshot. `plan` is a scan of that tablet alone."""

    def __init__(self, plan: ScanPlan) -> None:
        super().__init__(plan.tablets[0].tablet_id)
        self.plan = plan


def batches_of(options: Options, plan: ScanPlan) -> Iterator[pa.RecordBatch]:
    """The rows of a plan of one tablet, from any replica that serves them. Replicas in the task's zone are
    asked first.

    Raises:
        Rejected: NOT_FOUND, the table was deleted, or deleted and created again.
        SteleError: no replica served the rows in time.
    """
    (tablet,) = plan.tablets
    pool = FlightPool(options.zone or os.environ.get(_ZONE, ""))
    failed = 0

    def locate() -> None:
        # Replicas may have moved since the driver planned. Ask the masters only when no known replica
        # serves.
        nonlocal failed
        failed += 1
        if tablet.replicas and failed % len(tablet.replicas):
            return
        try:
            with Client(
                options.masters, timeout_s=_LOCATE_TIMEOUT_S, first_contact_s=_LOCATE_TIMEOUT_S
            ) as client:
                locations = client.open_table(options.table).asynchronous.locations
                there = {fresh.tablet_id: fresh for fresh in locations.tablets}
                if tablet.tablet_id in there:
                    tablet.update(there[tablet.tablet_id])
                elif locations.complete:
                    raise Rejected(
                        f"table {options.table} was deleted and created again since this frame was planned; "
                        "load() it again",
                        code=Code.NOT_FOUND,
                    )
        except Retryable:
            # The masters may be unavailable; the known nodes are tried again.
            time.sleep(_LOCATE_TIMEOUT_S * random.random())

    try:
        for batch in TabletScan(pool, plan, tablet, SCAN_TIMEOUT_S, locate):
            assert batch is not None  # only unordered scans start again
            yield batch
    finally:
        pool.close()
