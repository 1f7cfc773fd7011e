"""Second copies of tasks that write, which a real Spark starts by speculation while the first ones still run.

Spark starts no copy on the host of the first one, so two workers are on loopback hosts of their own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.client import Client
from tests.spark.standalone import environment, standalone
from tests.spark.tasks import PARTITIONING, SCHEMA, contents

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

HOSTS = ("127.0.0.2", "127.0.0.3")
ROWS = 200_000
REACHED = 10_000


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session whose two executors are on two hosts. It starts a second copy of a task that runs when another one has ended."""
    from stele_spark.session import session

    with standalone(tmp_path_factory.mktemp("work"), environment(SPARK_DAEMON_MEMORY="256m"), HOSTS) as url:
        made = session(
            "stele-speculation", spark__master=url, spark__speculation="true", spark__speculation__interval="100ms",
            spark__speculation__quantile="0.5", spark__speculation__multiplier="1.1", spark__executor__memory="512m",
            spark__executor__cores="1", spark__cores__max="2", spark__sql__warehouse__dir=str(tmp_path_factory.mktemp("w")),
        )  # fmt: skip
        made.sparkContext.setLogLevel("OFF")
        yield made
        made.stop()


def slow_once(spark: Any, seen: Path, first: Path, second: Path) -> Any:
    """A frame of two tasks. The first attempt at one of them gives all its rows, and then waits for the file `first`. Any other
    attempt at it waits for the file `second` before its first row. Each says in the folder `seen` where it runs."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os

        from pyspark import TaskContext

        (number,) = [n for batch in batches for n in batch.column(0).to_pylist()]
        if number == 1:
            yield pa.RecordBatch.from_pydict({"id": [ROWS], "v": ["ours"]})
            return
        context = TaskContext.get()
        assert context is not None
        attempt, until = context.attemptNumber(), time.monotonic() + 600
        told = {"host": os.environ["SPARK_LOCAL_IP"], "stage": context.stageId(), "at": time.time()}
        (seen / str(attempt)).write_text(json.dumps(told))
        while attempt and not second.exists() and time.monotonic() < until:
            time.sleep(0.05)
        yield from pa.table({"id": np.arange(ROWS), "v": ["ours"] * ROWS}).to_batches(10_000)
        while not attempt and not first.exists() and time.monotonic() < until:
            time.sleep(0.05)
        (seen / f"{attempt}-ended").touch()

    return spark.range(2, numPartitions=2).mapInArrow(rows, "id long, v string")


@pytest.mark.parametrize(("op", "both"), [("upsert", True), ("insert", False)])
def test_a_second_copy_beside_the_first_changes_nothing_that_others_wrote_since(
    spark: Any, masters: str, tmp_path: Path, op: str, both: bool
) -> None:
    """`both`: the first one goes on when the second one begins to write. Otherwise it never ends, and Spark kills it."""
    seen, first, second = tmp_path / "seen", tmp_path / "first", tmp_path / "second"
    seen.mkdir()
    with Client(masters) as client:
        table = client.create_table(op, SCHEMA, PARTITIONING)
        frame = slow_once(spark, seen, first, second)
        failed: list[BaseException] = []

        def save() -> None:
            from stele_spark.session import activate

            activate(spark)
            try:
                frame.write.format("stele").options(masters=masters, table=op, op=op).mode("append").save()
            except BaseException as exc:  # noqa: BLE001 - told below
                failed.append(exc)

        saving = threading.Thread(target=save)
        saving.start()
        reached: list[int] = []
        while saving.is_alive() and not (len(reached) >= REACHED and (seen / "1").exists()):
            time.sleep(0.3)
            reached = sorted(n for n in table.scan(["id"]).to_table()["id"].to_pylist() if n < ROWS)
        theirs = reached[:REACHED]
        table.write_arrow(pa.table({"id": theirs, "v": ["theirs"] * len(theirs)}))
        table.write_arrow(pa.table({"id": theirs[:3_000]}), "delete")
        second.touch()
        if both:
            first.touch()
        saving.join(600)
        assert not failed, failed
        wanted = dict.fromkeys(range(ROWS + 1), "ours") | dict.fromkeys(theirs, "theirs")
        for n in theirs[:3_000]:
            del wanted[n]
        assert len(theirs) == REACHED and contents(table) == wanted
        assert table.scan().count() == len(wanted)

    one, two = (json.loads((seen / attempt).read_text()) for attempt in ("0", "1"))
    assert {one["host"], two["host"]} == set(HOSTS) and one["stage"] == two["stage"]
    copies = spark.sparkContext._jsc.sc().statusStore().taskList(one["stage"], 0, 10)
    told = [copies.apply(n) for n in range(copies.size())]
    assert sorted(copy.speculative() for copy in told) == [False, False, True], "Spark itself says so"
    assert both or not (seen / "0-ended").exists()
