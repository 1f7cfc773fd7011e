"""How long a backup still takes: what is said while it runs."""

from __future__ import annotations

from stele.cli.pace import Pace


def test_it_says_nothing_before_it_knows_and_follows_the_pace_of_the_last_half_minute() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.left_s(0, 1_000) is None
    now[0] = 0.5
    assert pace.left_s(100, 1_000) is None, "half a second says little"
    now[0] = 2.0
    assert pace.left_s(200, 1_000) == 8
    assert pace.left_s(200, None) is None, "nobody knows how much there is"
    for second in range(3, 64):
        now[0] = float(second)
        left_s = pace.left_s(200 + second, 1_000)
    assert left_s == 737, "a row a second: what was fast at first is forgotten"
    assert pace.left_s(2_000, 1_000) == 0
