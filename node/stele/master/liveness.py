"""What one master alone remembers of the nodes: when it last heard each, and their replicas' newest reports.

Fed by heartbeats; lost at restart, and rebuilt from full reports that the leader asks for. Reads no clock itself.

Invariant: an incremental report is merged only into a full one of the same incarnation; a silent node keeps its last.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stele.master.records import NodeRecord
from stele.model import bounds
from stele.model.clock import agreed
from stele.model.config import Peer
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import common_pb2, master_pb2

STALL_MS = 3_000
"""A master that was not awake for so long heard nobody meanwhile: silence counts anew."""

RECORD_MS = 60_000
"""The catalog lags by so much behind what nodes tell of their logs: it counts where all masters started anew."""


@dataclass(frozen=True, slots=True)
class Report:
    """The newest status of a replica, and when (ms) this master got it."""

    node_id: str
    status: common_pb2.ReplicaStatusPB
    at_ms: int


class Told(NamedTuple):
    """What tells a node's newest start from one on an older copy of its volume: the number and the random name of that
    start, and the newest place in its log that it said is durable."""

    incarnation: int
    start: int
    log_synced: int


@dataclass(slots=True)
class NodeLife:
    """One node as this master hears it. `heard`: since it began to listen as what it is now. `full`: a full report of this
    incarnation is in `reports`.

    `wall_base_us`: its wall clock less this master's monotonic one; `wall_ahead_us`: of what it knows most clocks to say.
    `told`: by its newest vetted start; `registered`: the same for the catalog, when it registered and each RECORD_MS.
    `proven`: a process at the start's address has confirmed it (starts.py); what others tell in its name judges nobody.
    """

    node_id: str
    incarnation: int = 0
    sequence: int = 0
    heard: bool = False
    heard_ms: int = 0
    registration: master_pb2.NodeRegistrationPB | None = None
    full: bool = False
    full_since_ms: int = 0
    disk_free_bytes: int = 0
    disk_used_bytes: int = 0
    disk_low: bool = False
    wall_base_us: int | None = None
    wall_ahead_us: int | None = None
    start: int = 0
    proven: bool = False
    told: Told | None = None
    registered: Told | None = None
    registered_ms: int = 0
    reports: dict[tuple[str, int], Report] = field(default_factory=dict)


def refuse_older(request: master_pb2.TSHeartbeatRequest, told: Told) -> None:
    """Refuse a node that lost what it `told` before: on an older copy of its volume it has forgotten votes and
    acknowledged rows.

    Raises:
        Rejected: STALE_INCARNATION, there was a later start; VOLUME_OLD, another start had its number, or its log
            ends too early.
    """
    if request.start == told.start:
        return
    if request.taken_back:  # what its log lost was accepted; only a later start of the same volume ends it
        _refuse_earlier(request, told.incarnation + 1)
        return
    if (
        request.vetted
    ):  # by its log it would be old too; but it may use the very volume that has a later start by now
        _refuse_earlier(request, told.incarnation)
    node_id = id_from_pb(request.node_id)
    if request.incarnation == told.incarnation:
        raise Rejected(
            f"another start of node {node_id} was incarnation {request.incarnation}", code=Code.VOLUME_OLD
        )
    if 0 < request.log_found < told.log_synced:
        raise Rejected(
            f"the log of node {node_id} ends at {_place(request.log_found)}, it had told {_place(told.log_synced)}",
            code=Code.VOLUME_OLD,
        )
    _refuse_earlier(request, told.incarnation)


def _refuse_earlier(request: master_pb2.TSHeartbeatRequest, incarnation: int) -> None:
    if request.incarnation < incarnation:
        raise Rejected(
            f"node {id_from_pb(request.node_id)} speaks as incarnation {request.incarnation}, expected {incarnation} or more: a "
            "later start of it is running, or this one runs on an older copy of its volume",
            code=Code.STALE_INCARNATION,
        )


def _note(life: NodeLife, request: master_pb2.TSHeartbeatRequest, now_ms: int) -> None:
    """Only vetted and proven starts count: neither an older copy that one master cannot judge yet, nor who speaks in another's
    name, must become what judges others."""
    synced = request.log_synced
    if life.told is not None and life.told.start == request.start:
        synced = max(synced, life.told.log_synced)  # a heartbeat may come late
    life.told = Told(request.incarnation, request.start, synced)
    again = life.registered is not None and life.registered.start == request.start
    # All nodes' minutes begin together, so that one batch of the catalog has them all.
    if (
        not again
        or request.HasField("registration")
        or now_ms // RECORD_MS != life.registered_ms // RECORD_MS
    ):
        life.registered, life.registered_ms = life.told, now_ms


def _place(place: int) -> str:
    return f"segment {place >> 40}, byte {place & ((1 << 40) - 1)}"


class Liveness:
    """All nodes heard by this master. `began_ms` is when it began to listen as what it is now (leader or follower). `adopted`:
    its volume was copied, and the addresses in its catalog may be those of the original's nodes."""

    def __init__(self, now_ms: int, *, adopted: bool = False) -> None:
        self.began_ms = now_ms
        self._adopted = adopted
        self.clock_id = secrets.randbits(64) or 1
        """Of the monotonic clock that nodes compare theirs with."""
        self._awake_ms = now_ms
        self.nodes: dict[str, NodeLife] = {}
        self._by_tablet: dict[str, dict[tuple[str, int], Report]] = {}

    def awake(self, now_ms: int) -> None:
        """Called at least once a second while the process runs. After a stall (a process stopped, a machine suspended)
        the nodes' silence was this master's own, so nobody is silent until a new one has passed."""
        if now_ms - self._awake_ms > STALL_MS:
            self._begin(now_ms)
        self._awake_ms = now_ms

    def _begin(self, now_ms: int) -> None:
        self.began_ms = now_ms
        for life in self.nodes.values():
            life.heard = False

    def begin_leading(self, now_ms: int) -> None:
        """Forget all reports (they may have been cleared by another leader's answer); silence counts from now."""
        self._begin(now_ms)
        self._awake_ms = now_ms
        self._by_tablet.clear()
        for life in self.nodes.values():
            life.full = False
            life.registration = None
            life.reports.clear()

    def heard(
        self, request: master_pb2.TSHeartbeatRequest, now_ms: int, *, on_record: bool = False
    ) -> NodeLife:
        """Take note that a node is alive. Of those that are not `on_record` a bounded number is heard.

        Raises:
            Rejected: as refuse_older; then it counts as silent.
            Retryable: THROTTLED, too many nodes are heard.
        """
        self.awake(now_ms)
        node_id = id_from_pb(request.node_id)
        known = self.nodes.get(node_id)
        if known is not None:
            if known.told is not None:
                refuse_older(request, known.told)
            _refuse_earlier(request, known.incarnation)
        elif not on_record and len(self.nodes) >= bounds.NODES_HEARD_MAX:
            raise Retryable(f"{len(self.nodes)} nodes are heard already, no more", code=Code.THROTTLED)
        life = known or self.nodes.setdefault(node_id, NodeLife(node_id))
        if (request.incarnation, request.start) != (life.incarnation, life.start):
            self._forget_reports(life)
            life.incarnation, life.start = request.incarnation, request.start
            life.sequence, life.registration, life.proven = 0, None, False
        life.heard, life.heard_ms = True, now_ms
        life.disk_free_bytes, life.disk_used_bytes = request.disk_free_bytes, request.disk_used_bytes
        life.disk_low = request.disk_low
        life.wall_base_us = request.wall_base_us if request.clock_id == self.clock_id else None
        life.wall_ahead_us = request.wall_ahead_us if request.HasField("wall_ahead_us") else None
        if request.HasField("registration"):
            life.registration = request.registration
        if request.vetted and life.proven:
            _note(life, request, now_ms)
        return life

    def forget_strangers(self, known: Container[str]) -> None:
        """Forget the nodes that the catalog does not know. They were heard before this master led."""
        for node_id in [n for n in self.nodes if n not in known]:
            self._forget_reports(self.nodes[node_id])
            del self.nodes[node_id]

    def merge(self, request: master_pb2.TSHeartbeatRequest, now_ms: int) -> list[str]:
        """Merge a heartbeat's report; the ids of the tablets it spoke of. An incremental one without its full one,
        or one that comes late, changes nothing; then `full` is false, and a full one is to be asked for."""
        life = self.nodes[id_from_pb(request.node_id)]
        if not request.has_report:
            return []
        if request.sequence <= life.sequence:
            life.full = False  # its answer clears what only a newer, full report can make up for
            return []
        touched: dict[str, None] = {}
        if not request.incremental:
            touched.update((tablet_id, None) for tablet_id, _ in life.reports)
            self._forget_reports(life)
            life.full, life.full_since_ms = True, now_ms
        elif not life.full:
            return []
        life.sequence = request.sequence
        for status in request.tablets:
            report = Report(life.node_id, status, now_ms)
            key = (id_from_pb(status.tablet_id), status.replica_id)
            life.reports[key] = report
            self._by_tablet.setdefault(key[0], {})[(life.node_id, key[1])] = report
            touched[key[0]] = None
        for raw in request.removed_tablets:
            # One replica of it is gone; another may be on the same node. The full report asked for now tells.
            life.full = False
            touched[id_from_pb(raw)] = None
        return list(touched)

    def _forget_reports(self, life: NodeLife) -> None:
        for key in list(life.reports):
            self._forget(life, key)
        life.full = False

    def _forget(self, life: NodeLife, key: tuple[str, int]) -> None:
        del life.reports[key]
        of_tablet = self._by_tablet.get(key[0], {})
        of_tablet.pop((life.node_id, key[1]), None)
        if not of_tablet:
            self._by_tablet.pop(key[0], None)

    # --- questions ---

    def age_ms(self, node_id: str, now_ms: int) -> int:
        """How long ago the node was heard, at most since this master began: older silence may have been its own."""
        life = self.nodes.get(node_id)
        heard = life.heard_ms if life is not None else 0
        return max(0, now_ms - max(heard, self.began_ms))

    def ever_heard(self, node_id: str) -> bool:
        """Whether the node was heard since this master began."""
        life = self.nodes.get(node_id)
        return life is not None and life.heard

    def wall_agreed(self, node_id: str, base_us: int, now_ms: int, alive_ms: int) -> int | None:
        """What most wall clocks say, less this master's monotonic one: of the nodes and masters heard within `alive_ms`, and
        of this master, `node_id`, whose own is at `base_us`. None: they are at odds, or too few were heard, or it has not
        listened long enough to have heard all."""
        if now_ms - self.began_ms < alive_ms:
            return None
        bases = {
            life.node_id: life.wall_base_us
            for life in self.nodes.values()
            if life.wall_base_us is not None and now_ms - life.heard_ms <= alive_ms
        }
        bases[node_id] = base_us
        return agreed(list(bases.values())) if len(bases) > 1 else None

    def reports_of(self, tablet_id: str) -> list[Report]:
        """The newest reports of a tablet's replicas, by node and replica_id."""
        found = self._by_tablet.get(tablet_id, {})
        return [found[key] for key in sorted(found)]

    def disk_free(self, node_id: str) -> int | None:
        """The free bytes of the node's disk; None if it stated nothing of it."""
        life = self.nodes.get(node_id)
        if life is None or not (life.disk_free_bytes or life.disk_used_bytes):
            return None
        return life.disk_free_bytes

    def disk_low(self, node_id: str) -> bool:
        """Whether the node said that it refuses writes for want of space: of bytes, or of inodes."""
        life = self.nodes.get(node_id)
        return life is not None and life.disk_low

    def reported(self) -> Iterable[str]:
        """The tablets of which there are reports."""
        return self._by_tablet

    def report(self, tablet_id: str, node_id: str, replica_id: int) -> Report | None:
        """The newest report of one replica, or None."""
        return self._by_tablet.get(tablet_id, {}).get((node_id, replica_id))

    def leader_of(self, tablet_id: str) -> tuple[int, str]:
        """(term, node) of the newest leader that any replica reported; (0, "") if none."""
        best = (0, "")
        for report in self.reports_of(tablet_id):
            status = report.status
            if status.role == common_pb2.LEADER:
                best = max(best, (status.term, report.node_id))
            elif status.leader_node and status.term > best[0]:
                best = (status.term, id_from_pb(status.leader_node))
        return best

    def located(self, node: NodeRecord) -> NodeRecord:
        """The row of a node with the addresses at which it may be dialled: of an adopted catalog those of nodes that have
        registered since this master began alone."""
        if not self._adopted:
            return node
        life = self.nodes.get(node.node_id)
        told = life.registration if life is not None else None
        if told is None:
            return replace(node, address="", flight_address="")
        return replace(node, address=told.address, flight_address=told.flight_address)

    def peer_address(self, peer: Peer) -> str:
        """Where a configuration says that a peer is, for one whose row says nothing."""
        return "" if self._adopted else peer.address

    def addresses(self) -> tuple[list[master_pb2.NodeAddressPB], int]:
        """Where each node that registered since this master leads is, and a digest of the list."""
        found = [
            master_pb2.NodeAddressPB(
                node_id=id_to_pb(node_id), address=life.registration.address, incarnation=life.incarnation
            )
            for node_id, life in sorted(self.nodes.items())
            if life.registration is not None and life.registration.address
        ]
        said = b"".join(a.SerializeToString(deterministic=True) for a in found)
        return found, int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big")

    def all_full(self, node_ids: Iterable[str]) -> bool:
        """Whether each of these nodes has given a full report."""
        return all((life := self.nodes.get(n)) is not None and life.full for n in node_ids)
