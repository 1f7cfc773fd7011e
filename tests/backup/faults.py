"""A file system with faults on demand: a local folder behind pyarrow's port for file systems of others."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from stele.backup.folder import Folder


class Faulty(pafs.FileSystemHandler):
    """Like an object store it renames nothing, and has room for `bytes_left` bytes more."""

    def __init__(self, root: Path) -> None:
        self.local = pafs.LocalFileSystem()
        self.root = root
        self.bytes_left = 1 << 40
        self.writes = 0

    def get_type_name(self) -> str:
        return "faulty"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Any) -> Any:
        return self.local.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self.local.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self.local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self.local.delete_dir(path)

    def delete_file(self, path: str) -> None:
        self.local.delete_file(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def open_input_stream(self, path: str) -> Any:
        raise NotImplementedError

    def open_input_file(self, path: str) -> Any:
        return self.local.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return pa.PythonFile(_Bounded(self, path), mode="w")


class _Bounded:
    def __init__(self, faults: Faulty, path: str) -> None:
        self._faults = faults
        self._file = open(path, "wb")  # noqa: SIM115 - closed by its owner
        self.closed = False

    def write(self, data: Any) -> int:
        self._faults.writes += 1
        if self._faults.bytes_left < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._faults.bytes_left -= len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self._file.close()


def faulty(root: Path) -> tuple[Folder, Faulty]:
    """A folder with faults, and what makes them."""
    root.mkdir(parents=True, exist_ok=True)
    handler = Faulty(root)
    return Folder(pafs.PyFileSystem(handler), str(root), str(root)), handler
