"""Puts scanned segments in order and decides which groups of each to keep. Called by recovery; opens no
files.

Every segment's first group names the group before it, by segment and CRC. So the end of each segment but the last is
known. What lies after that end is ignored: a recovery has dropped it, or has written it again in the next segment.
Invariant: a gap before a known end, or below a synced offset, is damage and is never cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stele.wal.format import FooterRow, GroupHeader
from stele.wal.metadata import Metadata
from stele.wal.options import HEADER_BYTES
from stele.wal.quarantine import evidence_end
from stele.wal.scan import Behind, Found, Gap, Scan, Verdict, judge


@dataclass(frozen=True, slots=True)
class Damage:
    """Lost bytes of segment `sequence`, from `offset` to `end` (None: the end is unknown)."""

    sequence: int
    offset: int
    end: int | None
    what: str
    footer: dict[tuple[bytes, int], FooterRow] | None


@dataclass(slots=True)
class Part:
    """What is kept of a segment. `suffix`: groups of the last segment that are not proved to be synced."""

    scan: Scan
    groups: list[GroupHeader]
    suffix: list[GroupHeader] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)


@dataclass(slots=True)
class Linked:
    """The log in order. `spare`: files that nobody needs. `cut`: what was cut from the torn tail."""

    parts: list[Part] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    spare: list[Scan] = field(default_factory=list)
    cut: list[tuple[Scan, Gap, list[GroupHeader]]] = field(default_factory=list)
    prev: tuple[int, int] = (0, 0)
    synced_offset: int = HEADER_BYTES


_Named = tuple[int, int] | None


def link(scans: list[Scan], metadata: Metadata | None) -> Linked:
    """Order the scans and decide what to keep. `scans` come by rising sequence."""
    linked = Linked()
    expected = _expected(metadata)
    last = max((i for i in range(len(scans)) if _was_in_use(scans, i, metadata)), default=-1)
    for scan in scans[last + 1 :]:
        linked.spare.append(scan)
        linked.cut += [(scan, gap, []) for gap in scan.gaps]
    if expected and (last < 0 or scans[last].sequence < expected):
        linked.damages.append(
            Damage(
                expected,
                HEADER_BYTES,
                None,
                f"segment {expected} is missing, although the metadata names it",
                None,
            )
        )
    named: _Named = None
    is_tail = True
    at = last
    while at >= 0:
        scan = scans[at]
        if scan.header is None:
            part = Part(scan, [])
            part.damages.append(Damage(scan.sequence, 0, None, scan.fault, None))
            named = None
        elif is_tail:
            part = _tail(scan, metadata, linked)
            named = _first_names(part.groups + part.suffix)
        else:
            part = _closed(scan, named)
            named = _first_names(part.groups)
        is_tail = False
        linked.parts.append(part)
        linked.damages += part.damages
        if named is None:
            low = metadata.first_sequence if metadata is not None else 0
            at = at - 1 if at and scans[at - 1].sequence >= low else -1
        elif named[0] == 0:
            at = -1
        else:
            at = _predecessor(scans, at, named[0], linked, metadata, scan.sequence)
    linked.parts.reverse()
    used = {p.scan.sequence for p in linked.parts}
    linked.spare += [s for s in scans[: last + 1] if s.sequence not in used]
    _set_prev(linked)
    return linked


def _was_in_use(scans: list[Scan], at: int, metadata: Metadata | None) -> bool:
    """Whether the segment held groups, or may have."""
    scan = scans[at]
    if scan.groups or scan.shortened or scan.header is None or scan.sequence == _expected(metadata):
        return True
    return scan.may_hold_unread and not _only_prepared(scans, at, metadata)


def _only_prepared(scans: list[Scan], at: int, metadata: Metadata | None) -> bool:
    """Whether this segment was only prepared: the one before it is whole and not closed. A segment is closed
    before the next one gets its first group.

    Also False where this is unknown: the segment before has damage, or may be kept as evidence of earlier
    damage."""
    if not at or (metadata is not None and evidence_end(metadata.streams)):
        return False
    before = scans[at - 1]
    whole = before.header is not None and bool(before.groups) and not before.gaps and not before.unreadable
    return whole and not before.has_footer


def _expected(metadata: Metadata | None) -> int:
    """The sequence of the segment in use at the metadata's position; 0 for none."""
    position = metadata.position if metadata is not None else None
    return position.sequence if position is not None and position.offset > HEADER_BYTES else 0


