"""What tests of Spark share: a cluster of processes, a session, and the readers of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.harness.processes import Cluster
from tests.harness.spark_python import forked_workers
from tests.harness.standing import running
from tests.spark.readers import READERS, need_jar
from tests.spark.streaming import Streams
from tests.tserver.conftest import cluster

__all__ = ["cluster"]


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    """Makes the readers of a test, and stops them at its end."""
    found = Streams()
    yield found
    await asyncio.to_thread(found.stop)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One master and three nodes, while the module runs."""
    with running(Cluster(tmp_path_factory.mktemp("processes"), masters=1, nodes=3)) as there:
        yield there


@pytest.fixture(scope="module")
def masters(processes: Cluster) -> str:
    """The address of its master."""
    return ",".join(processes.master_addresses)


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session while the module runs, with the settings that the module gives in SESSION. One Java serves all sessions of a
    process. Its Python workers are forked from a template, unless the module says PYTHON_ANEW. Tables that Spark would make in the folder where it was started are made elsewhere."""
    from stele_spark.session import session

    given: dict[str, Any] = getattr(request.module, "SESSION", {"cores": 2})
    warehouse = tmp_path_factory.mktemp("warehouse")
    with nullcontext() if getattr(request.module, "PYTHON_ANEW", False) else forked_workers():
        made = session("stele-tests", **given, spark__sql__warehouse__dir=str(warehouse))
    made.sparkContext.setLogLevel("OFF")
    yield made
    made.stop()


@pytest.fixture(params=READERS)
def read(request: pytest.FixtureRequest, spark: Any, masters: str) -> Callable[..., Any]:
    """`read(table, **options)`: a DataFrameReader, with each of the readers in turn."""
    if request.param == "jvm":
        need_jar()
    spark.conf.set("spark.stele.reader", request.param)
    return lambda table, **options: spark.read.format("stele").options(
        masters=masters, table=table, **options
    )


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks feed batches as they come."""
    monkeypatch.setattr("stele_spark.sink._BATCH_ROWS", 1)
