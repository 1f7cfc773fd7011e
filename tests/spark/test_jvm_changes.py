"""Changes by the JVM catalog while masters and nodes come and go: a real Spark, and processes of a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from stele.client import Client
from stele.model.schema import Schema
from tests.harness.processes import Cluster
from tests.spark.readers import with_catalog

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True), ("amount", "double", True)], ["id"])
LONGER_THAN_AN_ANSWER_S, LONGER_THAN_PATIENCE_S = 10, 7


@pytest.fixture
def engine(spark: Any, masters: str) -> Any:
    return with_catalog(spark, masters)


def test_a_change_goes_on_while_its_master_is_away(engine: Any, processes: Cluster) -> None:
    """Nodes that do not answer keep the change open; the master has said so, and then restarts."""
    (master,) = processes.masters
    with Client(processes.master_addresses) as client:
        client.create_table("long", SCHEMA)
        with silent_nodes(processes) as resume, ThreadPoolExecutor(1) as threads:
            change = threads.submit(engine.sql, "ALTER TABLE st.long ADD COLUMN gate STRING")
            with pytest.raises(TimeoutError):
                change.result(timeout=LONGER_THAN_AN_ANSWER_S)
            processes.kill(master)
            with pytest.raises(TimeoutError):
                change.result(timeout=LONGER_THAN_PATIENCE_S)
            processes.restart(master)
            resume()
            change.result()
        assert [c.name for c in client.open_table("long").schema.columns] == ["id", "name", "amount", "gate"]


def test_a_change_that_is_lost_with_its_master_may_have_been_made(engine: Any, processes: Cluster) -> None:
    (master,) = processes.masters
    with Client(processes.master_addresses) as client:
        client.create_table("lost", SCHEMA)
        with silent_nodes(processes), ThreadPoolExecutor(1) as threads:
            change = threads.submit(engine.sql, "ALTER TABLE st.lost ADD COLUMN gate STRING")
            with pytest.raises(TimeoutError):
                change.result(timeout=2)
            processes.kill(master)
            try:
                with pytest.raises(Exception, match=r"UNKNOWN_OUTCOME: .*the change may have been made"):
                    change.result()
            finally:
                processes.restart(master)


@contextmanager
def silent_nodes(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """No node answers anything until the function is called, or the block ends; then all are ready."""

    def resume() -> None:
        for node in cluster.nodes:
            cluster.resume(node)

    try:
        for node in cluster.nodes:
            cluster.pause(node)
        yield resume
    finally:
        resume()
        for node in cluster.nodes:
            asyncio.run(cluster.wait_ready(node))


def test_a_table_that_was_made_again_is_another_one(engine: Any, processes: Cluster, masters: str) -> None:
    """At the frame's snapshot it has no rows, and none were shown."""
    spark = engine
    with Client(processes.master_addresses) as client:
        client.create_table("again", SCHEMA).put({"id": 1})
        options = {"masters": masters, "table": "again"}
        by_name, typed = (
            spark.table("st.again"),
            spark.read.format("stele").options(**options).schema("id long").load(),
        )
        reader = spark.read.format("stele").options(**options)
        loaded, unread = reader.load(), reader.load()
        frames = (loaded, by_name, typed)
        assert [frame.count() for frame in frames] == [1, 1, 1]
        client.delete_table("again")
        client.create_table("again", SCHEMA).put({"id": 2})
        for frame in (*frames, unread):
            with pytest.raises(
                Exception, match="again was deleted and created again since this frame was planned"
            ):
                frame.count()
            with pytest.raises(Exception, match="deleted and created again"):
                frame.where("id = 2").collect()
        assert [row.id for row in reader.load().collect()] == [2]
        assert [row.id for row in spark.table("st.again").collect()] == [2]


def test_what_cannot_be_read_is_told(engine: Any, processes: Cluster, masters: str) -> None:
    with Client(processes.master_addresses) as client:
        client.create_table("told", SCHEMA)
    given = {"masters": masters, "table": "told"}
    for options, said in (
        ({**given, "snapshot": "2099-01-01T00:00:00Z"}, "it lies in the future"),
        ({**given, "snapshot": "1969-01-01"}, "not before 1970"),
        ({**given, "snapshot": "2030-01-01"}, "CLOCK_AHEAD"),
        ({**given, "masters": "127.0.0.1:1"}, "127.0.0.1:1: it cannot be reached; check the address"),
        ({**given, "masters": "127.0.0.1:99999"}, "'127.0.0.1:99999': expected HOST or HOST:PORT"),
    ):
        with pytest.raises(Exception, match=said) as told:
            engine.read.format("stele").options(**options).load()
        assert type(told.value).__name__ == "AnalysisException", said
    engine.conf.set("spark.stele.reader", "jwm")
    try:
        with pytest.raises(Exception, match=r"spark\.stele\.reader is 'jwm': expected jvm or python"):
            engine.read.format("stele").options(**given).load()
    finally:
        engine.conf.unset("spark.stele.reader")
