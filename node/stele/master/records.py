"""Rows of the catalog and their keys. Used by catalog and by everything that proposes; opens nothing.

A new field goes to the end and has a default, which also applies to rows without it. Any other change (meaning or type of a
field, a new state) must raise `row_encoding.VERSION`.

Invariant: a record never changes; another one takes its place.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.config import Configuration
from stele.model.copies import CopyRecord
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TableId, TabletId
from stele.model.partition import Partition

NO_CONFIGURATION = Configuration(-1, ())
"""The configuration of a tablet whose peers are not chosen yet."""

TABLET_STATES = ("PREPARING", "CREATING", "RUNNING", "REPLACED", "DELETED")

GIVEN_UP_BEFORE = "declared lost, and silent"
"""The reason that drivers of the version before gave for nodes that they gave up. Rows of that version have
no `given_up`, so this text tells why a node drains.
"""

ADMINISTRATOR, DRIVER = "administrator", "driver"
"""Who asked for a node's wanted state: an administrator, whose order has no driver's epoch, or a driver."""
KEPT = ("PARKED", "FENCED")
"""Wanted states in which a node keeps its replicas though it does not serve. These states end after a time.
"""

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
