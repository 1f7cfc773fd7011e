"""Rows of the catalog and their encoding. Used by catalog and by everything that proposes; opens nothing.

A row is a version byte and compact JSON, with fields in declaration order. A new field goes to the end and
has a default, which also applies to rows without it. An older program ignores a new field and writes it back
unchanged. So a row may be shorter or longer than what this program writes; compare rows by the bytes that
were read (`Row.stored`). Any other change (meaning or type of a field, a new state) must raise VERSION. Older
programs then end at such a row.

Invariant: an unknown version is refused, and an unknown field is kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import intern
from typing import Any, TypeVar

from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.config import Configuration, decode_configuration, encode_configuration
from stele.model.copies import CopyRecord
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TableId, TabletId
from stele.model.jsons import parse_json
from stele.model.partition import Partition

VERSION = 1

NO_CONFIGURATION = Configuration(-1, ())
"""The configuration of a tablet whose peers are not chosen yet."""

TABLET_STATES = ("PREPARING", "CREATING", "RUNNING", "REPLACED", "DELETED")

GIVEN_UP_BEFORE = "declared lost, and silent"
"""The reason that drivers of the version before gave for nodes that they gave up. Rows of that version have
no `given_up`, so this text tells why a node drains.
"""

ADMINISTRATOR, DRIVER = "administrator", "driver"
KEPT = ("PARKED", "FENCED")
"""Wanted states in which a node keeps its replicas though it does not serve. These states end after a time.
"""
"""Who asked for a node's wanted state: an administrator, whose order has no driver's epoch, or a driver."""

TABLE_PREFIX = b"table/"
TABLET_PREFIX = b"tablet/"
NODE_PREFIX = b"node/"
INTENT_PREFIX = b"intent/"
RECOVERY_PREFIX = b"recovery/"
CLAIM_KEY = b"claim"
POLICY_KEY = b"policy"
CLUSTER_KEY = b"cluster"


@dataclass(frozen=True, slots=True)
class Row:
    """Common part of all records. `surplus`: values of fields that only a later release knows."""

    surplus: tuple[Any, ...] = field(default=(), compare=False, repr=False, kw_only=True)
    stored: bytes | None = field(default=None, init=False, compare=False, repr=False)
    """The bytes that this record was decoded from (not a copy). None if the record was not decoded, also
    after `replace`.
    """


@dataclass(frozen=True, slots=True)
class ClusterRecord(Row):
    """The cluster; there is one such record.

    `cluster_version`: the finalized one (versions.py). It is also the version byte of the row. So a master of
    a release that does not know this version ends. `keep_dropped_ms`: how long dropped tables can be
    recalled, unless their drop gives another time.
    """

    cluster_id: str
    cluster_version: int
    masters: int
    keep_dropped_ms: int = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class TableRecord(Row):
    """A table. `state`: RUNNING, ALTERING, DROPPED, REMOVED.

    A DROPPED table has no name any more and serves nobody; its tablets stay (dropping.py). A REMOVED table
    stays on record until the rows of its tablets are dropped.

    - `owner`, `comment`: for people.
    - `dropped_us`: since when it is dropped, for display.
    - `keep_ms`: the time that was left to keep it when the row was written.
    - `dropped_by`, `recalled_by`: the id of the last request that did so. By it a repeated request is
      recognised.
    - `replication_factor_before`: the one before its last change; 0 if it was never changed.
    - `schema`: the newest one. `fully_applied_schema`: while the table is altered, the schema before, which
      all tablets have; else "".
    - `altered_by`: likewise the ids of the last requests that altered it, with spaces between.
    """

    table_id: TableId
    name: str
    state: str
    schema: str
    partitioning: str
    replication_factor: int
    kind: str
    created_us: int
    replication_factor_before: int = 0
    fully_applied_schema: str = ""
    altered_by: str = ""
    dropped_us: int = 0
    keep_ms: int = 0
    dropped_by: str = ""
    recalled_by: str = ""
    owner: str = ""
    comment: str = ""


@dataclass(frozen=True, slots=True)
class TabletRecord(Row):
    """A tablet. `state`: PREPARING, CREATING, RUNNING, REPLACED, DELETED. `since_us`: when that state began.

    - `uncreated`: first replicas not yet reported.
    - `leader`: the master's choice until a replica reports a leader.
    - `holders`: for a DELETED tablet, the nodes that may have had a replica when it was deleted; empty if
      unknown.
    - `harmless`: if at most this many of the holders are left, they are too few to commit anything.
    - `by_hand`: what an administrator asked of its replicas.
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
    holders: tuple[str, ...] = ()
    harmless: int = 0
    leader_kept_until_us: int = 0
    """Until when drivers do not move its leader, because an administrator did. By the wall clock of a leading
    master; an end that comes early or late does no harm.
    """
    by_hand: ByHand = NOT_BY_HAND
    copies: tuple[CopyRecord, ...] = ()
    """Replicas made by heals and moves, and whether they hold the rows of another voter. Entries of replicas
    that left `config` mean nothing (`of_members`).
    """