def _set_prev(linked: Linked) -> None:
    """Set what the next segment's first group must name."""
    for part in reversed(linked.parts):
        if part.scan.header is None:
            continue
        if part.groups:
            linked.prev = (part.scan.header.segment_id, part.groups[-1].crc)
            return
        if part.suffix:
            first = part.suffix[0]
            linked.prev = (first.prev_segment_id, first.prev_crc)
            return


def _first_names(groups: list[GroupHeader]) -> _Named:
    if groups and groups[0].offset == HEADER_BYTES:
        return groups[0].prev_segment_id, groups[0].prev_crc
    return None


def _predecessor(
    scans: list[Scan], before: int, segment_id: int, linked: Linked, metadata: Metadata | None, sequence: int
) -> int:
    """Return the position in `scans` of the segment with this id, below `before`; -1 if it was collected or is
    lost. If its header may be the damaged one, return the position of that file."""
    for i in range(before - 1, -1, -1):
        header = scans[i].header
        if header is not None and header.segment_id == segment_id:
            return i
    if metadata is not None and metadata.collected_id == segment_id:
        return -1
    for i in range(before - 1, -1, -1):
        if scans[i].header is None:
            return i
    what = f"the segment before {sequence} is missing"
    linked.damages.append(Damage(sequence - 1, 0, None, what, None))
    return -1


def _closed(scan: Scan, named: _Named) -> Part:
    """Return what is kept of a segment that is not the last. `named`: (segment id, CRC) of its last group, as the
    next segment says; None if that segment's beginning is lost."""
    groups = scan.groups
    missing = False
    if named is not None:
        at = next((i for i, g in enumerate(groups) if g.crc == named[1]), None)
        if at is None:
            missing = True
        else:
            groups = groups[: at + 1]
    else:
        missing = not scan.has_footer
    part = Part(scan, list(groups))
    end = groups[-1].offset if groups and not missing else scan.length + 1
    for gap in scan.gaps:
        if gap.offset < end and judge(gap.found, False, Behind.SYNCED) is Verdict.REFUSE:
            part.damages.append(_damage(scan, gap))
    if missing and not (part.damages and part.damages[-1].end is None):
        what = f"{scan.path}: groups behind {scan.end} are missing"
        part.damages.append(Damage(scan.sequence, scan.end, None, what, scan.footer))
    return part


def _tail(scan: Scan, metadata: Metadata | None, linked: Linked) -> Part:
    """Return what is kept of the log's last segment. That is the last one with a whole group, or one that the
    metadata says had a group."""
    assert scan.header is not None
    synced = max([HEADER_BYTES, *(g.synced_offset for g in scan.groups)])
    if metadata is not None and metadata.position.sequence == scan.sequence:
        synced = max(synced, metadata.position.offset)
    if scan.shortened:
        # A prepared file's length was synced before it was taken into use, so no crash can shorten it.
        synced = max(synced, scan.header.prepared_bytes)
    part = Part(scan, [])
    end = None
    for gap in scan.gaps:
        behind = Behind.SYNCED if gap.offset < synced else Behind.UNSYNCED if gap.end else Behind.NOTHING
        if judge(gap.found, True, behind) is Verdict.REFUSE:
            part.damages.append(_damage(scan, gap))
        else:
            end = gap.offset
            cut = [g for g in scan.groups if g.offset > gap.offset]
            linked.cut.append((scan, gap, cut))
            break
    if end is None and scan.end < synced and not (part.damages and part.damages[-1].end is None):
        gap = Gap(scan.end, None, Found.BLANK, synced - scan.end)
        part.damages.append(_damage(scan, gap))
    kept = [g for g in scan.groups if end is None or g.offset < end]
    part.groups = [g for g in kept if g.end <= synced]
    part.suffix = [g for g in kept if g.end > synced]
    linked.synced_offset = part.groups[-1].end if part.groups else HEADER_BYTES
    return part


def _damage(scan: Scan, gap: Gap) -> Damage:
    what = f"{scan.path}: {gap.found.value} at {gap.offset}, where a synced group stood"
    return Damage(scan.sequence, gap.offset, gap.end, what, scan.footer)
