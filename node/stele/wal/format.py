"""Bytes of the log: segment headers, groups, records, footers. Pure; opens no files.

Invariant: a group that is damaged or only partly written is never taken for a group. The same is true of bytes of
another segment, or of an earlier use of this file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import NodeId, OpId, ReplicaId, StreamKey, TabletId
from stele.wal.options import HEADER_BYTES

if google_crc32c.implementation != "c":
    raise ImportError(
        "google-crc32c is installed without its C extension, a thousand times too slow; install its binary wheel"
    )

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"STELEWAL"
GROUP_MAGIC = b"SGRP"
GROUP_ALIGN = 8

_SEGMENT = struct.Struct("<8sII16sQQQI")
_GROUP_HEAD = struct.Struct("<4sBBHIIIIQQQQ")
_GROUP = struct.Struct(_GROUP_HEAD.format + "I")
_CRC = struct.Struct("<I")
GROUP_HEADER_BYTES = _GROUP.size + 4
RECORD = struct.Struct("<BBHI16sQQQQ")
_FOOTER_ROW = struct.Struct("<16sQQQQQQQ")
_PIECE_BYTES = 32 << 10
_PADDING = [b"\0" * n for n in range(GROUP_ALIGN)]

crc32c_extend = google_crc32c.extend


class Kind(IntEnum):
    """What a record means. The numbers are on disk."""

    ENTRY = 1
    TERM = 2
    VOTE = 3
    PROMOTE = 4
    TRUNCATE = 5
    CREATE = 6
    SNAPSHOT_BEGIN = 7
    SNAPSHOT_END = 8
    TOMBSTONE = 9
    FORGET = 10


class GroupKind(IntEnum):
    """What a group holds. The numbers are on disk."""

    RECORDS = 1
    SYNCED = 2
    FOOTER = 3


CODECS: dict[str | None, int] = {None: 0, "lz4": 1, "zstd": 2}
_CODEC_NAMES = {1: "lz4", 2: "zstd"}


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's first page. `prepared_bytes`: the file's synced length when it was taken into use."""

    node_id: NodeId
    sequence: int
    segment_id: int
    prepared_bytes: int
    recycled: bool


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """The first 64 bytes of a group. Offsets are bytes from the segment's beginning."""

    kind: int
    codec: int
    stored_bytes: int
    raw_bytes: int
    record_count: int
    prev_crc: int
    segment_id: int
    prev_segment_id: int
    offset: int
    synced_offset: int
    crc: int

    @property
    def end(self) -> int:
        """The byte offset at which the next group begins."""
        return aligned(self.offset + GROUP_HEADER_BYTES + self.stored_bytes)


class Record(NamedTuple):
    """One record. `kind` decides what `detail`, `a`, `b`, `c` and `blob` mean; see README.md."""

    kind: int
    detail: int
    tablet: bytes
    replica: int
    a: int
    b: int
    c: int
    blob: bytes

    @property
    def key(self) -> StreamKey:
        """The stream of the record."""
        return stream_key(self.tablet, self.replica)


@dataclass(slots=True)
class FooterRow:
    """What a segment holds of one stream. Updated for each group that is written.

    Indexes are 0 if the segment holds no entry of the stream."""

    first_term: int
    first_index: int
    last_term: int
    last_index: int
    first_offset: int
    last_offset: int

    @property
    def first(self) -> OpId | None:
        """The lowest entry; None if there is none."""
        return OpId(self.first_term, self.first_index) if self.first_index else None

    @property
    def last(self) -> OpId | None:
        """The highest entry, or the highest index that a record voids; None if there is neither."""
        return OpId(self.last_term, self.last_index) if self.last_index else None


def stream_key(tablet: bytes, replica: int) -> StreamKey:
    """A stream's key from the bytes on disk."""
    return StreamKey(TabletId(tablet.hex()), ReplicaId(replica))


