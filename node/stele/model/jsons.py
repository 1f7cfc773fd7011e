"""Parses JSON from others: files, rows, tickets, defaults. Opens nothing.

Python's parser raises RecursionError for deep nesting and turns large numbers into infinities; callers expect
neither. A limit on depth ensures that a parsed value can be written again, from any depth of the stack. Invariant: parsed
numbers are finite, values are at most DEPTH_MAX deep, and every other fault is a ValueError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

DEPTH_MAX = 100
_SHOWN = 40


def parse_json(text: str | bytes, *, parse_float: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text. `parse_float` converts numbers with a point or an exponent; default: a finite
    float.

    Raises:
        ValueError: not JSON, NaN or an infinity, an integer of thousands of digits, or nested too deeply.
    """
    text = _as_text(text)
    try:
        found = _decoder.decode(text) if parse_float is None else json.loads(text, parse_float=parse_float)
    except RecursionError:
        raise too_deep() from None
    if text.count("[") + text.count("{") > DEPTH_MAX:
        refuse_deep(found)
    return found


def parse_next_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at position `at`, and the position where it ends.

    Raises:
        ValueError: see `parse_json`.
    """
    try:
        found, end = _decoder.raw_decode(text, at)
    except RecursionError:
        raise too_deep() from None
    refuse_deep(found)
    return found, end


def refuse_deep(value: Any) -> None:
    """Check that a parsed value is at most DEPTH_MAX deep. Raises ValueError."""
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        inside = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, (dict, list))
        ]
        if not inside:
            return
        level = [each for values in inside for each in values]
    raise too_deep()


def whole_number(value: Any, most: int, least: int = 0) -> int:
    """Check that a parsed JSON value is a whole number within bounds. Raises ValueError or TypeError."""
    number = int(value)
    if not least <= number <= most:
        raise ValueError(f"number {str(number)[:_SHOWN]}; expected {least} to {most}")
    return number


def too_deep() -> ValueError:
    """The error for values that are nested too deeply."""
    return ValueError("values are nested too deeply")


def _as_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:_SHOWN]} is too large")
    return value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number in JSON")


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)
