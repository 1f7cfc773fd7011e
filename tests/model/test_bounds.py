"""The table of bounds: what its two small readers make of text of any length."""

from __future__ import annotations

import pytest

from stele.model import bounds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("18446744073709551615", (1 << 64) - 1),
        ("", None),
        ("9" * 21, None),
        ("9" * 5_000, None),
        ("-1", None),
        ("1_000", None),
        ("٣", None),  # a digit of another script: int() would take it
        ("²", None),  # isdigit() says yes, int() raises
    ],
)
def test_digits_are_ascii_and_few(text: str, value: int | None) -> None:
    assert bounds.digits(text) == value


def test_text_is_cut_to_its_bound() -> None:
    assert bounds.cut("short") == "short"
    assert len(bounds.cut("x" * 10_000)) == bounds.TEXT_CHARS_MAX
    assert bounds.cut("abcdefgh", 5) == "ab..."
