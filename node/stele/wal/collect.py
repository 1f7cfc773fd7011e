"""Garbage collection of whole closed segments. Called by log.py, one at a time.

Order: choose segments, raise the streams' starts, make the metadata durable, then remove. Invariant: a
segment goes only after the metadata that replaces its hard state is on disk. All its entries are flushed, and
no anchor needs one. If the disk lacks space, anchors that give way are ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import structlog

from stele.model.ids import OpId, StreamKey
from stele.wal.append_queue import Checkpoint
from stele.wal.base import SharedLog
from stele.wal.metadata import Metadata, write_metadata
from stele.wal.quarantine import evidence_end
from stele.wal.report import Collected
from stele.wal.segment import Segment
from stele.wal.state import State

_log = structlog.get_logger("stele.wal")


def collect(log: SharedLog, take_checkpoint: Callable[[], Checkpoint]) -> Collected:
    """See Log.collect. `take_checkpoint` returns the streams' states at a synced place of the log."""
    with log.lock:
        evidence = evidence_end(log.states.values())
    if not evidence:
        log.quarantine.clear()
    log.refresh_space()
    if _lacking(log) > 0:
        log.pool.empty()
        log.refresh_space()
    with log.lock:
        dropped = _drop_anchors(log)
        closed = sorted(s for s in log.segments if s < log.active_sequence)
        if not closed:
            return _report(log, 0, dropped)
        keep_from = _give_way(log, _lowest_needed(log), dropped)
        victims = [s for s in closed if s < keep_from]
        if not victims:
            return _report(log, 0, dropped)
        log.untold_starts |= _raise_starts(log, keep_from)
    checkpoint = take_checkpoint()
    assert checkpoint.position is not None
    # Segments that an earlier collection left for a reader do not mark the log's beginning.
    last = victims[-1]
    collected_id = log.segments[last].segment_id if last >= log.first_sequence else log.collected_id
    write_metadata(
        log.files,
        log.directory,
        Metadata(log.node_id, keep_from, collected_id, checkpoint.position, checkpoint.saved),
    )
    with log.lock:
        log.first_sequence, log.collected_id = keep_from, collected_id
        going: list[Segment] = []
        for sequence in victims:
            segment = log.segments[sequence]
            # A segment that is being read stays until the next collection. The metadata already omits it.
            if not segment.readers:
                going.append(log.segments.pop(sequence))
    gone = _give_up(log, going, evidence)
    log.stats.segments_collected += gone
    log.stats.segments_recycled = log.pool.recycled
    return _report(log, gone, dropped)


def _give_up(log: SharedLog, going: list[Segment], evidence: int) -> int:
    """Move or remove the files; returns how many went. A file that cannot go is listed again and tried the
    next time.

    Until then its bytes count as used. The directory needs no sync. If a removed file comes back after a crash,
    the next start removes it again, because the metadata no longer names it."""
    left: dict[int, Segment] = {}
    for segment in going:
        try:
            if segment.sequence < evidence:
                log.quarantine.take(segment.path, segment.sequence)
            else:
                log.pool.adopt(segment.path, sound=segment.sound)
        except FileNotFoundError:
            continue  # somebody removed it
        except OSError as exc:
            if not left:
                _log.warning(
                    "cannot remove or recycle a segment; the next collection tries again",
                    path=str(segment.path),
                    error=str(exc),
                )
            left[segment.sequence] = segment
    with log.lock:
        log.segments.update(left)
    return len(going) - len(left)


def _report(log: SharedLog, segments: int, dropped: list[tuple[StreamKey, str, int]]) -> Collected:
    """Report what this collection did. Includes the starts that an earlier collection raised before it failed."""
    starts, log.untold_starts = log.untold_starts, {}
    return Collected(segments, starts, tuple(dropped))


def bytes_from_each(log: SharedLog) -> dict[int, int]:
    """For each segment, the bytes of the closed segments from it on. Computed once for all streams, under the
    lock."""
    held, total = {}, 0
    for sequence in sorted(log.segments, reverse=True):
        total += log.segments[sequence].length
        held[sequence] = total
    return held


