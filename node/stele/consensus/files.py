"""Files that are whole or absent after a crash. Used for superblocks and for a node's own record.

Invariant: a file that exists under its name is complete. On return from a write, it survives power loss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
from pathlib import Path

import google_crc32c

from stele.model.errors import Code, Corrupt, Rejected

_HEADER = struct.Struct("<4sHQI")  # magic, version, length of the body, CRC-32C of all that and the body
_SUMMED = struct.Struct("<4sHQ")


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents. Each new name is synced in its parent."""
    while not path.exists():
        new = path
        while not new.parent.exists():
            new = new.parent
        # `remove_if_empty` may remove the parent meanwhile: then try again.
        with contextlib.suppress(FileNotFoundError):
            new.mkdir(exist_ok=True)
            sync_directory(new.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it, if it exists. The removal is synced."""
    if path.exists():
        shutil.rmtree(path)
        sync_directory(path.parent)


def remove_if_empty(path: Path) -> None:
    """Remove a directory if it is empty. The removal is synced.

    A `make_directory` inside it at the same moment still succeeds.
    """
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as exc:
        if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return
        raise
    sync_directory(path.parent)


def write_record(path: Path, magic: bytes, version: int, body: bytes) -> None:
    """Replace `path` by a checksummed record: written aside, synced, renamed, directory synced."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as f:
        f.write(frame_record(magic, version, body))
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def frame_record(magic: bytes, version: int, body: bytes) -> bytes:
    """The bytes that `write_record` writes, for sending them elsewhere."""
    return _HEADER.pack(magic, version, len(body), _sum(magic, version, body)) + body


def _sum(magic: bytes, version: int, body: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(_SUMMED.pack(magic, version, len(body))), body))


def parse_record(data: bytes, magic: bytes, version_max: int, what: str) -> tuple[int, bytes]:
    """Return the version and the body of a record.

    Raises:
        Corrupt: the bytes are damaged.
        Rejected: UNSUPPORTED_VERSION, written by a later release.
    """
    if len(data) < _HEADER.size:
        raise Corrupt(
            f"{what}: {len(data)} bytes; expected a header of {_HEADER.size}; copy the replica anew"
        )
    found, version, length, crc = _HEADER.unpack_from(data)
    if found != magic:
        raise Corrupt(f"{what}: begins with {found!r}, expected {magic!r}; it is a different kind of file")
    body = data[_HEADER.size :]
    if len(body) != length or _sum(magic, version, body) != crc:
        raise Corrupt(f"{what}: checksum or length differ from the header's; the disk lost or changed bytes")
    if version > version_max:
        raise Rejected(
            f"{what}: version {version} is unknown, this program reads up to {version_max}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    return version, body


def read_record(path: Path, magic: bytes, version_max: int) -> tuple[int, bytes]:
    """Return the version and the body of the record in `path`.

    Raises:
        FileNotFoundError: there is no file.
        Corrupt, Rejected: as `parse_record`.
    """
    return parse_record(path.read_bytes(), magic, version_max, str(path))
