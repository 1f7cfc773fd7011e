"""Backups on a real HDFS of one name node and one data node. `make hdfs` fetches its jars with Maven, and runs this."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele import backup
from stele.backup.finding import State
from stele.backup.folder import Folder
from stele.model.errors import Code, Rejected, Retryable
from tests.backup.conftest import There
from tests.backup.tables import numbered, rows
from tests.backup.test_interrupted import killed

JARS = Path(sys.prefix) / "hdfs"
_HERE = Path(__file__).parent / "hdfs"

pytestmark = pytest.mark.skipif(
    not JARS.exists() or shutil.which("java") is None, reason="needs HDFS's jars and Java: make hdfs"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("hdfs")
    server = subprocess.Popen(
        ["java", "-Xmx512m", "-cp", f"{JARS}/*", str(_HERE / "MiniHdfs.java"), str(data)],
        cwd=data,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdin is not None and server.stdout is not None
        slow = threading.Timer(300, server.kill)
        slow.start()
        port = next((line.split()[1] for line in server.stdout if line.startswith("PORT")), None)
        slow.cancel()
        assert port is not None, "HDFS did not start"
        yield f"127.0.0.1:{port}"
        server.stdin.close()
        server.wait(60)
    finally:
        server.kill()
        server.wait()
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def uri(address: str, request: pytest.FixtureRequest) -> str:
    """A folder of this test's own."""
    return f"hdfs://{address}/{request.node.name}"


def test_a_folder_answers_as_one_of_a_disk(uri: str) -> None:
    place: Folder = pickle.loads(pickle.dumps(Folder.at(uri)))  # as Spark's tasks get it
    assert not place.is_there()
    assert place.entries("none") == place.files("none") == []
    place.make("a/b")
    place.put("a/b/c", b"1")
    place.put("a/d", b"22")
    assert (place.entries("a"), place.files("a")) == (["b", "d"], ["b/c", "d"])
    assert (place.size("a/d"), place.size("a"), place.size("x")) == (2, None, None)
    place.put("a/d", b"333")
    assert bytes(place.read("a/d")) == b"333" and place.is_there()
    with pytest.raises(Rejected, match=f"{uri}/x: there is no such file") as missing:
        place.read("x")
    assert missing.value.code is Code.NOT_FOUND
    with pytest.raises(Rejected, match=f"{uri}/a/d/.*: Not a directory") as below:
        place.put("a/d/e", b"")
    assert below.value.code is Code.INVALID_ARGUMENT
    data = os.urandom(5 << 20)
    sink = place.new_file("half")
    sink.write(data)
    sink.discard()
    assert place.files("") == ["a/b/c", "a/d"]
    for _ in range(2):
        place.delete("a/d")
        place.delete_all("a")
    assert place.files("") == []


def test_what_may_not_be_written_is_refused(address: str, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder.at(uri).make()
    monkeypatch.setenv("HADOOP_USER_NAME", "stranger")
    with pytest.raises(Rejected, match="Permission denied") as told:
        Folder.at(uri).put("a", b"1")
    assert told.value.code is Code.PERMISSION_DENIED and "\n" not in str(told.value)
    monkeypatch.undo()
    small = Folder.at(f"hdfs://{address}/small")  # it may hold two files
    small.put("a", b"1")
    small.put("b", b"1")
    with pytest.raises(Retryable, match="free space there") as full:
        small.put("c", b"1")
    assert full.value.code is Code.DISK_FULL and small.entries("") == ["a", "b"]


def test_nobody_at_the_address_is_told_soon() -> None:
    with pytest.raises(Retryable, match=r"hdfs://127\.0\.0\.1:9/b: .*refused") as told:
        Folder.at("hdfs://127.0.0.1:9/b").is_there()
    assert told.value.code is Code.UNAVAILABLE


def test_from_creation_to_pruning(there: There, uri: str) -> None:
    client = there.client
    flights = numbered(client, "flights", 5_000)
    before = rows(flights)
    first = backup.create(client, uri, "flights")
    flights.write_arrow(pa.table({"id": np.arange(100)}), "delete")
    second = backup.create(client, uri, "flights")
    assert [(b.backup_id, b.state) for b in backup.list_backups(uri)] == [
        (second.backup_id, State.COMPLETE),
        (first.backup_id, State.COMPLETE),
    ]
    assert backup.verify(uri).faults == backup.verify(uri, first.backup_id).faults == []
    assert backup.compare(client, uri).differences == []
    backup.restore(client, uri, first.backup_id, tables={"flights": "again"})
    assert rows(client.open_table("again")) == before
    assert [b.backup_id for b in backup.prune(uri, keep=1).removed] == [first.backup_id]
    assert not [name for name in Folder.at(uri).files("") if name.startswith(first.backup_id)]


def test_one_that_is_killed_goes_on(there: There, uri: str) -> None:
    table = numbered(there.client, "t", 4_000, buckets=2)
    before = rows(table)
    killed(there, uri, "t", 1_000)
    (unfinished,) = backup.list_backups(uri)
    assert unfinished.state is State.UNFINISHED
    made = backup.create(there.client, uri, "t")
    assert (made.backup_id, made.rows) == (unfinished.backup_id, 4_000)
    backup.restore(there.client, uri, tables={"t": "again"})
    assert rows(there.client.open_table("again")) == before
