"""An administrator's changes to one tablet's replicas: move, add, remove, release. Called by service.py on
the leader.

Writes the tablet's row only; a driver carries it out. Invariant: no recorded request puts two replicas on one
machine, leaves the tablet without a majority, or needs a node that cannot hold a replica. A repeated request
changes nothing more.
"""

from __future__ import annotations

from dataclasses import replace

from stele.master.cluster_view import TEXT_OF_HAND_CHARS_MAX
from stele.master.leadership import Leadership
from stele.master.placement import check_machines
from stele.master.port import swap
from stele.master.records import NodeRecord, TabletRecord
from stele.master.versions import require_version
from stele.model.bounds import HOLDER_CHARS_MAX, cut
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.config import MemberType
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import CATALOG_TABLET_ID, NodeId, TabletId
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2 as pb

REPLICAS_MAX = 7


async def place_tablet(lead: Leadership, request: pb.PlaceTabletRequest) -> ByHand:
    """Record what an administrator asks for a tablet's replicas. Returns everything that is asked for the
    tablet from then on.

    Raises:
        Rejected: NOT_FOUND. INVALID_ARGUMENT or UNSAFE_CHANGE, with the reason and a remedy.
        Retryable: NOT_READY, this master has not heard enough nodes yet.
    """
    tablet_id = TabletId(id_from_pb(request.tablet_id))
    async with lead.locks.hold(tablets=(tablet_id,)):
        row = lead.catalog.tablet(tablet_id)
        if tablet_id == CATALOG_TABLET_ID:
            raise Rejected("the catalog's tablet has a replica on each master, and cannot be placed by hand")
        if row.state != "RUNNING":
            raise Rejected(f"tablet {tablet_id[:8]} is {row.state}; only a RUNNING one can be placed by hand")
        require_version(lead, 2, f"tablet {tablet_id[:8]}")
        lead.check_settled()
        wanted = _wanted(_Asked(lead, row), request)
        if wanted:
            wanted = replace(
                wanted,
                owner=cut(request.owner, HOLDER_CHARS_MAX),
                reason=cut(request.reason, TEXT_OF_HAND_CHARS_MAX),
                since_us=lead.wall_us(),
            )
        before = row.by_hand
        same = (wanted.pinned, wanted.avoided, wanted.extra)
        if same == (before.pinned, before.avoided, before.extra):
            return before
        await lead.commit([swap(row, replace(row, by_hand=wanted))])
    lead.look_at(tablet_id)
    return wanted


def _wanted(asked: _Asked, request: pb.PlaceTabletRequest) -> ByHand:
    source, target = id_from_pb(request.from_node), id_from_pb(request.to_node)
    match request.what:
        case pb.MOVE_REPLICA:
            return asked.move(source, target)
        case pb.ADD_REPLICA:
            return asked.add(target, request.replicas)
        case pb.REMOVE_REPLICA:
            return asked.remove(source, request.replicas)
        case pb.RELEASE_PLACEMENT:
            return NOT_BY_HAND
    raise Rejected("place tablet: the request does not say what to do; expected move, add, remove or release")