def deleted_row(row: TabletRecord, state: str, now_us: int) -> TabletRecord:
    """The row that is kept of a deleted or replaced tablet, so that late replicas are deleted
    (forgetting.py).

    Many such rows may exist for long. So it leaves out the configuration and the key range, two thirds of a
    row.
    """
    nobody = dataclasses.replace(row.config, peers=())
    return dataclasses.replace(
        row,
        state=state,
        since_us=now_us,
        config=nobody,
        partition=Partition(),
        leader="",
        by_hand=NOT_BY_HAND,
        copies=(),
    )


@dataclass(frozen=True, slots=True)
class NodeRecord(Row):
    """A node or a master. `state`: ACTIVE, DRAINING, RETIRED. `formed`: it was once seen with a formatted
    volume.

    `given_up`: why it is DRAINING. True: a driver gave it up because it was silent. False: somebody asked for
    it.

    `incarnation`, `start`, `log_synced`: from its last registration. They identify a start on an older copy
    of its volume (liveness.refuse_older).

    `wanted`: DRAINED, PARKED, FENCED, RETIRED or "". It counts only beside the state with which it was
    written (`asked`), because an older program changes `state` alone. `owner`: who asked for it. `reason`:
    why. `left_ms`: how long it still lasts, as of when the row was written; 0: without end.

    An older program takes a PARKED or FENCED node for one in service. It takes a DRAINED node for one that
    retires, which masters refuse.
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
    given_up: bool = False
    wanted: str = ""
    owner: str = ""
    left_ms: int = 0
    cluster_version: int = 0
    """The newest cluster version that its program can read, by its last registration. 0: it does not say, so
    1.

    For display only, because a master of an earlier release does not keep it up to date.
    """

    @property
    def returns(self) -> bool:
        """Whether it is DRAINING only because it was silent. Such a node returns to service with its next
        heartbeat.
        """
        return self.state == "DRAINING" and (self.given_up or self.reason == GIVEN_UP_BEFORE)

    @property
    def asked(self) -> str:
        """The state that an administrator or a driver requested for this node.

        IN_SERVICE: it serves. DRAINED: it has no leaders and replicas, but keeps its place. PARKED: it may be
        away, and keeps its replicas. FENCED: like PARKED, and it serves nobody. RETIRED: it drains, and is
        then gone for good.
        """
        if self.state == "ACTIVE":
            return self.wanted if self.wanted in KEPT and self.left_ms else "IN_SERVICE"
        if self.state == "DRAINING":
            if self.returns:
                return "IN_SERVICE"
            return "DRAINED" if self.wanted == "DRAINED" else "RETIRED"
        return "RETIRED"

    @property
    def takes_replicas(self) -> bool:
        """Whether new replicas may be placed on it, once it is formed and alive."""
        return self.state == "ACTIVE" and self.asked not in KEPT

    @property
    def asked_by(self) -> str:
        """Who asked for that state; "" if nobody asked. Rows of an earlier version do not say, so it was an
        administrator.
        """
        return "" if self.asked == "IN_SERVICE" else self.owner or ADMINISTRATOR


@dataclass(frozen=True, slots=True)
class IntentRecord(Row):
    """A change that a driver has begun on a tablet; at most one per tablet. `config_index`: that of the
    configuration when the change began.
    """

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
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ClaimRecord(Row):
    """The driver claim. The record stays after the claim expires, so that epochs only rise.

    `expires_us`: 0 if it was released. Otherwise a time of the clock of the leader that granted it, which
    other leaders must not judge.
    """

    holder: str = ""
    epoch: int = 0
    expires_us: int = field(default=0)


@dataclass(frozen=True, slots=True)
class PolicyRecord(Row):
    """What a driver may do; fields as in `DriverPolicyPB`. The row does not exist until somebody sets it.

    `holding`: who holds the change budget. Each holder has the ids and incarnations of the nodes that it has
    taken away.
    """

    dead_after_ms: int
    max_lost_nodes: int
    max_copies: int
    bytes_per_second: int
    drive_after_ms: int
    owner: str = ""
    balance_leaders: bool = True
    rebalance: bool = True
    held: str = ""
    holding: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryRecord(Row):
    """A lost majority that an administrator gave up. The record stays for ever, even when the tablet is gone.

    `incarnation`: that of the tablet from then on. `node_id`, `replica_id`: the survivor, whose log ended at
    `last_logged` or later. `term`: higher than any term that a replica reported. `config_before`: the
    configuration whose majority was lost. `told`: what the command said about the loss before the
    administrator agreed.
    """

    tablet_id: TabletId
    incarnation: int
    since_us: int
    owner: str
    reason: str
    told: str
    node_id: NodeId
    replica_id: ReplicaId
    last_logged: OpId
    term: int
    config_before: Configuration


R = TypeVar(
    "R",
    ClusterRecord,
    TableRecord,
    TabletRecord,
    NodeRecord,
    IntentRecord,
    ClaimRecord,
    PolicyRecord,
    RecoveryRecord,
)


def _partition(buckets: list[int], start: str, end: str) -> Partition:
    return Partition(tuple(buckets), bytes.fromhex(start), bytes.fromhex(end))


def _by_hand(raw: list[Any]) -> ByHand:
    if not raw:
        return NOT_BY_HAND
    pinned, avoided, extra, owner, reason, since_us = raw
    return ByHand(
        tuple(map(str, pinned)), tuple(map(str, avoided)), int(extra), str(owner), str(reason), int(since_us)
    )


def _same(value: Any) -> Any:
    return value


def _copy_to_json(c: CopyRecord) -> list[Any]:
    """The JSON of a comparison record. It is as short as possible, since each tablet may have one."""
    if c.waits:
        return [c.replica_id, c.cause]
    told = [c.replica_id, c.cause, c.other_id, c.at_us, c.snapshot, c.index, c.rows, c.checksum]
    return told if c.equal else [*told, c.other_rows, c.other_checksum]


def _copy_from_json(raw: list[Any]) -> CopyRecord:
    replica_id, cause, *numbers = raw
    if len(numbers) == 6:
        numbers += numbers[-2:]
    return CopyRecord(int(replica_id), str(cause), *map(int, numbers))


_TO_JSON: dict[type, Callable[[Any], Any]] = {
    Configuration: lambda c: encode_configuration(c).hex(),
    Partition: lambda p: [list(p.hash_buckets), p.range_start.hex(), p.range_end.hex()],
    OpId: lambda o: [o.term, o.index],
    ByHand: lambda h: (
        [list(h.pinned), list(h.avoided), h.extra, h.owner, h.reason, h.since_us] if h != NOT_BY_HAND else []
    ),
    CopyRecord: _copy_to_json,
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    # Thousands of rows say the same words, so each is kept once.
    **dict.fromkeys(
        ("tablet_id", "table_id", "node_id", "leader", "state", "target_node", "source_node"), intern
    ),
    "config": lambda raw: decode_configuration(bytes.fromhex(raw)),
    "partition": lambda raw: _partition(*raw),
    "config_before": lambda raw: decode_configuration(bytes.fromhex(raw)),
    "witness_start": lambda raw: OpId(*map(int, raw)),
    "last_logged": lambda raw: OpId(*map(int, raw)),
    "uncreated": lambda raw: tuple(int(r) for r in raw),
    "by_hand": _by_hand,
    "copies": lambda raw: tuple(map(_copy_from_json, raw)),
    "holders": lambda raw: tuple(str(node_id) for node_id in raw),
    "holding": lambda raw: tuple((str(name), tuple((str(n), int(i)) for n, i in away)) for name, away in raw),
    "waiting": lambda raw: tuple(map(str, raw)),
}
_BESIDE = {f.name for f in dataclasses.fields(Row)}
_FIELDS: dict[type, tuple[tuple[str, Callable[[Any], Any]], ...]] = {
    kind: tuple(
        (f.name, _FROM_JSON.get(f.name, _same)) for f in dataclasses.fields(kind) if f.name not in _BESIDE
    )
    for kind in (
        *(ClusterRecord, TableRecord, TabletRecord, NodeRecord, IntentRecord, ClaimRecord),
        *(PolicyRecord, RecoveryRecord),
    )
}
"""The decoder from JSON of each field, by the field's name."""


