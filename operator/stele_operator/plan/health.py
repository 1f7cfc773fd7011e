"""The health of tablets and of the volumes under them. Called by the rest of plan; pure.

Two questions have two time limits. May a pod be evicted? For this, a voter that missed three heartbeats does
not count. Should users hear of a fault? Only if it lasts as long as healing waits (`patience_s`); otherwise
each restart of a pod would be reported. Invariant: a tablet is healthy only if its leader is alive, and as
many voters as the replication factor are alive and answer the leader. Whether one counts as alive depends on
the time limit of the question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stele.driver.situation import failed_replicas, in_doubt, unreached_ms
from stele.driver.view import NodeView, TabletView
from stele.model.config import MemberType, Peer
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.api.cluster import Healing, TabletClusterSpec
from stele_operator.api.scalars import seconds
from stele_operator.plan.fates import SILENT_S, Member, State
from stele_operator.plan.observation import Catalog, Observation, Role
from stele_operator.plan.steady import unwell

_SERVED = ("PREPARING", "CREATING", "RUNNING")


@dataclass(frozen=True, slots=True)
class TabletCounts:
    """Counts of the tablets of tables. The catalog's own tablet is not counted."""

    total: int = 0
    healthy: int = 0
    under_replicated: int = 0
    unavailable: int = 0
    creating: int = 0
    """How many of the unavailable tablets were never created yet, so nothing in them is lost."""
    growing: int = 0
    """How many tablets have all their old voters and get more, because the replication factor was raised."""

    @property
    def ailing(self) -> int:
        """How many tablets were created and are not healthy."""
        return self.total - self.healthy - self.creating - self.growing


@dataclass(frozen=True, slots=True)
class TabletHealth:
    """The health of one tablet. `reason`: "" if it is healthy; else NoLeader, VoterLost, Creating or Growing."""

    tablet_id: str
    reason: str


def patience_s(o: Observation) -> float:
    """Seconds of a node's silence after which healing begins and users hear of its tablets."""
    healing = o.cluster.spec.healing if o.cluster.spec is not None else Healing()
    return max(SILENT_S, seconds(healing.witnessAfter))


def _heard(node: NodeView | None, patience: float = 0.0) -> bool:
    if node is None or node.heartbeat_age_ms >= max(SILENT_S, patience) * 1000:
        return False
    # For a node that was never heard, silence counts from when the leading master began to lead.
    return node.ever_heard or patience > 0


def live_voters(o: Observation, tablet: TabletView, patience: float = 0.0) -> int:
    """How many voters count: they have the rows, are on live nodes, answer their leader, and need no new
    copy.

    `patience`, in seconds: a voter that has been silent, or out of its leader's reach, for a shorter time
    still counts.
    """
    return len(_live(o, tablet, patience))


def live_nodes(o: Observation, tablet: TabletView) -> frozenset[str]:
    """The nodes of the tablet's `live_voters`, without patience."""
    return frozenset(p.node_id for p in _live(o, tablet, 0.0))


def row_nodes(tablet: TabletView) -> frozenset[str]:
    """The nodes of the tablet's voters, live or not. Voters have the rows."""
    return frozenset(p.node_id for p in tablet.config.peers if p.member_type is MemberType.VOTER)


def _live(o: Observation, tablet: TabletView, patience: float) -> list[Peer]:
    view = o.catalog.view if o.catalog else None
    if view is None:
        return []
    leaderless = {r.replica_id for r in tablet.replicas if r.leaderless}
    unreached = {n for n, ms in unreached_ms(tablet, view).items() if ms >= patience * 1000}
    lost = {*failed_replicas(tablet), *in_doubt(tablet), *unreached, *leaderless}
    voters = (p for p in tablet.config.peers if p.member_type is MemberType.VOTER)
    return [p for p in voters if _heard(view.node(p.node_id), patience) and p.replica_id not in lost]


def without_spare(o: Observation, role: Role) -> tuple[TabletView, ...]:
    """Tablets of a role that cannot lose one more voter: no leader is heard, or too few voters with the rows
    would be left.
    """
    return tuple(t for t in _ailing(o, role) if not _can_lose(o, t, 1))


