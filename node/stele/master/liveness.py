"""One master's memory of the nodes: the last heartbeat of each, and the newest reports of their replicas.

Fed by heartbeats. Lost at a restart, then rebuilt from full reports, which the leader asks for. Reads no
clock itself.

Invariant: an incremental report is merged only into a full one of the same incarnation. A silent node's last
report stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from sys import intern
from typing import NamedTuple

from stele.master.records import NodeRecord
from stele.model import bounds
from stele.model.clock import agreed
from stele.model.config import Peer
from stele.model.errors import Code, Rejected, Retryable
from stele.model.incarnation import is_given_up as is_other_history
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import common_pb2, master_pb2

STALL_MS = 3_000
"""A master that stood still for this long heard nobody meanwhile. So it starts to count silence anew."""

RECORD_MS = 60_000
"""How often a node's durable log position is written to the catalog. It matters only if all masters
restart."""


@dataclass(frozen=True, slots=True)
class Report:
    """The newest status of a replica, and the time (ms) at which this master received it.

    It is kept as bytes. A message would take twice as much, and hold the memory of all others that came with
    it.
    """

    node_id: str
    replica_id: int
    status_bytes: bytes
    at_ms: int

    @property
    def status(self) -> common_pb2.ReplicaStatusPB:
        """The status as a message, parsed in each call."""
        return common_pb2.ReplicaStatusPB.FromString(self.status_bytes)


class LastStart(NamedTuple):
    """A node's newest start: its incarnation, its random name, and its highest reported durable log position.

    It distinguishes that start from one on an older copy of the node's volume.
    """

    incarnation: int
    start: int
    log_synced: int


@dataclass(slots=True)
class NodeLife:
    """One node as this master hears it.

    - `heard`: it was heard since this master took its present role.
    - `full`: it has reported all its replicas since it started.
    - `tablets`: the tablets of which this master has reports of this node.
    - `load`: requests of clients per second at its leaders; None: it does not count them.
    - `dropped_digest`: names the list of dropped tables that it serves to nobody.
    - `wall_base_us`: its wall clock minus this master's monotonic clock.
    - `wall_ahead_us`: how far its clock is ahead of most clocks, by its own report.
    - `last_start`: its newest vetted start.
    - `registered`: the value of `last_start` to write into the catalog, taken at each registration and every
      RECORD_MS.
    - `proven`: a process at the start's address has confirmed it (starts.py). Claims of an unproven start are
      not used to judge other starts.
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
    load: int | None = None
    dropped_digest: int = 0
    wall_base_us: int | None = None
    wall_ahead_us: int | None = None
    start: int = 0
    proven: bool = False
    last_start: LastStart | None = None
    registered: LastStart | None = None
    registered_ms: int = 0
    tablets: set[str] = field(default_factory=set)
    merging: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False, compare=False)
    """Held while a report of it is merged."""


def refuse_older(request: master_pb2.TSHeartbeatRequest, last: LastStart) -> None:
    """Refuse a node on an older copy of its volume, which lacks votes and acknowledged rows.

    Raises:
        Rejected: STALE_INCARNATION, there was a later start. VOLUME_OLD, another start had the same
            incarnation, or the log ends too early.
    """
    if request.start == last.start:
        return
    if (
        request.taken_back
    ):  # somebody accepted the loss (`stele local take-back`); only a later start overrides it
        _refuse_earlier(request, last.incarnation + 1)
        return
    if request.vetted:
        # Its log may also look too short. But it may be an earlier process on the volume that the later start
        # uses.
        _refuse_earlier(request, last.incarnation)
    node_id = id_from_pb(request.node_id)
    if request.incarnation == last.incarnation:
        raise Rejected(
            f"incarnation {request.incarnation} of node {node_id[:8]} was another start; this volume is an older copy",
            code=Code.VOLUME_OLD,
        )
    if 0 < request.log_found < last.log_synced:
        raise Rejected(
            f"the log of node {node_id[:8]} ends at {_place(request.log_found)}, but it had reached "
            f"{_place(last.log_synced)}",
            code=Code.VOLUME_OLD,
        )
    _refuse_earlier(request, last.incarnation)


def _refuse_earlier(request: master_pb2.TSHeartbeatRequest, incarnation: int) -> None:
    if request.incarnation < incarnation:
        raise Rejected(
            f"node {id_from_pb(request.node_id)} has incarnation {request.incarnation}, expected "
            f"{incarnation} or more: a "
            "later start of it is running, or this one runs on an older copy of its volume",
            code=Code.STALE_INCARNATION,
        )


