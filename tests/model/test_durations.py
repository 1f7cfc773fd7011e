"""Times in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model.durations import seconds, text


@given(st.integers(min_value=0, max_value=10**12))
def test_a_duration_reads_back_as_it_was_written(ms: int) -> None:
    assert round(seconds(text(ms)) * 1000) == ms


@pytest.mark.parametrize(
    ("ms", "written"), [(90_000, "90s"), (3_600_000, "1h"), (604_800_000, "7d"), (1, "1ms")]
)
def test_the_largest_unit_that_fits(ms: int, written: str) -> None:
    assert text(ms) == written


@pytest.mark.parametrize("wrong", ["", "7", "7 d", "d7", "1w", "1h 30m"])
def test_anything_else_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="such as 90s or 1h30m"):
        seconds(wrong)