def aligned(offset: int) -> int:
    """The first place at or above `offset` where a group may begin."""
    return -(-offset // GROUP_ALIGN) * GROUP_ALIGN


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The header as one page of bytes."""
    body = _SEGMENT.pack(
        SEGMENT_MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        bytes.fromhex(header.node_id),
        header.sequence,
        header.segment_id,
        header.prepared_bytes,
        int(header.recycled),
    ).ljust(HEADER_BYTES - 4, b"\0")
    return body + _CRC.pack(google_crc32c.value(body))


def decode_segment_header(page: bytes, where: str) -> SegmentHeader:
    """The inverse of `encode_segment_header`.

    Raises:
        Corrupt: the bytes are damaged.
        Rejected: UNSUPPORTED_VERSION.
    """
    if len(page) < HEADER_BYTES:
        raise Corrupt(f"{where}: {len(page)} bytes; expected a header of {HEADER_BYTES}")
    page = page[:HEADER_BYTES]
    magic, version, _, node, sequence, segment_id, prepared, flags = _SEGMENT.unpack_from(page)
    if (
        google_crc32c.value(page[:-4]) != _CRC.unpack_from(page, HEADER_BYTES - 4)[0]
        or magic != SEGMENT_MAGIC
    ):
        raise Corrupt(f"{where}: the segment's header is damaged")
    if version != FORMAT_VERSION:
        raise Rejected(
            f"{where}: log format {version} is unknown; this program reads {FORMAT_VERSION}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    return SegmentHeader(NodeId(node.hex()), sequence, segment_id, prepared, bool(flags & 1))


def encode_group(
    kind: GroupKind,
    pieces: Sequence[bytes],
    record_count: int,
    *,
    segment_id: int,
    prev_segment_id: int,
    prev_crc: int,
    offset: int,
    synced_offset: int,
    compression: str | None = None,
) -> tuple[list[bytes], int, int]:
    """Return (buffers to write one after the other, their total length in bytes, the group's CRC).

    Large pieces are not copied; a small group is one buffer."""
    raw_bytes = stored = sum(map(len, pieces))
    body = [b"".join(pieces)] if raw_bytes < _PIECE_BYTES else join_small(pieces)
    codec = 0
    if compression is not None and raw_bytes > 64:
        packed = pa.compress(b"".join(body), codec=compression, asbytes=True)
        if len(packed) < raw_bytes:
            body, stored, codec = [packed], len(packed), CODECS[compression]
    head = _GROUP_HEAD.pack(
        GROUP_MAGIC,
        kind,
        codec,
        0,
        stored,
        raw_bytes,
        record_count,
        prev_crc,
        segment_id,
        prev_segment_id,
        offset,
        synced_offset,
    )
    crc = head_crc = google_crc32c.value(head)
    for piece in body:
        crc = crc32c_extend(crc, piece)
    own = _CRC.pack(crc)
    padding = _PADDING[-stored % GROUP_ALIGN]
    buffers = [head, own, _CRC.pack(crc32c_extend(head_crc, own)), *body, padding]
    # A system call copies one buffer faster than it walks a list of three.
    return (
        [b"".join(buffers)] if stored < _PIECE_BYTES else buffers,
        GROUP_HEADER_BYTES + stored + len(padding),
        crc,
    )


def join_small(pieces: Sequence[bytes]) -> list[bytes]:
    """Join neighbouring small pieces into one buffer; leave large ones alone."""
    joined: list[bytes] = []
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) < _PIECE_BYTES:
            small.append(piece)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(piece)
    if small:
        joined.append(b"".join(small))
    return joined


def decode_group_header(data: bytes, at: int, offset: int, segment_id: int) -> GroupHeader | None:
    """The header of this segment's group at `offset`, which is `data[at:]`; None if there is none."""
    if at + GROUP_HEADER_BYTES > len(data) or data[at : at + 4] != GROUP_MAGIC:
        return None
    head = data[at : at + GROUP_HEADER_BYTES]
    if google_crc32c.value(head[:-4]) != _CRC.unpack_from(head, GROUP_HEADER_BYTES - 4)[0]:
        return None
    _, kind, codec, _, stored, raw, count, prev_crc, own, prev_id, own_offset, synced, crc = (
        _GROUP.unpack_from(head)
    )
    if own != segment_id or own_offset != offset:
        return None
    return GroupHeader(kind, codec, stored, raw, count, prev_crc, own, prev_id, own_offset, synced, crc)


def body_is_whole(header: GroupHeader, data: bytes, at: int) -> bool:
    """Whether the body after the header at `data[at:]` has the checksum that the header says."""
    start = at + GROUP_HEADER_BYTES
    body = data[start : start + header.stored_bytes]
    if len(body) != header.stored_bytes:
        return False
    return bool(
        crc32c_extend(google_crc32c.value(data[at : at + GROUP_HEADER_BYTES - 8]), body) == header.crc
    )


def group_body(header: GroupHeader, data: bytes, at: int) -> bytes:
    """The group's body, decompressed. Check `body_is_whole` first.

    Raises:
        Rejected: UNSUPPORTED_VERSION: the codec is of a later version.
    """
    start = at + GROUP_HEADER_BYTES
    body = data[start : start + header.stored_bytes]
    if header.codec == 0:
        return body
    name = _CODEC_NAMES.get(header.codec)
    if name is None:
        raise Rejected(
            f"log group at {header.offset}: codec {header.codec} is unknown; upgrade this program",
            code=Code.UNSUPPORTED_VERSION,
        )
    raw: bytes = pa.decompress(body, decompressed_size=header.raw_bytes, codec=name, asbytes=True)
    return raw


def encode_record(
    kind: Kind, detail: int, tablet: bytes, replica: int, a: int, b: int, c: int, blob: bytes
) -> bytes:
    """One record with its blob."""
    return RECORD.pack(kind, detail, 0, len(blob), tablet, replica, a, b, c) + blob


def decode_records(body: bytes, count: int) -> Iterator[Record]:
    """The records of a group's body.

    Raises:
        Corrupt: the lengths do not fit the bytes.
        Rejected: UNSUPPORTED_VERSION: a record's kind is of a later version.
    """
    at = 0
    size = RECORD.size
    for _ in range(count):
        if at + size > len(body):
            raise Corrupt(f"log group: {count} records do not fit in {len(body)} bytes")
        kind, detail, _, length, tablet, replica, a, b, c = RECORD.unpack_from(body, at)
        at += size
        if not Kind.ENTRY <= kind <= Kind.FORGET:
            raise Rejected(
                f"log record of kind {kind} is unknown; upgrade this program", code=Code.UNSUPPORTED_VERSION
            )
        yield Record(kind, detail, tablet, replica, a, b, c, body[at : at + length])
        at += length
    if at != len(body):
        raise Corrupt(f"log group: {len(body) - at} bytes left over after its {count} records")


def encode_footer(rows: Iterable[tuple[tuple[bytes, int], FooterRow]]) -> bytes:
    """A footer's body: one row per stream."""
    return b"".join(
        _FOOTER_ROW.pack(
            tablet,
            replica,
            row.first_term,
            row.first_index,
            row.last_term,
            row.last_index,
            row.first_offset,
            row.last_offset,
        )
        for (tablet, replica), row in rows
    )


def decode_footer(body: bytes) -> dict[tuple[bytes, int], FooterRow]:
    """The inverse of `encode_footer`.

    Raises:
        Corrupt: the bytes are not whole rows.
    """
    if len(body) % _FOOTER_ROW.size:
        raise Corrupt(f"log footer: {len(body)} bytes; expected rows of {_FOOTER_ROW.size}")
    return {(tablet, replica): FooterRow(*row) for tablet, replica, *row in _FOOTER_ROW.iter_unpack(body)}
