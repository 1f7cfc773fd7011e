"""`python -m stele.wal.dump DIR` prints the segments, groups and records of a log. Changes nothing.

Reads a directory that no node has open, or a copy of it. Invariant: all damage is shown at its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from stele.model.entry import entry_kind_of
from stele.model.errors import SteleError
from stele.wal.files import OsFiles
from stele.wal.format import GroupHeader, GroupKind, Kind, Record, decode_records, group_body, stream_key
from stele.wal.metadata import METADATA, read_metadata
from stele.wal.scan import Scan, scan_segment
from stele.wal.sectors import read_content
from stele.wal.segment import sequence_of


def describe_record(r: Record) -> str:
    """One record as one line of text."""
    kind = Kind(r.kind)
    match kind:
        case Kind.ENTRY:
            what = (
                f"{r.a}.{r.b} {entry_kind_of(r.detail, r.a, r.b).name} timestamp {r.c}, {len(r.blob)} bytes"
            )
        case Kind.TERM:
            what = f"term {r.a}"
        case Kind.VOTE | Kind.PROMOTE:
            what = f"in term {r.a} for replica {r.b}"
        case Kind.TRUNCATE:
            what = f"from {r.b}"
        case Kind.CREATE | Kind.SNAPSHOT_BEGIN:
            what = f"at {r.a}.{r.b}"
        case Kind.SNAPSHOT_END:
            what = f"at {r.a}.{r.b}, later entries {'stay' if r.detail else 'go'}"
        case Kind.TOMBSTONE | Kind.FORGET:
            what = ""
    return f"{r.key} {kind.name} {what}".rstrip()


def describe_segment(scan: Scan, data: bytes) -> Iterator[str]:
    """A segment's lines: header, groups with their records, gaps, footer."""
    if scan.header is None:
        yield f"{scan.path.name}: {scan.fault}"
        return
    h = scan.header
    yield (
        f"{scan.path.name}: segment {h.sequence} id {h.segment_id:016x} node {h.node_id}, "
        f"{scan.length} bytes, {h.prepared_bytes} prepared{', recycled' if h.recycled else ''}"
    )
    places: list[tuple[int, GroupHeader | None, str]] = [(g.offset, g, "") for g in scan.groups]
    places += [(g.offset, None, f"{g.found.value}, next group at {g.end}") for g in scan.gaps]
    for offset, group, gap in sorted(places, key=lambda p: p[0]):
        if group is None:
            yield f"  {offset}: DAMAGED OR TORN: {gap}"
            continue
        yield (
            f"  {offset}: {GroupKind(group.kind).name} {group.record_count} records, {group.stored_bytes} bytes"
            f"{f' of {group.raw_bytes}' if group.codec else ''}, synced before {group.synced_offset}, "
            f"crc {group.crc:08x} after {group.prev_crc:08x}"
        )
        if group.kind == GroupKind.RECORDS:
            for record in decode_records(group_body(group, data, offset), group.record_count):
                yield f"    {describe_record(record)}"
        elif group.kind == GroupKind.FOOTER:
            for raw, row in (scan.footer or {}).items():
                yield (
                    f"    {stream_key(*raw)} {row.first} to {row.last}, groups {row.first_offset} to {row.last_offset}"
                )


def describe(directory: Path) -> Iterator[str]:
    """All lines of a log.

    Raises:
        SteleError: metadata that cannot be read.
    """
    found = read_metadata(OsFiles(), directory)
    metadata = found.metadata
    for name, fault in found.faults:
        yield f"{name}: {fault}"
    if metadata is None:
        yield f"{METADATA}: missing"
    else:
        p = metadata.position
        yield f"{METADATA}: node {metadata.node_id}, from segment {metadata.first_sequence} on, covers {p.sequence}:{p.offset}"
        for s in metadata.streams:
            flags = f"{' TOMBSTONED' if s.tombstoned else ''}{' DAMAGED' if s.damaged_at else ''}"
            yield f"  {s.key} term {s.hard.term} vote {s.hard.voted_for} start {s.start} last {s.last}{flags}"
    for path in sorted(directory.iterdir()):
        sequence = sequence_of(path.name)
        if sequence is None:
            sequence = sequence_of(path.name, "damaged")
        if sequence is not None:
            file = OsFiles().open(path)
            try:
                content = read_content(file)
            finally:
                file.close()
            yield from describe_segment(scan_segment(content, sequence, path), content.data)


def main(arguments: list[str]) -> int:
    """Print the log. Returns 0; 2 for bad usage; 5 if the metadata cannot be read."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m stele.wal.dump DIR (the directory of a log)", file=sys.stderr)
        return 2
    try:
        for line in describe(Path(arguments[0])):
            print(line)
    except SteleError as exc:
        print(exc, file=sys.stderr)
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
