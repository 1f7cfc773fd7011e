"""A driver's view of a cluster, as immutable values. Used by planner and executor; reads no clock, opens
nothing.

Invariant: a view is one moment as the leading master saw it. It may have newer reports of single replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain
from typing import overload

from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.config import Configuration, Peer
from stele.model.copies import CopyRecord
from stele.model.ids import CATALOG_TABLET_ID, OPID_NONE, NodeId, OpId, ReplicaId, TableId, TabletId

LEADERLESS_MS = 30_000
"""A member that has been opening, or has known no leader, for longer than this does not count as live."""
DROPPED_MARK = " (dropped)"
"""The suffix that a table's name has in views while the table is dropped and can be recalled."""


class NodeState(IntEnum):
    """A node's state in the catalog. Numbers are on the wire."""

    ACTIVE = 1
    DRAINING = 2
    RETIRED = 3


class Wanted(IntEnum):
    """The state that somebody wants for a node, stored apart from its seen state. Numbers are on the wire."""

    IN_SERVICE = 1
    DRAINED = 2
    """It gives its replicas and leaders away, and keeps its place."""
    PARKED = 3
    """It may be away for a while, keeps its replicas, and gets no new ones."""
    RETIRED = 4
    """It drains, and is then gone for good."""
    FENCED = 5
    """It runs and serves nobody. All others treat it as parked and away."""


class ReplicaState(IntEnum):
    """A replica's life cycle. UNKNOWN: its node reports no such replica. Numbers are on the wire."""

    UNKNOWN = 0
    BOOTSTRAPPING = 1
    CONFIGURING = 2
    RUNNING = 3
    STOPPED = 4
    FAILED = 5


class DataState(IntEnum):
    """What a replica has on disk. Numbers are on the wire."""

    UNKNOWN = 0
    READY = 1
    COPYING = 2
    TOMBSTONED = 3
    DELETED = 4


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node or a master.

    - `heartbeat_age_ms`: since the leading master last heard it, or began to lead.
    - `formed`: the catalog knows that its volume is formatted, so no other volume is formatted under its id.
    - `disk_low`: it reports that it refuses writes because space runs out.
    - `clock_ahead_us`: how far its clock is ahead of most clocks, by its own last report; 0 if unknown.
    - `given_up`: it is DRAINING only because it was silent.
    - `wanted`: None if its master's version does not report it (see `asked`).
    - `wanted_by`: "administrator", "driver" or "".
    - `wanted_left_ms`: when it returns to service on its own. 0: it does not.
    """

    node_id: NodeId
    role: str
    machine: str
    zone: str
    address: str
    state: NodeState = NodeState.ACTIVE
    heartbeat_age_ms: int = 0
    ever_heard: bool = True
    incarnation: int = 0
    replicas: int = 0
    disk_free_bytes: int = 0
    disk_used_bytes: int = 0
    disk_low: bool = False
    clock_ahead_us: int = 0
    formed: bool = True
    given_up: bool = False
    wanted: Wanted | None = None
    wanted_by: str = ""
    wanted_reason: str = ""
    wanted_left_ms: int = 0
    load: int | None = None
    """The requests of clients per second at its leaders; None: its release does not count them."""

    @property
    def asked(self) -> Wanted:
        """The state that an administrator or a driver requested for this node."""
        if self.wanted is not None:
            return self.wanted
        given_away = self.state is NodeState.DRAINING and not self.given_up
        return Wanted.RETIRED if given_away or self.state is NodeState.RETIRED else Wanted.IN_SERVICE

    @property
    def parked(self) -> bool:
        """Whether it may be away now, or is fenced. Then its replicas are not replaced."""
        return self.state is NodeState.ACTIVE and self.asked in (Wanted.PARKED, Wanted.FENCED)

    @property
    def takes_replicas(self) -> bool:
        """Whether it is wanted in service, so that new replicas and leaders may come to it."""
        return self.state is NodeState.ACTIVE and not self.parked

    @property
    def host(self) -> str:
        """The machine, or the node's id if the machine is unknown. Two replicas must not share it."""
        return self.machine or self.node_id


@dataclass(frozen=True, slots=True)
class CopyView:
    """The progress of a tablet copy. `state`: Waiting (a witness waits for its turn), Starting, Fetching,
    Verifying, Installing, Done, Failed."""

    state: str
    bytes_done: int = 0
    bytes_total: int = 0
    source_node: str = ""
    error: str = ""
    bytes_per_second: int | None = None
    """The copy's limit; 0: unlimited. None: its node does not report it and cannot change it."""


