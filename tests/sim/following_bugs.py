"""Faults of reads at followers, for `tests/sim/bugs.py`. Each docstring says which rule it breaks."""

from __future__ import annotations

from stele.consensus.following import Following
from stele.model.ids import NodeId
from stele.rpc.proto.consensus_pb2 import FollowPB
from stele.tserver.following import LeaderQuestions

_take_answers = LeaderQuestions._take_answers


async def past_a_hole(following: Following, index: int, incarnation: int) -> None:
    """A follower serves what it has, and not all entries up to the index that its leader gave."""


def any_answer(questions: LeaderQuestions, node_id: NodeId, follow: FollowPB) -> None:
    """An answer counts for the newest question to that node, whatever its number."""
    numbers = [n for n, question in questions._questions.unanswered.items() if question.node_id == node_id]
    newest = max(numbers, default=follow.number)
    _take_answers(questions, node_id, FollowPB(number=newest, answers=follow.answers))
