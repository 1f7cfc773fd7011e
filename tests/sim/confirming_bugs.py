"""Faults of how reads are confirmed by questions to nodes, for `tests/sim/bugs.py`. Each docstring says which rule it breaks.

One rule has two guards: a term has one leader, so an answer that compares either the term or the leader is right. Both are
missing in `follows_anybody`. Likewise reads end with the leadership, and a round asks whether its replica still leads.
"""

from __future__ import annotations

from collections.abc import Collection

from stele.consensus.reads import Reads
from stele.model.errors import SteleError
from stele.model.ids import NodeId, ReplicaId
from stele.raft import RaftCore
from stele.raft.effects import Role
from stele.rpc.proto.consensus_pb2 import ConfirmPB
from stele.tserver.confirming import Confirming

_take_answer, _refuse_all = Confirming._take_answer, Reads.refuse_all


def anybody(confirming: Confirming, *asked: object) -> bool:
    """Confirms every leader that is asked about."""
    return True


def follows_anybody(core: RaftCore, leader: ReplicaId, term: int) -> bool:
    """A follower confirms whoever asks: it compares neither the leader nor its term with its own."""
    return core.role is Role.FOLLOWER and not core.state.failed


def takes_any_answer(confirming: Confirming, node_id: NodeId, confirm: ConfirmPB) -> None:
    """An answer counts for the newest question to that node, whatever its number."""
    numbers = [n for n, question in confirming._questions.unanswered.items() if question.node_id == node_id]
    newest = max(numbers, default=confirm.number)
    _take_answer(confirming, node_id, ConfirmPB(number=newest, answers=True, refused=confirm.refused))


def keeps_rounds(reads: Reads, error: SteleError) -> None:
    """Reads that wait for answers of nodes wait on when the leadership ends."""
    kept, reads._confirming = reads._confirming, {}
    _refuse_all(reads, error)
    reads._confirming = kept


def counts_without_leading(core: RaftCore, term: int, followers: Collection[ReplicaId]) -> bool:
    """Answers count whether or not this replica still leads, in whatever term."""
    config = core.state.config
    confirmed = [p for p in config.voters if p.replica_id in (core.state.self_replica, *followers)]
    return len(confirmed) >= config.majority
