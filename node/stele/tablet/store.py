"""TabletStore: the rows of one tablet. The state machine that stele.consensus drives; compaction and files are told
in README.md.

Threads: `apply`, `begin_flush`, `finish_flush` and `memory_bytes` belong to the owner's thread. `view`,
`plan_compaction`, `install_compaction`, `checkpoint`, `verify` and a flush job's `write` may run on any. What readers see is
one immutable `_State`, swapped under a lock.

Invariant: manifest on disk + entries after its OpId = the state; nothing else is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from stele.model import writeop
from stele.model.block import decode_block, of_schema
from stele.model.clock import from_physical_us, physical_us, utc
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected, ensure
from stele.model.ids import HybridTime, OpId, new_id
from stele.model.schema import Schema
from stele.model.writeop import BodyKind, WriteHeader
from stele.tablet import exactly_once, manifest, reclaim
from stele.tablet.checked import read_sealed, seal
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import NAME, FileMeta
from stele.tablet.colwriter import write_layers
from stele.tablet.compaction import CompactionJob, CompactionResult, choose
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.files import FILES, Files, translate
from stele.tablet.locate import StoreRows
from stele.tablet.machine import Checkpoint, Outcome
from stele.tablet.manifest import Manifest
from stele.tablet.masks import MASKS, LiveMasks, MaskCache
from stele.tablet.memtable import MemTable, MemView
from stele.tablet.progress import Progress
from stele.tablet.reclaim import Judgement
from stele.tablet.runs import Kept
from stele.tablet.view import View
from stele.tablet.writing import vet, write_block

ONCE_MAGIC, ONCE_VERSION = b"STLONCE1", 1
_FLUSH_RUN_BYTES = 64 << 20
"""So much of the memory under flush is put in order at a time: it may be far more than it takes (`writing.complete`)."""
_log = structlog.get_logger("stele.tablet")


def _wall_us() -> int:
    return time.time_ns() // 1_000


def _steady_us() -> int:
    return time.monotonic_ns() // 1_000


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`flush_bytes`: memory of recent rows that is worth a flush. `history_us`: how long versions are kept for snapshots in
    the past, in microseconds before the present. That is the newest write's time and what has passed by `steady_us` since it
    was applied, or `wall_us` where that is earlier: a wrong clock ends no history."""

    flush_bytes: int = 32 << 20
    history_us: int = 15 * 60 * 1_000_000
    files: Files = FILES
    masks: MaskCache = MASKS
    wall_us: Callable[[], int] = _wall_us
    steady_us: Callable[[], int] = _steady_us


@dataclass(frozen=True, slots=True)
class _State:
    """What readers see. `frozen`: memory under flush. `files` newest first, as in the manifest."""

    active: MemTable
    frozen: MemTable | None
    files: tuple[ColumnFile, ...]
    manifest: Manifest


class StoreFlush:
    """Writes the frozen rows as a column file, the exactly-once state beside it, and the manifest that lists both."""

    def __init__(self, store: TabletStore, frozen: MemTable) -> None:
        self.opid = store.applied
        self.failed = False
        self.frozen = frozen
        self._store = store
        self._once = store._once.frozen()
        self._ceiling = store.max_ceiling
        self._timestamp = store.last_timestamp
        self._mark = store.history_mark

    def write(self) -> None:
        """See FlushJob."""
        try:
            self._store._write_flush(self)
        except BaseException:
            self.failed = True
            raise


