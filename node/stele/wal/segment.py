"""The segment that is being written, and what the log keeps in memory about the others. Used by appender, keeper and
recovery.

Invariant: a group's bytes go to one segment, at rising offsets. `synced` never passes the end of a sync that
returned.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stele.wal.files import File
from stele.wal.format import (
    GROUP_HEADER_BYTES,
    FooterRow,
    GroupKind,
    SegmentHeader,
    aligned,
    encode_footer,
    encode_group,
    encode_segment_header,
)
from stele.wal.metadata import Position
from stele.wal.options import HEADER_BYTES

_SEGMENT_NAME = "segment-{:016d}.wal"
_PREPARED_NAME = "prepared-{:016d}.wal"
_DAMAGED_NAME = "damaged-{:016d}.wal"
_ZEROS = b"\0" * (1 << 20)


def segment_name(sequence: int) -> str:
    """The file name of a segment."""
    return _SEGMENT_NAME.format(sequence)


def new_segment_id() -> int:
    """Return a random segment id; never 0."""
    return secrets.randbits(63) + 1


def prepared_name(number: int) -> str:
    """The file name of a file that waits to become a segment."""
    return _PREPARED_NAME.format(number)


def damaged_name(sequence: int) -> str:
    """The file name of a segment that is set aside."""
    return _DAMAGED_NAME.format(sequence)


def sequence_of(name: str, kind: str = "segment") -> int | None:
    """The number in a file name of that kind, None for other names."""
    if not (name.startswith(kind + "-") and name.endswith(".wal")):
        return None
    digits = name[len(kind) + 1 : -4]
    return int(digits) if digits.isascii() and digits.isdigit() else None


@dataclass(slots=True)
class Segment:
    """A segment in the log's table. The log's lock guards `readers`. `sound`: the disk can read all of it."""

    sequence: int
    path: Path
    segment_id: int
    length: int
    sound: bool = True
    readers: int = 0


@dataclass(slots=True)
class Ready:
    """A segment in place that holds no group yet. Its header is synced."""

    file: File
    path: Path
    header: SegmentHeader


@dataclass(slots=True)
class Chain:
    """The group written last. Every group names the one before it, also across segments."""

    segment_id: int = 0
    crc: int = 0


@dataclass(slots=True)
class FooterRows:
    """What a segment holds of each stream: the rows of its footer."""

    rows: dict[tuple[bytes, int], FooterRow] = field(default_factory=dict)

    def touch(self, raw: tuple[bytes, int], offset: int, term: int, low: int, high: int) -> None:
        """Note that the group at `offset` holds records of a stream. `low` to `high`: their indexes in that term;
        0 for none."""
        row = self.rows.get(raw)
        if row is None:
            row = self.rows[raw] = FooterRow(0, 0, 0, 0, offset, offset)
        elif offset > row.last_offset:
            row.last_offset = offset
        if low and not 0 < row.first_index <= low:
            row.first_term, row.first_index = term, low
        if high > row.last_index:
            row.last_term, row.last_index = term, high


class ActiveSegment:
    """Stages groups, writes them with one call, syncs them."""

    def __init__(self, ready: Ready, chain: Chain, compression: str | None) -> None:
        self.file = ready.file
        self.path = ready.path
        self.header = ready.header
        self.sequence = ready.header.sequence
        self.offset = HEADER_BYTES
        self.synced = HEADER_BYTES
        self.rows = FooterRows()
        self.last_kind: GroupKind | None = None
        self._chain = chain
        self.compression = compression
        self._staged: list[bytes] = []
        self._written = HEADER_BYTES

    @property
    def empty(self) -> bool:
        """Whether it holds no group."""
        return self.offset == HEADER_BYTES

    @property
    def full(self) -> bool:
        """Whether the prepared part is full."""
        return self.offset >= self.header.prepared_bytes

    @property
    def room(self) -> int:
        """Bytes left in the prepared part; negative past it."""
        return self.header.prepared_bytes - self.offset

    @property
    def position(self) -> Position:
        """The place after the last group."""
        return Position(self.sequence, self.offset)

    def fits(self, raw_bytes: int) -> bool:
        """Whether a group with `raw_bytes` of body ends inside the prepared part."""
        return aligned(self.offset + GROUP_HEADER_BYTES + raw_bytes) <= self.header.prepared_bytes

    def stage(
        self, kind: GroupKind, pieces: Sequence[bytes], count: int, *, synced: int | None = None
    ) -> int:
        """Add a group after the others, without writing it. Returns its offset."""
        offset = self.offset
        buffers, length, crc = encode_group(
            kind,
            pieces,
            count,
            segment_id=self.header.segment_id,
            prev_segment_id=self._chain.segment_id,
            prev_crc=self._chain.crc,
            offset=offset,
            synced_offset=self.synced if synced is None else synced,
            compression=self.compression if kind is GroupKind.RECORDS else None,
        )
        self._staged += buffers
        self.offset += length
        self._chain.segment_id = self.header.segment_id
        self._chain.crc = crc
        self.last_kind = kind
        return offset

    def write(self) -> int:
        """Write what is staged. Returns the number of bytes."""
        length = self.offset - self._written
        if length:
            self.file.write(self._staged, self._written)
            self._staged = []
            self._written = self.offset
        return length

    def sync(self) -> None:
        """On return all that was written survives power loss."""
        if self._written <= self.header.prepared_bytes:
            self.file.data_sync()
        else:
            self.file.full_sync()
        self.was_synced()

    def was_synced(self) -> None:
        """Record that a sync of all that was written has returned. Nothing may have been written since it
        began."""
        self.synced = self._written

    def finish(self, *, cut: bool) -> None:
        """Write the footer, sync and close. `cut`: the segment is closed early, so cut the file to its used
        length."""
        self.stage(GroupKind.FOOTER, [encode_footer(self.rows.rows.items())], len(self.rows.rows))
        self.write()
        self.sync()
        if cut:
            self.file.truncate(self.offset)
            self.file.full_sync()
        self.file.close()


def write_header(file: File, header: SegmentHeader) -> None:
    """Write a prepared file's header and sync it."""
    file.write([encode_segment_header(header)], 0)
    file.full_sync()


def write_zeros(file: File, length: int) -> None:
    """Fill a new file with zeros. If its blocks were only reserved, later syncs would be several times slower."""
    at = 0
    while at < length:
        size = min(len(_ZEROS), length - at)
        file.write([_ZEROS[:size]], at)
        at += size
    file.full_sync()
