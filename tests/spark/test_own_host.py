"""Where a task runs, and so which replica it reads: its host, for the JVM reader, and the zone in its environment. Each test has a
session of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stele.client import Client
from tests.harness.processes import Cluster
from tests.spark.connections import fill, hosts_read
from tests.spark.readers import READERS, need_jar
from tests.spark.standalone import environment, standalone

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]


@pytest.fixture
def session_at(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Makes a session whose executor is at an address. Stops it at the end."""
    from stele_spark.session import session

    made: list[Any] = []

    def at(host: str) -> Any:
        for each in made:
            each.stop()
        made[:] = [
            session(
                "stele-near",
                cores=1,
                spark__driver__host=host,
                spark__driver__bindAddress=host,
                spark__sql__warehouse__dir=str(tmp_path),
            )
        ]
        made[0].sparkContext.setLogLevel("OFF")
        return made[0]

    yield at
    for each in made:
        each.stop()


@pytest.fixture(scope="module")
def masters(masters: str) -> str:
    """The cluster, with a table that has a replica on each of three hosts, in zones of their own."""
    need_jar()
    with Client(masters) as client:
        fill(client, "near")
    return masters


def test_a_replica_on_the_host_of_the_task_is_read(
    session_at: Callable[[str], Any], masters: str, processes: Cluster, tmp_path: Path
) -> None:
    for node, other in zip(processes.nodes, processes.nodes[1:] + processes.nodes[:1]):
        spark = session_at(node.host)
        spark.conf.set("spark.stele.reader", "jvm")
        frame = spark.read.format("stele").options(masters=masters, table="near", zone=other.zone).load()
        assert hosts_read(processes, frame, tmp_path) == {node.host}


def test_executors_know_their_zone_by_their_environment(
    masters: str, processes: Cluster, tmp_path: Path
) -> None:
    """With a setting of the session, on executors of a standalone Spark."""
    from stele_spark.session import session

    with Client(masters) as client:
        (tablet,) = client.open_table("near").asynchronous.locations.tablets
        leader = processes.member(tablet.target().node_id)
    node = next(node for node in processes.nodes if node is not leader)
    work = tmp_path / "work"
    work.mkdir()
    with standalone(work, environment(SPARK_DAEMON_MEMORY="256m"), ["127.0.0.2"]) as url:
        spark = session(
            "stele-zone",
            spark__master=url,
            spark__executor__memory="512m",
            spark__executorEnv__STELE_ZONE=node.zone,
            spark__sql__warehouse__dir=str(tmp_path),
        )
        try:
            spark.sparkContext.setLogLevel("OFF")
            for reader in READERS:
                spark.conf.set("spark.stele.reader", reader)
                frame = spark.read.format("stele").options(masters=masters, table="near").load()
                assert hosts_read(processes, frame, tmp_path) == {node.host}, reader
        finally:
            spark.stop()
