"""Checks arguments of public methods before any server is asked. Pure; for clients, tables, sessions and key
spaces.

Invariant: an argument of a wrong kind is Rejected, with what was given and what was expected. Results are of
plain Python types (a numpy integer becomes an int).
"""

from __future__ import annotations

import datetime
import math
import operator
import time
from collections.abc import Iterable
from typing import Any

from stele.model.block import RowOp
from stele.model.bounds import HISTORY_MAX_MS, HISTORY_MIN_MS
from stele.model.clock import ahead_of, from_datetime, future_snapshot
from stele.model.column import shown
from stele.model.errors import Code, Rejected

_YEAR_S = 365 * 86_400.0
_HYBRID_TIME_MAX = (1 << 63) - 1
"""The last snapshot that a message can hold, in the year 2041."""
_SNAPSHOT_MAX = int(from_datetime(datetime.datetime.max))
"""The last time that a datetime can hold."""
THIS_CLOCK = "this machine's clock"
"""What messages call the clock that this process reads."""
_REPLICATION_FACTOR_MAX = (1 << 32) - 1
"""The most that a message can hold. The masters decide which values are possible."""


def refusal(what: str, given: object, expected: str) -> Rejected:
    """Return the error for a wrong argument."""
    return Rejected(f"{what} {shown(given)}: expected {expected}")


def text(given: Any, what: str) -> str:
    """Check a name, and return it: a str that is not empty, and can be encoded as UTF-8."""
    if not isinstance(given, str) or not given:
        raise refusal(what, given, "a name, as text")
    raw(given, what)
    return given


def zone(given: Any) -> str:
    """Check the name of a zone, and return it; "" means no zone."""
    return "" if given == "" else text(given, "zone")


def of_kind(given: Any, kind: type, what: str, expected: str) -> Any:
    """Return `given` if it is an instance of `kind`; else raise Rejected."""
    if isinstance(given, kind):
        return given
    raise refusal(what, given, expected)


def seconds(given: Any, what: str, *, zero: bool = False) -> float:
    """Return a time in seconds, above 0 and at most a year. With `zero`, 0 is allowed too."""
    if isinstance(given, (str, bytes, bool)) or not hasattr(given, "__float__"):
        raise refusal(what, given, "a number of seconds")
    try:
        found = float(given)
    except OverflowError:
        found = math.inf
    if 0 < found <= _YEAR_S or (zero and found == 0):
        return found
    raise refusal(what, given, f"a number of seconds{', 0 or' if zero else ''} above 0, of a year at most")


def history_ms(given: Any, *, none: bool = False) -> int:
    """Return a table's history retention in ms, given in seconds; 0 stands for the default. `none`: the
    caller writes None for the default, not 0."""
    if none and given is None:
        return 0
    expected = f"a number of seconds, 60 to ten years, or {'None' if none else '0'} for the default"
    if isinstance(given, (str, bytes, bool)) or not hasattr(given, "__float__"):
        raise refusal("history_s", given, expected)
    try:
        ms = float(given) * 1000
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, a huge int
        ms = math.inf
    if not none and ms == 0:
        return 0
    if not HISTORY_MIN_MS <= ms <= HISTORY_MAX_MS:
        raise refusal("history_s", given, expected)
    return round(ms)


def note(given: Any, what: str) -> str:
    """Check a text for people, and return it. It may be empty. The masters check the rest."""
    found: str = of_kind(given, str, what, "text")
    raw(found, what)
    return found


def seconds_or(given: Any, otherwise: float, what: str) -> float:
    """Return a time in seconds; `otherwise` if None is given."""
    return otherwise if given is None else seconds(given, what)


def whole_number(given: Any, what: str, *, least: int, most: int | None = None) -> int:
    """Return a whole number from `least` to `most`. `most` None: there is no upper bound."""
    try:
        found = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        found = None
    if found is None or found < least or (most is not None and found > most):
        raise refusal(
            what,
            given,
            f"a whole number, {least} or more" if most is None else f"a whole number, {least} to {most}",
        )
    return found


def replication_factor(given: Any) -> int:
    """Check a replication factor, the number of voters of each tablet, and return it."""
    return whole_number(given, "replication_factor", least=1, most=_REPLICATION_FACTOR_MAX)


def snapshot(given: Any, what: str = "snapshot", called: str = "") -> int:
    """Return a hybrid time, given as one or as a datetime (UTC if it has no time zone). None and 0 mean now,
    and give 0.

    `called`: the name of the time in messages, if it is not a snapshot."""
    if given is None:
        return 0
    if isinstance(given, datetime.datetime):
        try:
            found = int(from_datetime(given))
        except ValueError as exc:
            raise refusal(what, given, f"a time from 1970 on, in microseconds ({exc})") from None
    else:
        try:
            found = whole_number(given, what, least=0, most=_SNAPSHOT_MAX)
        except Rejected:
            expected = "a hybrid time (a whole number, as now() of a client gives) or a datetime"
            raise refusal(what, given, expected) from None
    if found > _HYBRID_TIME_MAX:  # only nodes judge others, by their own clocks
        now_us = time.time_ns() // 1_000
        why = (
            future_snapshot(found, now_us, THIS_CLOCK)
            if not called
            else f"{ahead_of(called, found, now_us, THIS_CLOCK)}; give an earlier time"
        )
        raise Rejected(why, code=Code.CLOCK_AHEAD)
    return found


def names(given: Any, what: str) -> list[str]:
    """Return a list of names. A single name may be given as a str."""
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else None
    if found is None or not all(isinstance(name, str) for name in found):
        raise refusal(what, given, "a list of names")
    return found


def raw(given: Any, what: str) -> bytes:
    """Return a key or value of a key space as bytes. A str is encoded as UTF-8."""
    if isinstance(given, str):
        try:
            return given.encode()
        except UnicodeEncodeError:  # bytes from a shell that are not UTF-8
            raise refusal(what, given, "text that is UTF-8, or bytes") from None
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    raise refusal(what, given, "bytes or str")


def row_op(given: Any) -> RowOp:
    """Return a row operation, given as a RowOp or by its name."""
    found = {op.name: op for op in RowOp}.get(given.upper()) if isinstance(given, str) else given
    if isinstance(found, RowOp):
        return found
    raise refusal("op", given, f"one of {', '.join(op.name.lower() for op in RowOp)}")
