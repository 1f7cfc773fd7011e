"""Compares replicas made by heals and moves with other voters of their tablets. Has the masters record the
results.

A part of the executor, so each driver does it. The catalog says which replicas wait to be compared, so the
next driver continues where one stops. Both replicas compute a checksum of their rows at one moment, which the
leader has prepared. No row leaves a node.

Invariants: one tablet is compared at a time, and a rest of the same length follows. A difference is recorded
only if it is found three times. The record stays until the replica holds the same rows as all other voters.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from stele.driver.view import ClusterView, TabletView
from stele.model.amounts import plural
from stele.model.clock import from_physical_us
from stele.model.config import MemberType
from stele.model.copies import CopyRecord
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID, TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.errors import error_from_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

log = structlog.get_logger("stele.driver")

_PREPARE_TIMEOUT_S = 5.0
_SUM_TIMEOUT_S = 600.0
_TRIES = 3
_REST_S = 0.2
_AGAIN_S = 1.0
_LATER_S = (10.0, 600.0)
"""The pauses after a comparison without a result: the first and the longest. Each pause is twice the one
before.
"""
_DIFFERED_S = 600.0
"""The pause after a difference was recorded. A change of members ends it."""
_RECORDED_S = 60.0
"""The time within which a recorded comparison appears in the masters' view."""


@dataclass(frozen=True, slots=True)
class Voter:
    """A replica, and where its node listens."""

    replica_id: int
    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class CopyMade:
    """A replica to be compared. `others`: the other voters, the leader first. `differed`: whether its rows
    differed in the last comparison.
    """

    tablet_id: TabletId
    table_name: str
    new: Voter
    others: tuple[Voter, ...]
    cause: str = ""
    differed: bool = False
    config_index: int = -1


