"""What `Log.open` does before the first append: read all, decide what to keep, rewrite what may not be on
disk.

The order lets a crash at any point be recovered the same way. First the metadata marks damaged streams. Then
a new segment gets what was read after the last synced offset; it is synced before it gets its name. Only
then the old tail is cut. Invariant: what a replica is told at start is durable. A tail is cut only if nothing
proves that it was synced.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace

import structlog

from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import StreamKey
from stele.wal.appender import voids
from stele.wal.base import SharedLog
from stele.wal.clear import Suspects
from stele.wal.format import (
    GroupHeader,
    GroupKind,
    Kind,
    Record,
    SegmentHeader,
    decode_records,
    encode_footer,
    encode_group,
    encode_segment_header,
    group_body,
)
from stele.wal.link import Linked, Part, link
from stele.wal.metadata import Metadata, Position, mend_metadata, read_metadata, write_metadata
from stele.wal.options import HEADER_BYTES
from stele.wal.quarantine import evidence_end
from stele.wal.replay import Raw, Replay
from stele.wal.report import RecoveryReport, StreamState
from stele.wal.scan import Scan, scan_segment
from stele.wal.sectors import Content, is_bad_sector, read_content
from stele.wal.segment import (
    ActiveSegment,
    Chain,
    FooterRows,
    Ready,
    Segment,
    new_segment_id,
    prepared_name,
    segment_name,
    sequence_of,
)
from stele.wal.state import place

_log = structlog.get_logger("stele.wal")
_NO_POSITION = Position(0, 0)


@dataclass(slots=True)
class _Found:
    """What the directory holds."""

    metadata: Metadata | None
    scans: list[Scan]
    bytes_read: int


def recover(log: SharedLog) -> tuple[ActiveSegment, Chain]:
    """Fill `log` with what its directory holds. Returns the segment to continue in, and the chain.

    Raises: see Log.open.
    """
    found = _read_all(log)
    linked = link(found.scans, found.metadata)
    if found.metadata is None and linked.parts and _first_link(linked) != 0:
        raise Corrupt(
            f"{log.directory}: the file `metadata` is missing; restore it, or give the node an empty volume"
        )
    replay = Replay(found.metadata, log.cache)
    position = found.metadata.position if found.metadata is not None else _NO_POSITION
    rows = FooterRows()
    suffix = _replay_parts(log, linked, replay, position, rows)
    active, chain = _new_segment(log, linked, found.scans, suffix, replay)
    failed = Suspects(replay, found.metadata).judge(linked.damages)
    damaged = failed.keys() | {raw for raw, s in replay.states.items() if s.damaged}
    if damaged:
        here = place(active.sequence, active.offset)
        _mark_damaged(log, found.metadata, replay, sorted(damaged), here)
    _put_in_place(log, active)
    warnings = _warn(log, linked, replay)
    end = _end(linked)
    _settle_tail(log, linked, rows, bool(failed))
    _fill(log, linked, replay, failed, active, found.metadata)
    if found.metadata is None:
        write_metadata(
            log.files, log.directory, Metadata(log.node_id, log.first_sequence, 0, _NO_POSITION, ())
        )
    log.recovery = RecoveryReport(
        streams={
            key: StreamState(s.hard.term, s.hard.voted_for, s.start, s.last, s.tombstoned)
            for key, s in log.states.items()
        },
        failed={key: s.failed for key, s in log.states.items() if s.failed is not None},
        damages=tuple(d.what for d in linked.damages),
        warnings=tuple(warnings),
        segments=len(linked.parts),
        bytes_read=found.bytes_read,
        rewritten_bytes=sum(len(body) for body, _ in suffix),
        found=end,
    )
    return active, chain


def _end(linked: Linked) -> int:
    """The place after the last group that is kept; 0 if there is none, or if lost bytes may have followed
    it."""
    tail = linked.parts[-1] if linked.parts else None
    if tail is None or any(d.sequence >= tail.scan.sequence for d in linked.damages):
        return 0
    groups = tail.groups + tail.suffix
    return place(tail.scan.sequence, groups[-1].end if groups else HEADER_BYTES)


# --- reading


def _read_all(log: SharedLog) -> _Found:
    files, directory = log.files, log.directory
    files.make_directory(directory)
    both = read_metadata(files, directory)
    metadata = both.metadata
    if metadata is not None and metadata.node_id != log.node_id:
        raise Rejected(
            f"{directory}: the log belongs to node {metadata.node_id}, not to {log.node_id}; "
            "mount the node's own volume",
            code=Code.WRONG_NODE,
        )
    mend_metadata(files, directory, both)
    log.quarantine.find(files.names(directory))
    evidence = evidence_end(metadata.streams) if metadata is not None else 0
    for name in files.names(directory):
        if sequence_of(name, "prepared") is not None:
            files.unlink(directory / name)
    scans = []
    bytes_read = 0
    for name in files.names(directory):
        sequence = sequence_of(name)
        if sequence is None:
            continue
        if metadata is not None and sequence < metadata.first_sequence:
            if sequence < evidence:
                log.quarantine.take(directory / name, sequence)
            else:
                log.pool.adopt(directory / name)
            continue
        content = _read(log, name)
        bytes_read += len(content.data)
        scan = scan_segment(content, sequence, directory / name)
        del content  # free it before the next one is read
        if scan.header is not None and scan.header.node_id != log.node_id:
            raise Rejected(
                f"{scan.path}: the segment belongs to node {scan.header.node_id}, not to {log.node_id}; "
                "mount the node's own volume",
                code=Code.WRONG_NODE,
            )
        scans.append(scan)
    scans.sort(key=lambda s: s.sequence)
    return _Found(metadata, scans, bytes_read)


def _read(log: SharedLog, name: str) -> Content:
    file = log.files.open(log.directory / name)
    try:
        return read_content(file)
    finally:
        file.close()


def _body(content: Content, group: GroupHeader, name: str) -> bytes:
    """The body of a group that was whole when the file was scanned.

    Raises:
        OSError: a sector went bad since then. The next start's scan will find it.
    """
    if content.lost(group.offset, group.end):
        raise OSError(errno.EIO, "a sector went bad while the log was read; start the node again", name)
    return group_body(group, content.data, group.offset)


def _first_link(linked: Linked) -> int:
    """The segment id that the log's first group names as its predecessor; 0 at the very beginning, -1 if
    unknown."""
    first = linked.parts[0]
    groups = first.groups + first.suffix
    return groups[0].prev_segment_id if groups and groups[0].offset == HEADER_BYTES else -1


def _replay_parts(
    log: SharedLog, linked: Linked, replay: Replay, position: Position, rows: FooterRows
) -> list[tuple[bytes, int]]:
    """Replay all groups but the suffix, which is not proved to be synced (see `Part`).

    Returns (body, number of records) of each group of the suffix. Fills `rows` with what the last segment
    holds of each stream.
    """
    suffix: list[tuple[bytes, int]] = []
    for part in linked.parts:
        if part.scan.header is None:
            continue
        is_last = part is linked.parts[-1]
        name = part.scan.path.name
        content = _read(log, name)
        sequence = part.scan.sequence
        for group in part.groups:
            if group.kind != GroupKind.RECORDS:
                continue
            covered = (sequence, group.offset) < (position.sequence, position.offset)
            if not covered:
                replay.at_position()
            for record in decode_records(_body(content, group, name), group.record_count):
                replay.apply(record, sequence, group.offset, covered)
                if is_last:
                    _touch(rows, record, group.offset)
        for group in part.suffix:
            if group.kind == GroupKind.RECORDS:
                suffix.append((_body(content, group, name), group.record_count))
        del content  # free it before the next one is read
    replay.at_position()
    return suffix


def _touch(rows: FooterRows, r: Record, offset: int) -> None:
    if r.kind == Kind.ENTRY:
        rows.touch((r.tablet, r.replica), offset, r.a, r.b, r.b)
    else:
        rows.touch((r.tablet, r.replica), offset, 0, 0, voids(r.kind, r.detail, r.b))


# --- the new segment


def _new_segment(
    log: SharedLog, linked: Linked, scans: list[Scan], suffix: list[tuple[bytes, int]], replay: Replay
) -> tuple[ActiveSegment, Chain]:
    """A segment with the suffix, synced but not yet named. Replays the suffix at its new place."""
    low = log.first_sequence if not scans else scans[-1].sequence + 1
    sequence = max([low, *(d.sequence + 1 for d in linked.damages)])
    header = SegmentHeader(log.node_id, sequence, new_segment_id(), HEADER_BYTES, False)
    file = log.files.create(log.directory / prepared_name(0))
    file.write([encode_segment_header(header)], 0)
    chain = Chain(*linked.prev)
    active = ActiveSegment(Ready(file, log.directory / segment_name(sequence), header), chain, None)
    for body, count in suffix:
        # The file is synced before it gets its name, so whoever sees it may rely on all of it.
        offset = active.stage(GroupKind.RECORDS, [body], count, synced=active.offset)
        for record in decode_records(body, count):
            replay.apply(record, sequence, offset, False)
            _touch(active.rows, record, offset)
    active.stage(GroupKind.SYNCED, [], 0, synced=active.offset)
    active.write()
    active.sync()
    active.compression = log.options.compression
    return active, chain


def _put_in_place(log: SharedLog, active: ActiveSegment) -> None:
    log.files.rename(log.directory / prepared_name(0), active.path)
    log.files.sync_directory(log.directory)


def _mark_damaged(
    log: SharedLog, metadata: Metadata | None, replay: Replay, damaged: list[Raw], here: int
) -> None:
    """Write into the metadata which streams are damaged, before this start removes the evidence.

    `here`: the place where appends go on. Only records from there on can end the damage."""
    known = (
        {(bytes.fromhex(s.key.tablet_id), int(s.key.replica_id)): s for s in metadata.streams}
        if metadata
        else {}
    )
    for raw in damaged:
        state = replay.placeholder(raw)
        state.damaged_at = state.damaged_at or here
        known[raw] = replace(known.get(raw) or state.saved(), damaged_at=state.damaged_at)
    base = metadata or Metadata(log.node_id, 0, 0, _NO_POSITION, ())
    write_metadata(log.files, log.directory, replace(base, streams=tuple(known.values())))


# --- what is left behind


def _warn(log: SharedLog, linked: Linked, replay: Replay) -> list[str]:
    warnings = []
    for scan, gap, groups in linked.cut:
        behind = _opids(log, scan, groups)
        size = _cut_bytes(gap.dirty_bytes, gap.offset, groups)
        text = f"{scan.path}: cut a torn tail of {size} bytes at {gap.offset}"
        if behind:
            text += f"; also cut whole groups behind it, which were never acknowledged: {behind}"
        text += "; the log continues after " + (
            ", ".join(f"{s.key} {s.last}" for s in replay.by_key().values() if not s.tombstoned)[:500]
            or "nothing"
        )
        warnings.append(text)
    for warning in warnings:
        _log.warning(warning)
    for damage in linked.damages:
        _log.error(
            "the log is damaged; streams that it may concern are FAILED and will be copied",
            what=damage.what,
            segment=damage.sequence,
            offset=damage.offset,
        )
    return warnings


def _cut_bytes(dirty: int, offset: int, groups: list[GroupHeader]) -> int:
    return max(dirty, groups[-1].end - offset) if groups else dirty


def _opids(log: SharedLog, scan: Scan, groups: list[GroupHeader]) -> str:
    if not groups:
        return ""
    content = _read(log, scan.path.name)
    rows = FooterRows()
    for group in groups:
        if group.kind == GroupKind.RECORDS:
            for record in decode_records(_body(content, group, scan.path.name), group.record_count):
                _touch(rows, record, group.offset)
    return ", ".join(
        f"{StreamKey(raw[0].hex(), raw[1])} {row.first} to {row.last}"  # type: ignore[arg-type]
        for raw, row in rows.rows.items()
        if row.first is not None
    )


def _settle_tail(log: SharedLog, linked: Linked, rows: FooterRows, failed: bool) -> None:
    """Close the old tail at its synced offset, and give files that nobody needs to the pool.

    Damaged files stay. While a stream is FAILED, so do files that may hold evidence."""
    tail = linked.parts[-1] if linked.parts else None
    spare = [s for s in linked.spare if not failed or not (s.groups or s.gaps or s.header is None)]
    if tail is not None and tail.scan.header is not None and not tail.damages:
        if not tail.groups:
            linked.parts.pop()
            if not failed or not tail.scan.gaps:
                spare.append(tail.scan)  # the new segment has all that it held
        elif tail.groups[-1].kind != GroupKind.FOOTER:
            _close_if_possible(log, tail, rows)
    for scan in spare:
        log.pool.adopt(scan.path, sound=not scan.unreadable)
    log.pool.sync_names()


def _close_if_possible(log: SharedLog, tail: Part, rows: FooterRows) -> None:
    """Close the tail. A file with a bad sector may refuse; then its successor's first group says where it
    ends.

    Raises:
        OSError: the disk failed, although it can read all of the file.
    """
    try:
        _close(log, tail, rows)
    except OSError as exc:
        if not (tail.scan.unreadable and is_bad_sector(exc)):
            raise
        _log.warning(
            "cannot write the segment's footer; the next segment says where it ends",
            path=str(tail.scan.path),
            error=str(exc),
        )


def _close(log: SharedLog, tail: Part, rows: FooterRows) -> None:
    assert tail.scan.header is not None
    segment_id = tail.scan.header.segment_id
    offset = tail.groups[-1].end
    buffers, length, _ = encode_group(
        GroupKind.FOOTER,
        [encode_footer(rows.rows.items())],
        len(rows.rows),
        segment_id=segment_id,
        prev_segment_id=segment_id,
        prev_crc=tail.groups[-1].crc,
        offset=offset,
        synced_offset=offset,
    )
    file = log.files.open(tail.scan.path)
    try:
        file.write(buffers, offset)
        file.truncate(offset + length)
        file.full_sync()
    finally:
        file.close()
    tail.scan.length = offset + length


def _fill(
    log: SharedLog,
    linked: Linked,
    replay: Replay,
    failed: dict[Raw, str],
    active: ActiveSegment,
    metadata: Metadata | None,
) -> None:
    for raw, why in failed.items():
        state = replay.placeholder(raw)
        state.failed, state.damaged = why, True
    log.states = replay.by_key()
    named = linked.prev[0]
    for part in reversed(linked.parts):
        scan = part.scan
        # A segment without a readable header has the id that its successor's first group names.
        segment_id = scan.header.segment_id if scan.header is not None else named
        log.segments[scan.sequence] = Segment(
            scan.sequence, scan.path, segment_id, scan.length, not scan.unreadable
        )
        groups = part.groups + part.suffix
        named = groups[0].prev_segment_id if groups and groups[0].offset == HEADER_BYTES else segment_id
    header = active.header
    log.segments[header.sequence] = Segment(header.sequence, active.path, header.segment_id, 0)
    log.active_length = active.offset
    log.first_sequence = min(log.segments)
    log.collected_id = metadata.collected_id if metadata is not None else 0
