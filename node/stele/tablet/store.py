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
from pathlib import Path

import structlog
import xxhash

from stele.model.amounts import duration
from stele.model.clock import physical_us, utc
from stele.model.entry import Entry
from stele.model.errors import Code, Rejected
from stele.model.holds import Held
from stele.model.ids import HybridTime, OpId
from stele.model.schema import Schema
from stele.model.writeop import WriteHeader
from stele.tablet import copying, manifest
from stele.tablet.applying import Applying
from stele.tablet.block_checks import check_block
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import VERSION
from stele.tablet.compaction import CompactionJob, CompactionResult
from stele.tablet.contents import Contents, State
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.files import FILES, Files
from stele.tablet.flushing import StoreFlush, read_once
from stele.tablet.history import History
from stele.tablet.holding import Costs, Holding
from stele.tablet.jobs import Jobs
from stele.tablet.machine import Checkpoint, FlushJob, Found, Lookup, Outcome
from stele.tablet.manifest import Manifest
from stele.tablet.masks import MASKS, LiveMasks, MaskCache
from stele.tablet.memtable import MemTable, MemView
from stele.tablet.merging import Merges
from stele.tablet.progress import Progress
from stele.tablet.splitting import split_keys
from stele.tablet.view import View

_log = structlog.get_logger("stele.tablet")


def _wall_us() -> int:
    return time.time_ns() // 1_000


def _steady_us() -> int:
    return time.monotonic_ns() // 1_000


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`flush_bytes`: bytes of recent rows that make a flush worthwhile.

    `history_us`: how long old versions are kept for snapshots if the schema does not say, in microseconds before
    the present. The present is the newest write's time plus what has passed by `steady_us` since it was applied. If `wall_us`
    is earlier, that is used instead. So a wrong clock ends no history.

    `file_version`: the format of column files that a flush or a merge may write now."""

    flush_bytes: int = 32 << 20
    history_us: int = 15 * 60 * 1_000_000
    files: Files = FILES
    masks: MaskCache = MASKS
    wall_us: Callable[[], int] = _wall_us
    steady_us: Callable[[], int] = _steady_us
    file_version: Callable[[], int] = lambda: VERSION


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
        self._once = once
        self._jobs = jobs
        self._progress = progress
        self._flushed = progress.applied
        self._holding = Holding(state.manifest.held)
        self._applying = Applying(self._contents, once, jobs, progress, self._holding, options.steady_us)
        self._history = History(
            self._contents,
            self._applying,
            progress,
            self._holding,
            jobs,
            default_us=options.history_us,
            wall_us=options.wall_us,
            steady_us=options.steady_us,
        )
        self._merges = Merges(self._contents, lambda: self._history.drop_mark, options.file_version)
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
        return self._history.length_us

    @property
    def history_mark(self) -> int:
        """Hybrid time below which no snapshot is served: `free_mark`, but no later than any hold, and no earlier than
        what the manifest says was dropped."""
        return self._history.mark

    @property
    def free_mark(self) -> int:
        """What `history_mark` would be without holds. It follows the present, but stays below the newest write."""
        return self._history.free_mark

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
    def clients_idle_us(self) -> int | None:
        """See StateMachine. Jobs count as clients here."""
        wrote_us = self._jobs.last_us
        ends = (self._once.idle_us, None if wrote_us is None else wrote_us + self._applying.jobs_idle_us)
        return max((end for end in ends if end is not None), default=None)

    @property
    def memory_bytes(self) -> int:
        """See StateMachine: about how many bytes recent rows take."""
        state = self._contents.state
        return sum(table.bytes for table in (state.active, *state.frozen))

    def split_keys(self, part_bytes: int) -> list[bytes]:
        """Keys that cut the files into parts of about `part_bytes` bytes. See stele.tablet.splitting."""
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
        """Whether this store has applied a write of this job and has not forgotten the job."""
        return self._jobs.knows(job)

    def may_know(self, client_id: bytes, sequence: int, first_attempt_us: int) -> bool:
        """Whether this write may have been applied before. Then applying it again gives its outcome."""
        return self._once.may_know(client_id, sequence, first_attempt_us)

    def expect(self, header: WriteHeader) -> None:
        """See StateMachine."""
        self._once.expect(header.client_id)
        if header.attempt is not None:
            self._jobs.expect(header.attempt.job)

    def stop_expecting(self, header: WriteHeader) -> None:
        """See StateMachine."""
        self._once.stop_expecting(header.client_id)
        if header.attempt is not None:
            self._jobs.stop_expecting(header.attempt.job)

    def knows_client(self, client_id: bytes) -> bool:
        """See StateMachine."""
        return self._once.knows_client(client_id)

    def exactly_once_checksum(self) -> int:
        """64 bits over the exactly-once state and the jobs. Equal on replicas with the same applied OpId."""
        return self._once.checksum() ^ (
            xxhash.xxh3_64_intdigest(told) if (told := self._jobs.encoded()) else 0
        )

    # --- applying

    def foreseen(self, payload: bytes, timestamp: int) -> Outcome | None:
        """See StateMachine. Certain only for a block of a known client whose effect is independent of stored rows."""
        return self._applying.foreseen(payload, timestamp)

    def begin(self, entry: Entry, found: Found | None = None) -> Outcome | Lookup:
        """See StateMachine. Looks up a small block's rows at once, if the files' parts that it needs were
        read before."""
        return self._applying.begin(entry, found)

    def apply(self, entry: Entry) -> Outcome:
        """See StateMachine."""
        return self._applying.apply(entry)

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
            at = self._applying.readable if snapshot is None else int(snapshot)
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
            self._history.drop_mark,
            self._holding.held,
            self.options.file_version(),
        )
        self._contents.freeze(self.schema)
        self._job = job
        return job

    def finish_flush(self, job: FlushJob) -> None:
        """See StateMachine."""
        mine = self._job
        if mine is not None and job is mine and not mine.failed:
            self._flushed = mine.opid
            self._job = None
            self._jobs.flushed()
            _log.debug(
                "flushed",
                opid=str(self._flushed),
                rows=sum(table.rows for table in mine.frozen),
                files=len(self._contents.state.files),
            )

    # --- compaction

    def plan_compaction(self, *, full: bool = False, room_bytes: int | None = None) -> CompactionJob | None:
        """The next merge worth doing, or None. One at a time, and none during a flush. Never blocks.

        `full`: merge all files, or as many as fit. `room_bytes`: disk space for the merge; None: unlimited.
        The owner runs it (stele.tablet.worker), then calls `install_compaction` or `abandon_compaction`.
        """
        return self._merges.plan(full=full, room_bytes=room_bytes)

    @property
    def reclaim_due(self) -> bool:
        """Whether enough rows may have become dead since `judge_dead` last looked. Cheap, never blocks."""
        return self._merges.reclaim_due

    def judge_dead(self) -> None:
        """Measure how much of the files is dead, for `plan_reclaim`. Blocks; any thread.

        Raises:
            Corrupt: a file is damaged.
        """
        self._merges.judge_dead()

    def plan_reclaim(self, *, room_bytes: int | None = None) -> CompactionJob | None:
        """Plan a merge of all files, if `judge_dead` found a good share of their rows dead. Otherwise plan as
        `plan_compaction` does."""
        return self._merges.plan_reclaim(room_bytes=room_bytes)

    def abandon_compaction(self, job: CompactionJob) -> None:
        """End a failed merge: remove what it wrote. The merge may be planned again."""
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
