"""What one pass observed, as immutable values. Made by observe from authoritative lists; read by everything
in plan.

Invariant: nothing comes from an earlier pass, with two exceptions: refused growth of volumes, and
`Catalog.steady`, which only saves work. Times are seconds since 1970 by the API server's clock
(`Kube.now_s`), which also stamps objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stele.driver.policy import StandingPolicy
from stele.driver.view import ClusterView, TabletView
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.group import TabletGroupSpec
from stele_operator.plan.steady import Steady

Role = Literal["master", "node"]
ROLES: tuple[Role, ...] = ("master", "node")
MASTERS_REFUSED = ("TabletCluster", "masters")
"""In `Observation.refused`: the masters refuse another number of them."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a status."""

    type: str
    status: str
    reason: str
    message: str
    last_transition: str = ""
    observed_generation: int = 0


@dataclass(frozen=True, slots=True)
class ClusterObject:
    """The TabletCluster. `spec`: None if it breaks a rule; then `faults` says which. `unknown`: fields that
    this operator does not know.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    spec: TabletClusterSpec | None
    faults: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    question: str = ""
    """Changes of its spec about which somebody asks, by an annotation."""


@dataclass(frozen=True, slots=True)
class GroupObject:
    """A TabletGroup that names this cluster. `created`: its creation time as text; of two TabletGroups for
    one table, the older one makes it. `spec`, `faults` and `unknown`: as in ClusterObject.
    """

    name: str
    uid: str
    resource_version: str
    generation: int
    created: str
    deleting: bool
    finalizers: tuple[str, ...]
    spec: TabletGroupSpec | None
    faults: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    recorded_table: str = ""
    """The table id in its status, which shows that the table existed once."""
    recorded_cluster: str = ""
    """The UUID of the cluster that held that table."""

    @property
    def table_name(self) -> str:
        """The name of the TabletGroup's table."""
        return (self.spec.tableName if self.spec else None) or self.name

    @property
    def own_table_id(self) -> str:
        """The id of a table that the TabletGroup creates. It is the group's own uid, so repeated creates make
        one table.
        """
        return self.uid.replace("-", "").lower()


