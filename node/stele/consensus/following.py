"""Asks the leader up to which index a follower must have applied before it serves a read.

One part of a StartedReplica. A question goes to the leader's node together with those of other tablets that
are read in the same turn of the loop. A tablet that nobody reads at a follower costs nothing. An answer is a
log index, which serves later reads, too.

Invariants:
- The answer covers every write that was acknowledged before `asked`. The leader reads its commit index after
  the question came. A majority still follows it in its term then. The follower that asks counts towards that
  majority.
- No read is served before this replica has applied that index. An index is valid in one incarnation of the
  tablet only.
- Ages are measured by a clock that never steps, and that continues while the process or the machine stands
  still. No other node's clock counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from stele.consensus.applier import Applier
from stele.consensus.ports import Host
from stele.consensus.state import Standing
from stele.model.ids import NodeId, ReplicaId
from stele.raft.core import RaftCore

PATIENCE_MS = 300
"""How long a follower waits for its leader. After that its reader asks another replica."""


class _Known(NamedTuple):
    """An answer of the leader: all writes acknowledged before `asked_us` have an index of at most `upto`."""

    asked_us: int
    incarnation: int
    upto: int


class _Asking(NamedTuple):
    """A question under way."""

    asked_us: int
    incarnation: int
    answer: asyncio.Future[int]


class Following:
    """What a replica knows about the age of its rows. `node_of(replica_id)`: the node of a replica of the
    group.
    """

    def __init__(
        self,
        standing: Standing,
        host: Host,
        core: RaftCore,
        node_of: Callable[[ReplicaId], NodeId | None],
        applier: Applier,
    ) -> None:
        self.standing = standing
        self._host = host
        self._core = core
        self._node_of = node_of
        self._applier = applier
        self._known: _Known | None = None
        self._asking: _Asking | None = None

    def leader_to_ask(self) -> tuple[NodeId, ReplicaId, int] | None:
        """(node, leader, term) of the leader that this voter follows. None: it follows no leader."""
        leader, term = self._core.leader, self._core.term
        if leader is None or not self.standing.running or not self._core.vouches(leader, term):
            return None
        node_id = self._node_of(leader)
        return None if node_id is None else (node_id, leader, term)

    async def fresh(self, since_us: int, *, at_once: bool) -> int:
        """Wait until this replica has applied every write acknowledged before `since_us`, by the node's
        steady clock.

        Returns the latest time, in microseconds, for which that holds. `at_once`: wait for every write
        acknowledged before this call.

        Raises:
            Retryable: SNAPSHOT_NOT_READY, the leader does not answer, or there is none. NOT_LEADER, this
                replica ends.
        """
        now_us = self._host.steady_us()
        known = self._known
        if at_once or known is None or known.asked_us < since_us or not self._counts(known.incarnation):
            known = await self._ask(now_us if at_once else since_us, now_us)
        elif self._asking is None and 2 * known.asked_us < since_us + now_us:
            self._begin(now_us)  # so that the next reads need not wait
        await self._applied(known.upto, known.incarnation)
        return known.asked_us

    async def holds(self, snapshot: int) -> None:
        """Return once everything at or below `snapshot` is applied here, and can never change. Raises as `fresh`."""
        incarnation = self.standing.superblock.tablet_incarnation
        await self._applied(await self._host.ask_leader(self, snapshot), incarnation)

    async def _applied(self, index: int, incarnation: int) -> None:
        await self._applier.wait(index)
        if not self.standing.running or not self._counts(incarnation):
            raise self.standing.refusal()

    def _counts(self, incarnation: int) -> bool:
        return incarnation == self.standing.superblock.tablet_incarnation

    async def _ask(self, since_us: int, now_us: int) -> _Known:
        """Return the leader's answer. Wait for the question under way if it was asked at `since_us` or later,
        else ask anew.
        """
        asking = self._asking
        if asking is None or asking.asked_us < since_us or not self._counts(asking.incarnation):
            asking = self._begin(now_us)
        return _Known(asking.asked_us, asking.incarnation, await asyncio.shield(asking.answer))

    def _begin(self, now_us: int) -> _Asking:
        answer = self._host.ask_leader(self, 0)
        self._asking = asking = _Asking(now_us, self.standing.superblock.tablet_incarnation, answer)
        answer.add_done_callback(lambda _: self._answered(asking))
        return asking

    def _answered(self, asking: _Asking) -> None:
        if self._asking is asking:
            self._asking = None
        answer = asking.answer
        if answer.cancelled() or answer.exception() is not None:
            return
        known = self._known
        if known is None or asking.asked_us > known.asked_us:
            self._known = _Known(asking.asked_us, asking.incarnation, answer.result())
