"""Makes tables from a backup: each is filled under another name, counted, and renamed at the end.

Invariants: a table has the wanted name only once it has all its rows. A file's checksum is verified before a row of it is
written. A restore that fails leaves no table behind. A killed one leaves a table with a name that says so. The same restore
goes on with it, since writing the same rows again changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from stele.backup.chain import Chain
from stele.backup.finding import choose
from stele.backup.folder import Folder, Location
from stele.backup.jobs import RestoreTablet, alone
from stele.backup.manifest import Manifest, TableEntry
from stele.backup.telling import Note, quiet
from stele.backup.verifying import OnRows, compare_async, named_tables, no_rows
from stele.backup.workers import Did, InProcess, Workers
from stele.client import arguments
from stele.client.async_client import AsyncClient
from stele.client.jobs import Job
from stele.client.partitioning import Partitionings, partition_schema
from stele.client.table import AsyncTable
from stele.model.errors import Advice, Code, Corrupt, Rejected, SteleError
from stele.model.partition import PartitionSchema
from stele.model.partitioning import by_ids, by_names
from stele.model.schema import Schema
from stele.rpc.threads import in_thread

_PARALLEL_TABLETS = 4
_NAME_CHARS = 200
_CREATE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Restored:
    """A table that was restored: its name in the backup, its name now, and its rows."""

    table: str
    name: str
    rows: int


async def restore_async(
    client: AsyncClient,
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | Sequence[str] | Mapping[str, str] = (),
    partitioning: Partitionings | Mapping[str, Partitionings] = None,
    replication_factor: int | None = None,
    again: bool = False,
    workers: Workers | None = None,
    on_rows: OnRows = no_rows,
    on_note: Note = quiet,
) -> list[Restored]:
    """Make tables from a backup. `backup`: its id or the first digits of it; None: the newest.

    `tables`: some of its tables, by name; or a map from names in the backup to new names. Default: all, as they were called.
    `partitioning`, `replication_factor`: others than they had; an empty list of partitionings: one tablet. `partitioning` may be a mapping
    by names in the backup; tables that it lacks keep theirs. `workers`: who writes the rows; None: this process. `on_rows` is called with a table's name in the backup and the number of rows that were written, as it happens.

    `again`: an existing table counts as restored if its rows equal those of the backup, unless it is the table that was backed up.
    So a restore with an unknown outcome may be repeated.

    Raises:
        Rejected: ALREADY_PRESENT: a table has the name. NOT_FOUND: no such folder, backup or table.
        Corrupt: a file is damaged or missing. No table was made.
        SteleError: the cluster or the folder cannot be reached. No table was made, unless the message says so.
    """
    place = await in_thread(Folder.at, folder)
    new_names = named_tables(tables)
    manifest = await in_thread(choose, place, backup, list(new_names))
    chain = await in_thread(Chain.of, place, manifest)
    chosen = [manifest.table(n) for n in new_names] if new_names else list(manifest.tables)
    targets = [_Target.of(manifest, t, new_names.get(t.name, t.name)) for t in chosen]
    settled = await _settled(client, place, manifest, targets, workers, again=again, note=on_note)
    targets = [target for target in targets if target.entry.name not in settled]
    for target in targets:
        wanted = partitioning.get(target.entry.name) if isinstance(partitioning, Mapping) else partitioning
        if wanted is not None:
            target.partitioning = _split(wanted, target)
        if replication_factor is not None:
            target.replication_factor = arguments.replication_factor(replication_factor)
    made: list[_Target] = []
    try:
        for target in targets:
            made.append(target)
            await target.make(client, on_note)
            await target.fill(place, chain, workers or InProcess(client, [target.table]), on_rows)
    except BaseException:
        for target in made:
            await target.remove(client)
        raise
    published = {target.entry.name: await target.publish() for target in targets}
    return [(settled | published)[table.name] for table in chosen]


def _split(wanted: Partitionings, target: _Target) -> PartitionSchema:
    try:
        return partition_schema(wanted, target.schema)
    except Rejected as exc:
        raise Rejected(f"table {target.entry.name}: {exc.args[0]}", code=exc.code) from exc


async def _settled(
    client: AsyncClient,
    place: Folder,
    manifest: Manifest,
    targets: Sequence[_Target],
    workers: Workers | None,
    *,
    again: bool,
    note: Note,
) -> dict[str, Restored]:
    """Return what an earlier run of the same restore has made, by names in the backup. Raises Rejected if
    other tables have the wanted names."""
    names = [target.name for target in targets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Rejected(f"two tables would be called {twice[0]}; give each another name")
    there = {info.name: info for info in await client.list_tables()}
    used = [target for target in targets if target.name in there]
    mine = [t for t in used if again and there[t.name].kind == "table"]
    mine = [t for t in mine if there[t.name].table_id != t.entry.table_id]
    if others := [target.name for target in used if target not in mine]:
        kinds = {name: "key space" if there[name].kind == "keyspace" else "table" for name in others}
        called = ", ".join(f"{kind} {name}" for name, kind in kinds.items())
        raise Rejected(
            f"{called} exist{'s' if len(others) == 1 else ''} already",
            code=Code.ALREADY_PRESENT,
            advice=Advice.RESTORE_AS,
            name=next(target.entry.name for target in used if target.name == others[0]),
        )
    if not mine:
        return {}
    report = await compare_async(
        client,
        place,
        manifest.backup_id,
        tables={t.entry.name: t.name for t in mine},
        workers=workers,
    )
    if wrong := [*report.faults, *report.differences]:
        raise Rejected(
            f"table {', '.join(t.name for t in mine)} exists already, and does not have the rows of the backup: {wrong[0]}; restore "
            "under another name, or rename the existing one first",
            code=Code.ALREADY_PRESENT,
        )
    for target in mine:
        note(f"table {target.name} was restored by an earlier run")
    rows = {table.table: table.rows for table in report.tables}
    return {t.entry.name: Restored(t.entry.name, t.name, rows[t.entry.name]) for t in mine}


class _Target:
    """One table that is being restored."""

    def __init__(self, entry: TableEntry, name: str, scratch: str) -> None:
        self.entry = entry
        self.name = name
        self.scratch = scratch
        columns = [(c.name, c.type, c.nullable, c.default) for c in entry.schema.columns]
        made = Schema.make(columns, [c.name for c in entry.schema.key_columns])
        self.schema = replace(made, history_ms=entry.schema.history_ms)
        self.partitioning = by_ids(by_names(entry.partitioning, entry.schema), self.schema)
        self.replication_factor = entry.replication_factor
        self.rows = 0
        self._table: AsyncTable | None = None
        self._is_mine = False

    @staticmethod
    def of(manifest: Manifest, entry: TableEntry, name: str) -> _Target:
        """The target for a table. Its scratch name follows from backup and names, so that the same restore finds it again."""
        digits = hashlib.sha256(f"{manifest.backup_id}/{entry.table_id}/{name}".encode()).hexdigest()[:8]
        return _Target(entry, arguments.text(name, "table name"), f"{name[:_NAME_CHARS]}.restoring-{digits}")

    @property
    def table(self) -> AsyncTable:
        """The scratch table."""
        assert self._table is not None
        return self._table

    async def make(self, client: AsyncClient, note: Note) -> None:
        """Make the scratch table, or take the one of a restore that was killed."""
        try:
            self._table = await client.create_table(
                self.scratch,
                self.schema,
                self.partitioning,
                replication_factor=self.replication_factor,
                owner=self.entry.owner,
                comment=self.entry.comment,
                timeout_s=_CREATE_TIMEOUT_S,
            )
            self._is_mine = True
            return
        except SteleError as exc:
            if exc.code is not Code.ALREADY_PRESENT:
                self._is_mine = True  # it may be there, without leaders yet
                raise
        self._table = await client.open_table(self.scratch)
        info = self._table.info
        wanted = (self.schema, self.partitioning, self.replication_factor)
        if (info.schema, _plain(info.partition_schema, self.schema), info.replication_factor) != wanted:
            raise Rejected(
                f"table {self.scratch} is left from another restore; delete it with `stele table delete {self.scratch}`",
                code=Code.ALREADY_PRESENT,
            )
        note(f"going on with table {self.scratch}, which is left from a restore that did not end")

    async def fill(self, place: Folder, chain: Chain, workers: Workers, on_rows: OnRows) -> None:
        """Write all rows, and count them."""
        # An attempt that nobody waits for may still run when the table has its name, and others write to it.
        job = Job.new() if workers.repeats and self.table.takes_jobs else None
        jobs = [
            RestoreTablet(
                place,
                alone(chain.parts(self.entry, tablet)),
                self.entry.schema,
                self.table.info.table_id,
                self.scratch,
                None if job is None else job.part(number),
            )
            for number, tablet in enumerate(self.entry.tablets)
        ]

        def tell(_: int, did: Did) -> None:
            if did.rows:
                on_rows(self.entry.name, did.rows)

        self.rows = sum(await workers.run(jobs, _PARALLEL_TABLETS, tell))
        there = await self.table.scan().count()
        if there != self.rows:
            raise Corrupt(
                f"table {self.scratch} has {there} rows after the restore; the backup has {self.rows}; "
                "somebody else may have written to it; restore again"
            )

    async def publish(self) -> Restored:
        """Give the table its name. Raises Rejected ALREADY_PRESENT if somebody took it meanwhile."""
        try:
            await self.table.alter(rename_to=self.name)
        except Rejected as exc:
            raise Rejected(
                f"all rows are restored, but the table could not be named {self.name}: {exc.args[0]}; rename it with "
                f"`stele table rename {self.scratch} NAME`, or delete it",
                code=exc.code,
            ) from exc
        return Restored(self.entry.name, self.name, self.rows)

    async def remove(self, client: AsyncClient) -> None:
        """Delete the scratch table, if this process made it and can reach the cluster."""
        if self._is_mine:
            with suppress(SteleError):
                await client.delete_table(self.scratch)


def _plain(partitioning: PartitionSchema, schema: Schema) -> PartitionSchema:
    return by_ids(by_names(partitioning, schema), schema)
