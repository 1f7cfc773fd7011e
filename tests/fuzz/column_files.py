"""Parsers of column files: the whole, the footer, and each form of a part, as they are and with right checksums."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

from stele.model.column import Column
from stele.model.keys import encode_keys
from stele.tablet import groupbounds
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import MAGIC, PART, PLAIN, TAIL, sums_inside
from stele.tablet.colwriter import Format, write_column_file
from stele.tablet.decoding import CODECS, COMPRESSED, LZ4, decode, whole
from stele.tablet.encoding import encode, message
from stele.tablet.files import FILES
from stele.tablet.groupbounds import BoundsWriter
from stele.tablet.sorted_runs import Run
from tests.fuzz.hunt import Parser
from tests.fuzz.texts import SCHEMA

NAME = "rows-00000001"


def table() -> list[Parser]:
    """All of them."""
    about, entries = _footer_parts()
    return [
        Parser(
            "column file's footer",
            [about],
            _read,
            (),
            0,
            lambda text: _column_file(text, entries),
        ),
        Parser(
            "column file's parts",
            [entries],
            _read,
            reseal=lambda table: _column_file(about, table),
        ),
        Parser("column file", [_a_column_file()], _read),
        *_parts(),
    ]


@cache
def _a_column_file() -> bytes:
    """Of format 2, with parts in each layout, some of them compressed."""
    batch = _rows()
    deleted = np.arange(400) % 7 == 0
    run = Run(batch, encode_keys(batch, SCHEMA), np.full(400, 9, np.uint64), deleted)
    half = 200
    runs: Iterator[Run] = iter([run.slice(0, half), run.slice(half, half)])
    with tempfile.TemporaryDirectory(prefix="stele-fuzz-") as folder:
        path = Path(folder) / NAME
        write_column_file(FILES, path, SCHEMA, runs, Format(compress=True))
        return path.read_bytes()


def _rows() -> pa.RecordBatch:
    rows = [
        {"id": 3 * n, "name": f"n{n % 9}", "x": n % 7 / 4, "ok": True, "blob": b"a code with %03d" % n}
        for n in range(400)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA.to_arrow())


def _parts() -> list[Parser]:
    """Parts as anybody may make them up, with right checksums: each layout, and what is compressed."""
    columns = {
        "index": pa.array([n % 9 * 10**12 for n in range(400)]),
        "index of texts": pa.array([None if n % 5 == 0 else f"text {n % 9}" for n in range(400)]),
        "index of short texts": pa.array([("UA", "DL")[n % 2] for n in range(400)]),
        "narrow": pa.array([n % 200 for n in range(400)]),
        "of one length": pa.array([f"a code with {n:03d}" for n in range(400)]),
    }
    found = []
    for name, array in columns.items():
        schema = pa.schema([pa.field("x", array.type)])
        encoded = encode(array, schema, compress=False)
        read = partial(_decoded, encoded.form, schema)
        found.append(Parser(f"part: {name}", [bytes(encoded.data)], read, (ValueError, pa.ArrowException)))
        packed = partial(_decoded, encoded.form | LZ4 << 8, schema)
        found.append(
            Parser(
                f"compressed part: {name}",
                [bytes(encoded.data)],
                packed,
                (ValueError, OSError, pa.ArrowException),
                reseal=_compressed,
            )
        )
    found += [_bounds(column, array) for column, array in zip(SCHEMA.columns, _rows().columns)]
    numbers = pa.array([n / 3 for n in range(400)])
    schema = pa.schema([pa.field("x", numbers.type)])
    inner, form = bytes(message(numbers, schema)), PLAIN | LZ4 << 8
    for name, seed, reseal in (
        ("compressed part", _compressed(inner), None),
        ("compressed message", inner, _compressed),
    ):
        read = partial(_decoded, form, schema)
        found.append(Parser(name, [seed], read, (ValueError, OSError, pa.ArrowException), reseal=reseal))
    return found


def _bounds(column: Column, array: pa.Array) -> Parser:
    """What groups hold of a column, in a part of it alone."""
    writer = BoundsWriter([column])
    for values in (array.slice(0, 40), array.slice(40, 50), pa.nulls(60, column.arrow)):
        writer.add(0, values, None)

    def read(data: bytes) -> object:
        found = groupbounds.read(np.frombuffer(data, np.uint8), column, [40, 50, 60])
        return found and [(found.ends(at), found.has_null(at), found.has_value(at)) for at in range(3)]

    return Parser(f"part: bounds of {column.name}", [writer.part()], read, (ValueError, struct.error))


def _compressed(raw: bytes) -> bytes:
    head = COMPRESSED.pack(len(raw), google_crc32c.value(raw), 0)
    return head + CODECS[LZ4].compress(raw, asbytes=True)


def _decoded(form: int, schema: pa.Schema, data: bytes) -> object:
    return whole(decode(form, np.frombuffer(data, np.uint8), schema, 400)).to_pylist()


def _footer_parts() -> tuple[bytes, bytes]:
    """(what the footer says, its table of parts)."""
    body = _footer()
    (size,) = struct.unpack_from("<I", body)
    return body[4 : 4 + size], body[4 + size :]


def _footer() -> bytes:
    whole = _a_column_file()
    length, _, _ = TAIL.unpack(whole[-TAIL.size :])
    return whole[-TAIL.size - length : -TAIL.size]


def _column_file(text: bytes, entries: bytes) -> bytes:
    body = struct.pack("<I", len(text)) + text + entries
    before = _a_column_file()[: -TAIL.size - len(_footer())]
    return before + body + TAIL.pack(len(body), google_crc32c.value(body), MAGIC)


def _read(raw: bytes) -> object:
    with tempfile.TemporaryDirectory(prefix="stele-fuzz-") as folder:
        path = Path(folder) / NAME
        path.write_bytes(raw)
        return _read_file(path, raw)


def _read_file(path: Path, raw: bytes) -> object:
    """As a copy checks it, a start opens it, and a scan, a lookup and a merge read it."""
    sums_inside(path.name, len(raw), lambda offset, length: raw[offset : offset + length])
    file = ColumnFile(path)
    file.verify()
    key, columns = SCHEMA.columns[:1], file.schema.columns
    seen: list[object] = [file.find_one(b"\x80" + bytes(7), 1), len(np.frombuffer(raw[:0], PART))]
    for group in file.groups_between(b"", b""):
        seen += [file.span(group), len(file.keys(group)), len(file.times(group)), file.deleted(group)]
        seen += [len(file.column(group, column)) for column in (*key, *columns)]
        seen += [bounds and bounds.ends(group) for bounds in map(file.bounds, columns)]
    return seen
