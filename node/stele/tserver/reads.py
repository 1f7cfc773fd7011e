"""Point reads and checksums on a replica's views. The work is done in threads, never on the event loop.

Invariant: the caller has made sure that the snapshot is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa

from stele.consensus.replica import Replica
from stele.model.errors import Code, Corrupt, Retryable
from stele.model.foreign import read_batch
from stele.model.ids import OpId

T = TypeVar("T")


async def point_read(replica: Replica, keys: bytes, column_ids: list[int], snapshot: int) -> bytes:
    """Arrow IPC stream of the rows that have these keys (an Arrow IPC record batch message), in key order.

    Raises:
        Rejected: keys that are no such message; unknown columns; SNAPSHOT_TOO_OLD.
    """
    machine = _machine(replica)
    schema = machine.schema
    view = machine.view(snapshot)

    def read() -> bytes:
        from stele.tablet.view import key_array

        batch = read_batch(keys, schema.to_arrow(schema.key_column_ids), "keys")
        with view:
            rows = view.get(key_array(batch, schema), column_ids)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_batch(rows)
        result: bytes = sink.getvalue().to_pybytes()
        return result

    return await _guarded(replica, read)


async def checksum(replica: Replica, snapshot: int) -> tuple[int, int, OpId]:
    """(checksum, rows, applied OpId) of a replica at a snapshot."""
    machine = _machine(replica)
    if replica.superblock.kind != "table":
        return machine.checksum(), len(machine), machine.applied
    view = machine.view(snapshot)

    def read() -> tuple[int, int, OpId]:
        with view:
            found = view.checksum()
            return found.checksum, found.rows, view.applied

    return await _guarded(replica, read)


def _machine(replica: Replica) -> Any:
    if replica.machine is None:
        raise Retryable("this replica holds no rows; ask another", code=Code.NOT_LEADER)
    return replica.machine


async def _guarded(replica: Replica, work: Callable[[], T]) -> T:
    try:
        return await replica.host.in_thread(work)
    except Corrupt as exc:
        replica.fail(str(exc))
        raise Retryable(f"this replica is damaged: {exc}; ask another", code=Code.NOT_LEADER) from exc
