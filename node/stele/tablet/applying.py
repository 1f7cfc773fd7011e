"""Applying committed entries to a store's rows: blocks, changes of the schema, holds, ceilings.

Made by store.py. `begin` and `apply` run in the thread of the store's owner, a lookup in any thread. Writes no files.

Invariant: the outcome of an entry follows from the entry and the state alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from stele.model import writeop
from stele.model.alter import follows
from stele.model.block import decode_block, of_schema, size_told
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected, SteleError
from stele.model.schema import Schema
from stele.model.writeop import BodyKind, WriteHeader
from stele.tablet.block_checks import grown_too_large
from stele.tablet.contents import Contents
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.holding import Holding
from stele.tablet.jobs import IDLE_US, Jobs
from stele.tablet.locate import StoreRows
from stele.tablet.machine import Found, Lookup, Outcome, WouldBlock
from stele.tablet.memtable import SMALL_ROWS
from stele.tablet.patches import Patch
from stele.tablet.progress import Progress
from stele.tablet.writing import Plan, plan_block

_log = structlog.get_logger("stele.tablet")

_BRIEF_LOOKUPS_MAX = 400
"""The most key lookups in files on the event loop: about 4 ms if all keys are found."""
_LOOKUPS_BESIDE_FILES = 4
"""What a looked-up row costs apart from the files, in units of one file lookup."""


class Applying:
    """Applies the entries of one store.

    `readable`: hybrid time of the newest write whose rows readers see. `written_us`: what `steady_us` said when the
    newest write was applied."""

    def __init__(
        self,
        contents: Contents,
        once: ExactlyOnce,
        jobs: Jobs,
        progress: Progress,
        holding: Holding,
        steady_us: Callable[[], int],
    ) -> None:
        self._contents = contents
        self._once = once
        self._jobs = jobs
        self._progress = progress
        self._holding = holding
        self._steady_us = steady_us
        self.readable = progress.last_timestamp
        self.written_us = steady_us()

    @property
    def jobs_idle_us(self) -> int:
        """How long an idle job is remembered."""
        return max(IDLE_US, self._schema.history_ms * 1_000)

    @property
    def _schema(self) -> Schema:
        return self._contents.state.active.schema

    def begin(self, entry: Entry, found: Found | None = None) -> Outcome | Lookup:
        """See StateMachine. Looks up a small block's rows at once, if the files' parts that it needs were
        read before."""
        if entry.kind is not EntryKind.WRITE:
            return self.apply(entry)
        header, body = writeop.decode(entry.payload)
        if found is not None:
            if isinstance(found, Plan) and not found.fits(self._contents.state.active):
                return Lookup(partial(self._look_up, header, body))  # a flush began meanwhile
            return self._apply_write(entry, header, body, found)
        if self._is_plain(header) or header.kind is not BodyKind.BLOCK or self._once.knows(header):
            return self._apply_write(entry, header, body, None)
        if not self._may_be_brief(body):
            return Lookup(partial(self._look_up, header, body))
        try:
            found = self._look_up(header, body, brief=True)
        except WouldBlock:
            return Lookup(partial(self._look_up, header, body))
        return self._apply_write(entry, header, body, found)

    def foreseen(self, payload: bytes, timestamp: int) -> Outcome | None:
        """See StateMachine."""
        header, _ = writeop.decode(payload)
        certain = (
            header.kind is BodyKind.BLOCK
            and header.attempt is None
            and self._is_plain(header)
            and self._once.surely_new(header, timestamp)
        )
        return Outcome(timestamp, in_memory=True) if certain else None

    def apply(self, entry: Entry) -> Outcome:
        """See StateMachine."""
        if entry.kind is EntryKind.WRITE:
            return self._apply_write(entry, *writeop.decode(entry.payload), None)
        self._progress.advance(entry)
        if entry.kind is EntryKind.CEILING:
            self._once.expire(entry.timestamp)
            self._holding.pass_time(entry.timestamp)
            self._jobs.expire(entry.timestamp, self.jobs_idle_us)
        return Outcome()

    def _is_plain(self, header: WriteHeader) -> bool:
        """Whether a block's effect is independent of the stored rows. It is not if another attempt at its
        part has written: rows of the block may be done already."""
        plain = header.plain and header.schema_version == self._schema.version
        return plain and not self._jobs.has_others(header.attempt)

    def _apply_write(
        self, entry: Entry, header: WriteHeader, body: memoryview, found: Found | None
    ) -> Outcome:
        self.written_us = self._steady_us()
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
        self._jobs.expire(entry.timestamp, self.jobs_idle_us)
        earlier = self._once.earlier(header, entry.timestamp)
        if earlier is not None:
            return earlier
        refused = None if header.attempt is None else self._jobs.enter(header.attempt, entry.timestamp)
        outcome = refused or self._apply_block(entry, header, body, found)
        self._once.record(header, outcome)
        self.readable = entry.timestamp
        return outcome

    def _apply_block(
        self, entry: Entry, header: WriteHeader, body: memoryview, found: Found | None
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
        old = self._schema
        if follows(new, old):
            self._contents.freeze(new)
            _log.info("schema changed", directory=self._contents.directory.name, version=new.version)
            return Outcome(entry.timestamp, schema_version=int(new.version))
        if new.version > old.version:
            why_not = f"schema version {new.version} does not follow version {old.version}: key, types or ids differ"
            return Outcome(entry.timestamp, code=Code.SCHEMA_MISMATCH, message=why_not)
        return Outcome(entry.timestamp)

    def _may_be_brief(self, body: memoryview) -> bool:
        rows, _ = size_told(body)
        lookups = rows * (_LOOKUPS_BESIDE_FILES + len(self._contents.state.files))
        return rows <= SMALL_ROWS and lookups <= _BRIEF_LOOKUPS_MAX

    def _look_up(self, header: WriteHeader, body: memoryview, *, brief: bool = False) -> Found:
        """Return what a block does, or the error that applying it must raise. If the write turns out to be a
        retry, the error is ignored. Any thread.

        With `brief`, raises WouldBlock."""
        try:
            block = decode_block(body, self._schema, trusted=True)
        except Rejected as exc:
            if exc.code is Code.SCHEMA_MISMATCH and not of_schema(body, self._schema):
                return Plan(refused=exc)
            return writeop.not_understood(header, body, exc)
        if block.schema_version < self._schema.version and (why := grown_too_large(block, self._schema)):
            return Plan(refused=why)  # its leader checked it with an older schema
        state = self._contents.state
        if state.active.patches.due(block.rows, len(block.column_ids)):
            if brief:
                raise WouldBlock
            state.active.settle()
        rows = StoreRows(state.active.schema, (state.active, *state.frozen), state.files, brief=brief)
        try:
            others = self._jobs.others(header.attempt)
            return plan_block(rows, block, writeop.HEADER.size + len(body), others)
        except SteleError as exc:
            return exc

    def _write(self, entry: Entry, plan: Found) -> Outcome:
        """Apply a plan. Since it was made, rows may have moved to files, but none has changed."""
        if isinstance(plan, SteleError):
            raise plan
        if plan.refused is not None:
            return Outcome(entry.timestamp, code=plan.refused.code, message=str(plan.refused.args[0]))
        active = self._contents.state.active
        for put in plan.puts:
            if isinstance(put, Patch):
                active.append_patch(put, entry.timestamp)
            elif put.keys is None or isinstance(put.keys, list):
                active.append(put.batch, entry.timestamp, put.deleted, put.size_bytes, put.keys)
            else:
                active.append_keyed(put.batch, entry.timestamp, put.deleted, put.size_bytes, put.keys)
        return Outcome(entry.timestamp, plan.errors)
