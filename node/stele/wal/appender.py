"""Writing: drain the queue, write, sync once, run the callbacks; and the thread that does it. Owned by
log.py.

Everything here belongs to the current writer (append_queue.py): this thread, or the event loop's
(loop_writer.py). Invariant: `done` callbacks run in the order of the appends, and in sync mode `always` only
after a sync covered them. After a failed write or sync nothing is written and no `done` ever runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import structlog

from stele import metrics
from stele.model.entry import Entry
from stele.model.errors import Code, Corrupt, ensure
from stele.wal.append_queue import Checkpoint, Done, Item, Rewritten, SmallBatchWriter, Writer, Written
from stele.wal.base import SharedLog
from stele.wal.format import RECORD, GroupKind, Kind, Record
from stele.wal.options import SyncMode
from stele.wal.segment import ActiveSegment, Chain
from stele.wal.state import State, place

_log = structlog.get_logger("stele.wal")

P = ParamSpec("P")
T = TypeVar("T")
_SOFT = frozenset((Kind.ENTRY, Kind.TRUNCATE, Kind.SNAPSHOT_BEGIN))
_RECORD_BYTES = RECORD.size
_ENTRY = int(Kind.ENTRY)
_pack = RECORD.pack


def voids(kind: int, detail: int, index: int) -> int:
    """The highest index that a record voids (for the footer); 0 if it voids none. Not for entries."""
    if kind == Kind.TRUNCATE:
        return index
    if kind == Kind.SNAPSHOT_END and not detail:
        return (1 << 63) - 1
    return 0


def call_all(callbacks: Sequence[Done]) -> None:
    """Run all callbacks, even if one of them fails."""
    for callback in callbacks:
        try:
            callback()
        except Exception:  # noqa: BLE001 - the other callbacks must still run
            _log.exception("a callback of the log failed")


_Row = tuple[State, int, int, int, int, Sequence[Entry]]
"""(stream, kind, first index, last index, term or flag, new entries for the cache), of one record or run of
entries."""


class _Group:
    """Records that will form one group, and what the index needs to know of them."""

    __slots__ = ("count", "index", "pieces", "size")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.count = 0
        self.index: list[_Row] = []


class Appender:
    """Owns the active segment and the chain of groups. See the module's docstring for who may call it."""

    def __init__(self, log: SharedLog, active: ActiveSegment, chain: Chain) -> None:
        self.active = active
        self.chain = chain
        self.synced_place = place(active.sequence, active.synced)
        self.unsettled: SmallBatchWriter | None = None
        """Writes small batches in the loop's thread, and knows the batch whose background sync has not
        ended."""
        self._written: list[Done] = []  # callbacks for what is written now
        self._log = log
        self._unindexed: list[tuple[int, int, list[_Row]]] = []  # sequence, offset of the group, its rows
        self._unsynced_since = 0.0
        self._sync_times = metrics.wal_sync_seconds.cell()
        self._worker = threading.Thread(target=self._run, name="stele-wal-appender", daemon=True)

    def start(self) -> None:
        """Start the thread that drains the queue."""
        self._worker.start()

    def join(self) -> None:
        """Drain the queue, close the segment, end the thread. The log must be closing or failed."""
        if self._worker.ident is None:
            self.turn()
        else:
            self._worker.join()

    def turn(self) -> None:
        """Write one batch in the caller's thread, or end a closing log. For logs opened without threads."""
        self.guard(self._one_turn)

    def guard(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Do the writer's work. An exception fails the log; then this returns None, now and on every later
        call."""
        try:
            if self._log.failed is None:
                return work(*args, **kwargs)
        except OSError as exc:
            error = Corrupt(
                f"log {self.active.path}: {exc}; this log acknowledges nothing more; check the disk",
                code=Code.IO_ERROR,
            )
            # It is not raised here, so set its cause by hand: the cause says whether the disk is full or
            # broken.
            error.__cause__ = exc
            self._log.fail(error)
        except Exception as exc:  # noqa: BLE001 - the log must not go on as if it had written
            self._log.fail(exc)
        return None

    # --- the thread

    def _run(self) -> None:
        self.guard(self._all_turns)

    def _one_turn(self) -> None:
        log, append_queue = self._log, self._log.append_queue
        with log.lock:
            if append_queue.writer is not Writer.THREAD:
                ensure(
                    append_queue.writer is not Writer.LOOP,
                    f"log {log.directory}: turn() was called inside a turn of the event loop",
                )
                append_queue.pass_writer(append_queue.writer, Writer.THREAD)
        self._settle()
        if append_queue.items:
            self._batch()
        if append_queue.closing:
            self._finish()
        with log.lock:
            append_queue.pass_writer(Writer.THREAD, Writer.NOBODY)

    def _all_turns(self) -> None:
        append_queue = self._log.append_queue
        worked = False
        while self._wait(worked):
            worked = True
            self._settle()
            if append_queue.closing and not append_queue.items:  # a closing log accepts no appends
                self._finish()
                return
            self._batch()

    def _wait(self, worked: bool) -> bool:
        """Wait until the thread is the writer and has work. False once the log has failed.

        After each batch of its own, the thread first offers the queue to the loop. Otherwise a busy log would
        never return to the loop.
        """
        log, append_queue = self._log, self._log.append_queue
        with log.lock:
            while log.failed is None:
                if append_queue.writer is Writer.THREAD:
                    if self.unsettled is not None or append_queue.closing:
                        return True
                    if not append_queue.items:
                        append_queue.pass_writer(Writer.THREAD, Writer.NOBODY)
                    elif not worked or not append_queue.give_to_loop():
                        return True
                timeout = self._sync_due()
                if append_queue.writer is Writer.NOBODY and (append_queue.closing or timeout == 0.0):
                    append_queue.pass_writer(Writer.NOBODY, Writer.THREAD)
                    return True
                if append_queue.writer is Writer.KERNEL and append_queue.closing:
                    append_queue.pass_writer(Writer.KERNEL, Writer.THREAD)
                    return True
                append_queue.wake.wait(timeout)
                worked = False
        return False

    def _settle(self) -> None:
        """End the batch that the event loop began."""
        if self.unsettled is not None:
            dones = self.unsettled.settle()
            if dones:
                self._log.dispatch(dones)

    def _batch(self) -> None:
        """Write all that is queued, sync it once, and run its callbacks."""
        log = self._log
        with log.lock:
            items = log.append_queue.take()
            checkpoints = [i[2] for i in items if isinstance(i[2], Checkpoint)]
            if checkpoints:
                saved = tuple(s.saved() for s in log.states.values())
        force = not items or self.write(items)
        if self._written:
            log.dispatch(self.take_written())
        dones = [done for _, _, _, done in items if done is not None]
        if force or log.options.sync is SyncMode.ALWAYS:
            self._sync()
        elif not self._unsynced_since:
            self._unsynced_since = time.monotonic()
        self.update_index()
        for checkpoint in checkpoints:
            checkpoint.saved = saved
            checkpoint.position = self.active.position
            checkpoint.ready.set()
        if dones:
            log.dispatch(dones)
        self.mark_synced()

    def _sync_due(self) -> float | None:
        """Seconds until a sync is due in mode `interval`; None while there is nothing to sync."""
        if not self._unsynced_since or self._log.options.sync is not SyncMode.INTERVAL:
            return None
        due = self._unsynced_since + self._log.options.sync_interval_ms / 1000 - time.monotonic()
        return max(due, 0.0)

    # --- writing

    def write(self, items: list[Item]) -> bool:
        """Encode and write the items. Returns whether one of them must be synced in every sync mode."""
        force = False
        group = _Group()
        limit = self._log.options.group_bytes_max
        for state, entries, record, _ in items:
            if entries is not None:
                assert state is not None
                self._add_entries(group, state, entries, again=type(record) is Rewritten)
            elif isinstance(record, Record):
                assert state is not None
                self._add_record(group, state, record)
                force |= record.kind not in _SOFT
            elif isinstance(record, Written):
                self._written.append(record.done)
            else:
                force = True
            if group.size >= limit:
                self._stage(group)
                group = _Group()
        if group.count:
            self._stage(group)
        self._write_staged()
        self._log.stats.batches += 1
        return force

    def take_written(self) -> list[Done]:
        """Return, once, the callbacks that waited until their items were written."""
        written, self._written = self._written, []
        return written

    def _add_entries(self, group: _Group, state: State, entries: Sequence[Entry], *, again: bool) -> None:
        """Put one call's entries into one group, so that a crash keeps all of them or none."""
        tablet, replica = state.raw
        pieces = group.pieces
        first, term = entries[0].index, entries[0].term
        for e in entries:
            payload = e.payload
            length = len(payload)
            if e.term != term:
                group.index.append((state, _ENTRY, first, e.index - 1, term, ()))
                first, term = e.index, e.term
            pieces.append(_pack(_ENTRY, e.kind, 0, length, tablet, replica, term, e.index, e.timestamp))
            pieces.append(payload if type(payload) is bytes else bytes(payload))
            group.size += length + _RECORD_BYTES
        group.count += len(entries)
        group.index.append((state, _ENTRY, first, e.index, term, () if again else entries))

    def _add_record(self, group: _Group, state: State, r: Record) -> None:
        group.pieces.append(RECORD.pack(r.kind, r.detail, 0, len(r.blob), r.tablet, r.replica, r.a, r.b, r.c))
        if r.blob:
            group.pieces.append(r.blob)
        group.size += _RECORD_BYTES + len(r.blob)
        group.count += 1
        group.index.append((state, r.kind, r.b, r.b, r.detail, ()))

    def _stage(self, group: _Group) -> None:
        if not self.active.fits(group.size):
            self._roll()
        active, stats = self.active, self._log.stats
        offset = active.stage(GroupKind.RECORDS, group.pieces, group.count)
        touch = active.rows.touch
        for state, kind, first, last, term, _ in group.index:
            if kind == _ENTRY:
                touch(state.raw, offset, term, first, last)
            else:
                touch(state.raw, offset, 0, 0, voids(kind, term, last))
        self._unindexed.append((active.sequence, offset, group.index))
        stats.records += group.count
        stats.groups += 1

    def _write_staged(self) -> None:
        self._log.stats.bytes_written += self.active.write()

    def _sync(self) -> None:
        begin = time.monotonic()
        if self.active.synced < self.active.offset:
            self.active.sync()
        self.synced(time.monotonic() - begin)

    def synced(self, took: float) -> None:
        """Record that a sync of all that was written has returned, after `took` seconds."""
        self.synced_place = place(self.active.sequence, self.active.synced)
        stats = self._log.stats
        stats.syncs += 1
        stats.last_sync_seconds = took
        self._sync_times.add(took)
        if took > stats.worst_sync_seconds:
            stats.worst_sync_seconds = took
        self._unsynced_since = 0.0

    def mark_synced(self) -> None:
        """Write a SYNCED marker, unsynced, if the queue is empty. Damage below it is then never taken for a
        torn tail."""
        active = self.active
        if active.synced < active.offset or active.last_kind is not GroupKind.RECORDS:
            return
        if self._log.append_queue.items:
            return
        active.stage(GroupKind.SYNCED, [], 0)
        self._write_staged()
        self._log.stats.markers += 1

    def _roll(self) -> None:
        """Go on in the next segment if it is ready. Otherwise stay in this one, past its prepared part."""
        active = self.active
        ensure(
            self._log.append_queue.writer is not Writer.LOOP,
            "log: a segment must not be closed in the loop's thread",
        )
        if active.empty:
            return  # a group that is larger than a whole segment
        ready = self._log.take_next(active.sequence)
        if ready is None:
            self._log.stats.overruns += 1
            return
        self._write_staged()
        # The next segment's first group says that all of this one was synced, so sync it now.
        begin = time.monotonic()
        active.finish(cut=False)
        self._sync_times.add(time.monotonic() - begin)
        self._log.stats.syncs += 1
        # A segment counts as closed, and may be collected, only once all its entries are in the index.
        self.update_index()
        self._log.segment_opened(ready, active)
        self.active = ActiveSegment(ready, self.chain, self._log.options.compression)

    # --- after the sync

    def update_index(self) -> None:
        """Put what was written into the index. From now on it can be read back, and may leave the cache."""
        with self._log.lock:
            self.index_written()

    def index_written(self) -> None:
        """See `update_index`; call with the log's lock held."""
        log = self._log
        log.active_length = self.active.offset
        cache = log.cache
        for sequence, offset, rows in self._unindexed:
            for state, kind, first, last, term, written in rows:
                if kind == _ENTRY:
                    state.extents.add(first, last, term, sequence, offset)
                    cache.add(state, written)
                elif kind == Kind.TRUNCATE:
                    state.extents.cut(first)
                elif kind == Kind.SNAPSHOT_END:
                    state.index_snapshot(first, bool(term))
                elif kind == Kind.TOMBSTONE:
                    state.extents.reset(state.start.index)
        self._unindexed.clear()

    def _finish(self) -> None:
        """End a closing log whose queue is empty."""
        if self.active.synced < self.active.offset:
            self.active.sync()
        self.active.finish(cut=True)
