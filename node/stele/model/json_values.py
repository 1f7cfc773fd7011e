"""Values of columns as JSON, for commands and definitions. Pure."""

from __future__ import annotations

import datetime
import math
from typing import Any

_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def json_value(value: Any) -> Any:
    """A column's Python value as a JSON value. Whatever JSON cannot hold becomes a string.

    Binary is hex; dates and timestamps are ISO 8601. NaN and Infinity are strings, because most JSON parsers
    refuse them as numbers.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _NOT_FINITE[str(value)]
        case bytes():
            return value.hex()
        case datetime.date():
            return value.isoformat()
        case _:
            return str(value)
