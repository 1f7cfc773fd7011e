"""Which replicas a task reads: those of its zone before all others, with both readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
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
        # A replica that is not ready within a second is passed over, so on a busy machine one read may go elsewhere.
        seen = [hosts_read(processes, read("near", zone=node.zone).load(), tmp_path)]
        while seen[-1] != {node.host} and len(seen) < 4:
            seen.append(hosts_read(processes, read("near", zone=node.zone).load(), tmp_path))
        assert seen[-1] == {node.host}, seen
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


def test_rows_that_may_be_old_come_from_followers(
    read: Callable[..., Any], masters: str, processes: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = f"aged_{request.node.callspec.params['read']}"
    with Client(masters) as client:
        (tablet,) = client.open_table("near").asynchronous.locations.tablets
        leader = processes.member(tablet.target().node_id)
        client.create_table(name, SCHEMA).write_arrow(pa.table({"id": [1], "text": ["new"]}))
    assert read(name, maxStaleness="0").load().count() == 1, "as new as without it"
    assert read(name, maxStaleness="600").load().count() == 0, "the table was empty then"
    found = hosts_read(processes, read("near", maxStaleness="0").load(), tmp_path)
    assert len(found) == 1 and leader.host not in found
    for node in processes.nodes:
        where = hosts_read(processes, read("near", maxStaleness="5", zone=node.zone).load(), tmp_path)
        assert (where == {node.host}) is (node is not leader), "the leader is the last, wherever it is"
    processes.kill(leader)
    try:
        assert read("near", maxStaleness="0.25").load().count() == ROWS
    finally:
        processes.restart(leader)
        asyncio.run(processes.wait_ready(leader))


def test_an_age_that_cannot_be_is_refused(read: Callable[..., Any]) -> None:
    bad = "expected seconds from 0 to 315360000, such as 5 or 0.5"
    for text, said in (
        ("-1", bad),
        ("soon", bad),
        ("nan", bad),
        ("1e3", bad),
        ("", bad),
        ("0.0001", bad),
        ("315360001", bad),
        ("901", "of history; give at most that"),
    ):
        with pytest.raises(Exception, match=said) as refused:
            read("near", maxStaleness=text).load()
        assert "staleness" in str(refused.value).lower()
    with pytest.raises(Exception, match='"snapshot" and "maxStaleness" are both given: give one of them'):
        read("near", maxStaleness="5", snapshot="2024-05-01T12:00:00Z").load()


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
