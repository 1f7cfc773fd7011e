"""Tells every master that this node lives, and what changed on it; learns who the masters are.

One loop per address: of each master in the leader's list or another master's, and each given at start. A list of one that does
not lead may be old, but may name a leader who is at no other address known here. Names are given and addresses learned, so that
two may lead to one master, which its node id tells: then one of them speaks, and the others rest, looked at now and
then, since a name may lead elsewhere later. A given address where nobody answers is asked less and less often, as the name
of a master that was retired stays in --masters for ever; but each time while fewer than a majority of the masters answer.

Reports are incremental and edge triggered: a change is told to a master until that master, as leader, has acknowledged it;
a full report goes to a newly elected leader, after this node's own start, when asked, and where a master gave no answer for so
long that it would say less than all that changed.

Invariant: a change is never forgotten before a leader has acknowledged a report that was made after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from stele.model.errors import Code, SteleError
from stele.model.ids import StreamKey
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import PeerBook
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.tserver.facts import NodeFacts
from stele.tserver.fences import Fences
from stele.tserver.monitor import NodeMonitor
from stele.tserver.replicas import Replicas
from stele.tserver.reports import all_keys, all_reports, report_one
from stele.tserver.vetting import Vouchers
from stele.tserver.wall_clock import WallClock
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver.heartbeat")

_COALESCE_S = 0.05
_TIMEOUT_S = 2.0
_GRACE_S = 1.0
DOUBT_S = 3.0
"""How long a start that some master refuses waits for the others' word, unless it was vetted before."""
REST_MAX_S = 15.0
"""How long an address is left alone at most: a new master under an old name is told so late, if the leader names it not."""


class ReportingNode(Protocol):
    """The node, as its heartbeats see it: what they tell of it, and whom they tell what they hear."""

    facts: NodeFacts
    replicas: Replicas
    log: Log
    monitor: NodeMonitor
    wall_clock: WallClock
    pool: ChannelPool
    book: PeerBook
    fences: Fences

    def remember_masters(self, masters: tuple[str, ...]) -> None:
        """Keep the newest list of masters beside --masters."""

    async def refused(self, error: SteleError, *, condemned: bool) -> None:
        """Masters know a later start or state of this node: it may not go on. `condemned`: nor any later start of this volume."""