def in_danger(o: Observation, role: Role) -> tuple[TabletView, ...]:
    """Tablets that cannot lose a voter now, although they have more than one replica. Also tablets of one
    replica that have no live leader.
    """
    return tuple(t for t in _ailing(o, role) if not _can_lose(o, t, min(1, t.replication_factor - 1)))


def needless(o: Observation, tablet: TabletView) -> bool:
    """Whether nobody needs a tablet of one replica, because its table was dropped. Its node may then be away.
    The table can still be recalled, since the volume comes back.
    """
    return tablet.replication_factor == 1 and o.catalog is not None and o.catalog.is_dropped(tablet)


def may_be_away(
    o: Observation, role: Role, absent: Collection[str]
) -> tuple[int, tuple[TabletView, ...]] | None:
    """How many members of a role may be away at once, whichever they are, and the tablets that set this
    limit. None if the role has no tablets yet.

    Each tablet keeps a majority. `absent`: nodes that are away already, and return with their voters.
    """
    tablets = o.catalog.view.tablets if o.catalog is not None else ()
    running = [t for t in tablets if t.node_role == role and t.state == "RUNNING" and not needless(o, t)]
    there = {t.tablet_id: live_nodes(o, t) | (row_nodes(t) & set(absent)) for t in _ailing(o, role)}
    # Those that do not ail have each of their voters.
    bounds = [(len(there.get(t.tablet_id, row_nodes(t))) - t.config.majority, t) for t in running]
    if not bounds:
        return None
    least = min(most for most, _ in bounds)
    return max(0, least), tuple(t for most, t in bounds if most == least)


def _ailing(o: Observation, role: Role) -> tuple[TabletView, ...]:
    """The tablets of a role, except those that are certainly well (`unwell`)."""
    return tuple(t for t in unwell(o.catalog, SILENT_S * 1000) if t.node_role == role) if o.catalog else ()


def _can_lose(o: Observation, tablet: TabletView, voters: int) -> bool:
    """Whether the tablet keeps a live leader and a majority without `voters` of its live voters. True for a
    tablet that is not created, since it has no rows.
    """
    if tablet.state != "RUNNING":
        return True
    return leads(o, tablet) and live_voters(o, tablet) - voters >= tablet.config.majority


def leads(o: Observation, tablet: TabletView) -> bool:
    """Whether the masters hear the node of the tablet's leader."""
    return o.catalog is not None and _heard(o.catalog.view.node(tablet.leader_node))


@dataclass(frozen=True, slots=True)
class TableHealth:
    """The tablets of one table. `ailing`: the unhealthy ones, in the catalog's order."""

    counts: TabletCounts = TabletCounts()
    ailing: tuple[TabletHealth, ...] = ()


_NO_TABLETS = TableHealth()


@dataclass(frozen=True, slots=True)
class Health:
    """The health of all tablets, judged once in a pass. Each TabletGroup looks up its own table.

    Tablets of dropped tables are not counted, because they serve nobody. The driver heals them all the same.
    """

    counts: TabletCounts = TabletCounts()
    tables: Mapping[str, TableHealth] = field(default_factory=dict)
    settled: bool = True
    """Whether all tablets are healthy even without patience, so that the next pass need not be soon."""

    def of(self, table_id: str) -> TableHealth:
        """The health of one table."""
        return self.tables.get(table_id, _NO_TABLETS)


def tablet_health(o: Observation) -> Health:
    """The health of every tablet of every table, for users."""
    if o.catalog is None:
        return Health()
    with o.catalog.steady.lock:
        return _tablet_health(o, o.catalog)


