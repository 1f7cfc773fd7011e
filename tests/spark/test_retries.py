"""Writes of a real Spark in trouble: tasks that are tried again while another client writes over their rows, a node that is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.client import Client
from tests.harness.processes import Cluster
from tests.spark.tasks import PARTITIONING, SCHEMA

pytestmark = pytest.mark.spark

SESSION = {"spark__master": "local[2,3]", "spark__speculation": "true"}
"""It tries a task up to three times. Speculation is on, although one machine runs no second copy."""
ROWS = 200_000
LOADED, TASKS = 1_000_000, 8


def failing(spark: Any, gate: Path) -> Any:
    """A frame of one task, whose first attempt gives all rows, waits for the gate to be a file, and fails."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        list(batches)
        yield from pa.table({"id": np.arange(ROWS), "v": ["ours"] * ROWS}).to_batches(10_000)
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            until = time.monotonic() + 600
            while not gate.exists() and time.monotonic() < until:
                time.sleep(0.05)
            raise RuntimeError("the first attempt fails")

    return spark.range(1, numPartitions=1).mapInArrow(rows, "id long, v string")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("op", ["upsert", "insert", "delete"])
def test_a_task_that_fails_after_it_wrote_is_tried_again(
    spark: Any, masters: str, tmp_path: Path, op: str
) -> None:
    gate = tmp_path / "gate"
    with Client(masters) as client:
        table = client.create_table(op, SCHEMA, PARTITIONING)
        if op == "delete":
            table.write_arrow(pa.table({"id": np.arange(ROWS), "v": ["old"] * ROWS}))
        frame = failing(spark, gate)
        if op == "delete":
            frame = frame.select("id")
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
        reached: set[int] = set()
        while len(reached) < 10_000 and saving.is_alive():
            time.sleep(0.1)
            there = set(table.scan(["id"]).to_table()["id"].to_pylist())
            reached = set(range(ROWS)) - there if op == "delete" else there
        theirs = sorted(reached)[:10_000]
        table.write_arrow(pa.table({"id": theirs, "v": ["theirs"] * len(theirs)}))
        table.write_arrow(pa.table({"id": theirs[:3_000]}), "delete")
        gate.touch()
        saving.join(600)
        assert not failed, failed
        found = table.scan(["id", "v"]).to_table()
        ours = {} if op == "delete" else dict.fromkeys(range(ROWS), "ours")
        wanted = ours | dict.fromkeys(theirs, "theirs")
        for n in theirs[:3_000]:
            del wanted[n]
        assert dict(zip(found["id"].to_pylist(), found["v"].to_pylist())) == wanted
        assert len(theirs) == 10_000


@pytest.mark.filterwarnings("default")
def test_a_node_that_is_killed_in_the_middle_of_a_load_costs_no_row(
    spark: Any, processes: Cluster, masters: str
) -> None:
    """It leads some of the tablets. A half of the rows is there before, with other values."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            ids = batch.column(0)
            yield pa.RecordBatch.from_pydict({"id": ids, "v": [f"new {n}" for n in ids.to_pylist()]})

    with Client(masters) as client:
        table = client.create_table("loaded", SCHEMA, PARTITIONING)
        before = np.arange(0, LOADED, 2)
        table.write_arrow(pa.table({"id": before, "v": ["old"] * len(before)}))
        victim = processes.member(table.asynchronous.locations.tablets[0].target().node_id)
        frame = spark.range(LOADED, numPartitions=TASKS).mapInArrow(rows, "id long, v string")
        sink = frame.write.format("stele").options(masters=masters, table="loaded").mode("append")
        saved = threading.Event()
        at_kill: list[tuple[int, bool]] = []

        def kill() -> None:
            while not table.scan(["id"], "id < 1000 AND v != 'old'").count():
                time.sleep(0.05)
            last = table.scan(["id"], f"id >= {LOADED - 1000} AND v != 'old'").count()
            processes.kill(victim)
            at_kill.append((last, saved.is_set()))

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        try:
            sink.save()
            saved.set()
            killer.join(60)
            assert at_kill == [(0, False)], "it was killed after the first rows and before the last ones"
            found = table.scan(["id", "v"]).to_table().sort_by("id")
        finally:
            processes.restart(victim)
        assert found["id"].to_pylist() == list(range(LOADED))
        assert found["v"].to_pylist() == [f"new {n}" for n in range(LOADED)]