class Heartbeater:
    """Owned by the node."""

    def __init__(self, node: ReportingNode, interval_s: float, addresses: tuple[str, ...]) -> None:
        self._node = node
        self._interval_s = interval_s
        self._given = addresses
        self._known: tuple[str, ...] = ()
        self._in_force: frozenset[str] = frozenset()
        self._told: dict[str, tuple[str, ...]] = {}
        self._loops: dict[str, _MasterLoop] = {}
        self._sequence = itertools.count(1)
        self._start = secrets.randbits(64)
        self._addresses_digest = 0
        self.node_state = pb.NODE_STATE_UNSPECIFIED
        self.leader_heard = False
        self.log_found = 0
        self.vetted = False
        record, options = node.facts.record, node.facts.options
        given = max(len(addresses), len(record.masters), len(record.first_masters))
        self._vouchers = Vouchers(options.node_id, options.role, given)
        self._heard = asyncio.Event()
        self._remembered = False
        self._ending: asyncio.Task[None] | None = None
        self._doubting: asyncio.TimerHandle | None = None

    def start(self, known: tuple[str, ...]) -> None:
        """Begin; `known` are the masters that were last told of."""
        self._known = known
        self._match_loops()

    @property
    def addresses(self) -> tuple[str, ...]:
        """All masters to tell: those of a leader's last list, those given at start, and those that other masters name."""
        return tuple(dict.fromkeys((*self._known, *self._given, *self._named)))

    @property
    def _named(self) -> tuple[str, ...]:
        """Those that any master names."""
        return (*self._known, *itertools.chain.from_iterable(self._told.values()))

    async def may_open(self) -> None:
        """Wait until so many masters did not refuse this start that its replicas may open."""
        await self._until(lambda: self._vouchers.may_open)
        await self._all_asked()

    async def vouched(self) -> None:
        """Wait until masters may count on what this start tells."""
        await self._until(lambda: self._vouchers.vetted)
        await self._all_asked()

    async def undoubted(self) -> None:
        """Wait until no master refuses this start any more, or so many vouch for it that it does not matter."""
        await self._until(lambda: not self.doubted)

    async def _all_asked(self) -> None:
        """A refusal that is on its way wins: every master has answered or failed once, or had its time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._until(lambda: all(loop.asked for loop in self._loops.values()))

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._heard.clear()
            await self._heard.wait()

    def asked(self, address: str, response: pb.TSHeartbeatResponse | None) -> None:
        """The master at `address` has heard this start and did not refuse it; None: it did not answer."""
        if response is not None:
            self._vouchers.answered(address, response)
        self._heard.set()

    @property
    def doubted(self) -> bool:
        """Whether some master refuses this start, and no majority has vouched for it."""
        return self._vouchers.doubt is not None and not self._vouchers.vetted

    def refused(self, address: str, error: SteleError) -> None:
        """The master at `address` refuses this start. A majority ends it; of a start that nobody vouched for, any that still does
        after a while."""
        self._vouchers.refused(address, error)
        verdict = self._vouchers.verdict
        if verdict is not None:
            self._end(verdict, condemned=verdict.code is Code.VOLUME_OLD)
        elif self.doubted and self._doubting is None:
            self._doubting = asyncio.get_running_loop().call_later(DOUBT_S, self._still_doubted)

    def _still_doubted(self) -> None:
        self._doubting = None
        doubt = self._vouchers.doubt
        if doubt is not None and self.doubted:
            self._end(doubt, condemned=False)

    def _end(self, why: SteleError, *, condemned: bool) -> None:
        if self._ending is None:
            ending = self._node.refused(why, condemned=condemned)
            self._ending = asyncio.get_running_loop().create_task(ending)

    def speaks(self, loop: _MasterLoop) -> bool:
        """Whether this loop is the one that tells its master; of several the first in the order of `addresses` is."""
        loops = (other for a in self.addresses if (other := self._loops.get(a)) is not None)
        return next((o for o in loops if o.answers and o.master == loop.master), loop) is loop

    def may_rest(self, loop: _MasterLoop) -> bool:
        """Whether it is no harm if this loop's address is not asked for a while."""
        if loop.answers:
            return not self.speaks(loop)
        answering = {other.master for other in self._loops.values() if other.answers} & self._in_force
        return loop.address not in self._named and 2 * len(answering) > len(self._in_force)

    def changed(self, key: StreamKey) -> None:
        """A replica's report is due: soon, and again until a leader has it."""
        for loop in self._loops.values():
            loop.changed(key)

    async def close(self) -> None:
        """Stop."""
        if self._doubting is not None:
            self._doubting.cancel()
        loops, self._loops = list(self._loops.values()), {}
        await asyncio.gather(*(loop.close() for loop in loops))
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)

    def learned_masters(self, infos: Iterable[pb.MasterInfoPB]) -> None:
        """The leader's list of masters."""
        infos = list(infos)
        masters = tuple(m.address for m in infos if m.address)
        self._in_force = frozenset(id_from_pb(m.node_id) for m in infos)
        if masters and masters != self._known:
            log.info("masters", addresses=masters)
            self._known = masters
            self._told.clear()
            self._match_loops()
            self._remembered = False
        if masters and not self._remembered:
            self._remembered = True
            self._node.remember_masters(masters)

    def told_masters(self, by: str, infos: Iterable[pb.MasterInfoPB]) -> None:
        """The list of the master at `by`, which does not lead: nobody is forgotten for it."""
        masters = tuple(m.address for m in infos if m.address)
        if masters and masters != self._told.get(by):
            self._told[by] = masters
            self._match_loops()

    def learned_addresses(self, response: pb.TSHeartbeatResponse) -> None:
        """Where the nodes are. Configurations hold the addresses of their time: with all peers at others now, as after
        a power failure of a whole cluster, nobody would find anybody."""
        for one in response.addresses:
            node_id = id_from_pb(one.node_id)
            if node_id != self._node.facts.identity.node_id:
                self._node.book.told(node_id, one.incarnation, one.address)
        self._addresses_digest = response.addresses_digest

    def request(
        self, tablets: list[common_pb2.ReplicaStatusPB], removed: list[StreamKey], master: str
    ) -> pb.TSHeartbeatRequest:
        """A heartbeat with what every one has, for the master that answered last; "" before."""
        node = self._node
        identity = node.facts.identity
        free, used = node.monitor.disk_bytes
        request = pb.TSHeartbeatRequest(
            node_id=id_to_pb(identity.node_id),
            incarnation=identity.incarnation,
            sequence=next(self._sequence),
            tablets=tablets,
            removed_tablets=[id_to_pb(key.tablet_id) for key in removed],
            disk_free_bytes=free,
            disk_used_bytes=used,
            disk_low=node.log.low_space,
            addresses_digest=self._addresses_digest,
            start=self._start,
            log_found=self.log_found,
            log_synced=node.log.synced_place,
            vetted=self.vetted,
            taken_back=node.facts.record.accepting,
        )
        node.wall_clock.tell(request, master)
        return request

    def _match_loops(self) -> None:
        for address in self.addresses:
            if address not in self._loops:
                self._loops[address] = _MasterLoop(self, self._node, address, self._interval_s)
        while gone := [a for a in self._loops if a not in self.addresses]:
            for address in gone:
                self._told.pop(address, None)
                self._loops.pop(address).end()


