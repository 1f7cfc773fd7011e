"""A cluster for tests that are no coroutines: blocking clients, Spark, programs. Used by tests/spark and tests/docs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.processes import READY_WITHIN_S, Cluster

_STEP_S = 2 * READY_WITHIN_S


@contextmanager
def standing(directory: Path, *, nodes: int = 3) -> Iterator[str]:
    """One master and `nodes` nodes; the master's address."""
    with running(Cluster(directory, masters=1, nodes=nodes)) as cluster:
        yield ",".join(cluster.master_addresses)


@contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="cluster", daemon=True)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_STEP_S)

    try:
        run(cluster.__aenter__())
        try:
            yield cluster
        finally:
            run(cluster.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
