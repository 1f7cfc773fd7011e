"""The layout of a column file, shared by its writer and its readers. README.md beside it describes it byte by
byte.

Invariant: no byte of a footer is used before its checksum was compared.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from stele.model.column import Column
from stele.model.errors import Code, Corrupt, Rejected, of_later_program
from stele.model.jsons import parse_json, whole_number
from stele.model.schema import Schema
from stele.tablet.checksums import RangeSums

NAME = "rows-"
"""Prefix of the names of column files."""
MAGIC = b"STLCOLF1"
VERSION = 2
"""The newest format. This program also reads and writes the earlier ones. In format 1 all parts are plain."""
VERSIONS = (1, VERSION)
_CLUSTER_VERSIONS = {1: 0, 2: 2}
"""Each format, and the cluster version that must be finalized before it is written."""
GROUP_ROWS = 32_768
GROUP_BYTES = 16 << 20
ALIGNMENT = 64

HEADER = struct.Struct("<8sI48s")
TAIL = struct.Struct("<QI8s")
CRC = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CRC.size

# Parts that are not columns: a group's keys, timestamps and delete marks; the bloom filter of the file, and what its groups
# hold (groupbounds.py).
PART_KEYS, PART_TIMES, PART_DELETED, PART_BLOOM = 0xFFFF_FFF0, 0xFFFF_FFF1, 0xFFFF_FFF2, 0xFFFF_FFF3
PART_BOUNDS = 0xFFFF_FFF4
PART = np.dtype(
    [("part", "<u4"), ("group", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("crc", "<u4"), ("form", "<u4")]
)
PLAIN, DICTIONARY, FIXED, NARROW = 0, 1, 2, 3
"""Layouts of a part, the low byte of its form. PLAIN is that of format 1. The second byte is a codec (encoding.py)."""
_FOOTER_SMALL = 1 << 20
_U64_MAX, _ROWS_MAX = (1 << 64) - 1, (1 << 31) - 1
_TIME_BYTES = 8
_PEEK = 32
Read = Callable[[int, int], bytes]
"""Gives `length` bytes (second argument) from an offset (first) on."""
HASH_BYTES = 8
"""Bytes of a key's hash, for the bloom filter."""
KEY_SCHEMA = pa.schema([pa.field("key", pa.binary())])
TIME_SCHEMA = pa.schema([pa.field("time", pa.uint64())])


@dataclass(frozen=True, slots=True)
class FileMeta:
    """What the manifest says of a column file. `footer_crc` ties the name to exactly these bytes."""

    name: str
    size: int
    footer_crc: int
    rows: int
    deletes: int
    unique: bool
    min_time: int
    max_time: int
    plain_size: int = 0
    """About its size in format 1; 0: it is a file of that format."""

    @property
    def plain_bytes(self) -> int:
        """About how many bytes it would have in format 1."""
        return max(self.size, self.plain_size)

    @property
    def merge_bytes(self) -> int:
        """Disk space that a merge of this file may take, with the spooled hashes of its keys. Counted without
        encodings, because the merged file may be compressed less."""
        return self.plain_bytes + HASH_BYTES * self.rows

    def to_json(self) -> list[Any]:
        """As a JSON value for the manifest."""
        return [
            self.name,
            self.size,
            self.footer_crc,
            self.rows,
            self.deletes,
            self.unique,
            self.min_time,
            self.max_time,
            *((self.plain_size,) if self.plain_size else ()),  # the release before takes eight values
        ]

    @staticmethod
    def from_json(raw: list[Any]) -> FileMeta:
        """The inverse of `to_json`. Raises ValueError or TypeError."""
        name, size, crc, rows, deletes, unique, low, high, *plain = raw
        (plain_size,) = plain or (0,)
        return FileMeta(
            file_name(name, NAME),
            int(size),
            int(crc),
            int(rows),
            int(deletes),
            bool(unique),
            int(low),
            int(high),
            whole_number(plain_size, _U64_MAX),
        )


_AFTER_PREFIX = re.compile(r"[0-9a-f]{8,16}(-[0-9a-f]{1,32}){0,2}")


