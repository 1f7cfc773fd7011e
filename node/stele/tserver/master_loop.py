"""Heartbeats to the master at one address. Made and ended by the heartbeater, which knows the other
addresses.

Owns the changes that this master has not acknowledged yet, and whether a full report is due.

Invariant: a change is forgotten only after a leader has acknowledged a report that was made after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import structlog

from stele.model.errors import Code, SteleError
from stele.model.ids import StreamKey
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.tserver.admission import Admission
from stele.tserver.heartbeat_source import HeartbeatSource
from stele.tserver.wall_clock import WallClock

log = structlog.get_logger("stele.tserver.heartbeat")

REST_MAX_S = 15.0
"""Longest pause between retries of a master that does not answer. At worst, a replaced master is found this
late.
"""
_COALESCE_S = 0.05
_TIMEOUT_S = 2.0


class OtherLoops(Protocol):
    """What a loop asks from all loops together, and reports to them. Implemented by Heartbeater."""

    @property
    def addresses_digest(self) -> int:
        """The digest of the nodes' addresses that a leader gave last."""

    def speaks(self, loop: MasterLoop) -> bool:
        """Whether this loop is the one that sends to its master."""

    def may_rest(self, loop: MasterLoop) -> bool:
        """Whether this loop may send nothing to its address for a while."""

    def leader_answered(self, response: pb.TSHeartbeatResponse) -> None:
        """Take over the answer of a master that leads."""

    def told_masters(self, by: str, response: pb.TSHeartbeatResponse) -> None:
        """Take over the answer of the master at `by`, which does not lead."""


class MasterLoop:
    """Sends heartbeats to one address. `master`: the node id that answered there last; "" before the first
    answer. `answers`: whether the last call was answered.
    """

    def __init__(
        self,
        address: str,
        others: OtherLoops,
        source: HeartbeatSource,
        admission: Admission,
        pool: ChannelPool,
        wall_clock: WallClock,
        interval_s: float,
    ) -> None:
        self.address = address
        self.master = ""
        self.answers = False
        self._others = others
        self._source = source
        self._admission = admission
        self._pool = pool
        self._wall_clock = wall_clock
        self._interval_s = interval_s
        self._asked = False
        self._rests = False
        self._failures = 0
        self._asked_at = 0.0
        self._dirty: dict[StreamKey, int] = {}
        self._count = 0
        self._full_due = True
        self._register_due = True
        self._leader_term = 0  # the term of the master at the other end; 0: it does not lead
        self._wake = asyncio.Event()
        self._may_log = True
        self._task = asyncio.get_running_loop().create_task(self._run())

    def changed(self, key: StreamKey, *, soon: bool = True) -> None:
        """Put a replica into the next report. `soon`: do not wait for the next heartbeat's time."""
        self._count += 1
        self._dirty[key] = self._count
        if soon:
            self.soon()

    def soon(self) -> None:
        """Send the next heartbeat soon, before its time, unless this address rests."""
        if not self._rests:
            self._wake.set()

    def end(self) -> None:
        """Stop, without waiting for the end."""
        self._task.cancel()

    async def close(self) -> None:
        """Stop."""
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
                await self._failed(exc)
            except Exception:
                log.exception("a heartbeat failed; the next one is sent as usual", master=self.address)
            rest = self._interval_s - (asyncio.get_running_loop().time() - started)
            try:
                async with asyncio.timeout(max(rest, _COALESCE_S)):
                    await self._wake.wait()
                await asyncio.sleep(_COALESCE_S)
            except TimeoutError:
                continue

    async def _failed(self, error: SteleError) -> None:
        if error.code in (Code.VOLUME_OLD, Code.STALE_INCARNATION):
            self._admission.refused(self.address, error)
        elif error.code is Code.NOT_FOUND:
            await self._register()
        self.answers = False
        self._failures += 1
        self._asked = True
        self._admission.no_answer(self.address)
        self._bound()
        if self._may_log and error.code is Code.UNSUPPORTED_VERSION:
            log.error("a master refuses this node", master=self.address, error=str(error))
        elif self._may_log:
            log.info("master not reached", master=self.address, error=str(error))
        self._may_log = False

    async def _register(self) -> None:
        """Register this node with a master that does not know it.

        That happens if the node formatted its volume without any master given. Heartbeats do not register a
        node.
        """
        with contextlib.suppress(SteleError):  # the next heartbeat is answered NOT_FOUND again
            await self._pool.unary(
                self.address,
                MasterServiceStub,
                "RegisterNode",
                self._source.register_request(),
                timeout_s=_TIMEOUT_S,
            )

    def _bound(self) -> None:
        """Send a full report later, if more changes wait for this master than a full report contains.

        Otherwise changes would pile up for a master that may never answer again.
        """
        if self._full_due or len(self._dirty) > self._source.replica_count:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Send a full report, once this master has said that it leads."""
        self._leader_term = 0
        self._full_due = True
        self._dirty.clear()

    def _may_rest(self, now: float) -> bool:
        if not self._asked or not self._others.may_rest(self):
            return False
        rest_s = REST_MAX_S if self.answers else self._interval_s * 2 ** min(self._failures, 30)
        return now - self._asked_at < min(rest_s, REST_MAX_S)

    async def _beat(self) -> None:
        source = self._source
        told = self._count
        full = self._full_due
        speaks = self._others.speaks(self)
        has_report = speaks and self._leader_term > 0 and source.may_report
        tablets: list[common_pb2.ReplicaStatusPB] = []
        removed: list[StreamKey] = []
        if has_report and full:
            tablets = source.full_report()
        elif has_report:
            tablets, removed = source.report(list(self._dirty))
        request = source.request(tablets, removed, self.master, self._others.addresses_digest)
        request.incremental = not full
        request.has_report = has_report and (full or bool(tablets) or bool(removed))
        if self._register_due:
            request.registration.CopyFrom(source.registration())
        sent_us = self._wall_clock.monotonic_us()
        response = await self._pool.unary(
            self.address, MasterServiceStub, "TSHeartbeat", request, timeout_s=_TIMEOUT_S
        )
        self._wall_clock.answered(response, sent_us)
        self._answered(response, told, full and has_report, speaks)

    def _answered(self, response: pb.TSHeartbeatResponse, told: int, full: bool, spoke: bool) -> None:
        self.master, self.answers, self._failures = id_from_pb(response.node_id), True, 0
        self._asked = True
        self._admission.answered(self.address, response)
        self._register_due = response.needs_reregister
        if not response.is_leader:
            self._others.told_masters(self.address, response)
            self._begin_anew()
            return
        self._others.leader_answered(response)
        if not spoke:
            self._leader_term = response.term
            self._full_due = True
            self._dirty.clear()
            return
        self._dirty = {key: n for key, n in self._dirty.items() if n > told}
        new_leader = response.term != self._leader_term
        self._leader_term = response.term
        self._full_due = new_leader or response.needs_full_report or (self._full_due and not full)
        if self._register_due or (self._full_due and self._source.opened):
            self._wake.set()
