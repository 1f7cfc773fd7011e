"""Small files that are read whole: manifest, exactly-once state, key space. One header, one body, one checksum each.

Layout, little-endian: 8 bytes magic, u32 version, u64 body length, u32 CRC-32C of the body, u32 CRC-32C of the 24
bytes before; then the body, then nothing.

Invariant: any flipped, missing or extra byte is found before a byte of the body is believed.
"""

from __future__ import annotations

import struct
from pathlib import Path

import google_crc32c

from stele.model.errors import Code, Corrupt, Rejected
from stele.tablet.files import translate

_HEADER = struct.Struct("<8sIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


def seal(magic: bytes, version: int, body: bytes) -> bytes:
    """The bytes of a checked file."""
    head = _HEADER.pack(magic, version, len(body), google_crc32c.value(body))
    return head + _CRC.pack(google_crc32c.value(head)) + body


def open_sealed(data: bytes, magic: bytes, version: int, name: str) -> bytes:
    """The body of a checked file.

    Raises:
        Corrupt: the bytes are not what `seal` made.
        Rejected: UNSUPPORTED_VERSION, whole but of a version this program does not know.
    """
    if len(data) < HEADER_BYTES:
        raise Corrupt(
            f"{name}: {len(data)} bytes; expected at least {HEADER_BYTES}; copy the replica from a peer"
        )
    found_magic, found_version, length, crc = _HEADER.unpack_from(data)
    (head_crc,) = _CRC.unpack_from(data, _HEADER.size)
    if found_magic != magic or google_crc32c.value(data[: _HEADER.size]) != head_crc:
        raise Corrupt(
            f"{name}: damaged header; expected {magic!r} and its checksum; copy the replica from a peer"
        )
    body = data[HEADER_BYTES:]
    if len(body) != length or google_crc32c.value(body) != crc:
        raise Corrupt(
            f"{name}: damaged body of {len(body)} bytes; expected {length}; copy the replica from a peer"
        )
    if found_version != version:
        raise Rejected(
            f"{name}: version {found_version}; this program reads {version}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    return body


def read_sealed(path: Path, magic: bytes, version: int) -> bytes:
    """The body of the checked file at `path`.

    Raises:
        Corrupt: missing or damaged (or IO_ERROR).
        Rejected: UNSUPPORTED_VERSION.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as exc:
        raise Corrupt(
            f"{path.name}: missing; expected it in {path.parent.name}; copy the replica from a peer"
        ) from exc
    except OSError as exc:
        raise translate(exc, f"reading {path.name}") from exc
    return open_sealed(data, magic, version, path.name)
