"""Reads one segment file: which groups are whole, and what lies between them. Called by recovery; decides
nothing.

Invariant: every byte up to the last whole group belongs to a group or to a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from stele.model.errors import Code, Corrupt, Rejected
from stele.wal.format import (
    GROUP_ALIGN,
    GROUP_HEADER_BYTES,
    GROUP_MAGIC,
    FooterRow,
    GroupHeader,
    GroupKind,
    SegmentHeader,
    body_is_whole,
    decode_footer,
    decode_group_header,
    decode_segment_header,
    group_body,
)
from stele.wal.options import HEADER_BYTES
from stele.wal.sectors import Content

_ID_AT = 24
_BLANK = b"\0" * GROUP_HEADER_BYTES


class Found(Enum):
    """What is found where a group could begin."""

    WHOLE = "a whole group"
    TORN_BODY = "a group's header without its whole body"
    TORN_HEADER = "bytes that are not a group"
    BLANK = "nothing"
    UNREADABLE = "bytes that the disk cannot read"


class Behind(Enum):
    """What the bytes after a gap prove about it."""

    NOTHING = "nothing"
    UNSYNCED = "whole groups, none of which proves that these bytes were synced"
    SYNCED = "proof that these bytes were synced"


class Verdict(Enum):
    """What recovery does at a place where a group could begin."""

    KEEP = "keep"
    END = "the log ends here"
    CUT = "cut a torn tail"
    REFUSE = "damage: fail the streams that it may concern"


# (what is found, is it the last segment, what is behind, verdict). None matches anything. The first matching
# row counts.
TABLE: tuple[tuple[Found | None, bool | None, Behind | None, Verdict], ...] = (
    (Found.WHOLE, None, None, Verdict.KEEP),
    (Found.UNREADABLE, None, None, Verdict.REFUSE),  # it may have been acknowledged
    (None, False, None, Verdict.REFUSE),
    (None, True, Behind.SYNCED, Verdict.REFUSE),
    (Found.BLANK, True, Behind.NOTHING, Verdict.END),
    (None, True, Behind.NOTHING, Verdict.CUT),
    (None, True, Behind.UNSYNCED, Verdict.CUT),
)


def judge(found: Found, is_tail: bool, behind: Behind) -> Verdict:
    """Return the verdict of `TABLE`. For a segment before the last, ask only about places before the end that the
    next segment names."""
    for row_found, row_tail, row_behind, verdict in TABLE:
        if row_found in (None, found) and row_tail in (None, is_tail) and row_behind in (None, behind):
            return verdict
    raise AssertionError("no row matches, although the last rows match anything")


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes from `offset` on that are not a whole group. `end`: where the next whole group is; None if there
    is none."""

    offset: int
    end: int | None
    found: Found
    dirty_bytes: int


@dataclass(slots=True)
class Scan:
    """A segment file as it was read. `header` is None if it is damaged; then `fault` says how and nothing
    else is known.

    `unreadable`: the disk cannot read some of the file, whether or not a group was there."""

    sequence: int
    path: Path
    length: int
    header: SegmentHeader | None = None
    fault: str = ""
    groups: list[GroupHeader] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    footer: dict[tuple[bytes, int], FooterRow] | None = None
    unreadable: bool = False

    @property
    def may_hold_unread(self) -> bool:
        """Whether groups may be in bytes that the disk cannot read."""
        return any(gap.found is Found.UNREADABLE for gap in self.gaps)

    @property
    def end(self) -> int:
        """The offset after the last whole group."""
        return self.groups[-1].end if self.groups else HEADER_BYTES

    @property
    def shortened(self) -> bool:
        """Whether the file is shorter than when it was taken into use, although it was not closed early."""
        return self.header is not None and self.footer is None and self.length < self.header.prepared_bytes

    @property
    def has_footer(self) -> bool:
        """Whether the segment was closed."""
        return self.footer is not None


