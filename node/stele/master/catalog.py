"""The catalog in memory: the rows of the catalog tablet, decoded and indexed. Leader and followers each have
one.

Only `applied` changes it; following.py calls that for each row and each committed change. Invariant: the
memory is a function of the key space's content. Deleted tables and tablets stay until their rows are dropped
(forgetting.py). The maps by name leave them out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from sys import intern
from typing import Any

from stele.master.records import (
    CLAIM_KEY,
    CLUSTER_KEY,
    INTENT_PREFIX,
    NODE_PREFIX,
    POLICY_KEY,
    RECOVERY_PREFIX,
    TABLE_PREFIX,
    TABLET_PREFIX,
    ClaimRecord,
    ClusterRecord,
    IntentRecord,
    NodeRecord,
    PolicyRecord,
    RecoveryRecord,
    TableRecord,
    TabletRecord,
)
from stele.master.row_encoding import decode
from stele.model.cluster_version import FIRST_CLUSTER_VERSION
from stele.model.errors import Code, Rejected
from stele.model.ids import CATALOG_TABLET_ID, OPID_NONE, OpId, TabletId
from stele.model.schema import Schema

CURRENT_TABLETS = ("PREPARING", "CREATING", "RUNNING")
"""States of tablets that hold a part of a table, or will hold one."""


GONE_TABLES = ("DROPPED", "REMOVED")
"""States of tables that have no name and serve nobody. DROPPED tables can be recalled."""


def _digest_of(drops: Mapping[str, str]) -> int:
    """A 64-bit digest of these tables and the requests that dropped them, independent of their order; 0 if
    there are none.
    """
    if not drops:
        return 0
    said = "".join(f"{table_id} {by}\n" for table_id, by in sorted(drops.items()))
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big") or 1


class Catalog:
    """All rows of the catalog, by id. Records are immutable, and readers must not change the maps."""

    def __init__(self, rows: Iterable[tuple[bytes, bytes]] = (), opid: OpId = OPID_NONE) -> None:
        self.cluster: ClusterRecord | None = None
        self.claim = ClaimRecord()
        self.policy: PolicyRecord | None = None
        """The policy by which the leading master drives; None: nobody has set one."""
        self.tables: dict[str, TableRecord] = {}
        self.table_by_name: dict[str, TableRecord] = {}
        self.altering: dict[str, int] = {}
        """Tables that are being altered, each with the schema version that it is to have. They may be
        DROPPED.
        """
        self.dropped: dict[str, TableRecord] = {}
        """Tables that are DROPPED."""
        self.removed: dict[str, None] = {}
        """Tables that are REMOVED."""
        self.withdrawn: dict[str, str] = {}
        """Tables that were dropped, each with the request that dropped it: DROPPED tables, and deleted ones
        of which nodes may still have replicas.
        """
        self._withdrawn_digest: int | None = 0
        self.tablets: dict[str, TabletRecord] = {}
        self.tablets_of: dict[str, dict[str, None]] = {}
        self.current: dict[str, None] = {}
        """Tablets in one of CURRENT_TABLETS."""
        self.gone: dict[str, None] = {}
        """All other tablets. Their rows stay until no replica of them can appear. They may outnumber
        `current`."""
        self.states: Counter[str] = Counter()
        """The number of tablets in each state."""
        self.replicas: Counter[str] = Counter()
        """By node: the replicas that the configurations of `current` give to it."""
        self.leads: Counter[str] = Counter()
        """By node: the tablets of `current` that it leads, as far as their rows say."""
        self.nodes: dict[str, NodeRecord] = {}
        self.intents: dict[str, IntentRecord] = {}
        self.recoveries: dict[str, RecoveryRecord] = {}
        """The last recovery of each tablet that was ever recovered."""
        self.opid = opid
        self._listeners: list[Callable[[bytes], None]] = []
        for key, value in rows:
            self.applied(key, None, value, opid)

    def on_change(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener(key)` after each change in memory."""
        self._listeners.append(listener)

    def no_more_changes(self, listener: Callable[[bytes], None]) -> None:
        """Remove a listener of `on_change`."""
        self._listeners.remove(listener)

    def applied(self, key: bytes, old: bytes | None, new: bytes | None, opid: OpId) -> None:
        """Apply a committed change of one row. `new` None: the row was deleted. In a batch, tablets come
        before their table.
        """
        del old
        self.opid = opid
        if key.startswith(TABLET_PREFIX):
            self._tablet(key, new)
        elif key.startswith(TABLE_PREFIX):
            self._table(key, new)
        elif key.startswith(NODE_PREFIX):
            self._put(self.nodes, NodeRecord, key[len(NODE_PREFIX) :], new)
        elif key.startswith(INTENT_PREFIX):
            self._put(self.intents, IntentRecord, key[len(INTENT_PREFIX) :], new)
        elif key.startswith(RECOVERY_PREFIX) and new is not None:
            done = decode(RecoveryRecord, new)
            last = self.recoveries.get(done.tablet_id)
            if last is None or last.incarnation <= done.incarnation:
                self.recoveries[done.tablet_id] = done
        elif key == CLAIM_KEY and new is not None:
            self.claim = decode(ClaimRecord, new)
        elif key == POLICY_KEY and new is not None:
            self.policy = decode(PolicyRecord, new)
        elif key == CLUSTER_KEY and new is not None:
            self.cluster = decode(ClusterRecord, new)
        for listener in self._listeners:
            listener(key)

    def _tablet(self, key: bytes, new: bytes | None) -> None:
        tablet_id = intern(key[len(TABLET_PREFIX) :].decode())
        before = self.tablets.get(tablet_id)
        record = self._put(self.tablets, TabletRecord, key[len(TABLET_PREFIX) :], new)
        if before is not None:
            self.states[before.state] -= 1
            into = self.current if before.state in CURRENT_TABLETS else self.gone
            del into[tablet_id]
            self._place(before, -1)
        if record is not None:
            self.states[record.state] += 1
            self.tablets_of.setdefault(record.table_id, {})[record.tablet_id] = None
            into = self.current if record.state in CURRENT_TABLETS else self.gone
            into[tablet_id] = None
            self._place(record, 1)
        elif before is not None:
            of_table = self.tablets_of[before.table_id]
            del of_table[tablet_id]
            if not of_table:
                del self.tablets_of[before.table_id]

    def _place(self, row: TabletRecord, number: int) -> None:
        if row.state in CURRENT_TABLETS:
            self.leads[row.leader] += number
            for peer in row.config.peers:
                self.replicas[peer.node_id] += number

    def _table(self, key: bytes, new: bytes | None) -> None:
        before = self.tables.get(key[len(TABLE_PREFIX) :].decode())
        record = self._put(self.tables, TableRecord, key[len(TABLE_PREFIX) :], new)
        if before is not None and self.table_by_name.get(before.name) == before:
            del self.table_by_name[before.name]
        table_id = key[len(TABLE_PREFIX) :].decode()
        if record is not None and record.state not in GONE_TABLES:
            self.table_by_name[record.name] = record
        self.dropped.pop(table_id, None)
        if record is not None and record.state == "DROPPED":
            self.dropped[table_id] = record
        self.removed.pop(table_id, None)
        if record is not None and record.state == "REMOVED":
            self.removed[table_id] = None
        if record is not None and record.state in GONE_TABLES and record.dropped_us > 0:
            by: str | None = record.dropped_by
        else:
            by = None
        if by != self.withdrawn.get(table_id):
            self._withdrawn_digest = None
            if by is None:
                del self.withdrawn[table_id]
            else:
                self.withdrawn[table_id] = by
        self.altering.pop(table_id, None)
        if record is not None and record.state != "REMOVED" and record.fully_applied_schema:
            self.altering[table_id] = int(Schema.from_json(record.schema).version)

    @staticmethod
    def _put(into: dict[str, Any], kind: type[Any], raw_key: bytes, new: bytes | None) -> Any:
        key = intern(raw_key.decode())
        if new is None:
            into.pop(key, None)
            return None
        record = decode(kind, new)
        into[key] = record
        return record

    # --- questions ---

    @property
    def cluster_version(self) -> int:
        """The finalized cluster version; before the catalog has rows, the first version."""
        return self.cluster.cluster_version if self.cluster is not None else FIRST_CLUSTER_VERSION

    @property
    def live_tables(self) -> list[TableRecord]:
        """All tables that are neither dropped nor removed, ordered by id."""
        return sorted(self.table_by_name.values(), key=lambda t: t.table_id)

    @property
    def withdrawn_digest(self) -> int:
        """A digest that names the `withdrawn` tables; 0 if there are none. Nodes send back the digest of the
        list that they have.

        Each drop makes a new digest. So a node that sends back the newest one knows of this drop, not only of
        an earlier drop of the same table.
        """
        if self._withdrawn_digest is None:
            self._withdrawn_digest = _digest_of(self.withdrawn)
        return self._withdrawn_digest

    def table(self, table_id: str, name: str = "") -> TableRecord:
        """The table with this id, or the table with this name that is neither dropped nor removed.

        Raises:
            Rejected: NOT_FOUND.
        """
        found = self.tables.get(table_id) if table_id else self.table_by_name.get(name)
        if found is None:
            what = f"id {table_id[:8]}" if table_id else f"name {name!r}"
            raise Rejected(
                f"there is no table with the {what}; `stele table list` shows all", code=Code.NOT_FOUND
            )
        return found

    def tablet(self, tablet_id: str) -> TabletRecord:
        """The tablet with this id. Raises `Rejected` NOT_FOUND."""
        found = self.tablets.get(tablet_id)
        if found is None:
            raise Rejected(f"there is no tablet with the id {tablet_id[:8]}", code=Code.NOT_FOUND)
        return found

    def incarnation_of(self, tablet_id: str) -> int:
        """The incarnation of a tablet; 0 if it was never recovered, or is not known."""
        found = self.tablets.get(tablet_id)
        return found.incarnation if found is not None else 0

    def tablets_of_table(self, table_id: str) -> list[TabletRecord]:
        """All tablets of a table, deleted and replaced ones too, by ordinal."""
        found = (self.tablets[t] for t in self.tablets_of.get(table_id, ()))
        return sorted(found, key=lambda t: (t.ordinal, t.since_us, t.tablet_id))

    def current_tablets(self, table_id: str) -> list[TabletRecord]:
        """The tablets of a table in one of CURRENT_TABLETS, by ordinal."""
        return [t for t in self.tablets_of_table(table_id) if t.state in CURRENT_TABLETS]

    def replication_factor(self, tablet: TabletRecord) -> int:
        """The number of voters that the tablet should have."""
        if tablet.tablet_id == CATALOG_TABLET_ID:
            return self.cluster.masters if self.cluster is not None else len(tablet.config.peers)
        table = self.tables.get(tablet.table_id)
        if table is None:
            return len(tablet.config.peers)
        return table.replication_factor + tablet.by_hand.extra

    def references_to(self, node_id: str) -> list[str]:
        """The configurations and intents that name a node, as text. While there are any, the node cannot be
        RETIRED."""
        found = [
            f"the configuration of tablet {t.tablet_id[:8]}"
            for t in map(self.tablets.__getitem__, self.current)
            if t.config.peer_on(node_id) is not None
        ]
        found += [
            f"the intent on tablet {i.tablet_id[:8]}"
            for i in self.intents.values()
            if i.target_node == node_id
        ]
        return found

    @property
    def catalog_tablet(self) -> TabletRecord | None:
        """The row of the catalog's own tablet."""
        return self.tablets.get(TabletId(CATALOG_TABLET_ID))
