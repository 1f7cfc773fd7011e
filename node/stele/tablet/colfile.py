"""Column files: immutable, sorted, mapped. Written by flush and by the compaction worker, read by views. The layout
is told byte by byte in README.md beside this file.

Invariant: no byte of a part is believed before its checksum was compared, and none of the file before the footer's. Nor
is the map touched before the disk has given the same bytes to a read, which may fail where a map would end the process.
"""

from __future__ import annotations

import bisect
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.hashing import hash_binary
from stele.model.schema import Column, Schema
from stele.tablet import bloom
from stele.tablet.files import Files, translate
from stele.tablet.reading import read_at, sum_at
from stele.tablet.runs import KeyList, Mask, Positions, Run, lower_bound

MAGIC = b"STLCOLF1"
VERSION = 1
GROUP_ROWS = 32_768
GROUP_BYTES = 16 << 20
ALIGNMENT = 64

_HEADER = struct.Struct("<8sI48s")
_TAIL = struct.Struct("<QI8s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size

# Parts that are no column: keys, timestamps, delete marks of a group; the bloom filter of the file.
PART_KEYS, PART_TIMES, PART_DELETED, PART_BLOOM = 0xFFFF_FFF0, 0xFFFF_FFF1, 0xFFFF_FFF2, 0xFFFF_FFF3
_PART = np.dtype(
    [("part", "<u4"), ("group", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("crc", "<u4"), ("_", "<u4")]
)
_KEY_SCHEMA = pa.schema([pa.field("key", pa.binary())])
_BISECT_KEYS = 16
_LET_GO_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileMeta:
    """What the manifest says of a column file. `footer_crc` ties the name to these very bytes."""

    name: str
    size: int
    footer_crc: int
    rows: int
    deletes: int
    unique: bool
    min_time: int
    max_time: int

    def to_json(self) -> list[Any]:
        """As the manifest holds it."""
        return [
            self.name,
            self.size,
            self.footer_crc,
            self.rows,
            self.deletes,
            self.unique,
            self.min_time,
            self.max_time,
        ]

    @staticmethod
    def from_json(raw: list[Any]) -> FileMeta:
        """The inverse of `to_json`. Raises ValueError or TypeError."""
        name, size, crc, rows, deletes, unique, low, high = raw
        return FileMeta(
            str(name), int(size), int(crc), int(rows), int(deletes), bool(unique), int(low), int(high)
        )


def write_column_file(files: Files, path: Path, schema: Schema, runs: Iterator[Run]) -> FileMeta:
    """Write sorted runs, whose keys follow on each other, as one file, and sync it. The directory is not synced.

    Raises:
        Retryable: DISK_FULL.
        Corrupt: IO_ERROR.
    """
    writer = _Writer(schema)
    size = files.write_new(path, writer.parts(runs))
    return FileMeta(
        path.name,
        size,
        writer.footer_crc,
        writer.rows,
        writer.deletes,
        writer.unique,
        writer.min_time,
        writer.max_time,
    )


class _Writer:
    """Turns runs into the bytes of a file, one part at a time."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._offset = 0
        self._table: list[tuple[int, int, int, int, int, int]] = []
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._groups: list[list[Any]] = []
        self._last_key = b""
        self.rows = self.deletes = self.footer_crc = self.max_time = 0
        self.min_time = (1 << 64) - 1
        self.unique = True

    def parts(self, runs: Iterator[Run]) -> Iterator[bytes | memoryview]:
        head = _HEADER.pack(MAGIC, VERSION, bytes(48))
        self._offset = HEADER_BYTES
        yield head + _CRC.pack(google_crc32c.value(head))
        for run in runs:
            yield from self._run(run)
        hashes = np.concatenate(self._hashes) if self._hashes else np.zeros(0, np.uint64)
        yield from self._part(PART_BLOOM, 0, bloom.build(hashes))
        yield from self._footer()

    def _run(self, run: Run) -> Iterator[bytes | memoryview]:
        if run.rows == 0:
            return
        same = key_bytes.same_as_before(run.keys)
        per_row = max(1, run.batch.nbytes // run.rows)
        step = max(1, min(GROUP_ROWS, GROUP_BYTES // per_row))
        start = 0
        while start < run.rows:
            end = min(start + step, run.rows)
            while end < run.rows and same[end]:
                end += 1  # all versions of a key stand in one group
            yield from self._group(run.slice(start, end - start), same[start:end])
            start = end

    def _group(self, run: Run, same: Mask) -> Iterator[bytes | memoryview]:
        group = len(self._groups)
        deletes = 0 if run.deleted is None else int(run.deleted.sum())
        # The first row of a slice is never a repeat: groups begin with a new key.
        unique = not bool(same.any())
        first, self._last_key = run.keys[0].as_py(), run.keys[-1].as_py()
        low, high = int(run.times.min()), int(run.times.max())
        self._groups.append([run.rows, first.hex(), deletes, unique, low, high])
        self.rows += run.rows
        self.deletes += deletes
        self.unique = self.unique and unique
        self.min_time, self.max_time = min(self.min_time, low), max(self.max_time, high)
        self._hashes.append(hash_binary(run.keys))
        yield from self._part(PART_KEYS, group, _message(run.keys, _KEY_SCHEMA))
        yield from self._part(PART_TIMES, group, np.ascontiguousarray(run.times).view(np.uint8).data)
        if deletes and run.deleted is not None:
            yield from self._part(PART_DELETED, group, np.packbits(run.deleted, bitorder="little").data)
        for position, column in enumerate(self._schema.columns):
            array = run.batch.column(position)
            yield from self._part(int(column.id), group, _message(array, _column_schema(column)))

    def _part(self, part: int, group: int, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
        start = -(-self._offset // ALIGNMENT) * ALIGNMENT
        raw = np.frombuffer(data, np.uint8)
        raw.flags.writeable = False  # or its checksum wants a copy
        padding = bytes(-len(raw) % ALIGNMENT)
        crc = google_crc32c.extend(google_crc32c.value(raw), padding)
        self._table.append((part, group, start, len(raw), crc, 0))
        yield bytes(start - self._offset)
        yield raw.data
        yield padding
        self._offset = start + len(raw) + len(padding)

    def _footer(self) -> Iterator[bytes]:
        about = {
            "schema": json.loads(self._schema.to_json()),
            "groups": self._groups,
            "last_key": self._last_key.hex(),
            "rows": self.rows,
            "deletes": self.deletes,
            "unique": self.unique,
            "min_time": self.min_time,
            "max_time": self.max_time,
        }
        text = json.dumps(about, separators=(",", ":")).encode()
        body = struct.pack("<I", len(text)) + text + np.array(self._table, _PART).tobytes()
        self.footer_crc = google_crc32c.value(body)
        yield body + _TAIL.pack(len(body), self.footer_crc, MAGIC)


def _message(array: pa.Array, schema: pa.Schema) -> memoryview:
    # Written into the file at once, so a copy of a slice's parent never lingers.
    return memoryview(pa.RecordBatch.from_arrays([array], schema=schema).serialize())


def _column_schema(column: Column) -> pa.Schema:
    return pa.schema([pa.field(column.name, column.arrow)])


class ColumnFile:
    """One open column file. Any thread; stays readable after it is unlinked."""

    def __init__(self, path: Path, expected: FileMeta | None = None) -> None:
        """Open and check header and footer.

        Raises:
            Corrupt: missing, damaged, or not the file the manifest means.
            Rejected: UNSUPPORTED_VERSION.
        """
        self.path = path
        self.name = path.name
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < HEADER_BYTES + _TAIL.size or (expected is not None and size != expected.size):
                    wanted = "a header and a footer" if expected is None else f"{expected.size}"
                    raise Corrupt(
                        f"{self.name}: {size} bytes; expected {wanted}; copy the replica from a peer"
                    )
                self.size = size
                self._check_header(read_at(file.fileno(), 0, HEADER_BYTES))
                footer = self._footer_bytes(file.fileno(), expected)
                # A map, once made, keeps the file readable after it is unlinked.
                self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except FileNotFoundError as exc:
            raise Corrupt(
                f"{self.name}: missing; the manifest lists it; copy the replica from a peer"
            ) from exc
        except OSError as exc:
            raise translate(exc, f"opening {self.name}") from exc
        try:
            self._read_footer(footer)
        except (ValueError, TypeError, KeyError, struct.error, Rejected) as exc:
            raise self._corrupt(f"footer: {exc!r}") from exc

    def _corrupt(self, what: str) -> Corrupt:
        return Corrupt(
            f"{self.name}: {what}; expected the bytes that were written; copy the replica from a peer"
        )

    def _check_header(self, raw: bytes) -> None:
        head = raw[: _HEADER.size]
        magic, version, _ = _HEADER.unpack(head)
        (crc,) = _CRC.unpack(raw[_HEADER.size :])
        if magic != MAGIC or google_crc32c.value(head) != crc:
            raise self._corrupt("damaged header")
        if version != VERSION:
            raise Rejected(
                f"{self.name}: version {version}; this program reads {VERSION}; upgrade it",
                code=Code.UNSUPPORTED_VERSION,
            )

    def _footer_bytes(self, fd: int, expected: FileMeta | None) -> bytes:
        length, crc, magic = _TAIL.unpack(read_at(fd, self.size - _TAIL.size, _TAIL.size))
        start = self.size - _TAIL.size - length
        if magic != MAGIC or start < HEADER_BYTES:
            raise self._corrupt("damaged tail")
        body = read_at(fd, start, length)
        if google_crc32c.value(body) != crc or (expected is not None and crc != expected.footer_crc):
            raise self._corrupt("damaged footer")
        return body

    def _read_footer(self, body: bytes) -> None:
        (text_length,) = struct.unpack_from("<I", body)
        about = json.loads(body[4 : 4 + text_length])
        table = np.frombuffer(body, _PART, offset=4 + text_length)
        self.schema = Schema.from_json(json.dumps(about["schema"]))
        self.rows, self.deletes = int(about["rows"]), int(about["deletes"])
        self.unique, self.min_time, self.max_time = (
            about["unique"],
            int(about["min_time"]),
            int(about["max_time"]),
        )
        self.groups: list[list[Any]] = about["groups"]
        self.first_keys = [bytes.fromhex(g[1]) for g in self.groups]
        self.last_key = bytes.fromhex(about["last_key"])
        self._parts = {
            (int(part), int(group)): (int(offset), int(length), int(part_crc))
            for part, group, offset, length, part_crc, _ in table.tolist()
        }
        self._verified: set[tuple[int, int]] = set()
        self._bloom_words: memoryview | None = None

    @property
    def first_key(self) -> bytes:
        """The lowest key."""
        return self.first_keys[0]

    def _part(self, part: int, group: int) -> npt.NDArray[np.uint8] | None:
        found = self._parts.get((part, group))
        if found is None:
            return None
        offset, length, _ = found
        if (part, group) not in self._verified:
            self._check((part, group))
            self._verified.add((part, group))
        return self._bytes[offset : offset + length]

    def _check(self, part: tuple[int, int]) -> None:
        """Read a part from the file and compare its checksum. Blocks, without the interpreter's lock."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                self._compare(part, lambda offset, length: sum_at(file.fileno(), offset, length))
        except FileNotFoundError:  # a merge has taken its place, and has read all of it before
            self._compare(part, lambda at, length: int(google_crc32c.value(self._bytes[at : at + length])))
        except OSError as exc:
            raise translate(exc, f"reading {self.name}") from exc

    def _compare(self, part: tuple[int, int], sum_of: Callable[[int, int], int]) -> None:
        offset, length, crc = self._parts[part]
        if sum_of(offset, length + -length % ALIGNMENT) != crc:
            raise self._corrupt(f"part {part[0]:#x} of group {part[1]} at byte {offset} is damaged")

    def verify(self, read: Callable[[int], None] = lambda size: None) -> None:
        """Read all parts from the file, also those that were found right before, and compare every checksum. `read` is told
        of each part's bytes.

        Raises:
            Corrupt: a part is damaged, or cannot be read.
        """
        kept = 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                fd = file.fileno()
                for part, (offset, length, _) in self._parts.items():
                    self._compare(part, lambda offset, length: sum_at(fd, offset, length))
                    read(length)
                    if offset + length - kept >= _LET_GO_BYTES:
                        # Read once: the next bytes get these pages, and what the node works with keeps its own.
                        os.posix_fadvise(fd, kept, offset + length - kept, os.POSIX_FADV_DONTNEED)
                        kept = offset + length
        except OSError as exc:
            raise translate(exc, f"reading {self.name}") from exc

    def keys(self, group: int) -> pa.BinaryArray:
        """Encoded keys of a group, ascending."""
        data = self._part(PART_KEYS, group)
        if data is None:
            raise self._corrupt(f"group {group} has no keys")
        return _array(data, _KEY_SCHEMA)

    def times(self, group: int) -> npt.NDArray[np.uint64]:
        """Hybrid times of a group's rows."""
        data = self._part(PART_TIMES, group)
        if data is None:
            raise self._corrupt(f"group {group} has no timestamps")
        return data.view("<u8")

    def deleted(self, group: int) -> Mask | None:
        """Delete marks of a group; None if it has none."""
        data = self._part(PART_DELETED, group)
        if data is None:
            return None
        return np.unpackbits(data, count=self.groups[group][0], bitorder="little").astype(bool)

    def column(self, group: int, column: Column) -> pa.Array:
        """A column of a group; one that the file does not have holds the default, else nulls."""
        data = self._part(int(column.id), group)
        if data is None:
            scalar = column.default_scalar()
            rows = self.groups[group][0]
            return pa.nulls(rows, column.arrow) if not scalar.is_valid else pa.repeat(scalar, rows)
        return _array(data, _column_schema(column))

    def batch(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> pa.RecordBatch:
        """These columns of a group, mapped; others are not read."""
        return pa.RecordBatch.from_arrays([self.column(group, c) for c in columns], schema=schema)

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        """A group as a sorted run."""
        return Run(
            self.batch(group, columns, schema), self.keys(group), self.times(group), self.deleted(group)
        )

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        """Groups that may hold keys in [lower, upper); b"" is unbounded."""
        start = max(0, bisect.bisect_right(self.first_keys, lower) - 1) if lower else 0
        if lower and lower > self.last_key:
            return range(0)
        end = bisect.bisect_left(self.first_keys, upper) if upper else len(self.groups)
        return range(start, end)

    def may_hold(self, hashes: npt.NDArray[np.uint64]) -> Mask:
        """Which key hashes the file may hold."""
        data = self._part(PART_BLOOM, 0)
        if data is None:
            raise self._corrupt("no bloom filter")
        return bloom.may_hold(data, hashes)

    def find(self, keys: pa.BinaryArray, hashes: npt.NDArray[np.uint64]) -> tuple[Positions, Positions]:
        """(group, row) of the newest version of each key; group -1 where the file does not have it."""
        groups = np.full(len(keys), -1, np.int64)
        rows = np.zeros(len(keys), np.int64)
        candidates = np.flatnonzero(self.may_hold(hashes))
        if len(candidates) == 0:
            return groups, rows
        wanted = keys.take(pa.array(candidates)) if len(candidates) < len(keys) else keys
        values = wanted.to_pylist()
        by_group: dict[int, list[int]] = {}
        for at, value in enumerate(values):
            group = bisect.bisect_right(self.first_keys, value) - 1
            if group >= 0 and value <= self.last_key:
                by_group.setdefault(group, []).append(at)
        for group, members in by_group.items():
            haystack = self.keys(group)
            if len(members) <= _BISECT_KEYS:
                listed = KeyList(haystack)
                places = [bisect.bisect_left(listed, values[at]) for at in members]
            else:
                places = lower_bound(haystack, wanted.take(pa.array(members))).tolist()
            for at, place in zip(members, places):
                if place < len(haystack) and haystack[place].as_py() == values[at]:
                    groups[candidates[at]] = group
                    rows[candidates[at]] = place
        return groups, rows

    def find_one(self, key: bytes, hash_: int) -> tuple[int, int] | None:
        """(group, row) of the newest version of one key, None if the file does not have it."""
        if not self.groups or key < self.first_keys[0] or key > self.last_key:
            return None
        if self._bloom_words is None:
            data = self._part(PART_BLOOM, 0)
            if data is None:
                raise self._corrupt("no bloom filter")
            self._bloom_words = data.view("<u4").data
        if not bloom.may_hold_one(self._bloom_words, hash_):
            return None
        group = bisect.bisect_right(self.first_keys, key) - 1
        keys = self.keys(group)
        row = bisect.bisect_left(KeyList(keys), key)
        return (group, row) if row < len(keys) and keys[row].as_py() == key else None

    def version_at(self, group: int, row: int, snapshot: int) -> int:
        """From the newest version of a key on, the row of the newest at or below `snapshot`; -1 for none."""
        times, keys = self.times(group), self.keys(group)
        key = keys[row]
        while row < len(times) and (row == 0 or keys[row] == key):
            if int(times[row]) <= snapshot:
                return row
            row += 1
            if row < len(times) and keys[row] != key:
                return -1
        return -1


def _array(data: npt.NDArray[np.uint8], schema: pa.Schema) -> pa.Array:
    return pa.ipc.read_record_batch(pa.py_buffer(data), schema).column(0)