def _note(life: NodeLife, request: master_pb2.TSHeartbeatRequest, now_ms: int) -> None:
    """Record a vetted and proven start, by which later starts are judged. Unproven starts may be older copies
    or forged.
    """
    synced = request.log_synced
    if life.last_start is not None and life.last_start.start == request.start:
        synced = max(synced, life.last_start.log_synced)  # a heartbeat may come late
    life.last_start = LastStart(request.incarnation, request.start, synced)
    again = life.registered is not None and life.registered.start == request.start
    # The periods of all nodes begin at the same time, so that one batch of the catalog holds them all.
    if (
        not again
        or request.HasField("registration")
        or now_ms // RECORD_MS != life.registered_ms // RECORD_MS
    ):
        life.registered, life.registered_ms = life.last_start, now_ms


def _place(place: int) -> str:
    return f"segment {place >> 40}, byte {place & ((1 << 40) - 1)}"


def is_given_up(status: common_pb2.ReplicaStatusPB, incarnation: int) -> bool:
    """Whether a recovery gave this replica up. False while the replica is being copied, since it does not
    know its incarnation yet.
    """
    given_up = is_other_history(status.tablet_incarnation, incarnation)
    return given_up and status.data_state != common_pb2.COPYING


REPORTS_AT_ONCE = 256
"""The most reports that are merged in one step of the event loop: some 3 ms."""


