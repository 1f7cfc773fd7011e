"""Writes a backup: all tables at one snapshot, each tablet as Parquet files in key order, the manifest last.

Invariants: memory is bounded, however large a tablet is. Without a whole manifest there is no backup. A backup that was
interrupted goes on after its last whole file at the same snapshot, or begins anew and says so.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from stele.backup.claim import Claim
from stele.backup.finding import State, find_backups, with_key
from stele.backup.folder import Folder, Location
from stele.backup.holding import HistoryHeld, hold_of, release
from stele.backup.increments import (
    LOST,
    chain_hold,
    move_hold,
    newest_of,
    no_increment,
    why_no_base,
)
from stele.backup.jobs import WriteTablet, of_tablet
from stele.backup.manifest import Manifest, TableEntry, TabletEntry
from stele.backup.planning import plan_of, rows_expected, unfinished, why_not
from stele.backup.row_files import FILE_BYTES
from stele.backup.telling import Note, OnProgress, Progress, quiet
from stele.backup.unfinished import Unfinished, never_began, remove
from stele.backup.workers import Did, InProcess, Workers
from stele.client import arguments
from stele.client.async_client import AsyncClient
from stele.client.holds import expires_ms
from stele.client.table import AsyncTable
from stele.client.tablet_scan import PARALLEL_TABLETS, ScanPlan
from stele.model.errors import Code, Rejected
from stele.model.ids import new_id
from stele.rpc.threads import in_thread

PARALLEL_MAX = 64
HOLD_FOR_S = 2 * 86_400.0
"""How long the tables keep their history for the next incremental backup, unless the caller says otherwise."""
BATCH_ROWS = 32_768
"""Rows that a node sends at once. A file ends only between two of these batches."""


async def create_async(
    client: AsyncClient,
    folder: Location,
    tables: str | Sequence[str],
    *,
    at: int | datetime | None = None,
    anew: bool = False,
    incremental: bool = False,
    full_if_needed: bool = False,
    hold_for_s: float | None = None,
    parallel: int = PARALLEL_TABLETS,
    key: str = "",
    workers: Workers | None = None,
    on_progress: OnProgress = quiet,
    on_note: Note = quiet,
) -> Manifest:
    """Back up tables as they are at one moment, now or `at`. Returns what was written.

    An unfinished backup of the same tables is continued; with `anew` it is removed, and a new one begins.
    `parallel`: how many tablets are read at once; each takes about 100 MiB of memory.

    `incremental`: only what changed since the newest complete backup of the same tables in the folder. If the tables no
    longer keep all these changes, this raises CURSOR_LOST; with `full_if_needed` it makes a full backup. `hold_for_s`: for
    how long the history is kept from this backup on, so that an incremental one can follow. None: two days for an
    incremental one, else not at all.

    `key`: makes this backup once. If a complete one has the key, that one is returned. An unfinished one is continued only if it
    has the same key. "": each call makes a backup.

    `workers`: who reads the tablets; None: this process. `on_progress` is called in other threads. `on_note` is called with each unusual thing.

    Raises:
        Rejected: NOT_FOUND: a table is not there. SNAPSHOT_TOO_OLD: the rows of that moment are gone.
            CHANGE_IN_PROGRESS: another process writes to the folder. SCHEMA_MISMATCH: a table was changed meanwhile.
            CURSOR_LOST: an incremental backup cannot be made.
        Retryable: DISK_FULL; UNAVAILABLE: the folder or a tablet cannot be reached.
    """
    place = await in_thread(Folder.at, folder)
    names = list(dict.fromkeys(arguments.names(tables, "tables")))
    if not names:
        raise Rejected("no tables to back up; name at least one")
    count = arguments.whole_number(parallel, "parallel", least=1, most=PARALLEL_MAX)
    # Before the tables are asked for: tablets that come later have no rows at this time.
    snapshot = arguments.snapshot(at) or int(client.now())
    opened = {table.info.table_id: table for table in await _opened(client, names)}
    who = workers or InProcess(client, opened.values())
    if await in_thread(place.is_there):
        await in_thread(find_backups, place)  # refuses a wrong folder before anything is written to it
    else:
        await in_thread(place.make)
    called = arguments.text(key, "key") if key else ""
    keep_s = hold_for_s if hold_for_s is not None or not incremental else HOLD_FOR_S
    keep_ms = None if keep_s is None else expires_ms(keep_s, "hold_for_s")
    async with Claim(place, "create", on_note) as claim:
        if called and (there := await in_thread(with_key, place, called)) is not None:
            on_note(f"backup {there.backup_id} of {there.time} was made by an earlier run")
            return there
        newest = await in_thread(newest_of, place, opened, client.identity.cluster_id)

        async def make(base: Manifest | None) -> Manifest:
            maker = _Maker(client, place, claim, opened, snapshot, base, who, count, on_progress, on_note)
            maker.key = called
            if keep_ms is not None:
                maker.chain_before, maker.chain_s = newest, keep_ms / 1_000
            return await maker.make(anew=anew, at=at)

        made = None
        if incremental:
            why = why_no_base(newest, snapshot)
            if not why:
                assert newest is not None
                try:
                    made = await make(newest)
                except Rejected as exc:
                    if exc.code not in LOST:
                        raise
                    why = f"some changes since backup {newest.backup_id} of {newest.time} are no longer kept: {exc.args[0]}"
            if made is None and not full_if_needed:
                raise no_increment(why)
            if made is None:
                on_note(f"making a full backup: {why}")
        return await make(None) if made is None else made


class _Maker:
    """Makes one backup of some tables, full or incremental: goes on with an unfinished one, or begins a new
    one."""

    def __init__(
        self,
        client: AsyncClient,
        place: Folder,
        claim: Claim,
        opened: dict[str, AsyncTable],
        snapshot: int,
        base: Manifest | None,
        workers: Workers,
        parallel: int,
        on_progress: OnProgress,
        on_note: Note,
    ) -> None:
        self._client = client
        self._place = place
        self._claim = claim
        self._opened = opened
        self._snapshot = snapshot
        self._base = base
        self._workers = workers
        self._parallel = parallel
        self._on_progress = on_progress
        self._note = on_note
        self.key = ""
        self.chain_s: float | None = None
        """How long the history is kept for another backup to follow; None: not at all."""
        self.chain_before: Manifest | None = None

    async def make(self, *, anew: bool, at: object) -> Manifest:
        """Go on with an unfinished backup, or make a new one. Raises what `create_async` raises."""
        place, opened = self._place, self._opened
        there = await in_thread(find_backups, place)
        for left in there:
            if left.state is State.REMAINS and await in_thread(never_began, place, left.backup_id):
                await in_thread(remove, place, left.backup_id)
        before = unfinished(there, set(opened))
        scans = {table_id: table.scan(snapshot=self._snapshot).plan for table_id, table in opened.items()}
        plan = plan_of(self._client, opened, scans, self._snapshot, self._base, self.key)
        work = Unfinished(place, plan, new_id()[:8])
        resumed = False
        for old in before:
            why = why_not(old, plan, anew=anew, at=at)
            if not why and not resumed:
                work, resumed = Unfinished(place, old, new_id()[:8]), True
                self._note(f"going on with backup {old.backup_id}, as of {old.time}")
                continue
            self._note(f"removing the unfinished backup {old.backup_id}: {why or 'another one is continued'}")
            await in_thread(remove, place, old.backup_id)
            await release(opened.values(), hold_of(old.backup_id))
        try:
            return await self._run(work, scans, resumed)
        except Rejected as exc:
            if exc.code is not Code.SNAPSHOT_TOO_OLD:
                raise
            if not resumed:
                await in_thread(remove, place, plan.backup_id)  # nobody can ever finish it
                raise
            self._note(
                f"beginning anew as of {plan.time}: unfinished backup {work.plan.backup_id} needs the rows as of "
                f"{work.plan.time}, which are gone"
            )
        await in_thread(remove, place, work.plan.backup_id)
        return await self._run(Unfinished(place, plan, new_id()[:8]), scans, False)

    async def _run(self, work: Unfinished, scans: dict[str, ScanPlan], resumed: bool) -> Manifest:
        plan = work.plan
        hold = "" if self.chain_s is None else chain_hold(self.chain_before, plan.backup_id)
        run = _Run(
            self._client,
            self._place,
            self._claim,
            work,
            self._opened,
            scans,
            self._base,
            self._workers,
            self._parallel,
            self._on_progress,
        )
        held = HistoryHeld(
            list(self._opened.values()),
            hold_of(plan.backup_id),
            plan.snapshot,
            self._note,
            "" if self._base is None else self._base.hold,
            self.chain_s or HOLD_FOR_S,
        )
        async with held:
            made = await run.run(resumed, hold)
            if self.chain_s is not None:
                await move_hold(self._opened.values(), made, self.chain_s, self._note)
            return made


async def _opened(client: AsyncClient, names: Sequence[str]) -> list[AsyncTable]:
    """Open all tables. Raises the first error, with the others of its kind in its message."""
    found, faults = [], list[Rejected]()
    for name in names:
        try:
            found.append(await client.open_table(name))
        except Rejected as exc:
            faults.append(exc)
    if len(faults) > 1:
        raise Rejected("; ".join(str(each.args[0]) for each in faults), code=faults[0].code)
    if faults:
        raise faults[0]
    return found


class _Run:
    """One try to finish a backup."""

    def __init__(
        self,
        client: AsyncClient,
        place: Folder,
        claim: Claim,
        work: Unfinished,
        opened: dict[str, AsyncTable],
        scans: dict[str, ScanPlan],
        base: Manifest | None,
        workers: Workers,
        parallel: int,
        on_progress: OnProgress,
    ) -> None:
        self._client = client
        self._place = place
        self._claim = claim
        self._work = work
        self._base = base
        self._opened = opened
        self._workers = workers
        self._parallel = parallel
        self._on_progress = on_progress
        chain = () if base is None or not base.hold else (base.hold,)
        self._expected = dict[str, int]()
        self._holds = (hold_of(work.plan.backup_id), *chain)
        self._lock = threading.Lock()
        self._rows = Counter[str]()
        self._tablets_done = Counter[str]()
        self._bytes = Counter[str]()
        self._scans = {  # by table; the plan was made of these, or is equal to what would be
            table_id: replace(
                scan,
                snapshot=work.plan.snapshot,
                spec=replace(scan.spec, ordered=True, batch_rows=BATCH_ROWS),
                prepared={},  # what is prepared holds for one snapshot
            )
            for table_id, scan in scans.items()
        }

    async def run(self, resumed: bool, hold: str) -> Manifest:
        """Write all tablets, then the manifest. `hold`: the name of the hold on history that the manifest records."""
        plan = self._work.plan
        if not resumed:
            await in_thread(self._work.begin)
        if self._base is None and self._on_progress is not quiet:
            self._expected = await rows_expected(self._client, self._opened)
        for table in plan.tables:
            self._told(table, Did())
        for table_id, scan in self._scans.items():
            await self._opened[table_id].reads.prepare(scan)  # then no lost leader stops the reading
        jobs = [self._job(table, tablet) for table in plan.tables for tablet in table.tablets]
        tables = [table for table in plan.tables for _ in table.tablets]
        done = await self._workers.run(
            jobs, self._parallel, lambda number, did: self._told(tables[number], did)
        )
        await self._claim.check()
        found = iter(done)  # only what attempts returned: others may have left files, and records
        manifest = replace(
            plan,
            finished=datetime.now(UTC),
            hold=hold,
            tables=tuple(
                replace(table, tablets=tuple(replace(t, files=next(found).files) for t in table.tablets))
                for table in plan.tables
            ),
        )
        await in_thread(self._work.publish, manifest)
        return manifest

    def _job(self, table: TableEntry, tablet: TabletEntry) -> WriteTablet:
        small = replace(self._work.plan, tables=(replace(table, tablets=(tablet,)),))
        scan = of_tablet(self._scans[table.table_id], tablet.tablet_id)
        base = None if self._base is None else self._base.snapshot
        return WriteTablet(self._place, small, scan, base, FILE_BYTES)

    def _told(self, table: TableEntry, did: Did) -> None:
        with self._lock:
            self._rows[table.table_id] += did.rows
            self._tablets_done[table.table_id] += did.ended
            self._bytes[table.table_id] += did.bytes
            now = Progress(
                table.name,
                self._rows[table.table_id],
                self._tablets_done[table.table_id],
                len(table.tablets),
                self._bytes[table.table_id],
                self._holds,
                self._expected.get(table.table_id, 0),
            )
            self._on_progress(now)
