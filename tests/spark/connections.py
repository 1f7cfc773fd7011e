"""Which nodes are read: the connections to their Flight ports, as the kernel knows them, in the middle of a read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from stele.client import Client
from stele.model.schema import Schema
from tests.harness.processes import FLIGHT_PORT, Cluster

SCHEMA = Schema.make([("id", "int64"), ("text", "string")], ["id"])
ROWS, ROW_BYTES = 60_000, 800
_SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"


def fill(client: Client, name: str) -> None:
    """Make a table of one tablet with more bytes than all buffers between a node and a task hold."""
    table = client.create_table(name, SCHEMA)
    for first in range(0, ROWS, 10_000):
        ids = range(first, first + 10_000)
        table.write_arrow(pa.table({"id": ids, "text": [f"{n:0{ROW_BYTES}}" for n in ids]}))


def read_now(cluster: Cluster) -> set[tuple[str, str]]:
    """The host of a node and the other end, of each open connection to a Flight port."""
    hosts = {node.host for node in cluster.nodes}
    found = set()
    for path in _SOCKETS:
        for line in Path(path).read_text().splitlines()[1:]:
            _, other, there, state, *_ = line.split()
            address, _, port = there.partition(":")
            host = ".".join(str(part) for part in reversed(bytes.fromhex(address[-8:])))
            if state == _ESTABLISHED and int(port, 16) == FLIGHT_PORT and host in hosts:
                found.add((host, other))
    return found


def hosts_read(cluster: Cluster, frame: Any, folder: Path) -> set[str]:
    """The hosts of the nodes that a frame of a table that `fill` made is read from. All its rows come."""
    reading, looked = folder / "reading", folder / "looked"
    reading.unlink(missing_ok=True)
    looked.unlink(missing_ok=True)
    before = read_now(cluster)
    counted: list[int] = []

    def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            reading.touch()
            while not looked.exists():
                time.sleep(0.02)
            yield batch

    def count() -> None:
        counted.append(frame.mapInArrow(held, "id long, text string").count())

    reader = threading.Thread(target=count, daemon=True)
    reader.start()
    while not reading.exists() and reader.is_alive():
        time.sleep(0.02)
    found = {host for host, _ in read_now(cluster) - before}
    looked.touch()
    reader.join()
    assert counted == [ROWS]
    return found