@dataclass(frozen=True, slots=True)
class FirstMaster:
    """One of the masters that form the cluster."""

    name: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Identity:
    """The ConfigMap `<cluster>-identity`. `formed`: from each first master's UUID to its format id; empty if
    the cluster has not formed.

    `first_serial`: for each role, the first serial that this cluster reserved, after those of an earlier
    cluster of this name. `fork_id`: which copy of its volumes this cluster is; "" if it is the original.
    `asleep`: the cluster was put to sleep, and not all members are back since (hibernation.py). `waking_s`:
    while it wakes, when the pods of all members had been asked for; 0 if they have not. `masters`: the least
    number of masters that hold the catalog; 0 means as many as formed it. It shows a loss of their volumes
    while no master leads (counting.py).
    """

    resource_version: str
    cluster_id: str
    owner_uid: str
    next_serial: dict[Role, int]
    first_masters: tuple[FirstMaster, ...]
    formed: dict[str, str] = field(default_factory=dict)
    first_serial: dict[Role, int] = field(default_factory=dict)
    fork_id: str = ""
    asleep: bool = False
    masters: int = 0
    waking_s: int = 0

    def own_from(self, role: Role) -> int:
        """The first reserved serial of a role that this cluster may use."""
        return self.first_serial.get(role, self.next_serial[role])

    def with_more(self, count: Mapping[Role, int]) -> Identity:
        """The identity with `count` more reserved serials of each role."""
        return replace(
            self,
            next_serial={role: self.next_serial[role] + count[role] for role in ROLES},
            first_serial={role: self.own_from(role) for role in ROLES},
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim of this cluster. `node_id` and `cluster_id`: "" if the claim does not name
    them. `selected_machine`: where the scheduler wants its volume.
    """

    name: str
    uid: str
    resource_version: str
    role: Role
    node_id: str
    cluster_id: str
    serial: int
    zone: str
    phase: str
    deleting: bool
    selected_machine: str
    requested_bytes: int
    created_s: float
    owned: bool
    format_id: str = ""
    released_s: float | None = None
    owner_uid: str = ""
    """The uid of the TabletCluster that owns the claim."""
    labelled: bool = True
    """Whether the claim has the labels by which lists find it."""
    identified: bool = True
    """Whether the claim carries the identity of its node."""
    retired: bool = False
    """Whether the claim records that its node is RETIRED. This counts while no master leads."""
    noted_uid: str = ""
    """The claim uid in the claim's own annotations; "" if an older operator made the claim, which noted none."""
    fork_id: str = ""
    from_source: bool = False
    """Whether the volume was filled from a snapshot or another claim. The operator never asks for that."""

    @property
    def copied(self) -> bool:
        """Whether the claim is a copy of another: restored elsewhere, or made from a snapshot or a clone."""
        return self.noted_uid != self.uid if self.noted_uid else self.from_source

    def noted(self, fork_id: str) -> bool:
        """Whether the claim records all that is needed to restore a lost identity."""
        return self.noted_uid == self.uid and self.fork_id == fork_id


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this cluster. `exit_code`: of its container's last end; None if the container never ended."""

    name: str
    uid: str
    resource_version: str
    role: Role
    node_id: str
    claim_uid: str
    machine: str
    ip: str
    phase: str
    ready: bool
    deleting: bool
    created_s: float
    spec_hash: str
    running: bool = False
    restarts: int = 0
    exit_code: int | None = None
    exit_message: str = ""
    exit_reason: str = ""
    """Kubernetes' reason for that end if it is specific, such as OOMKilled or Evicted."""
    waiting: str = ""
    unschedulable: str = ""
    keeps_off: tuple[str, ...] = ()
    """Machines that its affinity excludes."""
    unready_since_s: float = 0.0
    """When it was created, or was last ready."""
    owners: tuple[dict[str, Any], ...] = ()
    """Its ownerReferences."""
    parked: bool = False
    """Whether it has the label of parked nodes, so that the disruption budget does not count it."""


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a machine."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A Kubernetes node."""

    name: str
    ready: bool
    zone: str
    schedulable: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True)
class MasterReport:
    """What a master answered about itself."""

    node_id: str
    cluster_id: str
    address: str
    format_id: str
    formed: bool


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table in the catalog."""

    name: str
    type: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class TableRanges:
    """The ranges of a table, each from a start up to an end that it does not include. Both are encoded keys
    of `columns`; b"" means unbounded.
    """

    columns: tuple[str, ...]
    covered: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table in the catalog. `hash`: the columns and number of buckets of each hash level. `range`: None if
    the table has no ranges. `replication_factor_before`: the factor before the last change; 0 if it never
    changed.
    """

    table_id: str
    name: str
    state: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    hash: tuple[tuple[tuple[str, ...], int], ...]
    range: TableRanges | None
    replication_factor: int
    tablets: int
    replication_factor_before: int = 0
    owner: str = ""
    comment: str = ""
    history_ms: int = 0
    """How long old versions of rows are kept, in ms; 0 means the default."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The leading master's answer. `formed_nodes`: UUIDs of nodes that were once seen with a formatted
    volume. `names`: pod names by node UUID; a registered node may have none.
    """

    view: ClusterView
    tables: tuple[Table, ...] = ()
    formed_nodes: frozenset[str] = frozenset()
    names: dict[str, str] = field(default_factory=dict)
    standing: StandingPolicy | None = None
    """The policy in force while no driver is heard. None: these masters are of an earlier version that keeps
    no policy.
    """
    finalized: int = 1
    """The finalized cluster version."""
    readable: int = 1
    """The newest cluster version whose formats all members can read."""
    lagging: dict[str, int] = field(default_factory=dict)
    """Members that cannot read the newest version: from a label of the member to the version that it reads."""
    steady: Steady = field(default_factory=Steady, repr=False, compare=False)
    """Which tablets are certainly well and need no look. Made from this view, or from an earlier one; then
    `unwell` brings it up to date.
    """
    _by_id: Mapping[str, Table] = field(init=False, repr=False, compare=False)
    _by_name: Mapping[str, Table] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {t.table_id: t for t in self.tables})
        object.__setattr__(self, "_by_name", {t.name: t for t in self.tables})

    def table(self, table_id: str) -> Table | None:
        """The table of this id, or None."""
        return self._by_id.get(table_id)

    def is_dropped(self, tablet: TabletView) -> bool:
        """Whether the tablet's table was dropped and can still be recalled. `tables` does not list dropped
        tables.
        """
        return tablet.tablet_id != CATALOG_TABLET_ID and tablet.table_id not in self._by_id

    def table_named(self, name: str) -> Table | None:
        """The table of this name, or None."""
        return self._by_name.get(name)


