"""What clients write into the tablet of a world, and how a node serves it: pairs of a key space, or rows of a table.

Also the dumb twin of a table: what its committed writes say that a snapshot shows. Invariant: both are written and read
as production's services do it, after the same checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import pyarrow as pa

from stele.consensus.replica import Replica
from stele.model import writeop
from stele.model.block import RowOp, decode_block, encode_block
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import HybridTime
from stele.model.keys import encode_tuple
from stele.model.kvop import KeyOp, KeyOperation, encode_operations
from stele.model.schema import Schema
from stele.model.writeop import BodyKind, WriteHeader
from stele.tablet.machine import Outcome
from tests.linear.history import Kind, State

SCHEMA = Schema.make([("k", "string"), ("a", "int64", True), ("b", "int64", True)], ["k"])
_PAIRS = {Kind.PUT: KeyOp.REPLACE, Kind.INSERT: KeyOp.INSERT, Kind.DELETE_IGNORE: KeyOp.DELETE}
_ROWS = {
    Kind.PUT: RowOp.UPSERT,
    Kind.INSERT: RowOp.INSERT,
    Kind.INSERT_IGNORE: RowOp.INSERT_IGNORE,
    Kind.UPDATE: RowOp.UPDATE,
    Kind.UPDATE_IGNORE: RowOp.UPDATE_IGNORE,
    Kind.DELETE: RowOp.DELETE,
    Kind.DELETE_IGNORE: RowOp.DELETE_IGNORE,
}
Rows = dict[str, State]
"""The rows of a table at one moment, by key."""


class Content(Protocol):
    """One kind of tablet."""

    kind: str
    """As in a superblock; `schema`, too."""
    schema: str
    body_kind: BodyKind
    kinds: tuple[Kind, ...]
    """What clients do; some of it more often."""

    def value(self, client: int, sequence: int) -> State:
        """The value of a client's write."""

    def body(self, kind: Kind, key: str, value: State) -> bytes:
        """One operation, as a client sends it."""

    def payload(self, machine: Any, header: WriteHeader, body: bytes) -> bytes:
        """What the leader proposes."""

    def refusal(self, outcome: Outcome) -> SteleError | None:
        """The error that the client gets."""

    async def read(self, replica: Replica, key: str) -> State:
        """One row, linearizably."""

    def here(self, replica: Replica, key: str) -> State:
        """One row, of all that this replica has applied."""

    def at(self, machine: Any, snapshot: int) -> Rows | None:
        """All rows at a snapshot that is ready; None if this kind has no snapshots."""

    def checksum(self, machine: Any) -> object:
        """Equal on replicas that have applied the same."""


class Pairs:
    """A key space."""

    kind, schema, body_kind = "keyspace", "", BodyKind.KEYSPACE
    kinds = (Kind.PUT, Kind.PUT, Kind.INSERT, Kind.DELETE_IGNORE)

    def value(self, client: int, sequence: int) -> State:
        """See Content."""
        return client, sequence

    def body(self, kind: Kind, key: str, value: State) -> bytes:
        """See Content."""
        encoded = b"" if value is None else b"%d %d" % value
        return encode_operations([KeyOperation(_PAIRS[kind], key.encode(), encoded)])

    def payload(self, machine: Any, header: WriteHeader, body: bytes) -> bytes:
        """See Content."""
        return writeop.encode(header, body)

    def refusal(self, outcome: Outcome) -> SteleError | None:
        """See Content."""
        return outcome.error()

    async def read(self, replica: Replica, key: str) -> State:
        """See Content."""
        await replica.reads.linearizable_read()
        return self.here(replica, key)

    def here(self, replica: Replica, key: str) -> State:
        """See Content."""
        value = _machine_of(replica).read(key.encode())
        if value is None:
            return None
        client, sequence = value.split()
        return int(client), int(sequence)

    def at(self, machine: Any, snapshot: int) -> Rows | None:
        """See Content."""
        return None

    def checksum(self, machine: Any) -> object:
        """See Content."""
        return machine.checksum()


