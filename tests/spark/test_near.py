"""Which replicas a task reads: those of its zone before all others, with both readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stele.client import Client
from stele_spark.options import Options
from stele_spark.source import Reader
from stele_spark.types import spark_schema
from tests.harness.processes import Cluster
from tests.spark.connections import ROWS, SCHEMA, fill, hosts_read, read_now

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def masters(masters: str) -> str:
    """The cluster, with a table that has a replica in each of three zones."""
    with Client(masters) as client:
        fill(client, "near")
    return masters


def test_replicas_of_the_zone_in_the_option_are_read(
    read: Callable[..., Any], processes: Cluster, tmp_path: Path
) -> None:
    assert len({node.zone for node in processes.nodes}) == 3
    for node in processes.nodes:
        assert hosts_read(processes, read("near", zone=node.zone).load(), tmp_path) == {node.host}
    assert read("near", zone="nowhere").load().count() == ROWS


def test_a_zone_that_is_down_costs_no_row(read: Callable[..., Any], processes: Cluster) -> None:
    frame = read("near", zone=processes.nodes[1].zone).load()
    assert frame.rdd.getNumPartitions() == 1  # it is planned
    processes.kill(processes.nodes[1])
    try:
        assert frame.count() == ROWS
    finally:
        processes.restart(processes.nodes[1])
        asyncio.run(processes.wait_ready(processes.nodes[1]))


def test_the_environment_of_a_task_says_its_zone(
    masters: str, processes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hosts(**options: str) -> set[str]:
        given = Options.parse({"masters": masters, "table": "near", **options})
        reader = Reader(given, spark_schema(SCHEMA))
        (part,) = reader.partitions()
        before, batches = read_now(processes), reader.read(part)
        rows = next(batches).num_rows
        found = read_now(processes) - before
        assert rows + sum(batch.num_rows for batch in batches) == ROWS
        return {host for host, _ in found}

    # Each node is read once: within a process gRPC may use a connection again.
    first, second, third = processes.nodes
    for node in (first, second):
        monkeypatch.setenv("STELE_ZONE", node.zone)
        assert hosts() == {node.host}
    assert hosts(zone=third.zone) == {third.host}
