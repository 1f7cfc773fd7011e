"""Backups in a bucket, through pyarrow's own S3 client and moto's server.

The server has an environment of its own (`make s3-server`): its libraries and those of the kubernetes package exclude each
other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest

import stele
from stele import backup
from stele.backup.finding import State
from stele.backup.folder import Folder
from stele.model.errors import Code, Rejected, Retryable
from tests.backup.conftest import There
from tests.backup.tables import numbered, rows
from tests.backup.test_interrupted import killed

SERVER = Path(sys.prefix) / "s3" / "bin" / "moto_server"
_START_S = 60

pytestmark = pytest.mark.skipif(not SERVER.exists(), reason="needs a server of S3: make s3-server")


@pytest.fixture(scope="module", autouse=True)
def keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "most-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@contextmanager
def serving(**settings: str) -> Iterator[str]:
    """A server with a bucket named "bucket"; the options of its URIs."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(SERVER), "-H", "127.0.0.1", "-p", str(port)]
    env = {**os.environ, **settings}
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.05)
        options = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        fs, _ = pafs.FileSystem.from_uri(f"s3://bucket?{options}&allow_bucket_creation=true")
        fs.create_dir("bucket")
        yield options
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def options_of_module(keys: None) -> Iterator[str]:
    with serving() as options:
        yield options


@pytest.fixture
def uri(options_of_module: str, request: pytest.FixtureRequest) -> str:
    """A folder of this test's own."""
    return f"s3://bucket/{request.node.name}?{options_of_module}"


def test_a_folder_of_objects_answers_as_one_of_files(uri: str) -> None:
    place = Folder.at(uri)
    assert not place.is_there()
    assert place.entries("none") == place.files("none") == []
    place.make("a/b")
    place.put("a/b/c", b"1")
    place.put("a/d", b"22")
    assert (place.entries("a"), place.files("a"), place.files("")) == (
        ["b", "d"],
        ["b/c", "d"],
        ["a/b/c", "a/d"],
    )
    assert (place.size("a/d"), place.size("a"), place.size("x")) == (2, None, None)
    place.put("a/d", b"333")
    assert bytes(place.read("a/d")) == b"333" and place.is_there()
    with pytest.raises(Rejected) as missing:
        place.read("x")
    assert missing.value.code is Code.NOT_FOUND
    for _ in range(2):
        place.delete("a/d")
        place.delete_all("a")
    assert place.files("") == []


def test_hadoops_name_of_a_bucket_is_the_same_folder(uri: str) -> None:
    Folder.at(uri).put("a", b"1")
    place = Folder.at(uri.replace("s3://", "s3a://"))
    assert bytes(place.read("a")) == b"1"
    with pytest.raises(Rejected, match=r"s3a://bucket/.*/x: there is no such file"):
        place.read("x")


def test_a_file_in_many_parts_and_one_that_is_discarded(uri: str) -> None:
    place = Folder.at(uri)
    data = os.urandom(25 << 20)  # pyarrow sends parts of 10 MiB
    sink = place.new_file("large")
    for at in range(0, len(data), 1 << 20):
        sink.write(data[at : at + (1 << 20)])
    sink.complete()
    assert bytes(place.read("large")) == data and sink.bytes == len(data)
    sink = place.new_file("half")
    sink.write(data)
    sink.discard()
    assert place.files("") == ["large"]


def test_from_creation_to_pruning(there: There, uri: str) -> None:
    client = there.client
    flights, planes = numbered(client, "flights", 5_000), numbered(client, "planes", 10)
    before = rows(flights)
    first = backup.create(client, uri, ["flights", "planes"])
    flights.write_arrow(pa.table({"id": np.arange(100)}), "delete")
    second = backup.create(client, uri, "flights")
    assert [(b.backup_id, b.state) for b in backup.list_backups(uri)] == [
        (second.backup_id, State.COMPLETE),
        (first.backup_id, State.COMPLETE),
    ]
    assert (first.rows, second.rows) == (5_010, 4_900)
    assert backup.verify(uri).faults == backup.verify(uri, first.backup_id).faults == []
    assert backup.compare(client, uri).differences == []
    backup.restore(client, uri, first.backup_id, tables={"flights": "again", "planes": "planes2"})
    assert rows(client.open_table("again")) == before
    assert rows(client.open_table("planes2")) == rows(planes)
    assert backup.prune(uri, keep=1).removed == [], "no other backup has the planes"
    third = backup.create(client, uri, ["flights", "planes"])
    assert [b.backup_id for b in backup.prune(uri, keep=2).removed] == [first.backup_id]
    assert [b.backup_id for b in backup.list_backups(uri)] == [third.backup_id, second.backup_id]
    place = Folder.at(uri)
    assert not [name for name in place.files("") if name.startswith(first.backup_id)]
    assert place.files("writers") == []


def test_damage_of_an_object_is_found(there: There, uri: str) -> None:
    numbered(there.client, "t", 1_000)
    backup.create(there.client, uri, "t")
    place = Folder.at(uri)
    name = next(name for name in place.files("") if name.endswith(".parquet"))
    data = bytearray(place.read(name))
    data[len(data) // 2] ^= 1
    place.put(name, bytes(data))
    faults = backup.verify(uri).faults
    assert len(faults) == 1 and name in faults[0]
    with pytest.raises(stele.SteleError, match="is damaged"):
        backup.restore(there.client, uri, tables={"t": "again"})
    assert [info.name for info in there.client.list_tables()] == ["t"]


def test_one_that_is_killed_goes_on(there: There, uri: str) -> None:
    table = numbered(there.client, "t", 4_000, buckets=2)
    before = rows(table)
    killed(there, uri, "t", 1_000)
    (unfinished,) = backup.list_backups(uri)
    assert unfinished.state is State.UNFINISHED
    there_already = {name for name in Folder.at(uri).files(unfinished.backup_id) if "parquet" in name}
    assert there_already
    table.write_arrow(pa.table({"id": np.arange(2_000)}), "delete")  # later than the backup's moment
    made = backup.create(there.client, uri, "t")
    assert (made.backup_id, made.rows) == (unfinished.backup_id, 4_000)
    assert there_already & set(Folder.at(uri).files(made.backup_id))
    backup.restore(there.client, uri, tables={"t": "again"})
    assert rows(there.client.open_table("again")) == before


def test_a_bucket_that_is_not_there_is_refused(there: There, options_of_module: str) -> None:
    numbered(there.client, "t", 1)
    uri = f"s3://no-such-bucket/b?{options_of_module}"
    with pytest.raises(Rejected, match=r"s3://no-such-bucket/b: there is no bucket no-such-bucket") as told:
        backup.create(there.client, uri, "t")
    assert told.value.code is Code.NOT_FOUND


def test_a_server_that_does_not_answer_may_be_tried_again(there: There) -> None:
    numbered(there.client, "t", 1)
    uri = "s3://bucket/b?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    with pytest.raises(Retryable, match="Could not connect") as told:
        backup.create(there.client, uri, "t")
    assert told.value.code is Code.UNAVAILABLE


def test_a_key_that_is_not_allowed_is_refused() -> None:
    with serving(INITIAL_NO_AUTH_ACTION_COUNT="2") as options:
        place = Folder.at(f"s3://bucket/b?{options}")
        with pytest.raises(Rejected) as told:
            for _ in range(3):
                place.put("a", b"1")
        assert told.value.code is Code.PERMISSION_DENIED
        assert "most-secret" not in str(told.value)
