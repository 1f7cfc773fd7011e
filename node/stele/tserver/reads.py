"""Point reads and checksums on a replica's views.

A few keys are looked up on the event loop if all that they need is in memory. Passing them to a thread would
cost more. All other reads run in threads. The caller makes sure that the snapshot is complete.

Invariant: a point read takes a bounded share of a thread, and some hundred microseconds of the loop at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pyarrow as pa

from stele.consensus.ports import InThread
from stele.consensus.replica import Replica
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.foreign import read_batch
from stele.model.ids import HybridTime, OpId
from stele.model.incarnation import shown
from stele.model.schema import COLUMNS_MAX
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.proto import tserver_pb2
from stele.tablet.keyspace import KeySpace
from stele.tablet.machine import WouldBlock
from stele.tablet.store import TabletStore

T = TypeVar("T")

_BRIEF_KEYS_MAX, _BRIEF_VALUES_MAX, _BRIEF_BYTES_MAX = 32, 512, 1_024
"""The most keys, keys times columns, and bytes of keys that are looked up on the event loop."""
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_NEWER_RETRY_MS = 20
_FRESH_WAIT_MS = 1_000
"""How long a follower waits until it has applied the index that its leader names, if its reader gives no
time.
"""
VALUES_MAX = 65_536
"""The most keys times columns of one point read."""
KEYS_MAX = 1_024
"""The most keys of one point read, which take some milliseconds of a thread."""


async def point_read(
    replica: Replica,
    keys: bytes,
    column_ids: list[int],
    snapshot: int,
    *,
    in_thread: InThread,
    until: float,
) -> tuple[bytes, list[int]]:
    """Read the rows with these keys.

    Returns an Arrow IPC stream of the rows, in key order. Also returns for each row which of the keys it has.

    `keys`: an Arrow IPC record batch message. Gives up at `until` by the event loop's clock; the caller then
    tries again.

    Raises:
        Rejected: keys that are not a record batch; unknown columns; SNAPSHOT_TOO_OLD; TOO_LARGE, more than
            KEYS_MAX keys, or more columns than a table has.
        Retryable: TIMED_OUT, no thread was free in time.
    """
    machine = store_of(replica)
    schema = machine.schema
    if len(column_ids) > COLUMNS_MAX:
        raise Rejected(
            f"{len(column_ids)} columns in one read; at most {COLUMNS_MAX}; name fewer", code=Code.TOO_LARGE
        )
    if len(set(column_ids)) != len(column_ids):
        raise Rejected("read: a column is named twice; name each once")
    columns = len(column_ids) or len(schema.columns)
    view = machine.view(HybridTime(snapshot))

    def read(*, brief: bool = False) -> tuple[bytes, list[int]]:
        from stele.tablet.view import key_array

        batch = read_batch(keys, schema.to_arrow(schema.key_column_ids), "keys")
        if batch.num_rows > KEYS_MAX:
            raise Rejected(
                f"{batch.num_rows} keys in one read; at most {KEYS_MAX}; scan, or split the read",
                code=Code.TOO_LARGE,
            )
        if batch.num_rows * columns > VALUES_MAX:
            raise Rejected(
                f"{batch.num_rows} keys and {columns} columns in one read, at most {VALUES_MAX} values; "
                f"scan, or split the read",
                code=Code.TOO_LARGE,
            )
        if brief and (batch.num_rows > _BRIEF_KEYS_MAX or batch.num_rows * columns > _BRIEF_VALUES_MAX):
            raise WouldBlock
        rows, places = view.get(
            key_array(batch, schema), column_ids, bytes_max=MESSAGE_BYTES_MAX, brief=brief
        )
        return stream_of(rows), places

    def in_a_thread() -> tuple[bytes, list[int]]:
        with view:
            return read()

    if len(keys) <= _BRIEF_BYTES_MAX:
        try:
            found = read(brief=True)
        except WouldBlock:
            pass
        except Corrupt as exc:
            raise _damaged(replica, exc) from exc
        else:
            view.close()
            return found
    try:
        async with asyncio.timeout_at(until):
            return await _guarded(replica, in_thread(in_a_thread))
    except TimeoutError:
        raise Retryable(
            "the node was too busy to answer this read in time; try again", code=Code.TIMED_OUT
        ) from None


async def fresh_since(replica: Replica, request: tserver_pb2.ReadRequest | tserver_pb2.KvRequest) -> int:
    """Return a time such that all that was acknowledged before it is applied here, for a read at a follower.

    It is a time of the node's steady clock, and not older than the request allows.

    Raises:
        Retryable: SNAPSHOT_NOT_READY, TIMED_OUT, NOT_LEADER: ask another replica.
    """
    now_us = replica.host.steady_us()
    machine = replica.machine
    seen_newer = machine is None or request.after > machine.last_timestamp
    try:
        async with asyncio.timeout((request.deadline_ms or _FRESH_WAIT_MS) / 1000):
            return await replica.following.fresh(now_us - request.max_staleness_us, at_once=seen_newer)
    except TimeoutError:
        raise Retryable("this replica lags behind its leader; ask another", code=Code.TIMED_OUT) from None


def stream_of(rows: pa.RecordBatch) -> bytes:
    """An Arrow IPC stream of one batch. Its bytes are those of Arrow's own writer, which would take twice as
    long.
    """
    return b"".join((rows.schema.serialize(), rows.serialize(), _STREAM_END))


async def checksum(replica: Replica, snapshot: int) -> tuple[int, int, OpId]:
    """(checksum, rows, applied OpId) of a replica at a snapshot."""
    if replica.superblock.kind != "table":
        pairs = key_space_of(replica)
        return pairs.checksum(), len(pairs), pairs.applied
    view = store_of(replica).view(HybridTime(snapshot))

    def read() -> tuple[int, int, OpId]:
        with view:
            found = view.checksum()
            return found.checksum, found.rows, view.applied

    return await _guarded(replica, replica.host.in_thread(read))


def store_of(replica: Replica) -> TabletStore:
    """The rows of a table's replica.

    Raises:
        Retryable: NOT_LEADER, the replica holds no rows.
    """
    machine = replica.machine
    if not isinstance(machine, TabletStore):
        raise Retryable("this replica holds no rows; ask another", code=Code.NOT_LEADER)
    return machine


def check_incarnation(replica: Replica, incarnation: int, *, exact: bool = False) -> None:
    """Refuse a request for another incarnation of a tablet.

    0 means any incarnation, because programs of release 0.1.0 send none. With `exact`, 0 means a tablet that
    was never recovered.

    Raises:
        Rejected: STALE_INCARNATION.
    """
    own = replica.standing.superblock.tablet_incarnation
    if (incarnation or exact) and incarnation != own:
        raise Rejected(
            f"tablet {replica.tablet_id[:8]} is at incarnation {shown(own)}, but the request names "
            f"{shown(incarnation)}; ask the masters again",
            code=Code.STALE_INCARNATION,
        )


def check_tablet(replica: Replica, kind: str, incarnation: int) -> None:
    """Refuse a request for another kind of tablet, or for another incarnation of it (0: any).

    Raises:
        Rejected: STALE_INCARNATION. INVALID_ARGUMENT, the tablet is of another kind.
    """
    check_incarnation(replica, incarnation)
    superblock = replica.standing.superblock
    if superblock.kind != kind:
        raise Rejected(
            f"tablet {replica.tablet_id[:8]} is a {superblock.kind}, but the request is for a {kind}"
        )


def refuse_newer(machine: TabletStore, version: int) -> None:
    """Refuse a request that was made with a newer schema than the tablet has applied.

    Raises:
        Retryable: NOT_READY: this replica has not applied the change yet.
    """
    if version > machine.schema.version:
        raise Retryable(
            f"the request has schema version {version}, but this replica has {machine.schema.version} so "
            f"far; try again",
            code=Code.NOT_READY,
            retry_after_ms=_NEWER_RETRY_MS,
        )


def key_space_of(replica: Replica) -> KeySpace:
    """The pairs of a key space's replica.

    Raises:
        Retryable: NOT_LEADER, the replica holds no pairs.
    """
    machine = replica.machine
    if not isinstance(machine, KeySpace):
        raise Retryable("this replica holds no rows; ask another", code=Code.NOT_LEADER)
    return machine


async def _guarded(replica: Replica, work: Awaitable[T]) -> T:
    try:
        return await work
    except Corrupt as exc:
        raise _damaged(replica, exc) from exc


def _damaged(replica: Replica, exc: Corrupt) -> Retryable:
    replica.fail(str(exc))
    return Retryable(f"this replica is damaged: {exc}; ask another", code=Code.NOT_LEADER)
