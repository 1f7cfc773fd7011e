"""TabletStore: the rows of one tablet. A state machine that stele.consensus drives. README.md describes its
files.

Threads: only the owner's thread calls `apply`, `begin_flush`, `finish_flush` and `memory_bytes`. Any thread
may call `view`, `plan_compaction`, `install_compaction`, `checkpoint`, `verify` and a flush job's `write`.
Readers see one immutable state (contents.py).

Invariant: the manifest on disk plus the entries after its OpId give the whole state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import xxhash

from stele.model import writeop
from stele.model.alter import follows
from stele.model.amounts import duration
from stele.model.block import decode_block, of_schema, size_told
from stele.model.clock import from_physical_us, physical_us, utc
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected, SteleError
from stele.model.holds import Held
from stele.model.ids import HybridTime, OpId
from stele.model.schema import Schema
from stele.model.writeop import BodyKind, WriteHeader
from stele.tablet import copying, manifest
from stele.tablet.block_checks import check_block, grown_too_large
from stele.tablet.colfile import ColumnFile
from stele.tablet.compaction import CompactionJob, CompactionResult
from stele.tablet.contents import Contents, State
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.files import FILES, Files
from stele.tablet.flushing import StoreFlush, read_once
from stele.tablet.holding import Costs, Holding
from stele.tablet.jobs import IDLE_US, Jobs
from stele.tablet.locate import StoreRows
from stele.tablet.machine import Checkpoint, Lookup, Outcome, WouldBlock
from stele.tablet.manifest import Manifest
from stele.tablet.masks import MASKS, LiveMasks, MaskCache
from stele.tablet.memtable import SMALL_ROWS, MemTable, MemView
from stele.tablet.merging import Merges
from stele.tablet.progress import Progress
from stele.tablet.splitting import split_keys
from stele.tablet.view import View
from stele.tablet.writing import Plan, plan_block

_log = structlog.get_logger("stele.tablet")


def _wall_us() -> int:
    return time.time_ns() // 1_000


def _steady_us() -> int:
    return time.monotonic_ns() // 1_000


_BRIEF_LOOKUPS_MAX = 400
"""The most key lookups in files on the event loop: about 4 ms if all keys are found."""
_BRIEF_CELLS_MAX = 256
"""The most values that small updates on the event loop complete. Each row may be in a chunk of its own, and
then every column of that chunk is handled."""
_LOOKUPS_BESIDE_FILES = 4
"""What a looked-up row costs beside the files, in file lookups."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`flush_bytes`: bytes of recent rows that make a flush worthwhile.

    `history_us`: how long old versions are kept for snapshots if the schema does not say, in microseconds before
    the present. The present is the newest write's time plus what has passed by `steady_us` since it was applied. If `wall_us`
    is earlier, that is used instead. So a wrong clock ends no history."""

    flush_bytes: int = 32 << 20
    history_us: int = 15 * 60 * 1_000_000
    files: Files = FILES
    masks: MaskCache = MASKS
    wall_us: Callable[[], int] = _wall_us
    steady_us: Callable[[], int] = _steady_us


class TabletStore:
    """Rows of one tablet: recent ones in memory, the others in column files."""

    def __init__(
        self,
        directory: Path,
        options: StoreOptions,
        state: State,
        once: ExactlyOnce,
        jobs: Jobs,
        progress: Progress,
    ) -> None:
        self.directory = directory
        self.options = options
        self._contents = Contents(directory, options.files, state)
        self._merges = Merges(self._contents, lambda: self._drop_mark)
        self._once = once
        self._jobs = jobs
        self._progress = progress
        self._flushed = progress.applied
        self._readable = progress.last_timestamp
        self._written_us = options.steady_us()
        self._holding = Holding(state.manifest.held)
        self.hold_costs: Costs = {}
        """What `measure_holds` found last."""
        self._job: StoreFlush | None = None
        self._live = LiveMasks(options.masks)

    @staticmethod
    def create(directory: Path, schema: Schema, options: StoreOptions = StoreOptions()) -> TabletStore:
        """Create an empty store in `directory`, which is made if absent. Syncs all but the directory's own
        name.

        Raises:
            Rejected: ALREADY_PRESENT: there is one already.
            Retryable: DISK_FULL.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / manifest.NAME).exists():
            raise Rejected(f"{directory.name} already holds a store", code=Code.ALREADY_PRESENT)
        manifest.write(options.files, directory, Manifest((schema,)))
        return TabletStore.open(directory, options)

    @staticmethod
    def open(directory: Path, options: StoreOptions = StoreOptions()) -> TabletStore:
        """Open the store as last flushed, and remove leftovers of a crash. The owner then applies the later
        entries.

        Raises:
            Corrupt: a file is missing, or its header or footer is damaged.
            Rejected: UNSUPPORTED_VERSION.
        """
        found = manifest.read(directory)
        debris = manifest.remove_debris(options.files, directory, found)
        if debris:
            _log.info("removed leftover files of a crash", directory=directory.name, files=debris)
        once, jobs = ExactlyOnce(), Jobs()
        if found.once:
            of_clients, of_jobs = read_once(directory, found)
            once = ExactlyOnce.decode(of_clients)
            jobs = Jobs.decode(of_jobs) if of_jobs else jobs
        files = tuple(ColumnFile(directory / f.name, f) for f in found.files)
        state = State(MemTable(found.schema), (), files, found)
        progress = Progress(found.opid, found.max_ceiling, found.last_timestamp)
        return TabletStore(directory, options, state, once, jobs, progress)

    # --- what it is

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
        return self._contents.state.active.schema

    @property
    def history_us(self) -> int:
        """How long old versions are kept for snapshots, in microseconds before the present."""
        return self.schema.history_ms * 1_000 or self.options.history_us

    @property
    def history_mark(self) -> int:
        """Hybrid time below which no snapshot is served: `free_mark`, but no later than any hold, and no earlier than
        what the manifest says was dropped."""
        return max(self._contents.state.manifest.history_mark, self._holding.mark(self.free_mark))

    @property
    def free_mark(self) -> int:
        """What `history_mark` would be without holds. It follows the present, but stays below the newest write.

        Snapshots above the newest write all show the same rows, and are always served. Each replica has its
        own mark; marks differ by how late each replica has applied. If the newest write is in the future, the
        wall clock counts, because otherwise the present would be history.
        """
        # `apply` sets these in the reverse order, so another thread can only see too short a time.
        newest, written_us = self.last_timestamp, self._written_us
        rested_us = max(0, self.options.steady_us() - written_us)
        lag = min(physical_us(newest) + rested_us, self.options.wall_us()) - self.history_us
        return min(self._readable, from_physical_us(lag)) if lag > 0 else 0

    @property
    def kept_from(self) -> int:
        """Hybrid time from which on all versions are there, and stay there if a hold begins now.

        What a flush or a merge under way drops counts as gone."""
        flushed = self._job.mark if self._job is not None else 0
        return max(self.history_mark, flushed, self._merges.mark)

    @property
    def held(self) -> Held:
        """The holds on history, as of `applied`."""
        return self._holding.held

    def broken_since(self, time: int) -> str:
        """See Holding."""
        return self._holding.broken_since(time)

    def measure_holds(self) -> None:
        """Find out what each hold costs, for `hold_costs`. Blocks; any thread. Raises what `Holding.costs` raises."""
        self.hold_costs = self._holding.costs(self._contents.state.files, self.free_mark)

    @property
    def _drop_mark(self) -> int:
        """Versions that only snapshots below this hybrid time see may be dropped."""
        # In this order: a job that enters in between has its first write above the mark.
        return min(self.history_mark, self._jobs.held)

    @property
    def clients_idle_us(self) -> int | None:
        """See StateMachine. Jobs are clients, too."""
        wrote_us = self._jobs.last_us
        ends = (self._once.idle_us, None if wrote_us is None else wrote_us + self._jobs_idle_us)
        return max((end for end in ends if end is not None), default=None)

    @property
    def _jobs_idle_us(self) -> int:
        return max(IDLE_US, self.schema.history_ms * 1_000)

    @property
    def memory_bytes(self) -> int:
        """See StateMachine: about how many bytes recent rows take."""
        state = self._contents.state
        return sum(table.bytes for table in (state.active, *state.frozen))

    def split_keys(self, part_bytes: int) -> list[bytes]:
        """Keys that cut the files into parts of about so many bytes. See stele.tablet.splitting."""
        return split_keys(self._contents.state.files, part_bytes)

    @property
    def rewritten_bytes(self) -> int:
        """See StateMachine. A flush writes new files."""
        return 0

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the column files."""
        return sum(f.size for f in self._contents.state.files)

    @property
    def rows_estimate(self) -> int:
        """Live rows, roughly. Overwritten versions that are not merged yet are counted too."""
        state = self._contents.state
        files = sum(f.rows - 2 * f.deletes for f in state.files)
        return max(0, files + sum(table.rows for table in (state.active, *state.frozen)))

    @property
    def files(self) -> Sequence[str]:
        """Names of the column files, newest first."""
        return [f.name for f in self._contents.state.files]

    def admit(self, header: WriteHeader, wall_us: int, clock_error_us: int) -> None:
        """See StateMachine."""
        self._once.admit(header, wall_us, clock_error_us)
        if header.attempt is not None:
            self._jobs.admit(header.attempt, wall_us)

    def knows_job(self, job: bytes) -> bool:
        """Whether it applied a write of this job and has not forgotten it."""
        return self._jobs.knows(job)

    def may_know(self, client_id: bytes, sequence: int, first_attempt_us: int) -> bool:
        """Whether this write may have been applied before. Then applying it again gives its outcome."""
        return self._once.may_know(client_id, sequence, first_attempt_us)

    def knows_client(self, client_id: bytes) -> bool:
        """See StateMachine."""
        return self._once.knows_client(client_id)

    def exactly_once_checksum(self) -> int:
        """64 bits over the exactly-once state and the jobs. Equal on replicas with the same applied OpId."""
        return self._once.checksum() ^ (
            xxhash.xxh3_64_intdigest(told) if (told := self._jobs.encoded()) else 0
        )

    # --- applying

    def begin(self, entry: Entry) -> Outcome | Lookup:
        """See StateMachine. Looks up a small block's rows at once, if the files' parts that it needs were
        read before."""
        if entry.kind is not EntryKind.WRITE:
            return self.apply(entry)
        header, body = writeop.decode(entry.payload)
        if self._is_plain(header) or header.kind is not BodyKind.BLOCK or self._once.knows(header):
            return self._apply_write(entry, header, body, None)
        if not self._may_be_brief(body):
            return Lookup(partial(self._look_up, header, body))
        try:
            found = self._look_up(header, body, brief=True)
        except WouldBlock:
            return Lookup(partial(self._look_up, header, body))
        return self._apply_write(entry, header, body, found)

    def apply(self, entry: Entry, found: Plan | SteleError | None = None) -> Outcome:
        """See StateMachine."""
        if entry.kind is EntryKind.WRITE:
            return self._apply_write(entry, *writeop.decode(entry.payload), found)
        self._progress.advance(entry)
        if entry.kind is EntryKind.CEILING:
            self._once.expire(entry.timestamp)
            self._holding.pass_time(entry.timestamp)
            self._jobs.expire(entry.timestamp, self._jobs_idle_us)
        return Outcome()

    def _is_plain(self, header: WriteHeader) -> bool:
        """Whether a block's effect does not depend on the stored rows. Those of another attempt may be its own."""
        plain = header.plain and header.schema_version == self.schema.version
        return plain and not self._jobs.has_others(header.attempt)

    def _apply_write(
        self, entry: Entry, header: WriteHeader, body: memoryview, found: Plan | SteleError | None
    ) -> Outcome:
        self._written_us = self.options.steady_us()
        self._progress.advance(entry)
        self._holding.pass_time(entry.timestamp)
        if header.kind is BodyKind.SCHEMA:
            return self._change_schema(entry, header, body)
        if header.kind is BodyKind.HOLD:
            return self._holding.change(entry, header, body)
        if header.kind is not BodyKind.BLOCK:
            raise Corrupt(
                f"entry {entry.opid}: body kind {header.kind.name} in a table; expected BLOCK, SCHEMA or HOLD"
            )
        self._jobs.expire(entry.timestamp, self._jobs_idle_us)
        earlier = self._once.earlier(header, entry.timestamp)
        if earlier is not None:
            return earlier
        refused = None if header.attempt is None else self._jobs.enter(header.attempt, entry.timestamp)
        outcome = refused or self._apply_block(entry, header, body, found)
        self._once.record(header, outcome)
        self._readable = entry.timestamp
        return outcome

    def _apply_block(
        self, entry: Entry, header: WriteHeader, body: memoryview, found: Plan | SteleError | None
    ) -> Outcome:
        wrote = True
        if self._is_plain(header):
            try:
                self._contents.state.active.append_plain(body, entry.timestamp, len(entry.payload))
            except Rejected as exc:
                raise writeop.not_understood(header, body, exc) from exc
            outcome = Outcome(entry.timestamp)
        else:
            plan = found if found is not None else self._look_up(header, body)
            outcome = self._write(entry, plan)
            wrote = not isinstance(plan, Plan) or bool(plan.puts)
        if wrote and header.attempt is not None:
            self._jobs.wrote(header.attempt, entry.timestamp)
        return outcome

    def _change_schema(self, entry: Entry, header: WriteHeader, body: memoryview) -> Outcome:
        """Take a newer schema: rows from here on go to a memtable of their own. Stored rows stay as they are
        and are read by column ids."""
        try:
            new = Schema.from_json(str(body, "utf-8"))
        except (Rejected, UnicodeDecodeError) as exc:
            why = exc if isinstance(exc, Rejected) else Rejected(f"schema: {exc}")
            raise writeop.not_understood(header, body, why) from exc
        old = self.schema
        if follows(new, old):
            self._contents.freeze(new)
            _log.info("schema changed", directory=self.directory.name, version=new.version)
            return Outcome(entry.timestamp, schema_version=int(new.version))
        if new.version > old.version:
            why_not = f"schema version {new.version} does not follow version {old.version}: key, types or ids differ"
            return Outcome(entry.timestamp, code=Code.SCHEMA_MISMATCH, message=why_not)
        return Outcome(entry.timestamp)

    def _may_be_brief(self, body: memoryview) -> bool:
        rows, columns = size_told(body)
        of_table = len(self.schema.columns)
        if columns < of_table and rows * of_table > _BRIEF_CELLS_MAX:
            return False
        lookups = rows * (_LOOKUPS_BESIDE_FILES + len(self._contents.state.files))
        return rows <= SMALL_ROWS and lookups <= _BRIEF_LOOKUPS_MAX

    def _look_up(self, header: WriteHeader, body: memoryview, *, brief: bool = False) -> Plan | SteleError:
        """What a block does, or the error that applying must raise. The error counts only for a new write.
        Any thread.

        With `brief`, raises WouldBlock."""
        try:
            block = decode_block(body, self.schema, trusted=True)
        except Rejected as exc:
            if exc.code is Code.SCHEMA_MISMATCH and not of_schema(body, self.schema):
                return Plan(refused=exc)
            return writeop.not_understood(header, body, exc)
        if block.schema_version < self.schema.version and (why := grown_too_large(block, self.schema)):
            return Plan(refused=why)  # its leader checked it with an older schema
        state = self._contents.state
        rows = StoreRows(state.active.schema, (state.active, *state.frozen), state.files, brief=brief)
        try:
            others = self._jobs.others(header.attempt)
            return plan_block(rows, block, writeop.HEADER.size + len(body), others)
        except SteleError as exc:
            return exc

    def _write(self, entry: Entry, plan: Plan | SteleError) -> Outcome:
        """Apply a plan. Since it was made, rows may have moved to files, but none has changed."""
        if isinstance(plan, SteleError):
            raise plan
        if plan.refused is not None:
            return Outcome(entry.timestamp, code=plan.refused.code, message=str(plan.refused.args[0]))
        active = self._contents.state.active
        for put in plan.puts:
            if put.keys is None or isinstance(put.keys, list):
                active.append(put.batch, entry.timestamp, put.deleted, put.size_bytes, put.keys)
            else:
                active.append_keyed(put.batch, entry.timestamp, put.deleted, put.size_bytes, put.keys)
        return Outcome(entry.timestamp, plan.errors)

    def check_block(self, block: bytes) -> bool:
        """Check a block before it is proposed. Returns whether it is plain
        (stele.tablet.block_checks.check_block).

        A fast check finds most small plain blocks.

        Raises:
            Rejected: all faults of the block as a whole.
        """
        layout = self._contents.state.active.layout
        return (layout is not None and layout.is_plain(block)) or check_block(block, self.schema)

    # --- reading

    def view(self, snapshot: HybridTime | None = None) -> View:
        """The rows as they were at `snapshot` (None: now). The owner must have applied all writes at or below
        it.

        Raises:
            Rejected: SNAPSHOT_TOO_OLD: versions at that time may be gone.
        """
        with self._contents.swap_lock:
            state, applied = self._contents.state, self.applied
            at = self._readable if snapshot is None else int(snapshot)
            mark = self.history_mark
            if at < mark:
                raise Rejected(
                    f"snapshot {at} is {utc(physical_us(at))}, below the history mark {mark}, which is "
                    f"{utc(physical_us(mark))}; old versions of rows are kept for "
                    f"{duration(self.history_us / 1_000_000)}; read at a newer snapshot{self._holding.broken_since(at)}",
                    code=Code.SNAPSHOT_TOO_OLD,
                )
            memory: list[MemView] = [table.view() for table in (state.active, *state.frozen)]
        lost = self._holding.broken_since
        return View(state.active.schema, at, memory, state.files, applied, self._live, mark, lost)

    # --- flushing

    def should_flush(self) -> bool:
        """See StateMachine."""
        if self._job is not None:
            return self._job.failed
        # Each change of the schema leaves a memtable, and a lookup asks them all.
        return self.memory_bytes >= self.options.flush_bytes or bool(self._contents.state.frozen)

    def begin_flush(self) -> StoreFlush | None:
        """See StateMachine."""
        if self._job is not None:
            if not self._job.failed:
                return None
            # Write the same rows again. Entries applied since then wait for the next flush.
            again = self._job
            again.failed = False
            return again
        if self.applied == self._flushed:
            return None
        # Make the job before freezing; otherwise nothing would own the frozen memtable if this failed.
        state = self._contents.state
        job = StoreFlush(
            self._contents,
            tuple(table for table in (state.active, *state.frozen) if table.rows),
            self.schema,
            self._progress,
            self._once.frozen(),
            self._jobs.frozen(),
            self._drop_mark,
            self._holding.held,
        )
        self._contents.freeze(self.schema)
        self._job = job
        return job

    def finish_flush(self, job: Any) -> None:
        """See StateMachine."""
        if self._job is not None and job is self._job and not job.failed:
            self._flushed = self._job.opid
            self._job = None
            self._jobs.flushed()
            _log.debug(
                "flushed",
                opid=str(self._flushed),
                rows=sum(table.rows for table in job.frozen),
                files=len(self._contents.state.files),
            )

    # --- compaction

    def plan_compaction(self, *, full: bool = False, room_bytes: int | None = None) -> CompactionJob | None:
        """The next merge worth doing, or None. One at a time, and none during a flush. Never blocks.

        `full`: merge all files into one sorted run. `room_bytes`: disk space for the merge; None: unlimited.
        The owner runs it (stele.tablet.worker), then calls `install_compaction` or `abandon_compaction`.
        """
        return self._merges.plan(full=full, room_bytes=room_bytes)

    @property
    def reclaim_due(self) -> bool:
        """Whether enough may have died since `judge_dead` last looked. Cheap, never blocks."""
        return self._merges.reclaim_due

    def judge_dead(self) -> None:
        """Measure how much of the files is dead, for `plan_reclaim`. Blocks; any thread.

        Raises:
            Corrupt: a file is damaged.
        """
        self._merges.judge_dead()

    def plan_reclaim(self, *, room_bytes: int | None = None) -> CompactionJob | None:
        """A merge of all files, if `judge_dead` found a good share of them dead; else see
        `plan_compaction`."""
        return self._merges.plan_reclaim(room_bytes=room_bytes)

    def abandon_compaction(self, job: CompactionJob) -> None:
        """The merge failed: remove what it wrote. It may be planned again."""
        self._merges.abandon(job)

    def install_compaction(self, result: CompactionResult) -> None:
        """Replace the merged files by the result, durably. Blocks; any thread.

        Raises:
            Retryable: DISK_FULL; the old files stay, and the merge may be planned again.
            Corrupt: the worker's file is damaged; or IO_ERROR.
        """
        self._merges.install(result)

    # --- copies and closing

    def checkpoint(self, directory: Path) -> Checkpoint:
        """See StateMachine."""
        return copying.checkpoint(self._contents, directory)

    def verify(self, read: Callable[[int], None] = lambda size: None, compared: Collection[str] = ()) -> None:
        """See StateMachine."""
        copying.verify(self._contents, read, compared)

    def close(self) -> None:
        """See StateMachine."""
        self._contents.release()
        self._live.close()
