"""A blocking call that Ctrl-C interrupts ends: nothing of it goes on behind the back of whoever called."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client import Client
from stele.model.schema import Schema
from tests.client.small import SmallCluster, small_cluster

SCHEMA = Schema.make([("id", "int64"), ("n", "int32", True)], ["id"])


@contextmanager
def cluster_elsewhere(directory: Path) -> Iterator[SmallCluster]:
    """A cluster on a thread of its own: signals come to the main thread, which is the caller's."""
    started: Future[tuple[SmallCluster, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with small_cluster(directory) as (cluster, _):
            done = asyncio.Event()
            started.set_result((cluster, asyncio.get_running_loop(), done))
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    cluster, loop, done = started.result(60)
    try:
        yield cluster
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)


@contextmanager
def interrupted(once: Callable[[], object]) -> Iterator[None]:
    """Interrupted as soon as `once()` is true."""

    def interrupt() -> None:
        for _ in range(6_000):
            if once():
                break
            time.sleep(0.01)
        time.sleep(0.5)  # whoever has just asked waits for the answer by now
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored, where tests run in the background
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def held(go_on: threading.Event) -> None:
    """A batch that does not come until then."""
    go_on.wait(60)


def test_a_bulk_write_that_is_interrupted_stops(tmp_path: Path) -> None:
    with cluster_elsewhere(tmp_path) as cluster, Client([cluster.master_address]) as client:
        table = client.create_table("t", SCHEMA)
        (tablet,) = cluster.tablets.values()
        cluster.nodes[0].delay_s = 0.2
        with interrupted(lambda: tablet.attempts):
            table.write_arrow(pa.table({"id": np.arange(200_000)}))
        sent = len(tablet.attempts)
        time.sleep(1)
        assert len(tablet.attempts) <= sent + 1  # the one under way


def test_a_copy_that_is_interrupted_ends(tmp_path: Path) -> None:
    """Of one table into another, while it waits for the next batch of the scan."""
    with cluster_elsewhere(tmp_path) as cluster, Client([cluster.master_address]) as client:
        old, new = client.create_table("old", SCHEMA), client.create_table("new", SCHEMA)
        old.write_arrow(pa.table({"id": np.arange(1_000)}))
        go_on = threading.Event()
        cluster.nodes[0].flight_fault.append(lambda number: held(go_on))
        before = cluster.nodes[0].scans
        with interrupted(lambda: cluster.nodes[0].scans > before):
            new.write_arrow(old.scan().batches())
        go_on.set()
        assert new.scan().count() == 0
        assert new.write_arrow(old.scan().batches()).rows_written == 1_000


def test_a_scan_that_is_interrupted_ends(tmp_path: Path) -> None:
    with cluster_elsewhere(tmp_path) as cluster, Client([cluster.master_address]) as client:
        table = client.create_table("t", SCHEMA)
        table.write_arrow(pa.table({"id": np.arange(1_000)}))
        go_on = threading.Event()
        cluster.nodes[0].flight_fault.append(lambda number: held(go_on))
        before = cluster.nodes[0].scans
        with interrupted(lambda: cluster.nodes[0].scans > before):
            for _ in table.scan().batches():
                pass
        go_on.set()
        assert table.scan().count() == 1_000


def test_a_put_that_is_interrupted_lets_its_client_be_left(tmp_path: Path) -> None:
    """While no node answers, and the client itself would wait for ten minutes."""
    with cluster_elsewhere(tmp_path) as cluster:
        node = cluster.nodes[0]
        waits = interrupted(lambda: node.came.is_set() and not node.speaks.is_set())
        with waits, Client([cluster.master_address], timeout_s=600) as client:
            table = client.create_table("t", SCHEMA)
            table.put({"id": 0})
            cluster.loop.call_soon_threadsafe(node.came.clear)
            cluster.loop.call_soon_threadsafe(node.speaks.clear)
            table.put({"id": 1})
        cluster.loop.call_soon_threadsafe(node.speaks.set)
