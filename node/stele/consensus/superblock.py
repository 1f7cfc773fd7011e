"""The superblock: identity and data state of a replica, in one small file. Written by the tablet manager and
by copies.

Invariant: one rename replaces the superblock, so a replica is always in exactly one data state. COPYING: it
never had rows, or was ordered to be removed. TOMBSTONED: it never votes again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from stele.consensus.files import frame_record, parse_record, read_record, write_record
from stele.model.errors import Corrupt, unknown_here
from stele.model.ids import OPID_NONE, OpId, ReplicaId, StreamKey, TableId, TabletId
from stele.model.jsons import parse_json

SUPERBLOCK = "superblock"
_MAGIC = b"STSB"
_VERSION = 1


class DataState(IntEnum):
    """The data states of a replica. The numbers are those of DataStatePB, on disk and on the wire."""

    READY = 1
    COPYING = 2
    TOMBSTONED = 3
    DELETED = 4


@dataclass(frozen=True, slots=True)
class Superblock:
    """A replica's identity and data state.

    - `kind`: its state machine, "table" or "keyspace".
    - `schema`: `Schema.to_json` text, empty for a key space.
    - `partitioning`, `partition`: serialised PartitioningPB and PartitionPB.
    - `witness_start`: set while the replica logs as a WITNESS and its rows are still being copied.
    - `last_term`, `last_opid`: of a tombstone, the term and the last entry that the replica had.
    """

    tablet_id: TabletId
    replica_id: ReplicaId
    table_id: TableId
    table_name: str
    kind: str
    data_state: DataState
    schema: str = ""
    partitioning: bytes = b""
    partition: bytes = b""
    tablet_incarnation: int = 0
    witness_start: OpId = OPID_NONE
    last_term: int = 0
    last_opid: OpId = OPID_NONE
    last_config_index: int = -1
    leader_hint: ReplicaId | None = field(default=None)

    @property
    def key(self) -> StreamKey:
        """The replica's stream in the node's log."""
        return StreamKey(self.tablet_id, self.replica_id)

    @property
    def young_witness(self) -> bool:
        """Whether it logs and votes while its rows are still being copied."""
        return self.data_state is DataState.COPYING and self.witness_start != OPID_NONE

    def with_state(self, state: DataState) -> Superblock:
        """The same replica in another data state."""
        return replace(self, data_state=state)


def _opid(raw: Any) -> OpId:
    term, index = raw
    return OpId(int(term), int(index))


def _body(block: Superblock) -> bytes:
    value = {
        "tablet_id": block.tablet_id,
        "replica_id": block.replica_id,
        "table_id": block.table_id,
        "table_name": block.table_name,
        "kind": block.kind,
        "data_state": int(block.data_state),
        "schema": block.schema,
        "partitioning": block.partitioning.hex(),
        "partition": block.partition.hex(),
        "tablet_incarnation": block.tablet_incarnation,
        "witness_start": [block.witness_start.term, block.witness_start.index],
        "last_term": block.last_term,
        "last_opid": [block.last_opid.term, block.last_opid.index],
        "last_config_index": block.last_config_index,
        "leader_hint": block.leader_hint,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _data_state(number: int, what: str) -> DataState:
    try:
        return DataState(number)
    except ValueError:
        raise unknown_here(f"{what}: data state", number) from None


def _parse(body: bytes, what: str) -> Superblock:
    try:
        v = parse_json(body)
        hint = v["leader_hint"]
        return Superblock(
            tablet_id=TabletId(v["tablet_id"]),
            replica_id=ReplicaId(int(v["replica_id"])),
            table_id=TableId(v["table_id"]),
            table_name=str(v["table_name"]),
            kind=str(v["kind"]),
            data_state=_data_state(v["data_state"], what),
            schema=str(v["schema"]),
            partitioning=bytes.fromhex(v["partitioning"]),
            partition=bytes.fromhex(v["partition"]),
            tablet_incarnation=int(v["tablet_incarnation"]),
            witness_start=_opid(v["witness_start"]),
            last_term=int(v["last_term"]),
            last_opid=_opid(v["last_opid"]),
            last_config_index=int(v["last_config_index"]),
            leader_hint=None if hint is None else ReplicaId(int(hint)),
        )
    except (ValueError, TypeError, KeyError) as exc:
        raise Corrupt(f"{what}: {exc!r}; expected a superblock's fields; copy the replica anew") from exc


def encode_superblock(block: Superblock) -> bytes:
    """Bytes of a superblock, as a copy session sends them."""
    return frame_record(_MAGIC, _VERSION, _body(block))


def decode_superblock(data: bytes) -> Superblock:
    """The inverse of `encode_superblock`.

    Raises:
        Corrupt: the bytes are damaged.
        Rejected: UNSUPPORTED_VERSION, a later release wrote it.
    """
    return _parse(parse_record(data, _MAGIC, _VERSION, "superblock")[1], "superblock")


def write_superblock(directory: Path, block: Superblock) -> None:
    """Replace the superblock of the replica in `directory`; on return it survives power loss."""
    write_record(directory / SUPERBLOCK, _MAGIC, _VERSION, _body(block))


def read_superblock(directory: Path) -> Superblock:
    """The superblock of the replica in `directory`.

    Raises:
        FileNotFoundError: it was never made.
        Corrupt, Rejected: as `decode_superblock`.
    """
    path = directory / SUPERBLOCK
    return _parse(read_record(path, _MAGIC, _VERSION)[1], str(path))
