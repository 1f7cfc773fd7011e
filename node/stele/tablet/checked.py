"""Files that are replaced whole: manifest, exactly-once state, key space. Each has a header, a body and a
checksum.

Large ones are written and checked in pieces, because other threads wait while one handles a large byte
string.

Layout, little-endian: 8 bytes magic, u32 version, u64 body length, u32 CRC-32C of the body, u32 CRC-32C of
the 24 bytes before. Then the body, then nothing.

Invariant: a flipped, missing or extra byte is found before any of the body is used.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from stele.model.errors import Code, Corrupt, Rejected
from stele.tablet.files import translate

_HEADER = struct.Struct("<8sIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
PIECE_BYTES = 256 << 10
"""The size of the pieces in which a large file is written and checked."""


def seal(magic: bytes, version: int, body: bytes) -> bytes:
    """The bytes of a checked file."""
    return _header(magic, version, len(body), google_crc32c.value(body)) + body


def seal_pieces(magic: bytes, version: int, pieces: Callable[[], Iterable[bytes]]) -> Iterator[bytes]:
    """The bytes of a checked file with the body that `pieces` yields. Calls `pieces` twice; both calls must yield
    the same bytes."""
    length = crc = 0
    for piece in pieces():
        length += len(piece)
        crc = google_crc32c.extend(crc, piece)
    yield _header(magic, version, length, crc)
    yield from pieces()


def _header(magic: bytes, version: int, length: int, crc: int) -> bytes:
    head = _HEADER.pack(magic, version, length, crc)
    return head + _CRC.pack(google_crc32c.value(head))


def open_sealed(data: bytes, magic: bytes, version: int, name: str) -> bytes:
    """The body of a checked file.

    Raises:
        Corrupt: the bytes are damaged.
        Rejected: UNSUPPORTED_VERSION: the file is whole, but this program does not know its version.
    """
    header = _parse(data[:HEADER_BYTES], magic, name)
    body = data[HEADER_BYTES:]
    _compare(header, len(body), google_crc32c.value(body), version, name)
    return body


def _parse(head: bytes, magic: bytes, name: str) -> tuple[int, int, int]:
    """(version, body length, CRC) from the header."""
    if len(head) < HEADER_BYTES:
        raise Corrupt(
            f"{name}: has {len(head)} bytes; expected at least {HEADER_BYTES}; copy the replica from a peer"
        )
    found_magic, version, length, crc = _HEADER.unpack_from(head)
    (head_crc,) = _CRC.unpack_from(head, _HEADER.size)
    if found_magic != magic or google_crc32c.value(head[: _HEADER.size]) != head_crc:
        raise Corrupt(
            f"{name}: the header is damaged; expected {magic!r} and a checksum; copy the replica from a peer"
        )
    return version, length, crc


def _compare(header: tuple[int, int, int], length: int, crc: int, version: int, name: str) -> None:
    found_version, wanted_length, wanted_crc = header
    if length != wanted_length or crc != wanted_crc:
        raise Corrupt(
            f"{name}: the body is damaged ({length} bytes, expected {wanted_length}); "
            "copy the replica from a peer"
        )
    if found_version != version:
        raise Rejected(
            f"{name}: version {found_version}; this program reads {version}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )


@contextlib.contextmanager
def opened(
    path: Path,
    magic: bytes,
    version: int,
    read: Callable[[int], None] = lambda size: None,
    *,
    oldest: int | None = None,
) -> Iterator[BinaryIO]:
    """The checked file at `path`, open at the start of its body, after its checksum was compared.

    Versions from `oldest` to `version` are accepted; None: only `version`. Calls `read` with the number of bytes of
    each piece.

    Raises:
        Corrupt: the file is missing or damaged. IO_ERROR: the disk failed.
        Rejected: UNSUPPORTED_VERSION.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
            read(len(head))
            header = _parse(head, magic, path.name)
            length = crc = 0
            while piece := file.read(PIECE_BYTES):
                read(len(piece))
                length += len(piece)
                crc = google_crc32c.extend(crc, piece)
            if oldest is not None and oldest <= header[0] <= version:
                version = header[0]
            _compare(header, length, crc, version, path.name)
            file.seek(HEADER_BYTES)
            yield file
    except FileNotFoundError as exc:
        raise _missing(path) from exc
    except OSError as exc:
        raise translate(exc, f"reading {path.name}") from exc


def read_sealed(path: Path, magic: bytes, version: int) -> bytes:
    """The body of the checked file at `path`.

    Raises:
        Corrupt: the file is missing or damaged. IO_ERROR: the disk failed.
        Rejected: UNSUPPORTED_VERSION.
    """
    return open_sealed(read_bytes(path), magic, version, path.name)


def read_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        Corrupt: the file is missing. IO_ERROR: the disk failed.
        Retryable: the system has no file descriptor or memory for it now.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as exc:
        raise _missing(path) from exc
    except OSError as exc:
        raise translate(exc, f"reading {path.name}") from exc


def _missing(path: Path) -> Corrupt:
    return Corrupt(f"{path.name} is missing in {path.parent.name}; copy the replica from a peer")
