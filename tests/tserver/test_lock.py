"""The volume's lock is held as long as anything of a node works on the volume: who has it next would write beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stele.tserver import manager
from stele.tserver.node import start_node
from stele.tserver.volume import Fate, lock_directory
from stele.wal import recovery
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill

LOOK_S = 1.5
"""How long whoever would let go too early is given to do it."""


def locked(directory: Path) -> bool:
    """Whether another process would be refused."""
    try:
        os.close(lock_directory(directory))
    except Fate:
        return True
    return False


class Held:
    """Work in a thread that goes on when it is let."""

    def __init__(self, work: Callable[..., Any] = lambda: None) -> None:
        self._work = work
        self.begun, self.go = Event(), Event()

    def __call__(self, *args: Any) -> Any:
        self.begun.set()
        self.go.wait()
        return self._work(*args)

    async def wait_begun(self) -> None:
        await asyncio.to_thread(self.begun.wait)


async def test_a_start_that_is_ended_holds_the_lock_while_the_log_is_recovered(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process would acknowledge writes in a segment that the first one's recovery puts its own over."""
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED, replication_factor=1)
        await fill(client, 20)
        await cluster.stop("node-0")
        recovering = Held(recovery.link)
        monkeypatch.setattr(recovery, "link", recovering)
        options = cluster.options("node-0")
        starting = asyncio.ensure_future(start_node(options))
        await recovering.wait_begun()
        monkeypatch.undo()
        try:
            starting.cancel()
            await asyncio.wait((starting,), timeout=LOOK_S)
            assert locked(options.data_dir)
        finally:
            recovering.go.set()
            await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled() and not locked(options.data_dir)
        await cluster.launch("node-0")
        await fill(client, 40)
        assert await count(client) == 40


async def test_a_node_that_stops_holds_the_lock_while_an_order_works_on(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order that lasts is cancelled, and its thread goes on."""
    monkeypatch.setattr(manager, "_CLOSE_S", 0.05)
    node, order = cluster.running["node-0"], Held()
    ordered = asyncio.ensure_future(node.manager.whole(node.threads.in_thread(order)))
    await order.wait_begun()
    stopping = asyncio.ensure_future(cluster.stop("node-0"))
    try:
        await asyncio.wait((stopping,), timeout=LOOK_S)
        assert locked(node.volume.directory)
    finally:
        order.go.set()
        await asyncio.gather(stopping, ordered, return_exceptions=True)
    assert not locked(node.volume.directory)
    await cluster.launch("node-0")


_RECOVERS_FOR_EVER = """
import sys, time
from pathlib import Path
from stele.tserver import process
from stele.tserver.options import NodeOptions
from stele.wal import recovery

process.END_S = 0.5

def slow(*args):
    print("recovers", flush=True)
    time.sleep(600)

recovery.link = slow
directory, node, cluster = sys.argv[1:]
sys.exit(process.run_process(NodeOptions(Path(directory), node, cluster, "127.0.0.1:0")))
"""


def test_a_process_that_is_told_to_stop_ends_soon_whatever_its_recovery_does(tmp_path: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", _RECOVERS_FOR_EVER, str(tmp_path / "n"), "a" * 32, "b" * 32],
        stdout=subprocess.PIPE,
        text=True,
    )
    with started:
        try:
            assert started.stdout is not None
            assert any("recovers" in line for line in started.stdout)
            assert locked(tmp_path / "n")
            started.send_signal(signal.SIGTERM)
            assert started.wait(60) == 0
        finally:
            started.kill()
    assert not locked(tmp_path / "n")