NOBODY: Mapping[ReplicaId, int] = {}
"""No peers: one value for tens of thousands of replicas."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """The newest report of a replica from its own node."""

    node_id: NodeId
    replica_id: ReplicaId
    state: ReplicaState = ReplicaState.RUNNING
    data_state: DataState = DataState.READY
    has_data: bool = True
    last_committed: OpId = OPID_NONE
    bytes_on_disk: int = 0
    copy: CopyView | None = None
    error: str = ""
    age_ms: int = 0
    failed_peers: tuple[ReplicaId, ...] = ()
    """Leader only: peers that reported themselves FAILED in their last answer."""
    lacking_peers: tuple[ReplicaId, ...] = ()
    """Leader only: peers that need log entries that the leader no longer has."""
    unreached_ms: Mapping[ReplicaId, int] = field(default_factory=lambda: NOBODY, hash=False)
    """Leader only: peers that do not answer it, and for how long."""
    load: int = 0
    """The requests of clients per second. Reported while it leads and for a minute after."""

    @property
    def waits(self) -> bool:
        """Whether it is being opened, or knows no leader."""
        return self.state in (ReplicaState.BOOTSTRAPPING, ReplicaState.CONFIGURING)

    @property
    def ages(self) -> bool:
        """Whether the meaning of the report changes with its age."""
        return self.waits or bool(self.unreached_ms)

    @property
    def leaderless(self) -> bool:
        """Whether `waits` has been true for longer than LEADERLESS_MS."""
        return self.waits and self.age_ms > LEADERLESS_MS


@dataclass(frozen=True, slots=True)
class TabletView:
    """A tablet: its committed configuration, its leader, and the reports of its replicas.

    `replication_factor`: how many voters are wanted, including those that were asked for by hand.
    """

    tablet_id: TabletId
    table_id: TableId
    table_name: str
    state: str
    config: Configuration
    term: int
    leader_node: str
    replication_factor: int
    replicas: tuple[ReplicaView, ...] = ()
    leader_kept_until_us: int = 0
    """Until when drivers do not move its leader, because an administrator did; 0: they may."""
    by_hand: ByHand = NOT_BY_HAND
    copies: tuple[CopyRecord, ...] = ()
    """Replicas made by heals and moves, and whether they hold the rows of another voter."""

    @property
    def node_role(self) -> str:
        """The role of nodes that may hold it: "master" for the catalog's tablet, "node" for all others."""
        return "master" if self.tablet_id == CATALOG_TABLET_ID else "node"

    def report(self, replica_id: int, node_id: str) -> ReplicaView | None:
        """The report of this replica from this node, or None."""
        for replica in self.replicas:
            if replica.replica_id == replica_id and replica.node_id == node_id:
                return replica
        return None

    @property
    def of_dropped_table(self) -> bool:
        """Whether its table was dropped and can be recalled. In a master's answer only the name shows this."""
        return self.table_name.endswith(DROPPED_MARK)

    @property
    def is_current(self) -> bool:
        """Whether it holds, or is going to hold, a part of a table."""
        return self.state in ("PREPARING", "CREATING", "RUNNING")

    @property
    def leader(self) -> Peer | None:
        """The peer on the leader's node, or None."""
        return self.config.peer_on(self.leader_node) if self.leader_node else None