def _segment_of(state: State, index: int) -> int | None:
    """The segment of the entry at `index`, or of the first entry above it; None if there is none."""
    at = state.extents.find(max(index, state.start.index + 1))
    return None if at is None else state.extents[at].sequence


def _lowest_needed(log: SharedLog, *, firmly: bool = False) -> int:
    """The lowest segment with an entry that someone needs; at most the active one.

    `firmly`: ignore anchors that give way, as when the disk lacks space."""
    lowest = log.active_sequence
    for state in log.states.values():
        if state.needs_nothing:
            continue
        anchors = [a.index for a in state.anchors.values() if not (firmly and a.gives_way)]
        sequence = _segment_of(state, min([state.flushed + 1, *anchors]))
        if sequence is not None:
            lowest = min(lowest, sequence)
    return lowest


def _lacking(log: SharedLog) -> int:
    """How many bytes must be freed before one more segment leaves `low_space_bytes` free. 0 or less: none."""
    return log.options.low_space_bytes + log.options.segment_bytes - log.free_bytes


def _give_way(log: SharedLog, keep_from: int, dropped: list[tuple[StreamKey, str, int]]) -> int:
    """Return the lowest segment to keep: `keep_from`, or a later one if the disk lacks space.

    In that case, segments that are needed only by anchors with `gives_way` may go: the oldest first, as many as
    the disk needs. Adds these anchors to `dropped`."""
    lacking = _lacking(log)
    if lacking <= 0:
        return keep_from
    firmly, needed_from = _lowest_needed(log, firmly=True), keep_from
    known = sorted(log.segments)
    for oldest, behind in itertools.pairwise(known):
        if lacking <= 0 or behind > firmly:
            break
        lacking -= log.segments[oldest].length
        keep_from = max(keep_from, behind)
    if keep_from == needed_from:
        return keep_from
    gave_way = []
    for state in log.states.values():
        if state.needs_nothing:
            continue
        for name, anchor in state.anchors.items():
            sequence = _segment_of(state, anchor.index)
            if sequence is not None and sequence < keep_from:
                gave_way.append((state.key, name, anchor.index))
    _log.warning(
        "the disk is nearly full: log kept for peers is removed; peers that still need it will be copied",
        free_bytes=log.free_bytes,
        streams=len(gave_way),
        segments=sum(needed_from <= s < keep_from for s in known),
    )
    dropped += gave_way
    return keep_from


def _raise_starts(log: SharedLog, keep_from: int) -> dict[StreamKey, OpId]:
    """Raise the starts of streams whose first entries are in segments that go. Returns the new starts."""
    starts = {}
    for state in log.states.values():
        if state.tombstoned or state.failed is not None or not len(state.extents):
            continue
        first = state.extents.first_at_or_behind(keep_from)
        before = state.start
        state.raise_start(state.extents.last if first is None else first - 1)
        if state.start != before:
            starts[state.key] = state.start
    return starts


def _drop_anchors(log: SharedLog) -> list[tuple[StreamKey, str, int]]:
    """Drop the anchors that hold more of the log than `anchor_bytes_max`."""
    dropped: list[tuple[StreamKey, str, int]] = []
    held_from = bytes_from_each(log)
    if log.active_length + max(held_from.values(), default=0) <= log.anchor_bytes_max:
        return dropped
    for state in log.states.values():
        if state.needs_nothing:
            continue  # its entries may be in segments that are gone
        for name, anchor in list(state.anchors.items()):
            sequence = _segment_of(state, anchor.index)
            if sequence is None:
                continue
            held = log.active_length + held_from[sequence]
            if held > log.anchor_bytes_max:
                del state.anchors[name]
                dropped.append((state.key, name, anchor.index))
                _log.warning(
                    "anchor dropped, because it held too much of the log; a replica that needs that part is copied anew",
                    stream=str(state.key),
                    anchor=name,
                    index=anchor.index,
                    bytes=held,
                )
    return dropped
