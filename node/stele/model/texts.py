"""Values that people write as text (times and numbers), and text that people are shown. Pure.

Shared by conditions, options, defaults, commands and logs. Invariant: no digit of a text is silently dropped,
except for the precision of a `double`.
"""

from __future__ import annotations

import datetime
import math
import re

from stele.model.clock import from_datetime

_TOO_FINE = re.compile(r"[.,][0-9]{6}[0-9]*[1-9]")
_NO_SECONDS = re.compile(r"(?<![0-9]{2}:[0-9]{2}:[0-9]{2})(?<![0-9]{6})[.,]")


class Inexact(ValueError):
    """A text that would become another value than it says. The message says why."""


def printable(text: str) -> str:
    """The text on one line, safe for a terminal. Control characters and whatever else does not print become
    escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def moment(text: str) -> datetime.datetime:
    """Parse an ISO 8601 time. Without a zone it is UTC.

    Raises:
        Inexact: it is finer than a microsecond. Also a fraction of an hour or a minute, because Python would
            read it as a fraction of a second.
        ValueError: it is not a time.
    """
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError as exc:
        if "isoformat" not in str(exc):
            raise
        raise ValueError("such as 2026-05-01T11:50:00Z") from None
    if _TOO_FINE.search(text):
        raise Inexact("it is finer than a microsecond")
    if _NO_SECONDS.search(text):
        raise Inexact("only seconds may have a fraction")
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def snapshot(text: str) -> int:
    """Parse a hybrid time: its digits, or an ISO 8601 time. Without a zone that is UTC.

    Raises:
        ValueError: it is neither, or before 1970.
    """
    if text.isdecimal():
        return int(text)
    return from_datetime(moment(text))


def number(text: str) -> float:
    """Return the double that is nearest to a number given as text.

    Raises:
        Inexact: it is beyond all doubles.
        ValueError: it is not a number.
    """
    found = float(text)
    if math.isinf(found):
        raise Inexact("it is too large")
    return found