class TabletStore:
    """Rows of one tablet: recent ones in memory, the others in column files."""

    def __init__(
        self, directory: Path, options: StoreOptions, state: _State, once: ExactlyOnce, progress: Progress
    ) -> None:
        self.directory = directory
        self.options = options
        self._state = state
        self._once = once
        self._progress = progress
        self._flushed = progress.applied
        self._readable = progress.last_timestamp
        self._written_us = options.steady_us()
        self._job: StoreFlush | None = None
        self._compacting = False
        self._in_vain: Sequence[FileMeta] = ()
        self._judged = Judgement()
        self._live = LiveMasks(options.masks)
        self._swap_lock = threading.Lock()
        self._manifest_lock = threading.Lock()

    @staticmethod
    def create(directory: Path, schema: Schema, options: StoreOptions = StoreOptions()) -> TabletStore:
        """A new, empty store in `directory` (made if absent), synced, but not the name of `directory`.

        Raises:
            Rejected: ALREADY_PRESENT, there is one.
            Retryable: DISK_FULL.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / manifest.NAME).exists():
            raise Rejected(f"store in {directory.name}: there is one already", code=Code.ALREADY_PRESENT)
        manifest.write(options.files, directory, Manifest((schema,)))
        return TabletStore.open(directory, options)

    @staticmethod
    def open(directory: Path, options: StoreOptions = StoreOptions()) -> TabletStore:
        """The store as last flushed; the owner then applies the entries after `flushed`. Removes a crash's debris.

        Raises:
            Corrupt: a file is missing or its header or footer damaged.
            Rejected: UNSUPPORTED_VERSION.
        """
        found = manifest.read(directory)
        debris = manifest.remove_debris(options.files, directory, found)
        if debris:
            _log.info("removed debris of a crash", directory=directory.name, files=debris)
        once = ExactlyOnce()
        if found.once:
            once = ExactlyOnce.decode(read_sealed(directory / found.once, ONCE_MAGIC, ONCE_VERSION))
        files = tuple(ColumnFile(directory / f.name, f) for f in found.files)
        state = _State(MemTable(found.schema), None, files, found)
        return TabletStore(
            directory, options, state, once, Progress(found.opid, found.max_ceiling, found.last_timestamp)
        )

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def applied(self) -> OpId:
        """See StateMachine."""
        return self._progress.applied

    @property
    def flushed(self) -> OpId:
        """See StateMachine."""
        return self._flushed

    @property
    def max_ceiling(self) -> int:
        """See StateMachine."""
        return self._progress.max_ceiling

    @property
    def last_timestamp(self) -> int:
        """Hybrid time of the newest applied write."""
        return self._progress.last_timestamp

    @property
    def schema(self) -> Schema:
        """The newest schema."""
        return self._state.manifest.schema

    @property
    def history_mark(self) -> int:
        """Hybrid time below which no snapshot is served. It follows the present, as far as the newest write: later snapshots
        all show the same rows, and are served for ever. Each replica has its own, apart by how late each has applied.

        Where the newest write lies in the future, the wall clock counts: else the present would be history. What was dropped
        is told by the manifest, whatever the clock says next.
        """
        # `apply` sets them the other way round: on another thread the time may only seem shorter.
        newest, written_us = self.last_timestamp, self._written_us
        rested_us = max(0, self.options.steady_us() - written_us)
        lag = min(physical_us(newest) + rested_us, self.options.wall_us()) - self.options.history_us
        over = min(self._readable, from_physical_us(lag)) if lag > 0 else 0
        return max(self._state.manifest.history_mark, over)

    @property
    def clients_idle_us(self) -> int | None:
        """See StateMachine."""
        return self._once.idle_us

    @property
    def memory_bytes(self) -> int:
        """About how much memory recent rows take."""
        state = self._state
        return state.active.bytes + (0 if state.frozen is None else state.frozen.bytes)

    @property
    def rewritten_bytes(self) -> int:
        """See StateMachine. A flush writes new files."""
        return 0

    @property
    def bytes_on_disk(self) -> int:
        """Size of the column files."""
        return sum(f.size for f in self._state.files)

    @property
    def rows_estimate(self) -> int:
        """Live rows, roughly: overwritten versions that are not yet merged count twice."""
        state = self._state
        files = sum(f.rows - 2 * f.deletes for f in state.files)
        return max(0, files + state.active.rows + (0 if state.frozen is None else state.frozen.rows))

    @property
    def files(self) -> Sequence[str]:
        """Names of the column files, newest first."""
        return [f.name for f in self._state.files]

    def exactly_once_checksum(self) -> int:
        """64 bits over the exactly-once state; replicas at the same applied OpId agree."""
        return self._once.checksum()

    # --- applying --------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> Outcome:
        """See StateMachine."""
        if entry.kind is EntryKind.WRITE:
            self._written_us = self.options.steady_us()
        self._progress.advance(entry)
        if entry.kind is not EntryKind.WRITE:
            if entry.kind is EntryKind.CEILING:
                self._once.expire(entry.timestamp)
            return Outcome()
        header, body = writeop.decode(entry.payload)
        if header.kind is not BodyKind.BLOCK:
            raise Corrupt(f"entry {entry.opid}: body kind {header.kind.name} in a table; expected BLOCK")
        earlier = self._once.earlier(header, entry.timestamp)
        if earlier is not None:
            return earlier
        if header.plain and header.schema_version == self.schema.version:
            try:
                self._state.active.append_plain(body, entry.timestamp, len(entry.payload))
            except Rejected as exc:
                raise writeop.not_understood(header, body, exc) from exc
            outcome = Outcome(entry.timestamp)
        else:
            outcome = self._write(entry, header, body)
        self._once.record(header, outcome)
        self._readable = entry.timestamp
        return outcome

    def _write(self, entry: Entry, header: WriteHeader, body: memoryview) -> Outcome:
        try:
            block = decode_block(body, self.schema, trusted=True)
        except Rejected as exc:
            if exc.code is Code.SCHEMA_MISMATCH and not of_schema(body, self.schema):
                return Outcome(entry.timestamp, code=exc.code, message=str(exc.args[0]))
            raise writeop.not_understood(header, body, exc) from exc
        state = self._state
        rows = StoreRows(self.schema, state.active, state.frozen, state.files)
        return Outcome(entry.timestamp, write_block(rows, block, entry.timestamp, len(entry.payload)))

    def vet(self, block: bytes) -> bool:
        """Check a block before it is proposed; whether it is plain (stele.tablet.writing.vet).

        Raises:
            Rejected: every fault of the block as a whole.
        """
        return vet(block, self.schema)

    # --- reading ---------------------------------------------------------------------------------------------------

    def view(self, snapshot: HybridTime | None = None) -> View:
        """The rows as they were at `snapshot` (None: now). The owner has made sure that all writes at or below it are
        applied.

        Raises:
            Rejected: SNAPSHOT_TOO_OLD, history at that time may be gone.
        """
        with self._swap_lock:
            state, applied = self._state, self.applied
            at = self._readable if snapshot is None else int(snapshot)
            mark = self.history_mark
            if at < mark:
                raise Rejected(
                    f"snapshot {at} is {utc(physical_us(at))}, below the history mark {mark}, which is "
                    f"{utc(physical_us(mark))}; old versions of rows are kept for "
                    f"{self.options.history_us // 60_000_000} minutes; read at a newer snapshot",
                    code=Code.SNAPSHOT_TOO_OLD,
                )
            memory: list[MemView] = [state.active.view()]
            if state.frozen is not None:
                memory.append(state.frozen.view())
        return View(self.schema, at, memory, state.files, applied, self._live)

    # --- flushing --------------------------------------------------------------------------------------------------

    def should_flush(self) -> bool:
        """See StateMachine."""
        if self._job is not None:
            return self._job.failed
        return self._state.active.bytes >= self.options.flush_bytes

    def begin_flush(self) -> StoreFlush | None:
        """See StateMachine."""
        if self._job is not None:
            if not self._job.failed:
                return None
            # The same rows again; entries applied since then wait for the next flush.
            again = self._job
            again.failed = False
            return again
        if self.applied == self._flushed:
            return None
        job = StoreFlush(self, self._state.active)  # first: what is frozen without a job is in nobody's hands
        with self._swap_lock:
            self._state = replace(self._state, active=MemTable(self.schema), frozen=job.frozen)
        self._job = job
        return job

    def _write_flush(self, job: StoreFlush) -> None:
        """On the job's thread: files, then the manifest, then readers see the file instead of memory."""
        with self._manifest_lock:
            current = self._state.manifest
            if current.opid == job.opid:
                return
            number = self._reserve_number()
            try:
                self._write_flushed(job, current, number)
            except Exception:
                # It is tried again soon, and as long as it takes: what it left would fill what room there is.
                made = (path.name for path in self.directory.glob(f"{NAME}{number:08x}*"))
                self._remove_unlisted(f"once-{number:08x}", *made)
                raise

    def _write_flushed(self, job: StoreFlush, current: Manifest, number: int) -> None:
        once_name = f"once-{number:08x}"
        body = seal(ONCE_MAGIC, ONCE_VERSION, exactly_once.encode(job._once))
        self.options.files.write_new(self.directory / once_name, [body])
        metas: tuple[FileMeta, ...] = ()
        if job.frozen.rows:
            # Files that are older may hold what a delete hides, so a delete goes only when there are none.
            runs, bottom = job.frozen.view().runs(), not current.files
            kept = Kept(runs, job._mark, bottom=bottom, as_applied=True, run_bytes=_FLUSH_RUN_BYTES)
            path = self.directory / f"{NAME}{number:08x}"
            layers = ((kept.run(at) for at in layer if len(at)) for layer in kept.layers)
            metas = write_layers(self.options.files, path, self.schema, layers)
        opened = tuple(ColumnFile(self.directory / meta.name, meta) for meta in metas)
        new = replace(
            current,
            opid=job.opid,
            max_ceiling=job._ceiling,
            last_timestamp=job._timestamp,
            history_mark=max(current.history_mark, job._mark),
            next_file=number + 1,  # a merge that is under way has a name no number can take
            once=once_name,
            files=(*metas, *current.files),
        )
        manifest.write(self.options.files, self.directory, new)
        with self._swap_lock:
            self._state = replace(self._state, frozen=None, files=(*opened, *self._state.files), manifest=new)
        if current.once:
            self.options.files.remove(self.directory / current.once)

    def _remove_unlisted(self, *names: str) -> None:
        """Remove those of the files just written that the manifest on the disk does not list."""
        listed = manifest.read(self.directory).file_names()
        for name in names:
            if name not in listed:
                self.options.files.remove(self.directory / name)

    def _reserve_number(self) -> int:
        """A number for file names; never the same twice, so that a listed file is never written again."""
        with self._swap_lock:
            current = self._state.manifest
            self._state = replace(self._state, manifest=replace(current, next_file=current.next_file + 1))
        return current.next_file

    def finish_flush(self, job: Any) -> None:
        """See StateMachine."""
        if self._job is not None and job is self._job and not job.failed:
            self._flushed = self._job.opid
            self._job = None
            _log.debug("flushed", opid=str(self._flushed), rows=job.frozen.rows, files=len(self._state.files))

    # --- compaction ------------------------------------------------------------------------------------------------

    def plan_compaction(self, *, full: bool = False, room_bytes: int | None = None) -> CompactionJob | None:
        """The next merge worth doing, or None; one at a time, and none is planned while a flush writes. Never blocks.
        `full`: all files into one sorted run. `room_bytes`: what the merge may take of the disk; None: any amount.

        The owner runs it (stele.tablet.worker), then calls `install_compaction`, or `abandon_compaction`.
        """
        files = self._state.manifest.files
        if self._compacting or (files is self._in_vain and not full):
            return None  # a look at many files takes longer than one at all other stores of a node
        if not self._manifest_lock.acquire(blocking=False):
            return None  # a flush is writing: its file may be worth merging, too, so ask again later
        try:
            files, mark = self._state.manifest.files, self.history_mark
            chosen = choose(files, mark, full=full, room_bytes=room_bytes)
            if not (chosen or full or choose(files, mark, full=False)):
                self._in_vain = files
            return self._job_of(chosen) if chosen else None
        finally:
            self._manifest_lock.release()

    def _job_of(self, chosen: Sequence[FileMeta]) -> CompactionJob:
        current = self._state.manifest
        # A worker that outlives its node must never write a name that the next life of the node uses.
        job = CompactionJob(
            str(self.directory),
            tuple(f.name for f in chosen),
            f"{NAME}{self._reserve_number():08x}-{new_id()}",
            self.history_mark,
            chosen[-1] == current.files[-1],
            current.schema.to_json(),
        )
        self._compacting = True
        return job

    @property
    def reclaim_due(self) -> bool:
        """Whether enough may be dead since `judge_dead` last looked. Cheap, never blocks."""
        return not self._compacting and reclaim.due(
            self._state.manifest.files, self.history_mark, self._judged
        )

    def judge_dead(self) -> None:
        """Find out how much of the files is dead, for `plan_reclaim`. Blocks; any thread.

        Raises:
            Corrupt: a file is damaged.
        """
        self._judged = reclaim.judge(self._state.files, self.history_mark)

    def plan_reclaim(self, *, room_bytes: int | None = None) -> CompactionJob | None:
        """A merge of all files, if `judge_dead` found a good share of them dead; else as `plan_compaction`."""
        if self._compacting or not self._manifest_lock.acquire(blocking=False):
            return None
        try:
            files = self._state.manifest.files
            return self._job_of(files) if reclaim.worth(files, self._judged, room_bytes) else None
        finally:
            self._manifest_lock.release()

    def abandon_compaction(self, job: CompactionJob) -> None:
        """The merge failed; what it wrote is removed, and it may be planned again."""
        with self._manifest_lock:
            self._compacting = False
            self._remove_unlisted(*(path.name for path in self.directory.glob(f"{job.output}*")))

    def install_compaction(self, result: CompactionResult) -> None:
        """Put the merged files in the place of those they were made from, durably. Blocks; any thread.

        Raises:
            Retryable: DISK_FULL; the old files stand, and the merge may be planned again.
            Corrupt: the worker's file is damaged, or IO_ERROR.
        """
        job = result.job
        try:
            opened = tuple(ColumnFile(self.directory / m.name, m) for m in result.files)
            with self._manifest_lock:
                current = self._state.manifest
                names = [f.name for f in current.files]
                at = names.index(job.inputs[0])
                ensure(
                    tuple(names[at : at + len(job.inputs)]) == job.inputs,
                    "compaction: its files are not there",
                )
                end = at + len(job.inputs)
                new = replace(
                    current,
                    history_mark=max(current.history_mark, job.history_mark),
                    files=(*current.files[:at], *result.files, *current.files[end:]),
                )
                manifest.write(self.options.files, self.directory, new)
                with self._swap_lock:
                    old = self._state.files
                    self._state = replace(self._state, files=(*old[:at], *opened, *old[end:]), manifest=new)
                self._compacting = False
                if len(result.files) >= len(job.inputs):  # versions of one key that fit into no fewer files
                    self._in_vain = new.files
                for name in job.inputs:
                    self.options.files.remove(self.directory / name)
        except Exception:
            self.abandon_compaction(job)
            raise
        _log.debug("compacted", files=len(job.inputs), into=[m.name for m in result.files])

    # --- copies and end --------------------------------------------------------------------------------------------

    def checkpoint(self, directory: Path) -> Checkpoint:
        """See StateMachine."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise translate(exc, f"making {directory.name}") from exc
        if any(directory.iterdir()):
            raise Rejected(f"checkpoint: {directory.name} is not empty", code=Code.ALREADY_PRESENT)
        files = self.options.files
        with self._manifest_lock:
            on_disk = manifest.read(self.directory)
            names = (*on_disk.file_names(), manifest.NAME)
            for name in names:
                files.link(self.directory / name, directory / name)
        files.sync_directory(directory)
        return Checkpoint(on_disk.opid, names)

    def verify(self, read: Callable[[int], None] = lambda size: None, compared: Collection[str] = ()) -> None:
        """See StateMachine."""
        with self._manifest_lock:
            listed = manifest.read(self.directory)
            if listed.once:
                read_sealed(self.directory / listed.once, ONCE_MAGIC, ONCE_VERSION)
        for meta in listed.files:
            try:
                file = ColumnFile(self.directory / meta.name, meta)
                if meta.name not in compared:
                    file.verify(read)
            except Corrupt:
                if meta in self._state.manifest.files:  # else a merge has taken its place meanwhile
                    raise

    def close(self) -> None:
        """See StateMachine."""
        with self._swap_lock:
            self._state = replace(self._state, active=MemTable(self.schema), frozen=None, files=())
        self._live.close()
