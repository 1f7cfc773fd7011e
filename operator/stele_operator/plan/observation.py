"""What one pass saw: immutable values. Made by observe from authoritative lists; read by everything in plan.

Invariant: nothing here is remembered from an earlier pass, but what was refused to it (growth). Times are seconds since 1970 by the API
server's clock (`Kube.now_s`), which stamps what it makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stele.driver.view import ClusterView
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.group import TabletGroupSpec

Role = Literal["master", "node"]
ROLES: tuple[Role, ...] = ("master", "node")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition as it stands in a status."""

    type: str
    status: str
    reason: str
    message: str
    last_transition: str = ""
    observed_generation: int = 0


@dataclass(frozen=True, slots=True)
class ClusterObject:
    """The TabletCluster. `spec` is None where it broke a rule; `faults` says which. `unknown`: fields that it has and this
    operator does not know."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    spec: TabletClusterSpec | None
    faults: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupObject:
    """A TabletGroup that names this cluster. `created` is its creation time as text, for who came first. `spec`, `faults`
    and `unknown`: as of a TabletCluster."""

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
    """Table id in its status: it was there once."""
    recorded_cluster: str = ""
    """UUID of the cluster that this table was in."""

    @property
    def table_name(self) -> str:
        """The name of its table."""
        return (self.spec.tableName if self.spec else None) or self.name

    @property
    def own_table_id(self) -> str:
        """The id it gives to a table that it makes: its own uid, so that making it twice makes one."""
        return self.uid.replace("-", "").lower()


@dataclass(frozen=True, slots=True)
class FirstMaster:
    """One of the masters that form the cluster."""

    name: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Identity:
    """The ConfigMap `<cluster>-identity`. `formed` maps each first master's UUID to its format id; empty: not formed.
    `first_serial`: of each role, the first that is known to be set aside for this cluster and not for an earlier one.
    `fork_id`: which copy of its volumes this is; empty: as the cluster was formed."""

    resource_version: str
    cluster_id: str
    owner_uid: str
    next_serial: dict[Role, int]
    first_masters: tuple[FirstMaster, ...]
    formed: dict[str, str] = field(default_factory=dict)
    first_serial: dict[Role, int] = field(default_factory=dict)
    fork_id: str = ""

    def own_from(self, role: Role) -> int:
        """The first serial of a role that may be this cluster's to use though it is set aside already."""
        return self.first_serial.get(role, self.next_serial[role])

    def with_more(self, count: Mapping[Role, int]) -> Identity:
        """The same with so many more serials of each role set aside."""
        return replace(
            self,
            next_serial={role: self.next_serial[role] + count[role] for role in ROLES},
            first_serial={role: self.own_from(role) for role in ROLES},
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim of this cluster. `node_id` and `cluster_id` are empty where it does not say; `selected_machine`: where the scheduler wants its volume."""

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
    """Of the TabletCluster that it goes with."""
    labelled: bool = True
    """Whether it would be found by its labels."""
    identified: bool = True
    """Whether it says itself whose volume it is."""
    retired: bool = False
    """The masters said so once: what is to be known of its node while none of them leads."""
    noted_uid: str = ""
    """The uid of the claim that its annotations were written for; empty: an operator wrote them that did not note it."""
    fork_id: str = ""
    from_source: bool = False
    """Whether its volume was filled from a snapshot or another claim: no operator asks for that."""

    @property
    def copied(self) -> bool:
        """Whether it is a copy of another claim: restored elsewhere, or made from a snapshot or a clone."""
        return self.noted_uid != self.uid if self.noted_uid else self.from_source

    def noted(self, fork_id: str) -> bool:
        """Whether it says what a lost identity is read back from."""
        return self.noted_uid == self.uid and self.fork_id == fork_id


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this cluster. `exit_code` is of the container's last end, None if it never ended."""

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
    """Kubernetes' own word for that end, where it says more than that there was one: OOMKilled, Evicted."""
    waiting: str = ""
    unschedulable: str = ""
    keeps_off: tuple[str, ...] = ()
    """Machines that it was made not to take."""
    unready_since_s: float = 0.0
    """When it was made, or was last ready."""
    owners: tuple[dict[str, Any], ...] = ()
    """Its ownerReferences, as they stand."""


@dataclass(frozen=True, slots=True)
class Taint:
    """What keeps pods off a machine that do not tolerate it."""

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
    """What a master said of itself, asked directly."""

    node_id: str
    cluster_id: str
    address: str
    format_id: str
    formed: bool


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table as the catalog has it."""

    name: str
    type: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the catalog has it. `hash`: columns and buckets of each level."""

    table_id: str
    name: str
    state: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    hash: tuple[tuple[tuple[str, ...], int], ...]
    ranged: bool
    replication_factor: int
    tablets: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """What the leader master told. `formed_nodes`: UUIDs that were ever seen with a formatted volume;
    `names`: of pods, by their nodes' UUIDs; a node may be on record without."""

    view: ClusterView
    tables: tuple[Table, ...] = ()
    formed_nodes: frozenset[str] = frozenset()
    names: dict[str, str] = field(default_factory=dict)
    _by_id: Mapping[str, Table] = field(init=False, repr=False, compare=False)
    _by_name: Mapping[str, Table] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {t.table_id: t for t in self.tables})
        object.__setattr__(self, "_by_name", {t.name: t for t in self.tables})

    def table(self, table_id: str) -> Table | None:
        """The table of this id, or None."""
        return self._by_id.get(table_id)

    def table_named(self, name: str) -> Table | None:
        """The table of this name, or None."""
        return self._by_name.get(name)