class Liveness:
    """All nodes that this master hears.

    `began_ms`: when it took its present role, leader or follower. `adopted`: its volume is a copy, so the
    addresses in its catalog may be those of the original cluster's nodes.
    """

    def __init__(self, now_ms: int, *, adopted: bool = False) -> None:
        self.began_ms = now_ms
        self._adopted = adopted
        self.clock_id = secrets.randbits(64) or 1
        """Identifies this master's monotonic clock, which nodes compare with theirs."""
        self._awake_ms = now_ms
        self.nodes: dict[str, NodeLife] = {}
        self.on_report: Callable[[str], None] | None = None
        """Called with a tablet's id after a report of one of its replicas came or went."""
        self._by_tablet: dict[str, tuple[Report, ...]] = {}
        """By tablet: its reports, sorted by node and replica_id."""
        self._begun = 0
        """How often this master began to lead."""
        self._incarnation_of: Callable[[str], int] = lambda tablet_id: 0

    def awake(self, now_ms: int) -> None:
        """Record that this process runs; called at least once a second.

        After a stall (process stopped, machine suspended) this master has heard nobody. So it starts to count
        silence anew.
        """
        if now_ms - self._awake_ms > STALL_MS:
            self._begin(now_ms)
        self._awake_ms = now_ms

    def _begin(self, now_ms: int) -> None:
        self.began_ms = now_ms
        for life in self.nodes.values():
            life.heard = False

    def begin_leading(self, now_ms: int, incarnation_of: Callable[[str], int] = lambda tablet_id: 0) -> None:
        """Forget all reports, because nodes no longer send changes that another leader acknowledged. Silence
        counts from now.

        `incarnation_of`: gives the incarnation of a tablet, as the catalog has it.
        """
        self._incarnation_of = incarnation_of
        self._begin(now_ms)
        self._begun += 1
        self._awake_ms = now_ms
        self._by_tablet.clear()
        for life in self.nodes.values():
            life.full = False
            life.registration = None
            life.tablets.clear()

    def heard(
        self, request: master_pb2.TSHeartbeatRequest, now_ms: int, *, on_record: bool = False
    ) -> NodeLife:
        """Record that a node is alive. The number of nodes that are not `on_record` is bounded.

        Raises:
            Rejected: as `refuse_older`. The node then counts as silent.
            Retryable: THROTTLED, there are too many unregistered nodes.
        """
        self.awake(now_ms)
        node_id = intern(id_from_pb(request.node_id))
        known = self.nodes.get(node_id)
        if known is not None:
            if known.last_start is not None:
                refuse_older(request, known.last_start)
            _refuse_earlier(request, known.incarnation)
        elif not on_record and len(self.nodes) >= bounds.NODES_HEARD_MAX:
            raise Retryable(
                f"this master hears {len(self.nodes)} nodes already, the most it can; stop nodes that do not belong to this cluster",
                code=Code.THROTTLED,
            )
        life = known or self.nodes.setdefault(node_id, NodeLife(node_id))
        if (request.incarnation, request.start) != (life.incarnation, life.start):
            self._forget_reports(life)
            life.incarnation, life.start = request.incarnation, request.start
            life.sequence, life.registration, life.proven = 0, None, False
        life.heard, life.heard_ms = True, now_ms
        life.disk_free_bytes, life.disk_used_bytes = request.disk_free_bytes, request.disk_used_bytes
        life.disk_low = request.disk_low
        life.load = request.load if request.HasField("load") else None
        life.dropped_digest = request.dropped_digest
        life.wall_base_us = request.wall_base_us if request.clock_id == self.clock_id else None
        life.wall_ahead_us = request.wall_ahead_us if request.HasField("wall_ahead_us") else None
        if request.HasField("registration"):
            life.registration = request.registration
        if request.vetted and life.proven:
            _note(life, request, now_ms)
        return life

    def forget_start(self, life: NodeLife) -> None:
        """Forget a start that nobody confirmed, so that an earlier one is heard again."""
        self._forget_reports(life)
        life.incarnation, life.start, life.sequence = 0, 0, 0
        life.heard, life.registration, life.proven = False, None, False

    def forget_strangers(self, known: Container[str]) -> None:
        """Forget nodes that are not in the catalog. They were heard before this master led."""
        for node_id in [n for n in self.nodes if n not in known]:
            self._forget_reports(self.nodes[node_id])
            del self.nodes[node_id]

    async def merge(self, request: master_pb2.TSHeartbeatRequest, now_ms: int) -> list[str]:
        """Merge a heartbeat's report. Returns the ids of the tablets whose reports changed.

        An incremental report that is late, or comes before a full one, changes nothing. Then `full` becomes
        false, and the answer must ask for a full report. A large report is merged with pauses. In a pause the
        node may start anew, or this master may begin to lead. Then the rest of the report is outdated and
        changes nothing.

        A merge that has begun goes on to its end, even if the node no longer waits for the answer. The node's
        next report waits for the merge. So each full report counts, however slow this master is.
        """
        if not request.has_report:
            return []
        life = self.nodes[id_from_pb(request.node_id)]
        begun = self._now_of(life)
        number = len(request.tablets) + (0 if request.incremental else len(life.tablets))
        if number < REPORTS_AT_ONCE - 1 and not life.merging.locked():
            # This takes no pause, so nothing can come between.
            return await self._merge(life, request, now_ms, begun)
        await life.merging.acquire()
        merge = asyncio.get_running_loop().create_task(self._merge(life, request, now_ms, begun))
        merge.add_done_callback(lambda _: life.merging.release())
        return await asyncio.shield(merge)

    def _now_of(self, life: NodeLife) -> tuple[int, int, int]:
        """Identifies this leadership and this start of the node, to which a report belongs."""
        return self._begun, life.incarnation, life.start

    async def _merge(
        self, life: NodeLife, request: master_pb2.TSHeartbeatRequest, now_ms: int, begun: tuple[int, int, int]
    ) -> list[str]:
        if begun != self._now_of(life):
            return []
        if request.sequence <= life.sequence:
            life.full = (
                False  # the answer makes the node forget these changes, so only a new full report has them
            )
            return []
        if request.incremental and not life.full:
            return []
        life.sequence, life.full = request.sequence, False
        told: dict[str, dict[int, Report]] = {}
        touched: dict[str, None] = {}
        for number, status in enumerate(request.tablets, 1):
            report = Report(life.node_id, status.replica_id, status.SerializeToString(), now_ms)
            told.setdefault(intern(id_from_pb(status.tablet_id)), {})[status.replica_id] = report
            if number % REPORTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        gone = () if request.incremental else sorted(life.tablets - told.keys())
        for number, tablet_id in enumerate((*gone, *told)):
            if number % REPORTS_AT_ONCE == REPORTS_AT_ONCE - 1:
                await asyncio.sleep(0)
            if begun != self._now_of(life):
                return list(touched)
            self._put(life, tablet_id, told.get(tablet_id, {}), all_of_it=not request.incremental)
            self._changed(tablet_id)
            touched[tablet_id] = None
        life.full = not request.removed_tablets
        if not request.incremental:
            life.full_since_ms = now_ms
        for raw in request.removed_tablets:
            # One replica of it is gone, but the node may hold another. The full report that is asked for now
            # shows it.
            tablet_id = id_from_pb(raw)
            self._changed(tablet_id)
            touched[tablet_id] = None
        return list(touched)

    def _changed(self, tablet_id: str) -> None:
        if self.on_report is not None:
            self.on_report(tablet_id)

    def _put(self, life: NodeLife, tablet_id: str, fresh: dict[int, Report], *, all_of_it: bool) -> None:
        """Replace a node's reports of a tablet: those of the given replicas, or `all_of_it`."""
        kept = [
            r
            for r in self._by_tablet.get(tablet_id, ())
            if r.node_id != life.node_id or not (all_of_it or r.replica_id in fresh)
        ]
        if fresh:
            life.tablets.add(tablet_id)
        elif all_of_it:
            life.tablets.discard(tablet_id)
        if found := sorted((*kept, *fresh.values()), key=lambda r: (r.node_id, r.replica_id)):
            self._by_tablet[tablet_id] = tuple(found)
        else:
            self._by_tablet.pop(tablet_id, None)

    def _forget_reports(self, life: NodeLife) -> None:
        for tablet_id in sorted(life.tablets):
            self._put(life, tablet_id, {}, all_of_it=True)
            self._changed(tablet_id)
        life.full = False

    # --- questions ---

    def age_ms(self, node_id: str, now_ms: int) -> int:
        """How long ago the node was heard. At most the time since this master took its role, because before
        that it may not have listened.
        """
        life = self.nodes.get(node_id)
        heard = life.heard_ms if life is not None else 0
        return max(0, now_ms - max(heard, self.began_ms))

    def ever_heard(self, node_id: str) -> bool:
        """Whether the node was heard since this master began."""
        life = self.nodes.get(node_id)
        return life is not None and life.heard

    def wall_agreed(self, node_id: str, base_us: int, now_ms: int, alive_ms: int) -> int | None:
        """The time that most wall clocks agree on, minus this master's monotonic clock.

        Counts the nodes and masters heard within `alive_ms`, and this master (`node_id`, its own clock at
        `base_us`). None: they disagree, too few were heard, or this master has not listened long enough to
        hear all.
        """
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
        """The newest reports of a tablet's replicas, by node and replica_id. Leaves out replicas that a
        recovery gave up.
        """
        found, lowest = self.all_reports_of(tablet_id), self._incarnation_of(tablet_id)
        return [r for r in found if not is_given_up(r.status, lowest)] if lowest else found

    def all_reports_of(self, tablet_id: str) -> list[Report]:
        """As `reports_of`, but with the replicas that a recovery gave up."""
        return list(self._by_tablet.get(tablet_id, ()))

    def disk_free(self, node_id: str) -> int | None:
        """The free bytes on the node's disk; None if the node did not report them."""
        life = self.nodes.get(node_id)
        if life is None or not (life.disk_free_bytes or life.disk_used_bytes):
            return None
        return life.disk_free_bytes

    def disk_low(self, node_id: str) -> bool:
        """Whether the node reports that it refuses writes, because bytes or inodes run out."""
        life = self.nodes.get(node_id)
        return life is not None and life.disk_low

    def reported(self) -> Iterable[str]:
        """The ids of the tablets of which some node has reported a replica."""
        return self._by_tablet

    def report(self, tablet_id: str, node_id: str, replica_id: int) -> Report | None:
        """The newest report of one replica, or None."""
        for report in self._by_tablet.get(tablet_id, ()):
            if report.node_id == node_id and report.replica_id == replica_id:
                return report
        return None

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
        """The row of a node with its addresses.

        In an adopted catalog the addresses are removed unless the node registered with this master since it
        began.
        """
        if not self._adopted:
            return node
        life = self.nodes.get(node.node_id)
        told = life.registration if life is not None else None
        if told is None:
            return replace(node, address="", flight_address="")
        return replace(node, address=told.address, flight_address=told.flight_address)

    def peer_address(self, peer: Peer) -> str:
        """The address of a peer in its configuration, for a node whose row has none."""
        return "" if self._adopted else peer.address

    def addresses(self) -> tuple[list[master_pb2.NodeAddressPB], int]:
        """The address of each node that registered since this master leads, and a digest of this list."""
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
        """Whether each of these nodes has sent a full report."""
        return all((life := self.nodes.get(n)) is not None and life.full for n in node_ids)