@dataclass(frozen=True, slots=True)
class Existing:
    """What the operator compares of an existing Service or PodDisruptionBudget. `digest`: a hash of the spec
    that the operator wrote last. `spec`: the present one, with additions of the API server.
    """

    kind: str
    name: str
    uid: str
    resource_version: str
    digest: str
    spec: dict[str, Any] = field(repr=False)
    owners: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedGrowth:
    """The API server refused to let a claim grow to `size`. `why` has its message. The operator does not try
    again before `again_s`.
    """

    size: str
    why: str
    tries: int
    again_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that one pass observed. `machines`: None if the operator may not read them. `catalog`: None
    if no leading master answered.
    """

    now_s: float
    cluster: ClusterObject
    default_image: str
    identity: Identity | None = None
    claims: tuple[Claim, ...] = ()
    pods: tuple[Pod, ...] = ()
    machines: tuple[Machine, ...] | None = None
    existing: tuple[Existing, ...] = ()
    groups: tuple[GroupObject, ...] = ()
    master_reports: tuple[MasterReport, ...] = ()
    catalog: Catalog | None = None
    catalog_problem: str = ""
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Refusals in this pass, by kind and name. The API server refuses pods and claims. The masters refuse a
    TabletGroup's table, and the number of masters. Empty until actions were tried."""
    fresh_ids: tuple[str, ...] = ()
    """Random identifiers, enough for all that one pass may create. They are an input so that planning
    stays pure."""
    refused_growth: Mapping[str, RefusedGrowth] = field(default_factory=dict)
    """Refusals to let claims grow, by the uids of claims. They come from earlier passes."""

    _machines: Mapping[str, Machine] = field(init=False, repr=False, compare=False)
    _pods: Mapping[str, Pod] = field(init=False, repr=False, compare=False)
    _groups: Mapping[str, GroupObject] = field(init=False, repr=False, compare=False)
    _makers: Mapping[str, GroupObject] = field(init=False, repr=False, compare=False)
    _claimants: Mapping[str, Sequence[GroupObject]] = field(init=False, repr=False, compare=False)
    """An index by table name, because hundreds of TabletGroups each look for rivals."""

    def __post_init__(self) -> None:
        claimants: dict[str, list[GroupObject]] = {}
        for group in self.groups:
            claimants.setdefault(group.table_name, []).append(group)
        object.__setattr__(self, "_machines", {m.name: m for m in self.machines or ()})
        object.__setattr__(self, "_pods", {p.name: p for p in self.pods})
        object.__setattr__(self, "_groups", {g.name: g for g in self.groups})
        object.__setattr__(self, "_makers", {g.own_table_id: g for g in self.groups})
        object.__setattr__(self, "_claimants", claimants)

    @property
    def asleep(self) -> bool:
        """Whether the cluster was put to sleep, and not all members are back since."""
        return self.identity is not None and self.identity.asleep

    def machine(self, name: str) -> Machine | None:
        """The machine of this name, or None."""
        return self._machines.get(name)

    def pod(self, name: str) -> Pod | None:
        """The pod of this name, or None."""
        return self._pods.get(name)

    def group(self, name: str) -> GroupObject | None:
        """The TabletGroup of this name, or None."""
        return self._groups.get(name)

    def maker(self, table_id: str) -> GroupObject | None:
        """The TabletGroup whose own table has this id, or None."""
        return self._makers.get(table_id)

    def groups_of_table(self, name: str) -> Sequence[GroupObject]:
        """The TabletGroups that ask for a table of this name."""
        return self._claimants.get(name, ())
