"""Holds: named claims on a tablet's history. Orders about them travel as entries of the tablet's log. Pure; opens nothing.

An order is JSON in a WRITE entry of body kind HOLD (`stele.model.writeop`). A hold keeps old versions of rows from its
time on. It ends when it is released, or when an entry with a time past its expiry is applied. A hold that costs too much
is broken: it stays on record, but keeps nothing.

Invariant: the holds follow from the log's entries alone. No replica's clock is asked.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import Enum
from typing import Any

from stele.model.amounts import byte_size, duration
from stele.model.bounds import cut
from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Rejected, unknown_here
from stele.model.jsons import parse_json, whole_number
from stele.model.record import record
from stele.model.writeop import NO_CLIENT, BodyKind, WriteHeader, digest, encode

HOLDS_MAX = 16
"""The most holds of one tablet. Replicas check it as they apply entries, so it must never change."""
NAME_CHARS_MAX = 64
EXPIRES_MIN_MS, EXPIRES_MAX_MS = 1_000, 366 * 86_400_000
"""The shortest and the longest life of a hold. Its holder renews it long before it ends. Otherwise it
ends within a year."""
BYTES_MIN, BYTES_MAX = 1 << 20, 1 << 60
BYTES_DEFAULT = 4 << 30
"""How many bytes of old versions a hold may keep in each replica of a tablet, unless it says otherwise."""
VERSION_NEEDED = 2
"""The cluster version from which on logs and manifests may have holds."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_WHY_CHARS_MAX = 500
_TIME_MAX = (1 << 64) - 1


class Action(Enum):
    """What an order does. The words are on disk."""

    TAKE = "take"  # begin a hold, or begin it anew
    RENEW = "renew"  # another expiry, and perhaps a later time, of a hold that still keeps what it says
    RELEASE = "release"
    BREAK = "break"  # it keeps nothing from here on, and says why
    EXPIRE = "expire"  # nothing but the entry's time, which ends holds


_ACTIONS = {action.value: action for action in Action}


@record
class Hold:
    """A claim on history from the hybrid time `since` on.

    `expires_us`: an entry with a later time ends the hold, in µs since 1970. `bytes_max`: the most bytes of old rows that
    it may keep in one replica. `broken`: why it was broken; "" while it keeps history."""

    name: str
    since: int
    expires_us: int
    bytes_max: int
    broken: str = ""

    def to_json(self) -> list[Any]:
        """Return the hold as a list for a manifest. New fields go to the end."""
        return [self.name, self.since, self.expires_us, self.bytes_max, self.broken]

    @staticmethod
    def from_json(raw: list[Any]) -> Hold:
        """The inverse of `to_json`. Raises ValueError, TypeError or IndexError."""
        name, since, expires_us, bytes_max, broken = raw[:5]
        return Hold(
            name_of(name),
            whole_number(since, _TIME_MAX),
            whole_number(expires_us, _TIME_MAX),
            whole_number(bytes_max, BYTES_MAX),
            str(broken),
        )


@record
class HoldOrder:
    """An order about a hold. `since`: the time from which the hold keeps history.

    For TAKE, 0 means the entry's own time. For RENEW, 0 means no change. For BREAK, it is the `since` of the hold that was
    found too costly; the order has no effect on any other. `expires_ms` counts from the entry's time."""

    action: Action
    name: str = ""
    since: int = 0
    expires_ms: int = 0
    bytes_max: int = 0
    why: str = ""

    def encoded(self) -> bytes:
        """Return the payload of the WRITE entry for this order. Applying it twice changes nothing more."""
        fields = [self.action.value, self.name, self.since, self.expires_ms, self.bytes_max, self.why]
        body = json.dumps(fields, separators=(",", ":")).encode()
        return encode(WriteHeader(NO_CLIENT, 0, 0, 0, digest(body), 0, BodyKind.HOLD), body)

    @staticmethod
    def decoded(body: bytes | memoryview) -> HoldOrder:
        """The order in the body of an entry.

        Raises:
            Rejected: UNSUPPORTED_VERSION: the action is of a later release. INVALID_ARGUMENT: it is not an order.
        """
        try:
            word, name, since, expires_ms, bytes_max, why = parse_json(bytes(body))[:6]
            action = _ACTIONS.get(word)
            if action is None:
                raise unknown_here("an order about a hold:", str(word)[:40])
            return HoldOrder(
                action,
                name_of(name) if action is not Action.EXPIRE else "",
                whole_number(since, _TIME_MAX),
                whole_number(expires_ms, EXPIRES_MAX_MS),
                whole_number(bytes_max, BYTES_MAX),
                str(why)[:_WHY_CHARS_MAX],
            )
        except (ValueError, TypeError, KeyError, IndexError) as exc:
            raise Rejected(f"an order about a hold cannot be read: {exc!r}; upgrade the older side") from exc


