"""Compares a new replica with another voter of its tablet, once the change that made it has ended.

Started by `stele driver run` and by the operator; reads only. Both sum up their rows at one moment, which the leader has prepared. No row
leaves a node. Invariants: One tablet at a time, and a rest as long as it took. A difference counts only if it is found three times.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from stele.driver.steps import EndIntent, Step
from stele.driver.view import ClusterView
from stele.model.clock import from_physical_us
from stele.model.config import MemberType
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.errors import error_from_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

log = structlog.get_logger("stele.driver")

WAITING_MAX = 20_000
_PREPARE_TIMEOUT_S = 5.0
_SUM_TIMEOUT_S = 600.0
_TRIES = 3
_REST_S = 0.2
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Voter:
    """A replica, and where its node listens."""

    replica_id: int
    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class CopyMade:
    """A replica that became a voter. `others`: the other voters, the leader first."""

    tablet_id: str
    table_name: str
    new: Voter
    others: tuple[Voter, ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """What a comparison found. `snapshot`: its moment, a hybrid time. `sums`: (rows, checksum) of the new replica and of the other.
    `problem`: why nobody knows."""

    made: CopyMade
    other: Voter
    snapshot: int = 0
    sums: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Whether both answered, and alike."""
        return not self.problem and self.sums[0] == self.sums[1]

    @property
    def differs(self) -> bool:
        """Whether both answered, and not alike."""
        return not self.problem and self.sums[0] != self.sums[1]

    @property
    def said(self) -> str:
        """The result as a sentence for people."""
        made, ((rows, total), (other_rows, other_total)) = self.made, self.sums
        where = f"tablet {made.tablet_id[:8]} of {made.table_name}, replica {made.new.replica_id} on node {made.new.node_id[:8]}"
        if self.problem:
            return f"{where}: not compared: {self.problem}"
        if self.equal:
            return f"{where}: {rows:,} rows with checksum {total:016x}, as on node {self.other.node_id[:8]}"
        return (
            f"{where}: {rows:,} rows with checksum {total:016x}, but node {self.other.node_id[:8]} has {other_rows:,} with "
            f"{other_total:016x}; `stele table verify {made.table_name}` compares all its replicas"
        )


def copies_made(steps: Iterable[Step], view: ClusterView) -> list[CopyMade]:
    """The replicas of tables that became voters, by the steps that a driver has carried out on this view."""
    found = []
    for step in steps:
        tablet = view.tablet(step.tablet_id) if isinstance(step, EndIntent) else None
        if tablet is None or not isinstance(step, EndIntent) or tablet.tablet_id == CATALOG_TABLET_ID:
            continue
        voters = [
            Voter(peer.replica_id, peer.node_id, node.address)
            for peer in tablet.config.peers
            if peer.member_type is MemberType.VOTER and (node := view.node(peer.node_id)) is not None
        ]
        new = [voter for voter in voters if voter.replica_id == step.replica_id]
        others = sorted(
            (voter for voter in voters if voter.replica_id != step.replica_id),
            key=lambda voter: voter.node_id != tablet.leader_node,
        )
        if new and others:
            found.append(CopyMade(tablet.tablet_id, tablet.table_name, new[0], tuple(others), step.cause))
    return found


class CopyChecks:
    """The comparisons of one cluster. `on_done` is called with each result."""

    def __init__(self, pool: ChannelPool, on_done: Callable[[CopyCheck], None] = lambda check: None) -> None:
        self._pool = pool
        self._on_done = on_done
        self._waiting: deque[CopyMade] = deque(maxlen=WAITING_MAX)
        self._task: asyncio.Task[None] | None = None

    def add(self, made: Sequence[CopyMade]) -> None:
        """Compare these, after those that wait."""
        self._waiting.extend(made)
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._work())

    async def done(self) -> None:
        """Wait until none waits."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        """Stop. What waits is not compared."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while self._waiting:
            made, begun_s = self._waiting.popleft(), time.monotonic()
            check = await self._compare(made)
            (log.error if check.differs else log.info)("copy compared", result=check.said, cause=made.cause)
            self._on_done(check)
            await asyncio.sleep(max(_REST_S, time.monotonic() - begun_s))

    async def _compare(self, made: CopyMade) -> CopyCheck:
        check = CopyCheck(made, made.others[0], problem="it was not asked")
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_AGAIN_S)
            try:
                check = await self._once(made)
            except SteleError as exc:
                check = replace(check, problem=str(exc.args[0]))
            if check.equal:
                break
        return check

    async def _once(self, made: CopyMade) -> CopyCheck:
        snapshot = int(from_physical_us(time.time_ns() // 1_000))
        prepared = await self._prepared(made, snapshot)
        request = tserver_pb2.ChecksumRequest(
            tablet_id=id_to_pb(made.tablet_id), snapshot=snapshot, index=prepared.index
        )
        request.tablet_incarnation = prepared.tablet_incarnation
        sums = []
        for voter in (made.new, made.others[0]):  # one after the other
            answer = await self._ask(voter, "Checksum", request, _SUM_TIMEOUT_S)
            sums.append((int(answer.rows), int(answer.checksum)))
        return CopyCheck(made, made.others[0], snapshot, (sums[0], sums[1]))

    async def _prepared(self, made: CopyMade, snapshot: int) -> tserver_pb2.PreparedTabletPB:
        """Ask the voters until one leads: then all of them can answer for the snapshot."""
        request = tserver_pb2.PrepareSnapshotRequest(
            snapshot=snapshot,
            tablet_ids=[id_to_pb(made.tablet_id)],
            deadline_ms=int(_PREPARE_TIMEOUT_S * 1_000),
        )
        why: SteleError = Retryable("no replica answered", code=Code.UNAVAILABLE)
        for voter in (*made.others, made.new):
            with contextlib.suppress(SteleError):
                answer = await self._ask(voter, "PrepareSnapshot", request, _PREPARE_TIMEOUT_S)
                prepared: tserver_pb2.PreparedTabletPB = answer.tablets[0]
                if prepared.index:
                    return prepared
                why = error_from_pb(prepared.error)
        raise why

    async def _ask(self, voter: Voter, call: str, request: Any, timeout_s: float) -> Any:
        return await self._pool.unary(
            voter.address, TabletServerServiceStub, call, request, timeout_s=timeout_s, to_node=voter.node_id
        )