class Table:
    """A table with one key column and two others. Its rows are looked up, flushed and merged."""

    kind, schema, body_kind = "table", SCHEMA.to_json(), BodyKind.BLOCK
    kinds = (Kind.PUT, *_ROWS)

    def value(self, client: int, sequence: int) -> State:
        """An update writes the second value alone, so it has to say whose it is."""
        return client, sequence * 100 + client

    def body(self, kind: Kind, key: str, value: State) -> bytes:
        """See Content."""
        ids = [int(column.id) for column in SCHEMA.columns]
        columns: dict[int, list[Any]] = {ids[0]: [key]}
        if value is not None:
            if kind not in (Kind.UPDATE, Kind.UPDATE_IGNORE):
                columns[ids[1]] = [value[0]]
            columns[ids[2]] = [value[1]]
        schema = SCHEMA.to_arrow(list(columns))
        arrays = [pa.array(v, f.type) for v, f in zip(columns.values(), schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return encode_block(_ROWS[kind], list(columns), batch, SCHEMA.version)

    def payload(self, machine: Any, header: WriteHeader, body: bytes) -> bytes:
        """See Content."""
        plain = machine.check_block(body)
        return writeop.encode(replace(header, plain=plain, schema_version=int(machine.schema.version)), body)

    def refusal(self, outcome: Outcome) -> SteleError | None:
        """See Content. The only row's error is the write's."""
        error = outcome.error()
        if error is None and outcome.row_errors:
            error = Rejected(outcome.row_errors[0].message, code=outcome.row_errors[0].code)
        return error

    async def read(self, replica: Replica, key: str) -> State:
        """See Content."""
        return self._row(replica, key, await replica.reads.latest_snapshot())

    def here(self, replica: Replica, key: str) -> State:
        """See Content."""
        return self._row(replica, key, _machine_of(replica).last_timestamp)

    def _row(self, replica: Replica, key: str, snapshot: int) -> State:
        with _machine_of(replica).view(snapshot) as view:
            found, _ = view.get(pa.array([encode_tuple([key], [pa.string()])], pa.binary()))
        return _rows([found]).get(key)

    def at(self, machine: Any, snapshot: int) -> Rows | None:
        """See Content."""
        with machine.view(HybridTime(snapshot)) as view:
            return _rows(view.scan())

    def checksum(self, machine: Any) -> object:
        """See Content. Snapshots differ, as the time of the newest write tells. None where an entry is replayed that is older
        than what a merge has kept."""
        try:
            with machine.view() as view:
                found = view.checksum()
        except Rejected as exc:
            if exc.code is not Code.SNAPSHOT_TOO_OLD:
                raise
            return None
        return found, machine.exactly_once_checksum()


CONTENTS: dict[str, Content] = {each.kind: each for each in (Pairs(), Table())}


def _machine_of(replica: Replica) -> Any:
    if replica.machine is None:
        raise Retryable("no rows here")
    return replica.machine


def _rows(batches: Iterable[pa.RecordBatch]) -> Rows:
    return {row["k"]: (row["a"], row["b"]) for batch in batches for row in batch.to_pylist()}


@cache
def _written(body: bytes) -> tuple[RowOp, str, int | None, int | None]:
    block = decode_block(body, SCHEMA)
    (row,) = pa.RecordBatch.from_arrays(
        block.batch.columns, schema=SCHEMA.to_arrow(block.column_ids)
    ).to_pylist()
    assert block.op is not None
    return block.op, row["k"], row.get("a"), row.get("b")


def rows_of(entries: Iterable[Entry], snapshot: int) -> Rows:
    """What a snapshot of a table shows after these entries from the beginning on: each write once, in order."""
    rows: Rows = {}
    lowest: dict[bytes, int] = {}
    done: set[tuple[bytes, int]] = set()
    for entry in entries:
        if entry.kind is not EntryKind.WRITE or entry.timestamp > snapshot:
            continue
        header, body = writeop.decode(entry.payload)
        write = header.client_id, header.sequence
        if write in done or header.sequence < lowest.get(header.client_id, 0):
            continue
        done.add(write)
        lowest[header.client_id] = max(lowest.get(header.client_id, 0), header.lowest_unfinished)
        op, key, a, b = _written(bytes(body))
        old = rows.get(key)
        match op:
            case RowOp.UPSERT:
                rows[key] = (a, b)
            case RowOp.INSERT | RowOp.INSERT_IGNORE if old is None:
                rows[key] = (a, b)
            case RowOp.UPDATE | RowOp.UPDATE_IGNORE if old is not None:
                rows[key] = (old[0], b)
            case RowOp.DELETE | RowOp.DELETE_IGNORE:
                rows.pop(key, None)
    return rows
