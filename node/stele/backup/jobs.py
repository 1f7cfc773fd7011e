"""The jobs of a backup: write, restore, check or sum up one tablet. Run by workers.py's workers, here or elsewhere.

Invariants: each attempt at `WriteTablet` has a name of its own for its files, and returns only files that are whole and
recorded. An attempt at `RestoreTablet` that is a part of a job changes nothing that others have written since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stele.backup.chain import Part, rows_of_parts
from stele.backup.folder import Folder
from stele.backup.manifest import Manifest, TableEntry, TabletEntry
from stele.backup.row_files import RowFile, file_columns, rows_of
from stele.backup.unfinished import Done, Unfinished
from stele.backup.workers import Bench, Did
from stele.client.change_plan import change_plan
from stele.client.jobs import JobPart
from stele.client.ranges import NO_RANGE
from stele.client.tablet_scan import ScanPlan
from stele.model import checksum, keys
from stele.model.amounts import plural
from stele.model.block import RowOp
from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Corrupt, Rejected, SteleError
from stele.model.ids import new_id
from stele.model.partition import assign
from stele.model.schema import Schema
from stele.rpc.threads import in_thread

_BUFFER_BYTES = 16 << 20

OnDid = Callable[[Did], None]


def of_tablet(scan: ScanPlan, tablet_id: str) -> ScanPlan:
    """Return the part of a plan for one tablet."""
    prepared = {tablet_id: scan.prepared[tablet_id]} if tablet_id in scan.prepared else {}
    tablets = tuple(place for place in scan.tablets if place.tablet_id == tablet_id)
    return replace(scan, tablets=tablets, prepared=prepared)


@dataclass(frozen=True, slots=True)
class WriteTablet:
    """Write the rows of a tablet to files, going on after the files that are recorded. The result has all
    files of the tablet.

    `plan` and `scan`: the backup's plan and scan, cut to this tablet. `base`: the snapshot of the base; None
    for a full backup. `file_bytes`: the size at which a file ends."""

    folder: Folder
    plan: Manifest
    scan: ScanPlan
    base: int | None
    file_bytes: int

    @property
    def _table(self) -> TableEntry:
        return self.plan.tables[0]

    @property
    def _tablet(self) -> TabletEntry:
        return self._table.tablets[0]

    async def run(self, bench: Bench, tell: OnDid) -> Done:
        """See `Job.run`. Raises SNAPSHOT_TOO_OLD if the rows of the backup's moment are gone; then no run of
        this backup can succeed."""
        table, tablet, (place,) = self._table, self._tablet, self.scan.tablets
        work = Unfinished(self.folder, self.plan, new_id()[:8])
        done = await in_thread(work.load, table, tablet)
        tell(Did(sum(file.rows for file in done.files), sum(file.bytes for file in done.files)))
        if done.whole:
            return done
        scan = self.scan
        if not tablet.whole:
            assert self.base is not None
            scan = change_plan(scan, self.base, every=False)
        if done.last_key is not None:
            scan = replace(scan, spec=replace(scan.spec, lower_key=done.last_key + b"\x00"))
        try:
            reads = (await bench.table(table.table_id, table.name)).reads
            done = await reads.read_tablet(
                scan, place, lambda batches: self._write(work, done, batches, tell)
            )
        except Rejected as exc:
            raise self._explained(exc) from exc
        if place.incarnation != tablet.incarnation:
            raise Rejected(
                f"tablet {tablet.tablet_id} of table {table.name} lost its majority and was recovered while it was backed "
                "up; run the same again",
                code=Code.SNAPSHOT_TOO_OLD,
            )
        return done

    def _write(self, work: Unfinished, done: Done, batches: Iterator[pa.RecordBatch], tell: OnDid) -> Done:
        """Write the rows of a tablet after those that are done. Called in a thread of its own."""
        table, tablet = self._table, self._tablet
        columns, file, last_key = file_columns(table.schema, whole=tablet.whole), None, done.last_key
        told = 0
        try:
            for batch in batches:
                if file is None:
                    file = RowFile(self.folder, work.file_name(table, tablet, done.next_number), columns)
                file.write(pa.RecordBatch.from_arrays(batch.columns, schema=columns))
                last_key = keys.encode_keys(batch.slice(batch.num_rows - 1), table.schema)[0].as_py()
                tell(Did(batch.num_rows, file.bytes - told))
                told = file.bytes
                if file.bytes >= self.file_bytes:
                    whole_file, file = file.finish(), None
                    done = work.record(tablet, done, whole_file, last_key, whole=False)
                    tell(Did(bytes=whole_file.bytes - told))
                    told = 0
            last = None if file is None else file.finish()
        except BaseException:
            if file is not None:
                file.abandon()
            raise
        if last is not None:
            tell(Did(bytes=last.bytes - told))
        return work.record(tablet, done, last, last_key, whole=True)

    def _explained(self, error: Rejected) -> SteleError:
        """Return an error of a node as one that says what it means for the backup, and what to do."""
        name = self._table.name
        if error.code is Code.CURSOR_LOST:
            return Rejected(f"table {name}: {error.args[0]}", code=Code.SNAPSHOT_TOO_OLD)
        if error.code is Code.SNAPSHOT_TOO_OLD:
            return Rejected(
                f"table {name}: the rows of {utc(physical_us(self.plan.snapshot))} are gone before all were read: "
                f"{error.args[0]}; `stele table alter {name} --history 2h` keeps those of later backups for longer",
                code=error.code,
            )
        if error.code is Code.TABLET_DELETED:
            return Rejected(
                f"table {name} was deleted, or a range of it was dropped, while it was backed up; run the same again",
                code=error.code,
            )
        if error.code is Code.SCHEMA_MISMATCH:
            return Rejected(
                f"the columns of table {name} were changed while it was backed up; run the same again",
                code=error.code,
            )
        return error


@dataclass(frozen=True, slots=True)
class RestoreTablet:
    """Write the rows of a backed-up tablet to a table. The result is their number.

    `parts`: where its rows are. `schema`: of the rows. `part`: the part of a job, by which
    rows are written once; None if there is only one attempt."""

    folder: Folder
    parts: tuple[Part, ...]
    schema: Schema
    table_id: str
    name: str
    part: JobPart | None

    async def run(self, bench: Bench, tell: OnDid) -> int:
        """See `Job.run`."""
        table, rows = await bench.table(self.table_id, self.name), 0
        # Each of several tablets has a writer, since the rows of one may all go to the same new tablet.
        writer = table.arrow_writer(
            RowOp.UPSERT,
            buffer_bytes=_BUFFER_BYTES,
            on_rows=lambda written: tell(Did(written)),
            part=self.part,
        )
        try:
            batches = rows_of_parts(self.folder, self.parts, self.schema)
            while (batch := await in_thread(_next, batches)) is not None:
                rows += batch.num_rows
                await writer.feed(batch)
            written = await writer.finish()
            if outside := [error for error in written.row_errors if error.message.endswith(NO_RANGE)]:
                raise Rejected(
                    f"table {self.name}: at least {plural(len(outside), 'row')} of the backup would be in no range; "
                    "give ranges for all rows",
                    code=outside[0].code,
                )
            written.raise_for_errors()
        except BaseException:
            await writer.abandon()
            raise
        return rows


@dataclass(frozen=True, slots=True)
class Sum:
    """What was found of a tablet: its rows, the checksum over all their values, and what is wrong with its files."""

    rows: int = 0
    checksum: int = 0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckTablet:
    """Read all files of a tablet, also of the backups that this one builds on. `sums`: also sum up the values."""

    folder: Folder
    parts: tuple[Part, ...]
    schema: Schema
    sums: bool

    async def run(self, bench: Bench, tell: OnDid) -> Sum:
        """See `Job.run`. Faults of files do not raise: they are in the result."""
        return await in_thread(self._check, tell)

    def _check(self, tell: OnDid) -> Sum:
        alone = len(self.parts) == 1
        of_parts = [_of_part(self.folder, part, tell, sums=self.sums and alone) for part in self.parts]
        if alone:
            return of_parts[0]
        rows, total, faults = 0, 0, tuple(fault for each in of_parts for fault in each.faults)
        if not faults:
            for batch in rows_of_parts(self.folder, self.parts, self.schema):
                rows += batch.num_rows
                total += checksum.checksum(batch, self.schema) if self.sums else 0
        return Sum(rows, total & checksum.MASK, faults)


def _of_part(place: Folder, part: Part, tell: OnDid, *, sums: bool) -> Sum:
    """Read the files of a tablet in one backup."""
    table, tablet = part.table, part.tablet
    columns = file_columns(table.schema, whole=tablet.whole)
    rows = total = 0
    last: pa.Scalar | None = None
    faults = []
    for file in tablet.files:
        name = part.manifest.name_of(table, file)
        try:
            for batch in rows_of(place, name, file, columns):
                found = keys.encode_keys(batch, table.schema)
                if not _ascends(found, last):
                    raise Corrupt(f"{place.called(name)}: its keys do not ascend")
                if (assign(batch, table.schema, table.partitioning) != tablet.ordinal).any():
                    raise Corrupt(f"{place.called(name)}: it has rows of another tablet")
                last = found[-1]
                rows += batch.num_rows
                total += checksum.checksum(batch, table.schema) if sums else 0
                tell(Did(batch.num_rows))
        except Corrupt as exc:
            faults.append(str(exc.args[0]))
    return Sum(rows, total & checksum.MASK, tuple(faults))


def _ascends(found: pa.BinaryArray, last: pa.Scalar | None) -> bool:
    """Whether the keys ascend, and the first is above `last`."""
    if last is not None and not pc.less(last, found[0]).as_py():
        return False
    return bool(np.all(pc.less(found[:-1], found[1:]).to_numpy(zero_copy_only=False)))


@dataclass(frozen=True, slots=True)
class SumTablet:
    """Sum up the rows of one tablet. `scan`: reads this tablet alone. `schema`: the schema for the checksum."""

    scan: ScanPlan
    schema: Schema
    table_id: str
    name: str

    async def run(self, bench: Bench, tell: OnDid) -> Sum:
        """See `Job.run`."""
        (place,) = self.scan.tablets
        reads = (await bench.table(self.table_id, self.name)).reads
        return await reads.read_tablet(self.scan, place, self._add)

    def _add(self, batches: Iterator[pa.RecordBatch]) -> Sum:
        rows = total = 0
        names = self.schema.to_arrow().names
        for batch in batches:
            rows += batch.num_rows
            total += checksum.checksum(pa.RecordBatch.from_arrays(batch.columns, names=names), self.schema)
        return Sum(rows, total & checksum.MASK)


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next(batches, None)


def alone(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts of a tablet, without the other tablets of their backups, so that a pickled job is small."""
    return tuple(
        Part(replace(part.manifest, tables=()), replace(part.table, tablets=()), part.tablet)
        for part in parts
    )
