"""Nodes that die in the middle of a read, with both readers: each row comes once, and no election is needed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client import Client
from tests.harness.processes import Cluster
from tests.spark.connections import ROW_BYTES, ROWS, fill

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

BATCH_ROWS = 2_000


@pytest.fixture(scope="module")
def masters(masters: str) -> str:
    """The cluster, with a table of one tablet that is more than all buffers between a node and a task hold."""
    with Client(masters) as client:
        fill(client, "lost")
    return masters


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_that_die_in_the_middle_of_a_read_cost_no_row(
    read: Callable[..., Any], spark: Any, masters: str, processes: Cluster, tmp_path: Path, nodes: int
) -> None:
    """With two of three nodes gone there is no leader."""
    from pyspark.sql import functions as F

    with Client(masters) as client:
        (tablet,) = client.open_table("lost").asynchronous.locations.tablets
        leader = processes.member(tablet.target().node_id)
    victims = [leader, *(node for node in processes.nodes if node is not leader)][:nodes]
    reading, killed = tmp_path / "reading", tmp_path / "killed"

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            reading.touch()
            while number == 1 and not killed.exists():  # so that most of the rows are read after it
                time.sleep(0.02)
            yield batch

    def kill() -> None:
        while not reading.exists():
            time.sleep(0.02)
        for victim in victims:
            processes.kill(victim)
        killed.touch()

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(BATCH_ROWS))
    frame = read("lost").load().mapInArrow(slowly, "id long, text string")
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        rows = frame.groupBy(F.length("text").alias("length")).agg(
            F.count("*").alias("n"), F.countDistinct("id").alias("d"), F.sum("id").alias("s")
        )
        found = {row.length: (row.n, row.d, row.s) for row in rows.collect()}
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        killer.join(60)
        for victim in victims:
            processes.restart(victim)
            asyncio.run(processes.wait_ready(victim))
    assert killed.exists()
    assert found == {ROW_BYTES: (ROWS, ROWS, ROWS * (ROWS - 1) // 2)}
