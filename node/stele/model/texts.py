"""Values that people write as text: times and numbers; and text that people are shown. Shared by conditions, options,
defaults, commands and logs. Pure.

Invariant: no digit that stands there is dropped in silence, but for the precision of a `double`.
"""

from __future__ import annotations

import datetime
import math
import re

from stele.model.clock import from_datetime

_TOO_FINE = re.compile(r"[.,][0-9]{6}[0-9]*[1-9]")
_NO_SECONDS = re.compile(r"(?<![0-9]{2}:[0-9]{2}:[0-9]{2})(?<![0-9]{6})[.,]")


class Inexact(ValueError):
    """A text that would become another value than it says; the message is why."""


def printable(text: str) -> str:
    """The text on one line, as a terminal may be given it: control characters (C0, C1, line ends, overrides of direction) and
    whatever else does not print are escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def moment(text: str) -> datetime.datetime:
    """An ISO 8601 time. Without a zone it is UTC.

    Raises:
        Inexact: it is finer than a microsecond, or has a fraction of an hour or a minute, which Python takes for one of a
            second.
        ValueError: it is no time.
    """
    found = datetime.datetime.fromisoformat(text)
    if _TOO_FINE.search(text):
        raise Inexact("it is finer than a microsecond")
    if _NO_SECONDS.search(text):
        raise Inexact("only seconds have a fraction")
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def snapshot(text: str) -> int:
    """The hybrid time that a text stands for: one in digits, or an ISO 8601 time, UTC without a zone.

    Raises:
        ValueError: it is neither, or before 1970.
    """
    if text.isdecimal():
        return int(text)
    return from_datetime(moment(text))


def number(text: str) -> float:
    """The double nearest to a number in digits.

    Raises:
        Inexact: it is beyond all of them.
        ValueError: it is no number.
    """
    found = float(text)
    if math.isinf(found):
        raise Inexact("it is too large")
    return found
