"""Folders: what messages say, and what is there after a fault. No cluster."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from stele.backup import hdfs
from stele.backup.folder import Folder
from stele.backup.row_files import RowFile
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from tests.backup.faults import Faulty, faulty
from tests.backup.tables import NUMBERS


def batch(rows: int) -> pa.RecordBatch:
    columns = [pa.array(range(rows)), pa.array([os.urandom(8).hex() for _ in range(rows)])]
    return pa.RecordBatch.from_arrays(columns, schema=NUMBERS.to_arrow())


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    place, faults = faulty(tmp_path)
    faults.bytes_left = 100_000
    file = RowFile(place, "a.parquet", NUMBERS.to_arrow())
    with pytest.raises(Retryable, match=r"a\.parquet: No space left on device; free space") as full:
        for _ in range(10):
            file.write(batch(50_000))
    assert full.value.code is Code.DISK_FULL
    file.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_put_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    place = Folder.at(tmp_path)
    place.put("a.json", b"old")
    place.put("a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"
    (tmp_path / "b.json").mkdir()
    (tmp_path / "b.json" / "x").write_text("")
    with pytest.raises(SteleError):
        place.put("b.json", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


ERRORS = [
    (errno.ENOSPC, Retryable, Code.DISK_FULL),
    (errno.EDQUOT, Retryable, Code.DISK_FULL),
    (errno.EACCES, Rejected, Code.PERMISSION_DENIED),
    (errno.EROFS, Rejected, Code.PERMISSION_DENIED),
    (errno.ENOENT, Rejected, Code.NOT_FOUND),
    (errno.EIO, Corrupt, Code.IO_ERROR),
    (errno.ETIMEDOUT, Retryable, Code.UNAVAILABLE),
]


@pytest.mark.parametrize(("number", "kind", "code"), ERRORS)
def test_each_error_of_a_system_has_its_kind(number: int, kind: type, code: Code, tmp_path: Path) -> None:
    place = Folder.at(tmp_path)
    with pytest.raises(kind) as told, place.errors("x/y"):
        raise OSError(number, os.strerror(number))
    assert told.value.code is code and str(told.value.args[0]).startswith(f"{tmp_path}/x/y")


def test_secrets_of_a_uri_are_in_no_message() -> None:
    for uri in ("hdfs-nope://me:secret@host:80/a/b?key=secret", "s4://me:secret@bucket/x"):
        with pytest.raises(Rejected) as told:
            Folder.at(uri)
        text = str(told.value)
        assert "secret" not in text.replace(uri, "") or "secret" not in text


@pytest.mark.parametrize("given", ["", "  ", None, 7, b"x"])
def test_no_folder_is_refused(given: Any) -> None:
    with pytest.raises(Rejected, match="expected a path, or a URI"):
        Folder.at(given)


def test_a_path_may_be_relative_and_a_uri_of_a_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("b", Path("b"), tmp_path / "b", f"file://{tmp_path}/b", f"file://{tmp_path}/b/"):
        assert Folder.at(given).root == Folder.at(given).shown == f"{tmp_path}/b"


def test_names_below_a_folder(tmp_path: Path) -> None:
    store = Folder(pafs._MockFileSystem(), "bucket", "mock://bucket")
    for place in (Folder.at(tmp_path), store, faulty(tmp_path / "f")[0]):
        assert place.entries("none") == place.files("none") == []
        place.make("a/b")
        place.put("a/b/c", b"1")
        place.put("a/d", b"22")
        assert (place.entries("a"), place.files("a"), place.files("")) == (
            ["b", "d"],
            ["b/c", "d"],
            ["a/b/c", "a/d"],
        )
        assert (place.size("a/d"), place.size("a"), place.size("x"), bytes(place.read("a/d"))) == (
            2,
            None,
            None,
            b"22",
        )
        assert place.is_there()
        place.delete("a/d")
        place.delete("a/d")
        place.delete_all("a")
        place.delete_all("a")
        assert place.files("") == []


def test_faults_are_made_on_demand(tmp_path: Path) -> None:
    place, faults = faulty(tmp_path)
    assert isinstance(faults, Faulty)
    faults.bytes_left = 3
    with pytest.raises(Retryable):
        place.put("a", b"1234")


def test_without_its_library_hdfs_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native.fsspec", None)
    with pytest.raises(Rejected, match=r"pip install '\.\[hdfs\]'"):
        Folder.at("hdfs://namenode:8020/b")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("org.apache.hadoop.security.AccessControlException", errno.EACCES),
        ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", errno.EDQUOT),
        ("org.apache.hadoop.hdfs.server.namenode.SafeModeException", None),
    ],
)
def test_errors_of_hdfs_have_their_first_line_and_a_number_where_one_fits(
    kind: str, number: int | None
) -> None:
    found = hdfs.error_of(RuntimeError(f'RPCError("{kind}", "not \\"/own\\"\\n\\tat org.apache.Deep.down")'))
    assert found is not None and (found.errno, str(found.args[-1])) == (number, 'not "/own"')
    assert hdfs.error_of(RuntimeError("a fault of ours")) is None
