"""Parses JSON from others: files, rows, tickets, defaults. Opens nothing.

Python's parser raises RecursionError for deep nesting and turns large numbers into infinities; callers expect
neither. Invariant: parsed numbers are finite, and every other fault is a ValueError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_SHOWN = 40


def parse_json(text: str | bytes, *, parse_float: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text. `parse_float` converts numbers with a point or an exponent; default: a finite
    float.

    Raises:
        ValueError: not JSON, NaN or an infinity, an integer of thousands of digits, or nested too deeply for
            Python.
    """
    try:
        if parse_float is None:
            return _decoder.decode(_as_text(text))
        return json.loads(text, parse_float=parse_float)
    except RecursionError:
        raise too_deep() from None


def parse_next_json(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends.

    Raises:
        ValueError: see `parse_json`.
    """
    try:
        return _decoder.raw_decode(text, at)
    except RecursionError:
        raise too_deep() from None


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