class Tablets(Sequence[TabletView]):
    """The tablets of a view, in their order. Never changed.

    They are kept in parts, and views that follow each other share most parts. If each view had one tuple of
    all tablets, Python's garbage collector would visit every tablet again and again: 2 to 7 ms for 10,000.
    """

    __slots__ = ("_at", "_parts")

    PART = 128
    """The number of tablets in a part."""

    def __init__(self, tablets: Iterable[TabletView]) -> None:
        every = tuple(tablets)
        self._parts = tuple(every[start : start + self.PART] for start in range(0, len(every), self.PART))
        self._at: Mapping[str, int] = {t.tablet_id: place for place, t in enumerate(every)}

    def with_newer(self, newer: Mapping[str, TabletView]) -> Tablets:
        """These tablets, each replaced by its newer view in `newer` if there is one. `newer` is by id;
        unknown ids are ignored.
        """
        changed: dict[int, list[TabletView]] = {}
        for tablet_id, tablet in newer.items():
            place = self._at.get(tablet_id)
            if place is not None:
                number, offset = divmod(place, self.PART)
                if number not in changed:
                    changed[number] = list(self._parts[number])
                changed[number][offset] = tablet
        if not changed:
            return self
        made = Tablets.__new__(Tablets)
        made._at = self._at
        made._parts = tuple(tuple(changed.get(number, part)) for number, part in enumerate(self._parts))
        return made

    def since(self, before: Tablets | None) -> Iterator[TabletView]:
        """As `ClusterView.tablets_since`."""
        if before is None or self._at is not before._at:
            return iter(self)
        pairs = zip(self._parts, before._parts, strict=True)
        return chain.from_iterable(now for now, then in pairs if now is not then)

    def get(self, tablet_id: str) -> TabletView | None:
        """The tablet with this id, or None."""
        place = self._at.get(tablet_id)
        return None if place is None else self._parts[place // self.PART][place % self.PART]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[TabletView]:
        return chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, place: int) -> TabletView: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[TabletView, ...]: ...

    def __getitem__(self, place: int | slice) -> TabletView | tuple[TabletView, ...]:
        if isinstance(place, slice):
            return tuple(self)[place]
        number = range(len(self))[place]
        return self._parts[number // self.PART][number % self.PART]

    def __eq__(self, other: object) -> bool:
        return self._parts == other._parts if isinstance(other, Tablets) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return repr(tuple(self))


MOVE, MOVE_BY_HAND = "move", "move-by-hand"
"""Kinds of intents that replace a healthy replica: for balance, or because an administrator asked for it."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A change that a driver recorded in the catalog before it began to act."""

    tablet_id: TabletId
    replica_id: ReplicaId
    target_node: NodeId
    kind: str
    epoch: int
    source_node: str = ""
    replaces_replica: int = 0
    witness: bool = False
    witness_start: OpId = OPID_NONE
    expires_us: int = 0
    reason: str = ""
    cause: str = ""
    """As `Step.cause`. Empty if a driver of an earlier version began it."""

    @property
    def moves(self) -> bool:
        """Whether it replaces a replica that is healthy."""
        return self.kind in (MOVE, MOVE_BY_HAND)


@dataclass(frozen=True, slots=True)
class Claim:
    """The driver claim. `expires_us`: for display only, by the wall clock of a master; 0: it was released."""

    holder: str
    epoch: int
    expires_us: int


@dataclass(frozen=True, slots=True)
class Away:
    """A node that was taken away for a moment. `incarnation`: that of the process that was taken away; 0:
    unknown. With a higher one the node is back.
    """

    node_id: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of the change budget: it takes something away from the cluster, or makes up for a loss.

    `name`: heal/NODE, drain/NODE, park/NODE, masters, upgrade or hibernate. `away`: nodes in service that it
    has taken away for a moment, because their pods are made again. Holders that park, drain or heal show in
    the states of their nodes instead.
    """

    name: str
    away: tuple[Away, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster at one moment. `settled`: the leading master has heard all nodes that it can expect to
    hear. `tablets`: kept as `Tablets`, in whatever form they were given.
    """

    nodes: tuple[NodeView, ...]
    tablets: Sequence[TabletView]
    intents: tuple[Intent, ...] = ()
    claim: Claim | None = None
    settled: bool = True
    leader_master: str = ""
    term: int = 0
    now_us: int = 0
    holding: tuple[Holder, ...] = ()
    """Who holds the change budget, as the catalog says."""

    _nodes: Mapping[str, NodeView] = field(init=False, repr=False, compare=False)
    _tablets: Tablets = field(init=False, repr=False, compare=False)
    _intents: Mapping[str, Intent] = field(init=False, repr=False, compare=False)
    """An index by tablet, because the planner looks up an intent for each tablet."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_nodes", {n.node_id: n for n in self.nodes})
        tablets = self.tablets if isinstance(self.tablets, Tablets) else Tablets(self.tablets)
        object.__setattr__(self, "tablets", tablets)
        object.__setattr__(self, "_tablets", tablets)
        object.__setattr__(self, "_intents", {i.tablet_id: i for i in self.intents})

    def node(self, node_id: str) -> NodeView | None:
        """The node with this id, or None."""
        return self._nodes.get(node_id)

    def tablet(self, tablet_id: str) -> TabletView | None:
        """The tablet with this id, or None."""
        return self._tablets.get(tablet_id)

    def tablets_since(self, before: ClusterView | None) -> Iterator[TabletView]:
        """All tablets that may differ from those of an earlier view, and some that do not. It costs only as
        much as the changes.

        It returns all tablets if `before` is None, or if tablets came, went or changed their order. Then the
        caller must itself find the tablets of `before` that are gone.
        """
        return self._tablets.since(before._tablets if before is not None else None)

    def with_newer(self, newer: Mapping[str, TabletView]) -> ClusterView:
        """The view with newer reports of some tablets, by id. Tablets that it does not have are ignored."""
        return replace(self, tablets=self._tablets.with_newer(newer))

    def intent(self, tablet_id: str) -> Intent | None:
        """The intent on this tablet, or None; the catalog allows one."""
        return self._intents.get(tablet_id)