def key_of(record: Row) -> bytes:
    """The key of a record's row."""
    match record:
        case ClusterRecord():
            return CLUSTER_KEY
        case ClaimRecord():
            return CLAIM_KEY
        case PolicyRecord():
            return POLICY_KEY
        case TableRecord():
            return TABLE_PREFIX + record.table_id.encode()
        case TabletRecord():
            return TABLET_PREFIX + record.tablet_id.encode()
        case NodeRecord():
            return NODE_PREFIX + record.node_id.encode()
        case IntentRecord():
            return INTENT_PREFIX + record.tablet_id.encode()
        case RecoveryRecord():
            return RECOVERY_PREFIX + f"{record.tablet_id}/{record.incarnation:06}".encode()
        case _:
            raise TypeError(f"{type(record).__name__} is not a catalog record")


def encode(record: Row) -> bytes:
    """The bytes of a record's row. Values that only a later release knows come last."""
    values = [_plain(getattr(record, name)) for name, _ in _FIELDS[type(record)]]
    values += record.surplus
    return (
        bytes([_version_of(record)]) + json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode()
    )


def _version_of(record: Row) -> int:
    return max(VERSION, record.cluster_version) if isinstance(record, ClusterRecord) else VERSION


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return [_plain(each) for each in value]
    convert = _TO_JSON.get(type(value))
    return convert(value) if convert is not None else value


