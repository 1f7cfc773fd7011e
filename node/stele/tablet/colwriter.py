"""Writes column files: turns sorted runs into parts and a footer. Called by flush and by merges.

Invariant: a file of format 1 is written exactly as the release before writes it, because that release must read it
after a downgrade."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.column import Column
from stele.model.hashing import hash_binary
from stele.model.schema import Schema
from stele.tablet import bloom
from stele.tablet.colformat import (
    CRC,
    GROUP_BYTES,
    GROUP_ROWS,
    HEADER,
    HEADER_BYTES,
    KEY_SCHEMA,
    MAGIC,
    PART_BLOOM,
    PART_BOUNDS,
    PART_DELETED,
    PART_KEYS,
    PART_TIMES,
    PLAIN,
    TAIL,
    VERSION,
    FileMeta,
    column_schema,
    padded,
)
from stele.tablet.encoding import Encoded, encode, encode_keys, encode_times, message, unchanged
from stele.tablet.files import Files
from stele.tablet.groupbounds import BoundsWriter
from stele.tablet.sorted_runs import Mask, Run
from stele.tablet.spool import HashSpool

_ENTRY = struct.Struct("<IIQQII")
"""A row of the part table, as `PART` reads it."""


@dataclass(frozen=True, slots=True)
class Format:
    """How to write a file. `compress`: whether to use codecs, too. A flush has no time for them."""

    version: int = VERSION
    compress: bool = False


def write_column_file(
    files: Files, path: Path, schema: Schema, runs: Iterator[Run], wanted: Format
) -> FileMeta:
    """Write sorted runs with rising keys as one file, and sync it. Does not sync the directory.

    Raises:
        Retryable: DISK_FULL.
        Corrupt: IO_ERROR.
    """
    with HashSpool(path.parent) as spool:
        writer = _Writer(schema, spool, wanted)
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
        0 if wanted.version == 1 else size + writer.saved,
    )


def write_layers(
    files: Files, path: Path, schema: Schema, layers: Iterable[Iterator[Run]], wanted: Format
) -> tuple[FileMeta, ...]:
    """Write one file per layer that has rows (`Kept`), newest first: `path`, then `path`-1 and so on.

    Raises:
        SteleError: see `write_column_file`.
    """
    metas: list[FileMeta] = []
    for runs in layers:
        first = next(runs, None)
        if first is not None:
            place = path.with_name(f"{path.name}-{len(metas)}") if metas else path
            metas.append(write_column_file(files, place, schema, itertools.chain([first], runs), wanted))
    return tuple(metas)


class _Writer:
    """Turns runs into the bytes of a file, one part at a time.

    Of written rows it keeps only the footer's data, and the hashes of their keys in `spool`."""

    def __init__(self, schema: Schema, spool: HashSpool, wanted: Format) -> None:
        self._schema = schema
        self._wanted = wanted
        self._offset = 0
        self._table = bytearray()
        self._spool = spool
        self._groups: list[list[Any]] = []
        self._last_key = b""
        self._bounds = BoundsWriter(schema.columns)
        self.rows = self.deletes = self.footer_crc = self.max_time = 0
        self.min_time = (1 << 64) - 1
        self.unique = True
        self.saved = 0
        """About how many more bytes its parts would take in format 1."""

    def parts(self, runs: Iterator[Run]) -> Iterator[bytes | memoryview]:
        head = HEADER.pack(MAGIC, self._wanted.version, bytes(48))
        self._offset = HEADER_BYTES
        yield head + CRC.pack(google_crc32c.value(head))
        for run in runs:
            yield from self._run(run)
        yield from self._long_part(PART_BLOOM, 0, bloom.build(self._spool.rows, self._spool.ranges()))
        if self._wanted.version != 1:
            yield from self._part(PART_BOUNDS, 0, self._bounds.part())
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
                end += 1  # all versions of a key are in one group
            yield from self._group(run.slice(start, end - start), same[start:end])
            start = end

    def _group(self, run: Run, same: Mask) -> Iterator[bytes | memoryview]:
        group = len(self._groups)
        deletes = 0 if run.deleted is None else int(run.deleted.sum())
        # The first row of a slice never repeats a key, because a group begins with a new key.
        unique = not bool(same.any())
        first, self._last_key = run.keys[0].as_py(), run.keys[-1].as_py()
        low, high = int(run.times.min()), int(run.times.max())
        self._groups.append([run.rows, first.hex(), deletes, unique, low, high])
        self.rows += run.rows
        self.deletes += deletes
        self.unique = self.unique and unique
        self.min_time, self.max_time = min(self.min_time, low), max(self.max_time, high)
        self._spool.add(hash_binary(run.keys))
        yield from self._encoded(PART_KEYS, group, self._keys(run))
        yield from self._encoded(PART_TIMES, group, self._times(run))
        if deletes and run.deleted is not None:
            yield from self._part(PART_DELETED, group, np.packbits(run.deleted, bitorder="little").data)
        for position, column in enumerate(self._schema.columns):
            yield from self._encoded(
                int(column.id), group, self._column(position, column, run.batch.column(position))
            )

    def _keys(self, run: Run) -> Encoded:
        if self._wanted.version == 1:
            return unchanged(message(run.keys, KEY_SCHEMA))
        return encode_keys(run.keys, KEY_SCHEMA)

    def _times(self, run: Run) -> Encoded:
        times = np.ascontiguousarray(run.times)
        return unchanged(times.view(np.uint8).data) if self._wanted.version == 1 else encode_times(times)

    def _column(self, position: int, column: Column, array: pa.Array) -> Encoded:
        schema = column_schema(column)
        if self._wanted.version == 1:
            return unchanged(message(array, schema))
        found = encode(array, schema, compress=self._wanted.compress)
        self._bounds.add(position, array, found.distinct)
        return found

    def _encoded(self, part: int, group: int, what: Encoded) -> Iterator[bytes | memoryview]:
        self.saved += max(0, what.plain_bytes - what.size)
        yield from self._long_part(part, group, filter(len, (what.head, what.body)), what.form)

    def _part(self, part: int, group: int, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
        return self._long_part(part, group, (data,))

    def _long_part(
        self, part: int, group: int, pieces: Iterable[bytes | memoryview], form: int = PLAIN
    ) -> Iterator[bytes | memoryview]:
        start = padded(self._offset)
        yield bytes(start - self._offset)
        length = crc = 0
        for piece in pieces:
            raw = np.frombuffer(piece, np.uint8)
            raw.flags.writeable = False  # otherwise its checksum would copy it
            length += len(raw)
            crc = google_crc32c.extend(crc, raw)
            yield raw.data
        padding = bytes(padded(length) - length)
        crc = google_crc32c.extend(crc, padding)
        self._table += _ENTRY.pack(part, group, start, length, crc, form)
        yield padding
        self._offset = start + length + len(padding)

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
        body = struct.pack("<I", len(text)) + text + bytes(self._table)
        self.footer_crc = google_crc32c.value(body)
        yield body + TAIL.pack(len(body), self.footer_crc, MAGIC)