class _Asked:
    """One request. Each method checks it and returns what is asked for from then on."""

    def __init__(self, lead: Leadership, row: TabletRecord) -> None:
        self._lead = lead
        self._row = row
        self._what = f"tablet {row.tablet_id[:8]}"
        self._members = {p.node_id: p for p in row.config.peers}
        table = lead.catalog.tables[row.table_id]
        self._factor = table.replication_factor

    def move(self, source: str, target: str) -> ByHand:
        """Bring the replica on `source` to `target`."""
        hand = self._row.by_hand
        if source == target:
            raise Rejected(f"{self._what}: source and target are the same node")
        if source not in self._members and target in hand.pinned:
            return hand  # asked for before, and done
        self._check_member(source)
        begun = source in hand.avoided and target in hand.pinned
        if not begun and (target not in hand.pinned or target in self._members):
            self._check_target(target)
        return replace(
            hand,
            pinned=(*_without(hand.pinned, source, target), target),
            avoided=(*_without(hand.avoided, source, target), source),
        )

    def add(self, target: str, replicas: int) -> ByHand:
        """Ask for one replica more than now, `replicas` in all; on `target` if it is given."""
        hand = self._row.by_hand
        if replicas > REPLICAS_MAX:
            raise Rejected(f"{self._what}: {replicas} replicas; at most {REPLICAS_MAX} are possible")
        extra = replicas - self._factor
        if extra <= hand.extra:
            if extra == hand.extra and (not target or target in hand.pinned):
                return hand  # asked for already
            raise self._changed(replicas)
        if extra != hand.extra + 1:
            raise self._changed(replicas)
        self._check_machines(replicas)
        if not target:
            return replace(hand, extra=extra, avoided=hand.avoided if self._has_other_place() else ())
        self._check_target(target)
        return replace(
            hand,
            extra=extra,
            pinned=(*_without(hand.pinned, target), target),
            avoided=_without(hand.avoided, target),
        )

    def remove(self, source: str, replicas: int) -> ByHand:
        """Ask for one replica less than now, `replicas` in all, and for none on `source`."""
        hand = self._row.by_hand
        extra = replicas - self._factor
        if extra == hand.extra and source in hand.avoided:
            return hand  # asked for already
        if hand.extra == 0:
            raise Rejected(
                f"{self._what} has no more replicas than its table's replication factor {self._factor}, so a driver "
                "would replace the removed one; move the replica to another node, or lower the factor of the table"
            )
        if extra != hand.extra - 1:
            raise self._changed(replicas)
        self._check_member(source)
        self._check_majority(source)
        return replace(
            hand,
            extra=extra,
            pinned=_without(hand.pinned, source),
            avoided=(*_without(hand.avoided, source), source),
        )

    def _has_other_place(self) -> bool:
        """Whether a machine is free for one more replica. Nodes that must not have one do not count."""
        nodes = self._lead.catalog.nodes
        taken = {_machine(n) for m in self._members if (n := nodes.get(m)) is not None}
        avoided = self._row.by_hand.avoided
        return any(
            c.machine not in taken and c.node_id not in avoided for c in self._lead.candidates() if not c.full
        )

    def _changed(self, replicas: int) -> Rejected:
        now = self._factor + self._row.by_hand.extra
        return Rejected(
            f"{self._what} is to have {now} replicas, but the request is for {replicas}: somebody changed it "
            f"meanwhile; read it again with `stele tablet describe`",
            code=Code.CAS_FAILED,
        )

    def _check_member(self, node_id: str) -> None:
        if node_id not in self._members:
            places = ", ".join(self._name(n) for n in self._members)
            raise Rejected(
                f"{self._what} has no replica on node {self._name(node_id)}; it has some on {places}",
                code=Code.NOT_FOUND,
            )

    def _check_target(self, node_id: str) -> None:
        """Raise unless the node can hold a new replica of the tablet now."""
        lead, name = self._lead, self._name(node_id)
        node = lead.catalog.nodes.get(NodeId(node_id))
        if node is None or node.role != "node":
            raise Rejected(
                f"there is no node with the id {node_id[:8]}; `stele node list` shows all",
                code=Code.NOT_FOUND,
            )
        if node_id in self._members:
            raise Rejected(f"{self._what} has a replica on node {name} already")
        if not node.takes_replicas:
            state = "parked" if node.state == "ACTIVE" else node.state
            why = f" ({node.reason})" if node.reason else ""
            raise Rejected(f"node {name} is {state}{why} and gets no replicas; choose one in service")
        for peer in self._members.values():
            other = lead.catalog.nodes.get(peer.node_id)
            if other is not None and _machine(other) == _machine(node):
                raise Rejected(
                    f"node {name} is on machine {_machine(node)}, which already has replica {peer.replica_id} of "
                    f"{self._what}; choose a node on another machine"
                )
        if not node.formed or not lead.is_alive(node):
            raise Retryable(
                f"node {name} sends no heartbeats now; try again, or choose another", code=Code.NOT_READY
            )
        self._check_room(node)

    def _check_room(self, node: NodeRecord) -> None:
        lead = self._lead
        reports = lead.liveness.reports_of(self._row.tablet_id)
        size = max((r.status.bytes_on_disk for r in reports), default=0)
        free = lead.liveness.disk_free(node.node_id)
        needed = size + lead.options.disk_free_bytes_min
        if lead.liveness.disk_low(node.node_id) or (free is not None and free < needed):
            raise Rejected(
                f"node {self._name(node.node_id)} has no room: {free or 0:,} bytes are free, but the replica "
                f"needs {size:,} beside {lead.options.disk_free_bytes_min:,} that stay free; enlarge its "
                "volume or choose another node"
            )

    def _check_machines(self, replicas: int) -> None:
        candidates = self._lead.candidates()
        check_machines(
            f"{replicas} replicas of {self._what}",
            replicas,
            len({c.machine for c in candidates}),
            len(self._lead.active_machines()),
        )

    def _check_majority(self, source: str) -> None:
        """Raise UNSAFE_CHANGE unless most voters other than the one on `source` are heard now."""
        left = [
            p
            for p in self._members.values()
            if p.node_id != source and p.member_type is not MemberType.NON_VOTER
        ]
        nodes = self._lead.catalog.nodes
        alive = [p for p in left if (n := nodes.get(p.node_id)) is not None and self._lead.is_alive(n)]
        if not left or len(alive) < len(left) // 2 + 1:
            raise Rejected(
                f"{self._what} would lose its majority: {len(alive)} of its other {len(left)} voters are "
                "heard; bring their nodes back first",
                code=Code.UNSAFE_CHANGE,
            )

    def _name(self, node_id: str) -> str:
        node = self._lead.catalog.nodes.get(NodeId(node_id))
        return node.name if node is not None and node.name else node_id[:8] or "(none)"


def _machine(node: NodeRecord) -> str:
    return node.machine or node.node_id


def _without(nodes: tuple[str, ...], *gone: str) -> tuple[str, ...]:
    return tuple(n for n in nodes if n not in gone)