def stored(record: Row) -> bytes:
    """The bytes of a record's row as they stand in the key space."""
    return record.stored if record.stored is not None else encode(record)


def decode(kind: type[R], data: bytes) -> R:
    """The record of a row.

    Raises:
        Rejected: UNSUPPORTED_VERSION, a version or value that only a later release knows.
        Corrupt: the bytes are not a row.
    """
    version = data[0] if data else 0
    newest = CLUSTER_VERSION if kind is ClusterRecord else VERSION
    if version > newest:
        raise _later(kind, f"version {version}, but this program reads up to version {newest}")
    try:
        if version < VERSION:
            raise ValueError(f"version {version}")
        values = parse_json(data[1:])
    except ValueError as exc:
        raise Corrupt(f"catalog row {kind.__name__}: {exc}; expected what encode wrote") from exc
    fields = _FIELDS[kind]
    try:
        if not isinstance(values, list):
            raise TypeError(f"a {type(values).__name__}; expected a list")
        known = {name: convert(value) for (name, convert), value in zip(fields, values, strict=False)}
        record = kind(**known, surplus=tuple(values[len(fields) :]))
    except (ValueError, TypeError) as exc:
        raise _later(kind, f"it has values that this release does not know ({exc})") from exc
    object.__setattr__(record, "stored", data)  # the class is frozen
    return record


def _later(kind: type[Any], why: str) -> Rejected:
    return Rejected(
        f"catalog row {kind.__name__}: {why}; upgrade this program", code=Code.UNSUPPORTED_VERSION
    )
