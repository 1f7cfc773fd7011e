"""The JVM reader reads a replica on the host of its task before all others. Each test has a session of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stele.client import Client
from tests.harness.processes import Cluster
from tests.spark.connections import fill, hosts_read
from tests.spark.readers import need_jar

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


def test_a_replica_on_the_host_of_the_task_is_read(
    session_at: Callable[[str], Any], masters: str, processes: Cluster, tmp_path: Path
) -> None:
    need_jar()
    with Client(masters) as client:
        fill(client, "near")
    for node, other in zip(processes.nodes, processes.nodes[1:] + processes.nodes[:1]):
        spark = session_at(node.host)
        spark.conf.set("spark.stele.reader", "jvm")
        frame = spark.read.format("stele").options(masters=masters, table="near", zone=other.zone).load()
        assert hosts_read(processes, frame, tmp_path) == {node.host}