def name_of(given: Any) -> str:
    """Return `given` if it is a valid name for a hold. Else raise a ValueError that says what is wrong."""
    if not isinstance(given, str) or not _NAME.match(given) or len(given) > NAME_CHARS_MAX:
        raise ValueError(
            f"name of a hold {str(given)[: NAME_CHARS_MAX + 1]!r}: expected 1 to {NAME_CHARS_MAX} letters, digits, dots, dashes "
            "and underscores, a letter or digit first"
        )
    return given


def faults_of(order: HoldOrder) -> list[str]:
    """Return what is wrong with an order, as messages. If there are none, the order may be proposed."""
    found = []
    try:
        name_of(order.name)
    except ValueError as exc:
        found.append(str(exc))
    if order.action in (Action.TAKE, Action.RENEW) and not (
        EXPIRES_MIN_MS <= order.expires_ms <= EXPIRES_MAX_MS
    ):
        found.append(f"the hold expires in {order.expires_ms / 1000:g} s: expected 1 s to 366 days")
    if order.action is Action.TAKE and not BYTES_MIN <= order.bytes_max <= BYTES_MAX:
        found.append(f"the hold may keep {order.bytes_max:,} bytes: expected 1 MiB to {BYTES_MAX >> 50} PiB")
    return found


@record
class Held:
    """All holds of a tablet at one moment of its log, in the order in which they were first taken."""

    holds: tuple[Hold, ...] = ()

    @property
    def since(self) -> int | None:
        """The hybrid time from which on history is kept; None: no hold keeps any."""
        return min((hold.since for hold in self.holds if not hold.broken), default=None)

    @property
    def expires_us(self) -> int | None:
        """When the first hold expires, in µs since 1970; None if there is no hold."""
        return min((hold.expires_us for hold in self.holds), default=None)

    def named(self, name: str) -> Hold | None:
        """The hold of this name."""
        return next((hold for hold in self.holds if hold.name == name), None)

    def at(self, time: int) -> Held:
        """Return the holds without those that expired before an entry with this hybrid time."""
        us = physical_us(time)
        if all(us <= hold.expires_us for hold in self.holds):
            return self
        return Held(tuple(hold for hold in self.holds if us <= hold.expires_us))

    def after(self, order: HoldOrder, time: int) -> Held:
        """Return the holds after an entry with this hybrid time has carried out the order. First call `at` with
        the same time.

        Raises:
            Rejected: CURSOR_LOST: the hold to renew is gone or broken. TOO_LARGE: there are too many holds.
        """
        old = self.named(order.name)
        expires_us = physical_us(time) + order.expires_ms * 1_000
        match order.action:
            case Action.TAKE:
                if old is None and len(self.holds) >= HOLDS_MAX:
                    raise Rejected(
                        f"the tablet has {HOLDS_MAX} holds on its history, which is the most; release one of "
                        f"{', '.join(hold.name for hold in self.holds)}",
                        code=Code.TOO_LARGE,
                    )
                return self._with(Hold(order.name, order.since or time, expires_us, order.bytes_max))
            case Action.RENEW:
                if old is None:
                    raise Rejected(
                        f"there is no hold {order.name} any more: it expired, or was released, so old rows may be gone; "
                        "begin again with a scan, and take a new hold at its snapshot",
                        code=Code.CURSOR_LOST,
                    )
                if old.broken:
                    raise Rejected(told_broken(old), code=Code.CURSOR_LOST)
                return self._with(replace(old, since=max(old.since, order.since), expires_us=expires_us))
            case Action.RELEASE:
                return Held(tuple(hold for hold in self.holds if hold is not old))
            case Action.BREAK:
                if old is None or old.broken or old.since != order.since:
                    return self  # it has moved on, and was judged by what it no longer keeps
                return self._with(replace(old, broken=order.why or "it was broken"))
            case Action.EXPIRE:
                return self

    def _with(self, new: Hold) -> Held:
        if self.named(new.name) is None:
            return Held((*self.holds, new))
        return Held(tuple(new if hold.name == new.name else hold for hold in self.holds))


NONE_HELD = Held()


def told_broken(hold: Hold) -> str:
    """Return the message for a reader who relied on a broken hold."""
    return (
        f"hold {hold.name} on the history from {utc(physical_us(hold.since))} on is broken: {hold.broken}; begin again with a "
        "scan, and take a new hold at its snapshot, with a higher limit or read more often"
    )


def too_costly(hold: Hold, cost: int, now_us: int) -> str:
    """The reason for breaking a hold that keeps `cost` bytes."""
    age = duration((now_us - physical_us(hold.since)) / 1e6)
    return cut(
        f"at {utc(now_us)} it had kept {age} of history, with {byte_size(cost)} of old rows in one replica; its limit is {byte_size(hold.bytes_max)}",
        _WHY_CHARS_MAX,
    )
