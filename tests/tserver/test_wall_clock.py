"""What a node makes of the clocks that it hears."""

from __future__ import annotations

import pytest

from stele.model.clock import CLOCK_OFF_MAX_US, agreed
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2
from stele.tserver.wall_clock import FRESH_US, KEPT_US, SLOW_US, WallClock

NOW_US = 1_790_000_000_000_000
HOUR_US = 3_600_000_000
SELF = "0" * 32


class Machine:
    """Its clocks; `skew_us` is what is wrong with the one on the wall."""

    def __init__(self) -> None:
        self.passed_us, self.skew_us = 5_000_000, 0
        self.clock = WallClock(SELF, lambda: NOW_US + self.passed_us + self.skew_us, lambda: self.passed_us)

    @property
    def fault(self) -> str:
        return self.clock.fault(self.clock.read())

    def hear(self, *skews_us: int, agreed_us: int | None = None, took_us: int = 0) -> None:
        """Answers of masters 1, 2, ... whose clocks are so far ahead; `agreed_us`: so is what most say, to them all."""
        for number, skew_us in enumerate(skews_us, 1):
            answer = master_pb2.TSHeartbeatResponse(
                node_id=id_to_pb(f"{number:032x}"), clock_id=number, clock_us=self.passed_us + 777
            )
            answer.wall_us = NOW_US + self.passed_us + skew_us
            if agreed_us is not None:
                answer.wall_agreed_us = NOW_US + self.passed_us + agreed_us
            sent_us = self.passed_us - took_us // 2
            self.passed_us += took_us // 2
            self.clock.answered(answer, sent_us)


AGREED: list[tuple[str, list[int], int | None]] = [
    ("nobody", [], None),
    ("one", [5], 5),
    ("two", [5, CLOCK_OFF_MAX_US + 5], 5),
    ("two at odds", [0, CLOCK_OFF_MAX_US + 1], None),
    ("two of three", [HOUR_US, 7, 8], 8),
    ("three at odds", [0, HOUR_US, 2 * HOUR_US], None),
    ("half", [0, 0, HOUR_US, HOUR_US], None),
    ("three of five", [0, 1, 2, HOUR_US, -HOUR_US], 1),
]


@pytest.mark.parametrize(("clocks", "said"), [c[1:] for c in AGREED], ids=[c[0] for c in AGREED])
def test_clocks_agree_by_majority(clocks: list[int], said: int | None) -> None:
    assert agreed(clocks) == said


def test_a_node_that_hears_nobody_goes_on() -> None:
    machine = Machine()
    machine.skew_us = HOUR_US
    assert not machine.fault and machine.clock.ahead_us is None


@pytest.mark.parametrize("skew_us", [HOUR_US, -HOUR_US], ids=["ahead", "behind"])
def test_a_start_with_a_wrong_clock_is_judged_by_most_masters(skew_us: int) -> None:
    machine = Machine()
    machine.skew_us = skew_us
    machine.hear(0)
    assert not machine.fault  # one against one
    machine.hear(0, 0, 0)
    assert machine.clock.ahead_us == skew_us
    assert f"the clock of node {SELF[:8]} says" in machine.fault


def test_one_wrong_master_convinces_nobody() -> None:
    machine = Machine()
    machine.hear(HOUR_US, 0, 0)
    assert not machine.fault and machine.clock.ahead_us == 0


def test_what_a_wrong_master_hears_of_all_clocks_counts_and_not_its_own() -> None:
    machine = Machine()
    machine.hear(HOUR_US, agreed_us=0)
    assert not machine.fault
    machine.skew_us = HOUR_US
    assert machine.fault


def test_a_step_is_seen_at_the_next_reading_and_its_end_too() -> None:
    machine = Machine()
    machine.hear(3, 3, 3)
    machine.passed_us += 600_000_000
    assert not machine.fault
    machine.skew_us = CLOCK_OFF_MAX_US + 4
    assert machine.fault
    machine.skew_us = CLOCK_OFF_MAX_US + 3
    assert not machine.fault


def test_what_was_heard_long_ago_counts_no_more() -> None:
    machine = Machine()
    machine.hear(0, 0, 0)
    machine.skew_us = HOUR_US
    machine.passed_us += KEPT_US
    assert machine.fault
    machine.passed_us += 1
    assert not machine.fault and machine.clock.ahead_us is None


def test_slow_answers_say_nothing_and_others_are_read_in_their_middle() -> None:
    machine = Machine()
    machine.hear(HOUR_US, HOUR_US, HOUR_US, took_us=SLOW_US + 2)
    assert not machine.fault and machine.clock.ahead_us is None
    machine.hear(0, 0, 0, took_us=SLOW_US)
    assert machine.clock.ahead_us == 0


def test_all_clocks_set_right_alike_are_right() -> None:
    machine = Machine()
    machine.hear(-HOUR_US, agreed_us=-HOUR_US)
    assert machine.fault
    machine.hear(0, agreed_us=0)
    assert not machine.fault


def test_a_master_can_compare_it_on_its_own_monotonic_clock() -> None:
    machine = Machine()
    machine.hear(0)
    machine.skew_us = 40
    request = master_pb2.TSHeartbeatRequest()
    machine.clock.tell(request, f"{1:032x}")
    assert request.clock_id == 1
    assert request.wall_base_us == NOW_US + 40 - 777
    assert request.wall_ahead_us == 40


def test_masters_that_are_gone_do_not_outvote_those_that_answer() -> None:
    """All clocks were wrong alike and are right by now."""
    machine = Machine()
    machine.hear(HOUR_US, HOUR_US, HOUR_US, agreed_us=HOUR_US)
    machine.passed_us += FRESH_US + 1
    assert machine.fault
    machine.hear(0, agreed_us=0)
    assert not machine.fault and machine.clock.ahead_us == 0
