"""Times as people write them, such as `90s` or `1h30m`. Used by command line and operator; opens nothing.

Invariant: `seconds(text(ms)) * 1000 == ms`.
"""

from __future__ import annotations

import re

PATTERN = r"^([0-9]+(ms|s|m|h|d))+$"
_PART = re.compile(r"([0-9]+)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


def seconds(text: str) -> float:
    """Seconds in a duration such as `90s`, `1h30m` or `250ms`.

    Raises:
        ValueError: for any other text.
    """
    if re.match(PATTERN, text) is None:
        raise ValueError(
            f"duration {text!r}: expected a number with a unit ms, s, m, h or d, such as 90s or 1h30m"
        )
    return sum(int(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def text(ms: int) -> str:
    """The duration in the largest unit that gives a whole number: `7d`, `90s`, `1500ms`."""
    return next(f"{ms // size}{unit}" for unit, size in _MS if not ms % size)
