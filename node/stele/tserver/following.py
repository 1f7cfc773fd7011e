"""Reads at followers: sends one question to each leader's node for all tablets read here in the same turn,
and takes the answers.

Owned by the messenger. A follower asks up to which log index it must have applied
(stele.consensus.following). The leader's node answers at once where this follower and the leader are a
majority. Otherwise it answers once other voters have confirmed, or once the snapshot is ready. A question
that is not answered within PATIENCE_MS fails, and the reader asks another replica.

Invariants: an answer counts only for the question with its number, and for the node that was asked
(questions.py). However much other nodes ask, only a bounded number of answers is under way.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable

import structlog

from stele.consensus.following import PATIENCE_MS
from stele.consensus.ports import Follower
from stele.consensus.replica import Replica
from stele.model.bounds import INDEX_MAX
from stele.model.errors import Code, Retryable, SteleError, let_go
from stele.model.ids import NodeId, ReplicaId
from stele.rpc.convert import whole_records
from stele.rpc.logging import OncePer
from stele.rpc.proto import consensus_pb2
from stele.tserver.questions import TABLETS_MAX, Questions
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")

_ASK = struct.Struct(">16sQQQQQ")
"""The fields of one asked tablet: tablet, its incarnation, who leads, who asks, the term, the snapshot."""
_ANSWER = struct.Struct(">HQ")
_WORK_MAX = 4_096
"""The most tablets of one asking node whose answers are being worked out at the same time. A node that asks
about more gets no answer.
"""

Asked = tuple[Follower, int]
"""Who asks, for which snapshot."""
_Part = tuple[bytes, asyncio.Future[int]]


class LeaderQuestions:
    """The questions of one node's followers, and its leaders' answers to others.

    `send(node_id, follow)` sends to a node. `first` is a random number.
    """

    def __init__(
        self,
        replicas: Replicas,
        send: Callable[[NodeId, consensus_pb2.FollowPB], None],
        *,
        first: int,
        now_ms: int,
    ) -> None:
        self._replicas = replicas
        self._send = send
        self._turn: dict[Asked, asyncio.Future[int]] = {}
        self._questions = Questions(
            self._ask, first=first, patience_ms=PATIENCE_MS, greet_ms=PATIENCE_MS, now_ms=now_ms
        )
        self._work: Counter[NodeId] = Counter()  # answers that take time, by who asked
        self._tasks: set[asyncio.Task[None]] = set()
        self._once = OncePer()

    def ask_leader(self, follower: Follower, snapshot: int) -> asyncio.Future[int]:
        """As `Host.ask_leader`."""
        loop = asyncio.get_running_loop()
        if not self._turn:
            loop.call_soon(self._end_turn)
        future = self._turn.get((follower, snapshot))
        if future is None:
            self._turn[follower, snapshot] = future = loop.create_future()
        return future

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, {}
        wanted: dict[NodeId, list[_Part]] = {}
        for (follower, snapshot), future in turn.items():
            found = follower.leader_to_ask()
            if found is None:
                _fail(future, "it follows no leader now")
                continue
            node_id, leader, term = found
            standing = follower.standing
            block = standing.superblock
            ask = _ASK.pack(
                standing.raw_tablet_id, block.tablet_incarnation, leader, block.replica_id, term, snapshot
            )
            wanted.setdefault(node_id, []).append((ask, future))
        for node_id, parts in wanted.items():
            self._questions.ask(node_id, parts)

    def _ask(self, node_id: NodeId, number: int, parts: list[_Part]) -> None:
        asks = b"".join(ask for ask, _ in parts)
        self._send(node_id, consensus_pb2.FollowPB(number=number, asks=asks, wait_ms=PATIENCE_MS))

    def told(self, node_id: NodeId, follow: consensus_pb2.FollowPB) -> None:
        """Take what a node sent: a question, or answers."""
        if follow.answers:
            self._take_answers(node_id, follow)
        else:
            self._answer(node_id, follow)

    def _take_answers(self, node_id: NodeId, follow: consensus_pb2.FollowPB) -> None:
        parts = self._questions.asked(node_id, follow.number)
        if not parts:
            return
        for place, index in whole_records(_ANSWER, follow.answers):
            if place >= len(parts):
                continue
            _, future = parts[place]
            if future.done():
                continue
            if 0 < index <= INDEX_MAX:
                future.set_result(index)
            else:
                _fail(future, "its leader cannot answer now")
        if all(future.done() for _, future in parts):
            self._questions.answered(node_id, follow.number)

    def _answer(self, node_id: NodeId, follow: consensus_pb2.FollowPB) -> None:
        count = len(follow.asks) // _ASK.size
        if count > TABLETS_MAX or self._work[node_id] + count > _WORK_MAX:
            event = "dropped a node's questions for its reading followers: too many at once"
            self._once.tell(log.warning, event, node_id, "long", peer_node=node_id, tablets=count)
            return
        answers = []
        for at, (tablet, incarnation, leader, asker, term, snapshot) in enumerate(
            whole_records(_ASK, follow.asks)
        ):
            replica = self._replicas.route((tablet, leader))
            index: int | None = 0
            if replica is not None and _may_ask(replica, node_id, incarnation, asker):
                index = None if snapshot else replica.reads.index_for(ReplicaId(asker), term)
                if index is None:
                    wait_ms = max(1, min(follow.wait_ms, PATIENCE_MS))
                    self._answer_later(node_id, follow.number, at, replica, snapshot, wait_ms)
                    continue
            answers.append(_ANSWER.pack(at, index or 0))
        if answers:
            self._send(node_id, consensus_pb2.FollowPB(number=follow.number, answers=b"".join(answers)))

    def _answer_later(
        self, node_id: NodeId, number: int, at: int, replica: Replica, snapshot: int, wait_ms: int
    ) -> None:
        async def work() -> None:
            incarnation = replica.superblock.tablet_incarnation
            try:
                index = await replica.reads.index_by_others(snapshot, wait_ms)
                if replica.superblock.tablet_incarnation != incarnation:
                    index = 0
            except SteleError as exc:
                let_go(exc)
                index = 0
            self._send(node_id, consensus_pb2.FollowPB(number=number, answers=_ANSWER.pack(at, index)))

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._work[node_id] -= 1
            if not self._work[node_id]:
                del self._work[node_id]

        task = asyncio.get_running_loop().create_task(work())
        self._work[node_id] += 1
        self._tasks.add(task)
        task.add_done_callback(ended)

    def tick(self, now_ms: int) -> None:
        """Fail the questions that were not answered in time."""
        for _, future in self._questions.tick(now_ms):
            _fail(future, f"its leader did not answer within {PATIENCE_MS} ms")

    def lost(self, node_id: NodeId) -> None:
        """Fail the questions to a node whose connection was reset."""
        for _, future in self._questions.give_up(node_id):
            _fail(future, "the connection to its leader broke")

    async def close(self) -> None:
        """Stop answering."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _may_ask(replica: Replica, node_id: NodeId, incarnation: int, asker: int) -> bool:
    return (
        replica.running
        and replica.superblock.tablet_incarnation == incarnation
        and replica.has_on(node_id, ReplicaId(asker))
    )


def _fail(future: asyncio.Future[int], why: str) -> None:
    if not future.done():
        future.set_exception(
            Retryable(
                f"this replica cannot tell how old its rows are: {why}; ask another",
                code=Code.SNAPSHOT_NOT_READY,
            )
        )
        future.exception()  # its reader may have gone