def scan_segment(content: Content, sequence: int, path: Path) -> Scan:
    """Classify every byte of a segment file.

    Raises:
        Rejected: UNSUPPORTED_VERSION.
    """
    data = content.data
    scan = Scan(sequence, path, len(data), unreadable=bool(content.unreadable))
    if content.lost(0, HEADER_BYTES):
        scan.fault = f"{path}: the disk cannot read the segment's header"
        return scan
    try:
        header = decode_segment_header(data[:HEADER_BYTES], str(path))
    except Corrupt as exc:
        scan.fault = str(exc.args[0])
        return scan
    if header.sequence != sequence:
        scan.fault = f"{path}: the header says segment {header.sequence}"
        return scan
    scan.header = header
    segment_id = header.segment_id
    offset = HEADER_BYTES
    chained = True
    while True:
        found, group = _look(content, offset, header)
        if group is not None and found is Found.WHOLE:
            last = scan.groups[-1] if scan.groups and chained else None
            if last is None or (group.prev_segment_id, group.prev_crc) == (segment_id, last.crc):
                if not GroupKind.RECORDS <= group.kind <= GroupKind.FOOTER:
                    raise Rejected(
                        f"{path}: the group at {offset} is of unknown kind {group.kind}; upgrade this "
                        f"program",
                        code=Code.UNSUPPORTED_VERSION,
                    )
                scan.groups.append(group)
                if group.kind == GroupKind.FOOTER:
                    scan.footer = decode_footer(group_body(group, data, offset))
                    return scan
                offset = group.end
                chained = True
                continue
            found = Found.TORN_BODY
        behind = _next_group(content, offset + GROUP_ALIGN, segment_id)
        if behind is None:
            dirty = _dirty(data, offset, found, group)
            if found is not Found.BLANK or dirty:
                scan.gaps.append(Gap(offset, None, found, dirty))
            return scan
        scan.gaps.append(Gap(offset, behind, found, behind - offset))
        offset = behind
        chained = False


def _look(content: Content, offset: int, header: SegmentHeader) -> tuple[Found, GroupHeader | None]:
    """What is at `offset`, and the group's header if the header is whole."""
    begins = content.data.startswith(GROUP_MAGIC, offset)
    if content.lost(offset, offset + (GROUP_HEADER_BYTES if begins else GROUP_ALIGN)):
        return Found.UNREADABLE, None
    group = decode_group_header(content.data, offset, offset, header.segment_id)
    if group is None:
        return _without_header(content.data, offset, header.segment_id, header.recycled), None
    if content.lost(offset, group.end):
        return Found.UNREADABLE, group
    return (Found.WHOLE if body_is_whole(group, content.data, offset) else Found.TORN_BODY), group


def _without_header(data: bytes, offset: int, segment_id: int, recycled: bool) -> Found:
    head = data[offset : offset + GROUP_HEADER_BYTES]
    if head == _BLANK[: len(head)]:
        return Found.BLANK
    if recycled and not (
        head.startswith(GROUP_MAGIC) and head[_ID_AT : _ID_AT + 8] == segment_id.to_bytes(8, "little")
    ):
        return Found.BLANK  # bytes of the file's earlier use
    return Found.TORN_HEADER


def _next_group(content: Content, offset: int, segment_id: int) -> int | None:
    """Return the offset of this segment's next whole group at or after `offset`; None if there is none."""
    own, data = segment_id.to_bytes(8, "little"), content.data
    at = data.find(GROUP_MAGIC, offset)
    while at >= 0:
        if at % GROUP_ALIGN == 0 and data[at + _ID_AT : at + _ID_AT + 8] == own:
            group = decode_group_header(data, at, at, segment_id)
            if group is not None and not content.lost(at, group.end) and body_is_whole(group, data, at):
                return at
        at = data.find(GROUP_MAGIC, at + 1)
    return None


def _dirty(data: bytes, offset: int, found: Found, group: GroupHeader | None) -> int:
    """Return an upper bound of the number of bytes that a torn write left at `offset`."""
    if group is not None:
        return min(group.end, len(data)) - offset
    return 0 if found is Found.BLANK else len(data[offset:].rstrip(b"\0"))
