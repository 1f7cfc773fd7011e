"""Numbers of bytes and lengths of time, as people read them."""

from __future__ import annotations

import pytest

from stele.model.amounts import byte_size, duration, plural


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 bytes"),
        (1_048_575, "1,048,575 bytes"),  # what is there is not told as 0 MiB
        (1 << 20, "1 MiB"),
        ((1 << 30) - 1, "1024 MiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_bytes(count: int, told: str) -> None:
    assert byte_size(count) == told


def test_times_and_counts() -> None:
    assert [duration(s) for s in (0.2, 59.6, 3_700, 90_061)] == ["1 s", "1 min", "1 h 1 min", "1 d 1 h"]
    assert [plural(n, "row") for n in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]
