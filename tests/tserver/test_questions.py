"""Questions to other nodes: an answer counts once, for the node that was asked, and no node takes another's room."""

from __future__ import annotations

import pytest

from stele.model.ids import NodeId
from stele.tserver.questions import TABLETS_MAX, Questions, Room, places_from_bytes, places_to_bytes

A, B = NodeId("a" * 32), NodeId("b" * 32)
FIRST = 1_000


class Asker:
    """Questions about numbers, and what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, int, list[int]]] = []
        self.questions = Questions[int](
            lambda *sent: self.sent.append(sent), first=FIRST, patience_ms=100, greet_ms=1_000, now_ms=0
        )

    def ask(self, node_id: NodeId, *parts: int) -> int:
        self.questions.ask(node_id, list(parts))
        return self.sent[-1][1]

    def greet(self, node_id: NodeId) -> int:
        """The number of the greeting; 0: none was sent."""
        before = len(self.sent)
        self.questions.greet(node_id)
        return self.sent[before][1] if self.sent[before:] else 0

    def answering(self, node_id: NodeId) -> bool:
        return node_id in self.questions.answering


@pytest.fixture
def asker() -> Asker:
    return Asker()


def test_an_answer_counts_once_and_for_the_node_that_was_asked(asker: Asker) -> None:
    one, two = asker.ask(A, 1, 2), asker.ask(B, 3)
    questions = asker.questions
    assert asker.sent == [(A, one, [1, 2]), (B, two, [3])]
    assert len({FIRST, one, two}) == 3 and min(one, two) > FIRST
    assert questions.answered(B, one) == questions.answered(A, two) == questions.answered(A, two + 1) == []
    assert questions.asked(A, one) == [1, 2] and questions.asked(B, one) == []
    assert questions.answered(A, one) == [1, 2]
    assert questions.answered(A, one) == questions.asked(A, one) == []
    assert questions.answered(B, two) == [3]


def test_many_tablets_are_asked_about_in_few_questions(asker: Asker) -> None:
    asker.ask(A, *range(2 * TABLETS_MAX + 1))
    assert [len(parts) for _, _, parts in asker.sent] == [TABLETS_MAX, TABLETS_MAX, 1]
    assert [p for _, number, _ in asker.sent for p in asker.questions.answered(A, number)] == list(
        range(2 * TABLETS_MAX + 1)
    )
    asker.questions.ask(A, [])
    assert len(asker.sent) == 3


def test_what_is_not_answered_in_time_is_given_back_and_answered_no_more(asker: Asker) -> None:
    early = asker.ask(A, 1)
    assert asker.questions.tick(60) == []
    late = asker.ask(A, 2)
    assert asker.questions.tick(100) == [1]
    assert asker.questions.answered(A, early) == []
    assert asker.questions.answered(A, late) == [2]
    assert asker.questions.tick(1_000) == []


def test_a_node_is_greeted_now_and_then_until_it_answers(asker: Asker) -> None:
    greeting = asker.greet(A)
    assert asker.sent == [(A, greeting, [])] and asker.greet(B)
    assert not asker.answering(A) and not asker.greet(A)
    asker.questions.tick(999)
    assert not asker.greet(A)
    asker.questions.tick(1_000)
    assert asker.greet(A)
    asker.questions.answered(A, greeting)  # late, and yet it answers
    assert asker.answering(A) and not asker.answering(B)


def test_a_late_answer_to_a_question_says_that_the_node_answers(asker: Asker) -> None:
    number = asker.ask(A, 1)
    asker.questions.tick(5_000)
    assert asker.questions.answered(A, number) == []
    assert asker.answering(A)


def test_only_an_answer_to_what_was_asked_since_the_reset_says_that_a_node_answers(asker: Asker) -> None:
    greeting, question = asker.greet(A), asker.ask(A, 1)
    asker.questions.answered(A, greeting)
    asker.questions.lost(A)
    assert not asker.answering(A)
    assert asker.questions.answered(A, question) == [1], "it was answered, by whoever ran then"
    asker.questions.answered(A, greeting)
    assert not asker.answering(A)
    again = asker.greet(A)
    for other in (greeting, question, again + 1, 0):
        asker.questions.answered(A, other)
        assert not asker.answering(A)
    asker.questions.answered(A, again)
    assert asker.answering(A)


def test_a_node_that_was_never_asked_does_not_answer(asker: Asker) -> None:
    """Names that somebody makes up push out no node that answers."""
    number = asker.greet(A)
    asker.questions.answered(B, number)
    assert not asker.answering(B)


def test_what_a_node_was_asked_can_be_taken_back(asker: Asker) -> None:
    numbers = asker.ask(A, 1), asker.ask(B, 2), asker.ask(A, 3)
    assert asker.questions.give_up(A) == [1, 3]
    assert asker.questions.give_up(A) == []
    assert [asker.questions.answered(n, number) for n, number in zip((A, B, A), numbers)] == [[], [2], []]


def test_a_node_that_asks_too_much_leaves_the_others_their_room() -> None:
    room = Room(2 * TABLETS_MAX, "dropped")
    assert room.untouched
    assert not room.takes(A, TABLETS_MAX + 1) and room.untouched
    assert room.takes(A, TABLETS_MAX) and room.takes(A, TABLETS_MAX - 1) and not room.untouched
    assert not room.takes(A, 2) and room.takes(A, 1) and not room.takes(A, 1)
    assert room.takes(B, TABLETS_MAX)
    room.clear()
    assert room.untouched and room.takes(A, TABLETS_MAX)


def test_places_are_read_as_they_were_written() -> None:
    assert places_from_bytes(places_to_bytes([0, 7, TABLETS_MAX - 1])) == {0, 7, TABLETS_MAX - 1}
    assert places_from_bytes(b"\0\1\0") == {1}, "half a place"
    assert places_from_bytes(places_to_bytes([])) == frozenset()