@dataclass(frozen=True, slots=True)
class Existing:
    """A Service or PodDisruptionBudget that exists: what the operator compares of it. `digest`: of the spec that the
    operator last gave it; `spec`: as it is now, with what the API server added."""

    kind: str
    name: str
    uid: str
    resource_version: str
    digest: str
    spec: dict[str, Any] = field(repr=False)
    owners: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedGrowth:
    """That the API server did not let a claim grow to `size`, and why; not tried again before `again_s`."""

    size: str
    why: str
    tries: int
    again_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything one pass saw. `machines` is None where the operator may not read them; `catalog` where no leader answered."""

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
    """Why a pod or claim could not be made in this very pass, by kind and name, or the masters refuse the table of a TabletGroup:
    empty until it was tried."""
    fresh_ids: tuple[str, ...] = ()
    """Random identifiers, enough for all that one pass may make: chance is an argument."""
    refused_growth: Mapping[str, RefusedGrowth] = field(default_factory=dict)
    """By the uids of claims; of all that is here the one thing that earlier passes have seen."""

    _machines: Mapping[str, Machine] = field(init=False, repr=False, compare=False)
    _pods: Mapping[str, Pod] = field(init=False, repr=False, compare=False)
    _groups: Mapping[str, GroupObject] = field(init=False, repr=False, compare=False)
    _makers: Mapping[str, GroupObject] = field(init=False, repr=False, compare=False)
    _claimants: Mapping[str, Sequence[GroupObject]] = field(init=False, repr=False, compare=False)
    """Found once: hundreds of TabletGroups each ask for a few of them."""

    def __post_init__(self) -> None:
        claimants: dict[str, list[GroupObject]] = {}
        for group in self.groups:
            claimants.setdefault(group.table_name, []).append(group)
        object.__setattr__(self, "_machines", {m.name: m for m in self.machines or ()})
        object.__setattr__(self, "_pods", {p.name: p for p in self.pods})
        object.__setattr__(self, "_groups", {g.name: g for g in self.groups})
        object.__setattr__(self, "_makers", {g.own_table_id: g for g in self.groups})
        object.__setattr__(self, "_claimants", claimants)

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
        """The TabletGroup that makes its table under this id, or None."""
        return self._makers.get(table_id)

    def groups_of_table(self, name: str) -> Sequence[GroupObject]:
        """The TabletGroups that ask for a table of this name."""
        return self._claimants.get(name, ())
