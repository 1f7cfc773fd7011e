"""How `repr` shows a client's objects: kind, name and cluster. Pure; asks nobody.

Invariant: the text has no rows, keys, values, conditions or control characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.model.clock import physical_us, utc
from stele.model.key_bounds import EVERYTHING, KeyRange
from stele.model.texts import printable

_NAMES_SHOWN = 5


def shown_as(thing: object, what: str, cluster_id: str) -> str:
    """`<stele.Table readings: 3 columns; cluster 1a2b3c4d>`. `cluster_id`: empty before a server has answered."""
    cluster = f"cluster {cluster_id[:8]}" if cluster_id else "no cluster has answered yet"
    return f"<stele.{type(thing).__name__} {printable(what)}; {cluster}>"


def blocking(asynchronous: object) -> str:
    """The repr of an object of the blocking client, made from the repr of its asynchronous object."""
    return repr(asynchronous).replace("<stele.Async", "<stele.", 1)


def named(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def many(count: int, what: str) -> str:
    """`1 tablet`, `4 tablets`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def read(tablets: int, ranges: Sequence[KeyRange]) -> str:
    """`4 tablets`; `4 tablets, 2 ranges of keys` for a scan that does not read all keys."""
    of_keys = "" if tuple(ranges) == EVERYTHING else f", {many(len(ranges), 'range')} of keys"
    return many(tablets, "tablet") + of_keys


def at(snapshot: int) -> str:
    """Return the time of a snapshot as text, in UTC."""
    return utc(physical_us(snapshot))