class _MasterLoop:
    """Heartbeats to one address. `master`: which one answered there last; `answers`: it did when it was asked last."""

    def __init__(self, owner: Heartbeater, node: ReportingNode, address: str, interval_s: float) -> None:
        self._owner = owner
        self._node = node
        self.address = address
        self.master = ""
        self.answers = False
        self._interval_s = interval_s
        self._rests = False
        self._failures = 0
        self._asked_at = 0.0
        self._dirty: dict[StreamKey, int] = {}
        self._count = 0
        self._full_due = True
        self._register_due = True
        self._leader_term = 0  # of the master at the other end; 0: it does not lead
        self._wake = asyncio.Event()
        self._may_log = True
        self.asked = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def changed(self, key: StreamKey) -> None:
        self._count += 1
        self._dirty[key] = self._count
        if not self._rests:
            self._wake.set()

    def end(self) -> None:
        self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            started = asyncio.get_running_loop().time()
            self._wake.clear()
            try:
                self._rests = self._may_rest(started)
                if not self._rests:
                    self._asked_at = started
                    await self._beat()
                    self._may_log = True
            except SteleError as exc:
                if exc.code in (Code.VOLUME_OLD, Code.STALE_INCARNATION):
                    self._owner.refused(self.address, exc)
                elif exc.code is Code.NOT_FOUND:
                    await self._register()
                self.answers = False
                self._failures += 1
                self._tell(None)
                self._bound()
                if self._may_log:
                    log.info("master not reached", master=self.address, error=str(exc))
                self._may_log = False
            except Exception:
                log.exception("a heartbeat failed; they go on", master=self.address)
            rest = self._interval_s - (asyncio.get_running_loop().time() - started)
            try:
                async with asyncio.timeout(max(rest, _COALESCE_S)):
                    await self._wake.wait()
                await asyncio.sleep(_COALESCE_S)
            except TimeoutError:
                continue

    async def _register(self) -> None:
        """A node whose volume was formatted where no master was given is on no record: its heartbeats make none."""
        node_id, role = self._node.facts.identity.node_id, self._node.facts.options.role
        request = pb.RegisterNodeRequest(node_id=id_to_pb(node_id), role=role)
        with contextlib.suppress(SteleError):  # the next heartbeat says so again
            await self._node.pool.unary(
                self.address, MasterServiceStub, "RegisterNode", request, timeout_s=_TIMEOUT_S
            )

    def _bound(self) -> None:
        """Of one that does not answer no more is kept than a full report would say: it may never answer again."""
        if self._full_due or len(self._dirty) > len(all_keys(self._node.replicas)):
            self._begin_anew()

    def _begin_anew(self) -> None:
        """What there is to tell will be in a full report, once it has said that it leads."""
        self._leader_term = 0
        self._full_due = True
        self._dirty.clear()

    def _may_rest(self, now: float) -> bool:
        if not self.asked or not self._owner.may_rest(self):
            return False
        rest_s = REST_MAX_S if self.answers else self._interval_s * 2 ** min(self._failures, 30)
        return now - self._asked_at < min(rest_s, REST_MAX_S)

    async def _beat(self) -> None:
        node = self._node
        told = self._count
        full = self._full_due
        speaks = self._owner.speaks(self)
        # Replicas that a failed log stopped are not what is wrong: told as FAILED they would be replaced.
        has_report = speaks and node.replicas.opened and self._leader_term > 0 and node.log.failed is None
        tablets: list[common_pb2.ReplicaStatusPB] = []
        removed: list[StreamKey] = []
        if has_report and full:
            tablets = all_reports(node.replicas)
        elif has_report:
            for key in list(self._dirty):
                report = report_one(node.replicas, key)
                if report is not None:
                    tablets.append(report)
                else:
                    removed.append(key)
        request = self._owner.request(tablets, removed, self.master)
        request.incremental = not full
        request.has_report = has_report and (full or bool(tablets) or bool(removed))
        if self._register_due:
            request.registration.CopyFrom(node.facts.registration())
        sent_us = node.wall_clock.monotonic_us()
        response = await node.pool.unary(
            self.address, MasterServiceStub, "TSHeartbeat", request, timeout_s=_TIMEOUT_S
        )
        node.wall_clock.answered(response, sent_us)
        self._answered(response, told, full and has_report, speaks)

    def _tell(self, response: pb.TSHeartbeatResponse | None) -> None:
        self.asked = True
        self._owner.asked(self.address, response)

    def _answered(self, response: pb.TSHeartbeatResponse, told: int, full: bool, spoke: bool) -> None:
        owner = self._owner
        self.master, self.answers, self._failures = id_from_pb(response.node_id), True, 0
        self._tell(response)
        self._register_due = response.needs_reregister
        if not response.is_leader:
            owner.told_masters(self.address, response.masters)
            self._begin_anew()
            return
        owner.leader_heard = True
        owner.node_state = response.node_state
        self._node.fences.learned(response.term, response.driver_epoch)
        owner.learned_masters(response.masters)
        owner.learned_addresses(response)
        if not spoke:
            self._leader_term = response.term
            self._full_due = True
            self._dirty.clear()
            return
        self._dirty = {key: n for key, n in self._dirty.items() if n > told}
        new_leader = response.term != self._leader_term
        self._leader_term = response.term
        self._full_due = new_leader or response.needs_full_report or (self._full_due and not full)
        if self._register_due or (self._full_due and self._node.replicas.opened):
            self._wake.set()