Sum = tuple[int, int]
"""(rows, checksum) of a replica at a moment."""


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """The result of a comparison.

    Attributes:
        made: The replica.
        other: The voter that it was compared with; of several, one that holds other rows if there is one.
        moment: The hybrid time of the sums; of a key space, the log index.
        sums: Of the replica, and of `other`.
        by_index: Whether `moment` is a log index.
        further: The sums of further voters that were asked.
        problem: Why there is no result; "" if there is one.
    """

    made: CopyMade
    other: Voter
    moment: int = 0
    sums: tuple[Sum, Sum] = ((0, 0), (0, 0))
    by_index: bool = False
    further: Mapping[Voter, Sum] = field(default_factory=dict)
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Whether the replica and all voters that were asked have the same sums."""
        return not self.problem and self.sums[0] == self.sums[1]

    @property
    def differs(self) -> bool:
        """Whether the replica and `other` answered with different sums."""
        return not self.problem and self.sums[0] != self.sums[1]

    @property
    def record(self) -> CopyRecord:
        """The result as the catalog keeps it."""
        (rows, total), (other_rows, other_total) = self.sums
        return CopyRecord(
            self.made.new.replica_id,
            self.made.cause,
            self.other.replica_id,
            snapshot=0 if self.by_index else self.moment,
            index=self.moment if self.by_index else 0,
            rows=rows,
            checksum=total,
            other_rows=other_rows,
            other_checksum=other_total,
        )

    @property
    def said(self) -> str:
        """The result as a sentence for people."""
        made, ((rows, total), (other_rows, other_total)) = self.made, self.sums
        where = f"tablet {made.tablet_id[:8]} of {made.table_name}, replica {made.new.replica_id} on node {made.new.node_id[:8]}"
        what = "key" if self.by_index else "row"
        if self.problem:
            return f"{where}: not compared: {self.problem}"
        if self.equal:
            return f"{where}: {plural(rows, what)} with checksum {total:016x}, as on node {self.other.node_id[:8]}"
        return (
            f"{where}: {plural(rows, what)} with checksum {total:016x}, but node {self.other.node_id[:8]} has {other_rows:,} with "
            f"{other_total:016x}{self._further()}; {self._advice()}"
        )

    def _further(self) -> str:
        told = []
        for voter, found in self.further.items():
            like = {self.sums[1]: self.other, self.sums[0]: self.made.new}.get(found)
            holds = (
                f"as node {like.node_id[:8]}" if like is not None else f"{found[0]:,} with {found[1]:016x}"
            )
            told.append(
                f", and node {voter.node_id[:8]} {'holds the same ' if like is not None else 'has '}{holds}"
            )
        return "".join(told)

    def _advice(self) -> str:
        made = self.made
        move = f"`stele tablet move {made.tablet_id[:8]} --from NODE --to NODE`"
        if self.further and set(self.further.values()) == {self.sums[1]}:
            return f"{move} replaces the replica on node {made.new.node_id[:8]}"
        if self.by_index:
            return f"once you know which one is right, {move} replaces the other one"
        return (
            f"`stele table verify {made.table_name}` compares all its replicas; {move} replaces a wrong one"
        )


def copies_to_compare(view: ClusterView) -> list[CopyMade]:
    """The replicas that wait to be compared, and after them those that differed. Leaves out those that cannot
    be compared now. Pure.
    """
    found = [
        made
        for tablet in view.tablets
        if tablet.copies and tablet.state == "RUNNING" and tablet.tablet_id != CATALOG_TABLET_ID
        for record in tablet.copies
        if not record.equal and (made := _made(tablet, record, view)) is not None
    ]
    return sorted(found, key=lambda made: made.differed)


def _made(tablet: TabletView, record: CopyRecord, view: ClusterView) -> CopyMade | None:
    voters = [
        Voter(peer.replica_id, peer.node_id, node.address)
        for peer in tablet.config.peers
        if peer.member_type is MemberType.VOTER and (node := view.node(peer.node_id)) is not None
    ]
    new = next((voter for voter in voters if voter.replica_id == record.replica_id), None)
    others = sorted(
        (voter for voter in voters if voter.replica_id != record.replica_id),
        key=lambda voter: voter.node_id != tablet.leader_node,
    )
    if new is None or not others or not tablet.leader_node:
        return None
    told = (record.cause, record.differs, tablet.config.opid_index)
    return CopyMade(tablet.tablet_id, tablet.table_name, new, tuple(others), *told)


@dataclass(slots=True)
class _Trial:
    """When a replica is to be compared again, and how many comparisons in a row failed."""

    due_s: float
    config_index: int
    failures: int = 0


class CopyChecks:
    """The comparisons of one driver.

    `claim` takes or renews its claim. `record` has the masters record a result. Both raise SteleError.
    `on_done` is called with each result. Of several attempts in a row without a result, it is called only
    with the first.
    """

    def __init__(
        self,
        pool: ChannelPool,
        claim: Callable[[], Awaitable[object]],
        record: Callable[[CopyCheck], Awaitable[None]],
        on_done: Callable[[CopyCheck], None] = lambda check: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._claim = claim
        self._record = record
        self._on_done = on_done
        self._now_s = now_s
        self._waiting: deque[CopyMade] = deque()
        self._trials: dict[tuple[str, int], _Trial] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether comparisons are under way."""
        return self._task is not None and not self._task.done()

    def look(self, wanted: list[CopyMade]) -> None:
        """Begin the comparisons in `copies_to_compare` that are due. Does nothing while comparisons are under
        way.
        """
        if self.busy:
            return
        open_now = {(made.tablet_id, made.new.replica_id) for made in wanted}
        self._trials = {key: trial for key, trial in self._trials.items() if key in open_now}
        self._waiting.extend(made for made in wanted if self._is_due(made))
        if self._waiting:
            self._task = asyncio.create_task(self._work())

    async def done(self) -> None:
        """Wait until no comparison is under way."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        """Stop. Replicas that wait to be compared are left to the next driver."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _is_due(self, made: CopyMade) -> bool:
        trial = self._trials.get((made.tablet_id, made.new.replica_id))
        return trial is None or self._now_s() >= trial.due_s or trial.config_index != made.config_index

    async def _work(self) -> None:
        while self._waiting:
            made, begun_s = self._waiting.popleft(), time.monotonic()
            try:
                await self._claim()
            except SteleError as exc:  # another driver is at work, which compares them
                log.info(
                    "copies are not compared now, because this driver does not hold the claim", error=str(exc)
                )
                self._waiting.clear()
                return
            check = await self._compare(made)
            (log.error if check.differs else log.info)("copy compared", result=check.said, cause=made.cause)
            recorded = not check.problem and await self._is_recorded(check)
            if self._learn(check, recorded):
                self._on_done(check)
            await asyncio.sleep(max(_REST_S, time.monotonic() - begun_s))

    async def _is_recorded(self, check: CopyCheck) -> bool:
        try:
            await self._record(check)
        except SteleError as exc:
            log.warning(
                "the comparison of a copy was not recorded; it is repeated later",
                result=check.said,
                error=str(exc),
            )
            return False
        return True

    def _learn(self, check: CopyCheck, recorded: bool) -> bool:
        """Note when this replica is due again. Returns whether to report the result."""
        made = check.made
        key = (made.tablet_id, made.new.replica_id)
        failures = 0 if recorded else (self._trials[key].failures if key in self._trials else 0) + 1
        pause_s = min(_LATER_S[0] * 2 ** (failures - 1), _LATER_S[1])
        if recorded:
            pause_s = _DIFFERED_S if check.differs else _RECORDED_S
        self._trials[key] = _Trial(self._now_s() + pause_s, made.config_index, failures)
        return not check.problem or failures == 1

    async def _compare(self, made: CopyMade) -> CopyCheck:
        check = CopyCheck(made, made.others[0], problem="it was not asked")
        others = made.others if made.differed else made.others[:1]
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_AGAIN_S)
            try:
                check = await self._once(made, others)
            except SteleError as exc:
                check = replace(check, problem=str(exc.args[0]))
            if check.equal:
                break
            if check.differs:
                others = made.others  # to say which one stands alone
        return check

    async def _once(self, made: CopyMade, others: tuple[Voter, ...]) -> CopyCheck:
        snapshot = int(from_physical_us(time.time_ns() // 1_000))
        prepared = await self._prepared(made, snapshot)
        request = tserver_pb2.ChecksumRequest(
            tablet_id=id_to_pb(made.tablet_id), snapshot=snapshot, index=prepared.index
        )
        request.tablet_incarnation = prepared.tablet_incarnation
        new = await self._ask(made.new, "Checksum", request, _SUM_TIMEOUT_S)
        found: dict[Voter, tuple[int, Sum, Sum]] = {}
        for voter in others:  # one after the other
            try:
                answer = await self._ask(voter, "Checksum", request, _SUM_TIMEOUT_S)
            except SteleError:
                if made.differed or not found:
                    raise
                continue  # it would only tell which one stands alone
            found[voter] = at_one_moment(new, answer, snapshot)
        odd = next((voter for voter, (_, mine, its) in found.items() if mine != its), others[0])
        moment, mine, its = found[odd]
        further = {voter: its for voter, (at, _, its) in found.items() if voter != odd and at == moment}
        return CopyCheck(made, odd, moment, (mine, its), bool(new.sums), further)

    async def _prepared(self, made: CopyMade, snapshot: int) -> tserver_pb2.PreparedTabletPB:
        """Ask voters to prepare the snapshot until one of them leads. Then all of them can answer for it."""
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


def at_one_moment(
    mine: tserver_pb2.ChecksumResponse, its: tserver_pb2.ChecksumResponse, snapshot: int
) -> tuple[int, Sum, Sum]:
    """(moment, sum, sum) of two answers. Answers of key spaces have the sums of several log indexes; the
    highest common index counts.

    Raises:
        Retryable: NOT_READY, the answers have no moment in common.
    """
    if not mine.sums and not its.sums:
        return snapshot, (mine.rows, mine.checksum), (its.rows, its.checksum)
    first, second = ({s.index: (s.rows, s.checksum) for s in answer.sums} for answer in (mine, its))
    common = first.keys() & second.keys()
    if not common:
        raise Retryable(
            "the two replicas have no checksum at a common log index yet; try again", code=Code.NOT_READY
        )
    index = max(common)
    return index, first[index], second[index]
