"""The folder that holds backups: a local path, or any file system of pyarrow (S3, HDFS, ...). Knows no formats.

Invariants: `put` leaves the old file or the whole new one. Every error is a SteleError that names the file, without the
secrets of a URI.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.fs as pafs

from stele.backup import hdfs
from stele.client.arguments import refusal
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from stele.model.ids import new_id

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_RENAMES = ("local", hdfs.TYPE_NAME)
"""File systems that rename a file in one step. Object stores show an object only once it is whole."""
_SCHEME = "://"
_IS_HDFS = re.compile(r"^hdfs://", re.IGNORECASE)
_S3A = re.compile(r"^s3[an]://", re.IGNORECASE)
_S3_ERROR = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))?")
_S3_NOT_ALLOWED = (
    "ACCESS_DENIED",
    "EXPIRED_TOKEN",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_SIGNATURE",
    "MISSING_AUTHENTICATION_TOKEN",
    "SIGNATURE_DOES_NOT_MATCH",
    "UNRECOGNIZED_CLIENT",
)
"""Errors of S3 that mean "not allowed", as Amazon's SDK calls them (`Aws::Client::CoreErrors`)."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a file system. `shown`: its name in messages."""

    fs: pafs.FileSystem
    root: str
    shown: str

    @staticmethod
    def at(location: str | os.PathLike[str] | Folder) -> Folder:
        """The folder of a path or URI: /backups, s3://bucket/backups, hdfs://name/backups. Hadoop's name s3a:// means
        s3://. Asks nobody, except S3 for the region of a bucket.

        Raises:
            Rejected: no such kind of file system, or a library for it is missing.
        """
        if isinstance(location, Folder):
            return location
        try:
            text = os.fspath(location)
        except TypeError:
            text = ""
        if not isinstance(text, str) or not text.strip():
            raise refusal("folder", location, "a path, or a URI such as s3://bucket/backups")
        if _SCHEME not in text:
            path = str(Path(text).expanduser().absolute())
            return Folder(pafs.LocalFileSystem(), path, path)
        shown = _without_secrets(text)
        try:
            fs, root = (
                hdfs.connect(text)
                if _IS_HDFS.match(text)
                else pafs.FileSystem.from_uri(_S3A.sub("s3://", text))
            )
        except (pa.ArrowException, ValueError, OSError) as exc:
            raise Rejected(
                f"{shown}: {_first_line(exc)}; expected a path, or a URI such as s3://bucket/backups"
            ) from exc
        return Folder(fs, root.rstrip("/") or "/", root if fs.type_name == "local" else shown)

    def path(self, name: str) -> str:
        """Return the file system's path of a name below the folder; "" is the folder itself."""
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def called(self, name: str) -> str:
        """Return a name below the folder as messages show it."""
        return f"{self.shown.rstrip('/')}/{name}" if name else self.shown

    # --- reading

    def is_there(self) -> bool:
        """Whether the folder exists.

        Raises:
            Rejected: it is a file.
        """
        with self.errors(""):
            info = self.fs.get_file_info(self.root)
        if info.type is pafs.FileType.File:
            raise Rejected(f"{self.shown} is a file; expected a folder")
        return info.type is pafs.FileType.Directory or bool(self.entries(""))

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if there is no such file."""
        with self.errors(name):
            info = self.fs.get_file_info(self.path(name))
        return int(info.size) if info.type is pafs.FileType.File else None

    def read(self, name: str) -> pa.Buffer:
        """All bytes of a file. Raises Rejected NOT_FOUND if there is none."""
        with self.errors(name), self.fs.open_input_file(self.path(name)) as file:
            return file.read_buffer()

    def entries(self, name: str) -> list[str]:
        """The names directly below a folder, sorted; empty if there is no such folder."""
        selector = pafs.FileSelector(self.path(name), allow_not_found=True)
        with self.errors(name):
            return sorted(info.base_name for info in self.fs.get_file_info(selector))

    def files(self, name: str) -> list[str]:
        """The files anywhere below a folder, with names relative to it, sorted."""
        at = self.path(name).rstrip("/") + "/"
        selector = pafs.FileSelector(self.path(name), allow_not_found=True, recursive=True)
        with self.errors(name):
            found = self.fs.get_file_info(selector)
        return sorted(
            info.path.partition(at)[2] or info.base_name for info in found if info.type is pafs.FileType.File
        )

    # --- writing

    def make(self, name: str = "") -> None:
        """Make a folder, with those above it. Nothing happens if it exists."""
        with self.errors(name):
            self.fs.create_dir(self.path(name), recursive=True)

    def put(self, name: str, data: bytes) -> None:
        """Write a whole file. It replaces a file of this name, and is durable once this returns.

        Raises:
            Retryable: DISK_FULL. The old file, or none, is still there.
        """
        if self.fs.type_name not in _RENAMES:
            self.write(name, data)  # in one request: an object appears whole
            return
        above, _, last = name.rpartition("/")
        temporary = f"{above}/.{last}.{new_id()[:8]}".lstrip("/")
        sink = self.new_file(temporary)
        try:
            with self.errors(name):
                sink.write(data)
            sink.complete()
            with self.errors(name):
                self.fs.move(self.path(temporary), self.path(name))
        except BaseException:
            sink.discard()
            raise
        self._sync_names(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file in place: on a disk a reader may see a part of it, and a crash may leave one."""
        with self.errors(name), self.fs.open_output_stream(self.path(name)) as file:
            file.write(data)

    def new_file(self, name: str) -> Sink:
        """Open a new file to write to. It is partial until `complete` is called."""
        with self.errors(name):
            if self.fs.type_name == "local":
                return Sink(self, name, open(self.path(name), "xb"))
            return Sink(self, name, self.fs.open_output_stream(self.path(name)))

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        if self.size(name) is not None:
            with self.errors(name):
                self.fs.delete_file(self.path(name))
            self._sync_names(name)

    def delete_all(self, name: str) -> None:
        """Delete a folder with all that is in it, if it exists."""
        with self.errors(name), suppress(FileNotFoundError):
            self.fs.delete_dir(self.path(name))

    def _sync_names(self, name: str) -> None:
        """Sync a local folder, so that the names in it survive power loss."""
        if self.fs.type_name == "local":
            with self.errors(name):
                descriptor = os.open(os.path.dirname(self.path(name)), os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    @contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Raise an error of the file system within the block as a SteleError."""
        try:
            yield
        except (OSError, pa.ArrowException) as exc:
            raise self._error(name, exc) from exc
        except RuntimeError as exc:
            if (error := hdfs.error_of(exc)) is None:
                raise
            raise self._error(name, error) from exc

    def _error(self, name: str, exc: Exception) -> SteleError:
        where, number = self.called(name), getattr(exc, "errno", None)
        why = os.strerror(number) if number else _first_line(exc)
        if number in _FULL:
            return Retryable(
                f"{where}: {why}; free space there, then run the same again: it goes on where it stopped",
                code=Code.DISK_FULL,
            )
        if isinstance(exc, FileNotFoundError):
            return Rejected(f"{where}: there is no such file or folder; check its path", code=Code.NOT_FOUND)
        if isinstance(exc, FileExistsError):
            return Rejected(f"{where} exists already", code=Code.ALREADY_PRESENT)
        if number in _NOT_ALLOWED:
            return Rejected(f"{where}: {why}", code=Code.PERMISSION_DENIED)
        if isinstance(exc, (NotADirectoryError, IsADirectoryError)):
            return Rejected(f"{where}: {why}; expected a folder")
        if number == errno.EIO:
            return Corrupt(f"{where}: {why}", code=Code.IO_ERROR)
        if self.fs.type_name == "s3":
            return self._error_of_s3(where, why)
        return Retryable(f"{where}: {why}", code=Code.UNAVAILABLE)

    def _error_of_s3(self, where: str, why: str) -> SteleError:
        bucket = self.root.partition("/")[0]
        found = _S3_ERROR.search(why)
        name, status = found.groups() if found else ("", "")
        if name == "NO_SUCH_BUCKET" or why.startswith(f"Bucket '{bucket}' not found"):
            return Rejected(f"{where}: there is no bucket {bucket}; create it first", code=Code.NOT_FOUND)
        if name in _S3_NOT_ALLOWED or status == "403":
            return Rejected(
                f"{where}: {why}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what that key may do",
                code=Code.PERMISSION_DENIED,
            )
        return Retryable(f"{where}: {why}", code=Code.UNAVAILABLE)


Location: TypeAlias = str | os.PathLike[str] | Folder
"""What callers may give for a folder."""


class Sink:
    """A file that is written from front to back. Knows the number and the SHA-256 of its bytes.

    pyarrow writes to it as to a file, so its methods raise OSError if the disk or store fails."""

    def __init__(self, folder: Folder, name: str, file: Any) -> None:
        self._folder = folder
        self._name = name
        self._file = file
        self._digest = hashlib.sha256()
        self._discarded = False
        self.bytes = 0

    @property
    def sha256(self) -> str:
        """The SHA-256 of what was written, in hex."""
        return self._digest.hexdigest()

    @property
    def closed(self) -> bool:
        """False. pyarrow asks this before it writes."""
        return False

    def writable(self) -> bool:
        """Return True. pyarrow asks this before it writes."""
        return True

    def write(self, data: Any) -> int:
        """Append bytes. After `discard` it does nothing, because a Parquet writer always ends with a footer."""
        if not self._discarded:
            self._file.write(data)
            self._digest.update(data)
            self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing. pyarrow calls this."""

    def complete(self) -> None:
        """Close the file. It is durable once this returns."""
        with self._folder.errors(self._name):
            if self._folder.fs.type_name == "local":
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        self._folder._sync_names(self._name)

    def discard(self) -> None:
        """Remove the file, as far as the file system still allows."""
        self._discarded = True
        with suppress(OSError, pa.ArrowException):
            self._file.close()
        with suppress(OSError, pa.ArrowException):
            self._folder.fs.delete_file(self._folder.path(self._name))


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]


def _without_secrets(uri: str) -> str:
    """Return a URI without user, password and options."""
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
