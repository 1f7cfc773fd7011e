"""Chooses the node for a new replica. Called by planner; pure.

Invariant: it never chooses a machine with a member of the tablet, nor a node that is not in service, formed
and alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from stele.driver.kept_steps import Asked
from stele.driver.policy import Policy
from stele.driver.situation import Situation, is_dead
from stele.driver.view import ClusterView, DataState, Intent, NodeView, TabletView
from stele.model.by_hand import ByHand
from stele.model.config import Peer


class Coming:
    """The replicas and bytes that intents bring to each node: replicas that their tablets' configurations do
    not name yet, and bytes that have not arrived.
    """

    def __init__(self) -> None:
        self.replicas: Counter[str] = Counter()
        self.bytes_due: Counter[str] = Counter()

    def count(self, tablet: TabletView | None, intent: Intent, number: int) -> None:
        """Add an intent (`number` 1), or take it out again (-1)."""
        if tablet is None or not tablet.config.names(intent.replica_id, intent.target_node):
            self.replicas[intent.target_node] += number
        if tablet is not None:
            self.bytes_due[intent.target_node] += number * _bytes_due(tablet, intent)


class Load:
    """Replicas per node, including those planned in this round. One per plan; the planner's only mutable
    state.

    - `avoid`: nodes to use only if there is no other.
    - `out_of_reach`: nodes with a replica that some leader does not reach; never used.
    - `bytes_due`: bytes that copies, running or planned, are still to bring to a node.
    - `coming`: the replicas and bytes of intents; None: they are counted from the view.
    - `replicas`: the result of `replicas_of`; None: they are counted from the view.
    - `asked`: notes that a check asked for any of this.
    """

    def __init__(
        self,
        view: ClusterView,
        avoid: frozenset[str] = frozenset(),
        out_of_reach: frozenset[str] = frozenset(),
        replicas: Counter[str] | None = None,
        coming: Coming | None = None,
        asked: Asked | None = None,
    ) -> None:
        self.avoid = avoid
        self.out_of_reach = out_of_reach
        self.asked = asked or Asked()
        if coming is None:
            coming = Coming()
            for intent in view.intents:
                coming.count(view.tablet(intent.tablet_id), intent, 1)
        self.bytes_due = Counter(coming.bytes_due)
        self._replicas: Counter[str] = Counter(replicas_of(view.tablets) if replicas is None else replicas)
        self._replicas.update(coming.replicas)

    def planned(self, node_id: str, bytes_needed: int) -> None:
        """Count a replica that this round plans."""
        self._replicas[node_id] += 1
        self.bytes_due[node_id] += bytes_needed

    def of(self, node_id: str) -> int:
        """How many replicas the node has, including planned ones."""
        self.asked.others = True
        return self._replicas[node_id]


def replicas_of(tablets: Iterable[TabletView]) -> Counter[str]:
    """The replicas that configurations give to each node."""
    return Counter(p.node_id for t in tablets if t.is_current for p in t.config.peers)


def tablet_bytes(tablet: TabletView) -> int:
    """The least number of bytes that a new replica of the tablet needs."""
    return max((r.bytes_on_disk for r in tablet.replicas), default=0)


def _bytes_due(tablet: TabletView, intent: Intent) -> int:
    """The bytes of a copy that have not arrived yet. Arrived bytes no longer count as free on the disk."""
    report = tablet.report(intent.replica_id, intent.target_node)
    if report is not None and report.has_data and report.data_state is DataState.READY:
        return 0
    copy = report.copy if report is not None else None
    if copy is None or not copy.bytes_total:
        return tablet_bytes(tablet)
    return max(0, copy.bytes_total - copy.bytes_done)


def usable(node: NodeView, role: str, policy: Policy) -> bool:
    """Whether the node may get new replicas at all."""
    if node.role != role or not node.takes_replicas:
        return False
    leaving = (policy.lost, policy.unneeded, policy.retiring or (), policy.parked)
    if any(node.node_id in nodes for nodes in leaving):
        return False
    return node.formed and node.ever_heard and not is_dead(node, policy)


def has_room(node: NodeView, bytes_needed: int, policy: Policy) -> bool:
    """Whether the node's disk has room for this many more bytes. A node that does not report its disk
    has room, unless it refuses writes."""
    states_disk = node.disk_free_bytes or node.disk_used_bytes
    return not node.disk_low and (
        not states_disk or node.disk_free_bytes >= bytes_needed + policy.min_disk_free_bytes
    )


def choose_target(
    situation: Situation,
    view: ClusterView,
    policy: Policy,
    load: Load,
    *,
    without: Peer | None = None,
    any_room: bool = False,
    among: Collection[str] | None = None,
) -> NodeView | None:
    """The best node for one more replica of the tablet, or None.

    The node is on another machine than each peer. Among such nodes these come first, in this order: a node
    not to avoid, a node asked for by hand, a zone with fewer peers. Then fewer replicas, fewer on its
    machine, more free bytes, a smaller id.

    `without`: ignore this peer, because it is removed first. `any_room`: accept a node whose disk has no room
    besides the copies under way. `among`: only these nodes.
    """
    load.asked.others = True
    nodes: dict[str, NodeView] = {n.node_id: n for n in view.nodes}
    peers = [p for p in situation.tablet.config.peers if p is not without]
    taken = {host_of(nodes, p.node_id) for p in peers}
    replaced = {m.peer.replica_id for m in situation.members if not m.live or not m.active}
    zones = Counter(
        nodes[p.node_id].zone for p in peers if p.node_id in nodes and p.replica_id not in replaced
    )
    bytes_needed = tablet_bytes(situation.tablet)
    able = (n for n in view.nodes if usable(n, situation.tablet.node_role, policy))
    roomy = (n for n in able if any_room or has_room(n, load.bytes_due[n.node_id] + bytes_needed, policy))
    free = (n for n in roomy if n.host not in taken and n.node_id not in load.out_of_reach)
    asked = (n for n in free if among is None or n.node_id in among)
    machines: Counter[str] = Counter()
    for node in view.nodes:
        machines[node.host] += load.of(node.node_id)
    return _best(asked, zones, machines, load, situation.tablet.by_hand)


def host_of(nodes: Mapping[str, NodeView], node_id: str) -> str:
    """The machine of a node; its id if the catalog does not know it."""
    node = nodes.get(node_id)
    return node.host if node is not None else node_id


def _best(
    nodes: Iterable[NodeView], zones: Counter[str], machines: Counter[str], load: Load, by_hand: ByHand
) -> NodeView | None:
    return min(
        nodes,
        key=lambda n: (
            n.node_id in load.avoid,
            n.node_id in by_hand.avoided,
            n.node_id not in by_hand.pinned,
            zones[n.zone],
            load.of(n.node_id),
            machines[n.host],
            -n.disk_free_bytes,
            n.node_id,
        ),
        default=None,
    )