def file_name(name: Any, prefix: str) -> str:
    """Check a file name from a manifest, which may come from another node.

    Raises ValueError for a name that no store gives to a file, such as a path to another directory."""
    if not (
        isinstance(name, str) and name.startswith(prefix) and _AFTER_PREFIX.fullmatch(name[len(prefix) :])
    ):
        raise ValueError(f"file name {str(name)[:40]!r}; expected {prefix!r} and a number")
    return name


def column_schema(column: Column) -> pa.Schema:
    """The Arrow schema of the message that holds this column's part."""
    return pa.schema([pa.field(column.name, column.arrow)])


@dataclass(frozen=True, slots=True)
class Footer:
    """A file's footer.

    `parts`: (part, group) to (offset, length without padding, CRC-32C with padding). `forms`: how the parts
    that are not plain are encoded (encoding.py).
    """

    schema: Schema
    rows: int
    deletes: int
    unique: bool
    min_time: int
    max_time: int
    groups: list[list[Any]]
    first_keys: list[bytes]
    last_key: bytes
    parts: dict[tuple[int, int], tuple[int, int, int]]
    forms: dict[tuple[int, int], int]


def version_for(cluster_version: int) -> int:
    """The newest format that may be written. `cluster_version`: the finalized one; 0: not heard yet."""
    return max(version for version, needed in _CLUSTER_VERSIONS.items() if needed <= cluster_version)