def _tablet_health(o: Observation, catalog: Catalog) -> Health:
    patience, settled = patience_s(o), True
    looked_at: dict[str, list[TabletHealth]] = {}
    well = Counter[str]()
    for tablet in unwell(catalog, SILENT_S * 1000):
        if tablet.tablet_id not in catalog.steady.others:
            well[tablet.table_id] -= 1
        if tablet.tablet_id != CATALOG_TABLET_ID and tablet.state in _SERVED:
            reason = _ailment(o, tablet, 0.0)
            if reason:  # otherwise patience makes no difference
                settled, reason = False, _ailment(o, tablet, patience)
            looked_at.setdefault(tablet.table_id, []).append(TabletHealth(tablet.tablet_id, reason))
    well.update(catalog.steady.by_table)
    for table_id in [i for i in well.keys() | looked_at.keys() if catalog.table(i) is None]:
        well.pop(table_id, None)
        looked_at.pop(table_id, None)
    tables = {}
    for table_id in well.keys() | looked_at.keys():
        tablets = looked_at.get(table_id, [])
        counts = _counted(tablets, well[table_id])
        if counts.total:
            tables[table_id] = TableHealth(counts, tuple(t for t in tablets if t.reason))
    everything = (t for tablets in looked_at.values() for t in tablets)
    return Health(_counted(everything, well.total()), tables, settled)


def _ailment(o: Observation, tablet: TabletView, patience: float) -> str:
    if tablet.state != "RUNNING":
        return "Creating"
    if not _led(o, tablet, patience):
        return "NoLeader"
    live = live_voters(o, tablet, patience)
    if live >= tablet.replication_factor:
        return ""
    kept = [p for p in tablet.config.peers if p.member_type is MemberType.VOTER]
    demoted = any(p.member_type is MemberType.NON_VOTER and not p.promote for p in tablet.config.peers)
    grows = live >= _voters_before(o, tablet) and live == len(kept) and not demoted
    return "Growing" if grows else "VoterLost"


def _voters_before(o: Observation, tablet: TabletView) -> int:
    """The number of voters that the tablet had before its table's replication factor was raised."""
    table = o.catalog.table(tablet.table_id) if o.catalog is not None else None
    before = table.replication_factor_before if table is not None else 0
    return min(before or tablet.replication_factor, tablet.replication_factor)


def _led(o: Observation, tablet: TabletView, patience: float) -> bool:
    """Whether the tablet has a leader, or had one within `patience` seconds. Replicas report each change, so
    the newest report says when.
    """
    if o.catalog is None:
        return False
    if tablet.leader_node:
        return _heard(o.catalog.view.node(tablet.leader_node), patience)
    return any(report.age_ms < patience * 1000 for report in tablet.replicas)


def _counted(tablets: Iterable[TabletHealth], well: int) -> TabletCounts:
    """The counts of these tablets and of `well` more healthy ones."""
    reasons = Counter(t.reason for t in tablets)
    reasons[""] += well
    return TabletCounts(
        total=reasons.total(),
        healthy=reasons[""],
        under_replicated=reasons["VoterLost"],
        unavailable=reasons["NoLeader"] + reasons["Creating"],
        creating=reasons["Creating"],
        growing=reasons["Growing"],
    )


def catalog_tablet(o: Observation) -> TabletView | None:
    """The catalog's own tablet; None if no leading master answered."""
    return o.catalog.view.tablet(CATALOG_TABLET_ID) if o.catalog else None


def going(everyone: Sequence[Member]) -> tuple[Member, ...]:
    """Members whose claims somebody deleted. Kubernetes keeps such a claim only until its pod ends; then the
    volume is gone.
    """
    return tuple(
        m
        for m in everyone
        if m.claim is not None
        and m.claim.deleting
        and m.claim.phase == "Bound"
        and m.pod is not None
        and m.state not in (State.DRAINING, State.RETIRED)
    )


def masters_wanted(o: Observation, spec: TabletClusterSpec) -> int:
    """The number of masters that there should be: that of the catalog, or before there is one, that of the
    spec.
    """
    catalog = catalog_tablet(o)
    return catalog.replication_factor if catalog is not None else spec.masters.replicas


def lost_in_use(o: Observation, everyone: Sequence[Member], role: Role = "node") -> tuple[Member, ...]:
    """Lost nodes, or lost masters, that a configuration still names. Once all its tablets have moved away, a
    lost member is no longer a risk.
    """
    lost = tuple(m for m in everyone if m.role == role and m.lost)
    if not lost or o.catalog is None:
        return ()
    named = {p.node_id for t in o.catalog.view.tablets for p in t.config.peers}
    return tuple(m for m in lost if m.node_id in named)
