"""Rows of the catalog and their bytes. Used by catalog and by everything that proposes; opens nothing.

A row is a version byte and compact JSON with fields in declaration order, so equal values have equal bytes. A new field
goes to the end and has a default, which rows without it mean.

Invariant: an unknown version or field is refused, never dropped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stele.model.config import Configuration, decode_configuration, encode_configuration
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TableId, TabletId
from stele.model.partition import Partition

VERSION = 1

NO_CONFIGURATION = Configuration(-1, ())
"""Of a tablet whose peers are not chosen yet."""

TABLET_STATES = ("PREPARING", "CREATING", "RUNNING", "REPLACED", "DELETED")

TABLE_PREFIX = b"table/"
TABLET_PREFIX = b"tablet/"
NODE_PREFIX = b"node/"
INTENT_PREFIX = b"intent/"
CLAIM_KEY = b"claim"
CLUSTER_KEY = b"cluster"


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """One per cluster. `cluster_version` is what all formats may use."""

    cluster_id: str
    cluster_version: int
    masters: int


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table. `state`: RUNNING, ALTERING, REMOVED. Removed ones stay until their tablets' rows are dropped."""

    table_id: TableId
    name: str
    state: str
    schema: str
    partitioning: str
    replication_factor: int
    kind: str
    created_us: int


@dataclass(frozen=True, slots=True)
class TabletRecord:
    """A tablet. `state`: PREPARING, CREATING, RUNNING, REPLACED, DELETED. `uncreated`: first replicas not yet reported.

    `leader` is the master's choice until one is reported; `since_us` is when `state` began.
    """

    tablet_id: TabletId
    table_id: TableId
    ordinal: int
    state: str
    partition: Partition
    since_us: int
    config: Configuration = NO_CONFIGURATION
    term: int = 0
    leader: str = ""
    next_replica_id: int = 1
    uncreated: tuple[int, ...] = ()
    incarnation: int = 0


def mark_of(row: TabletRecord, state: str, now_us: int) -> TabletRecord:
    """What stays on record of a tablet that is gone: by it late replicas are deleted (forgetting.py), and for a long time
    there may be many. Which peers it had and what it held is of no use any more, and is two thirds of a row."""
    nobody = Configuration(row.config.opid_index, ())
    return dataclasses.replace(
        row, state=state, since_us=now_us, config=nobody, partition=Partition(), leader=""
    )


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node or a master. `state`: ACTIVE, DRAINING, RETIRED. `formed`: seen with a formatted volume, ever.

    `incarnation`, `start`, `log_synced`: as it registered last; a start on an older copy of its volume is refused
    (liveness.refuse_older).
    """

    node_id: NodeId
    role: str
    state: str
    formed: bool = False
    name: str = ""
    address: str = ""
    flight_address: str = ""
    http_port: int = 0
    machine: str = ""
    zone: str = ""
    version: str = ""
    reason: str = ""
    incarnation: int = 0
    start: int = 0
    log_synced: int = 0


@dataclass(frozen=True, slots=True)
class IntentRecord:
    """What a driver has begun on a tablet; one per tablet. `config_index` is that of the configuration then."""

    tablet_id: TabletId
    replica_id: ReplicaId
    target_node: NodeId
    kind: str
    epoch: int
    config_index: int
    expires_us: int
    source_node: str = ""
    replaces_replica: int = 0
    witness: bool = False
    witness_start: OpId = OPID_NONE
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """Who drives. Stays when it has expired, so that epochs only rise. `expires_us`: 0 if it was given back; else by the
    clock of the leader that granted it, and not to be judged by another."""

    holder: str = ""
    epoch: int = 0
    expires_us: int = field(default=0)


R = TypeVar("R", ClusterRecord, TableRecord, TabletRecord, NodeRecord, IntentRecord, ClaimRecord)

_TO_JSON: dict[type, Callable[[Any], Any]] = {
    Configuration: lambda c: encode_configuration(c).hex(),
    Partition: lambda p: [list(p.hash_buckets), p.range_start.hex(), p.range_end.hex()],
    OpId: lambda o: [o.term, o.index],
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "config": lambda raw: decode_configuration(bytes.fromhex(raw)),
    "partition": lambda raw: Partition(tuple(raw[0]), bytes.fromhex(raw[1]), bytes.fromhex(raw[2])),
    "witness_start": lambda raw: OpId(int(raw[0]), int(raw[1])),
    "uncreated": lambda raw: tuple(int(r) for r in raw),
}


def key_of(record: Any) -> bytes:
    """The key of a record's row."""
    match record:
        case ClusterRecord():
            return CLUSTER_KEY
        case ClaimRecord():
            return CLAIM_KEY
        case TableRecord():
            return TABLE_PREFIX + record.table_id.encode()
        case TabletRecord():
            return TABLET_PREFIX + record.tablet_id.encode()
        case NodeRecord():
            return NODE_PREFIX + record.node_id.encode()
        case IntentRecord():
            return INTENT_PREFIX + record.tablet_id.encode()
        case _:
            raise TypeError(f"{type(record).__name__} is no catalog record")


def encode(record: Any) -> bytes:
    """The bytes of a record's row."""
    values = [_plain(getattr(record, f.name)) for f in dataclasses.fields(record)]
    return bytes([VERSION]) + json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    convert = _TO_JSON.get(type(value))
    return convert(value) if convert is not None else value


def decode(kind: type[R], data: bytes) -> R:
    """The record of a row.

    Raises:
        Rejected: UNSUPPORTED_VERSION for a version this program does not know.
        Corrupt: for bytes that are no such row.
    """
    if not data or data[0] != VERSION:
        raise Rejected(
            f"catalog row {kind.__name__}: version {data[0] if data else 'none'} is unknown, this program reads "
            f"{VERSION}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    try:
        values = json.loads(data[1:])
        fields = dataclasses.fields(kind)
        if len(values) > len(fields):
            raise ValueError(f"{len(values)} fields, expected {len(fields)}")
        pairs = zip(fields, values, strict=False)
        return kind(**{f.name: _FROM_JSON.get(f.name, _same)(v) for f, v in pairs})
    except (ValueError, TypeError, IndexError) as exc:
        raise Corrupt(f"catalog row {kind.__name__}: {exc}; expected what encode wrote") from exc


def _same(value: Any) -> Any:
    return value