def _check_header(name: str, raw: bytes) -> int:
    """Check that `raw`, the first HEADER_BYTES, is the header of a column file, and return the file's version.

    Raises:
        Corrupt: it is not, or it is damaged.
        Rejected: UNSUPPORTED_VERSION.
    """
    if len(raw) != HEADER_BYTES:
        raise damaged(name, "the header is damaged")
    head = raw[: HEADER.size]
    magic, version, _ = HEADER.unpack(head)
    (crc,) = CRC.unpack(raw[HEADER.size :])
    if magic != MAGIC or google_crc32c.value(head) != crc:
        raise damaged(name, "the header is damaged")
    if version not in VERSIONS:
        raise Rejected(
            f"{name}: version {version}; this program reads {VERSION}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    return int(version)


def read_footer(name: str, size: int, read: Read, expected: int | None = None) -> Footer:
    """The footer of a file of `size` bytes. Also checks the header. `expected`: the footer's checksum, if
    known.

    Raises:
        Corrupt: header or footer is damaged, or the footer is of another file. Also whatever `read` raises.
        Rejected: UNSUPPORTED_VERSION.
    """
    version, body = _footer_bytes(name, size, read, expected)
    try:
        return _parse(version, body, size)
    except (ValueError, TypeError, LookupError, OverflowError, struct.error, Rejected) as exc:
        if of_later_program(exc):
            raise
        raise damaged(name, f"footer: {exc!r}") from exc


def _footer_bytes(name: str, size: int, read: Read, expected: int | None = None) -> tuple[int, bytes]:
    """(the file's version, its footer)."""
    if size < HEADER_BYTES + TAIL.size:
        raise damaged(name, f"it has {size} bytes, too few for a header and a footer")
    version = _check_header(name, read(0, HEADER_BYTES))
    tail = read(size - TAIL.size, TAIL.size)
    if len(tail) != TAIL.size:
        raise damaged(name, f"{TAIL.size - len(tail)} bytes are missing at its end")
    length, crc, magic = TAIL.unpack(tail)
    start = size - TAIL.size - length
    if magic != MAGIC or start < HEADER_BYTES:
        raise damaged(name, "the tail is damaged")
    if length > _FOOTER_SMALL and not _plausible(read(start, _PEEK), length):
        raise damaged(name, "the tail is damaged")  # a wrong length, which has no checksum, may be gigabytes
    body = read(start, length)
    if google_crc32c.value(body) != crc or (expected is not None and crc != expected):
        raise damaged(name, "the footer is damaged")
    return version, body


def _plausible(opening: bytes, length: int) -> bool:
    (text_length,) = struct.unpack_from("<I", opening)
    table = length - 4 - text_length
    return table >= 0 and table % PART.itemsize == 0 and opening[4:].startswith(b'{"schema":')


def _table(body: bytes) -> np.ndarray[Any, Any]:
    (text_length,) = struct.unpack_from("<I", body)
    return np.frombuffer(body, PART, offset=4 + text_length)


def _parse(version: int, body: bytes, size: int) -> Footer:
    (text_length,) = struct.unpack_from("<I", body)
    about = parse_json(body[4 : 4 + text_length])
    table = _table(body).tolist()
    found = Footer(
        schema=Schema.from_json(json.dumps(about["schema"])),
        rows=int(about["rows"]),
        deletes=int(about["deletes"]),
        unique=bool(about["unique"]),
        min_time=whole_number(about["min_time"], _U64_MAX),
        max_time=whole_number(about["max_time"], _U64_MAX),
        groups=[_group(*group) for group in about["groups"]],
        first_keys=[bytes.fromhex(group[1]) for group in about["groups"]],
        last_key=bytes.fromhex(about["last_key"]),
        parts={
            (int(part), int(group)): (int(offset), int(length), int(crc))
            for part, group, offset, length, crc, _ in table
        },
        forms={} if version == 1 else {(part, group): form for part, group, *_, form in table if form},
    )
    _ensure_consistent(found, size)
    return found


def _group(rows: Any, first_key: Any, deletes: Any, unique: Any, oldest: Any, newest: Any) -> list[Any]:
    if not isinstance(first_key, str):
        raise ValueError(f"a group's first key is {str(first_key)[:40]}; expected text")
    times = [whole_number(time, _U64_MAX) for time in (oldest, newest)]
    return [
        whole_number(rows, _ROWS_MAX, 1),
        first_key,
        whole_number(deletes, _ROWS_MAX),
        bool(unique),
        *times,
    ]


def _ensure_consistent(footer: Footer, size: int) -> None:
    """Check what a reader relies on: the totals are the sums of the groups, and each row has its time in the file.
    So a false number of rows cannot make a reader take more memory than the file has bytes. Raises ValueError."""
    for told, position in ((footer.rows, 0), (footer.deletes, 2)):
        if told != sum(group[position] for group in footer.groups):
            raise ValueError("its totals are not the sums of its groups")
    if any(offset + length > size for offset, length, _ in footer.parts.values()):
        raise ValueError("a part lies after its end")
    for number, group in enumerate(footer.groups):
        _, length, _ = footer.parts[PART_TIMES, number]
        form = footer.forms.get((PART_TIMES, number), PLAIN)
        # With a dictionary each row has an index of a byte or more.
        if length < group[0] if form == DICTIONARY else length != _TIME_BYTES * group[0] or form != PLAIN:
            raise ValueError(f"group {number} has {group[0]} rows, but {length} bytes of timestamps")


def sums_inside(name: str, size: int, read: Read) -> RangeSums | None:
    """The checksums of all parts of a column file, from its footer; None for files of other kinds.

    Raises:
        Corrupt, Rejected: see `read_footer`.
    """
    if not name.startswith(NAME):
        return None
    try:
        table = np.sort(_table(_footer_bytes(name, size, read)[1]), order="offset")
    except (ValueError, struct.error) as exc:
        raise damaged(name, f"footer: {exc!r}") from exc
    begins, lengths = table["offset"].astype(np.int64), table["length"].astype(np.int64)
    ends = begins + lengths + -lengths % ALIGNMENT
    if (begins < np.concatenate(([HEADER_BYTES], ends[:-1]))[: len(begins)]).any() or (
        ends > size - TAIL.size
    ).any():
        raise damaged(name, "the footer lists parts that overlap")
    return RangeSums(name, list(zip(begins.tolist(), ends.tolist(), table["crc"].tolist())))


def padded(length: int) -> int:
    """The padded size of a part of `length` bytes. Its checksum covers the padding."""
    return length + -length % ALIGNMENT


def damaged(name: str, what: str) -> Corrupt:
    """The error for a damaged file."""
    return Corrupt(f"{name}: {what}; the disk changed the file; copy the replica from a peer")
