"""Judges what watchers of a key space were given, against what its clients wrote and read. Imports nothing of the client.

The revisions of a watch are an order of all writes. It is right if it holds every acknowledged write once, if a write that
ended before another began stands before it, and if each read is what the writes up to its revision give.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Pairs = Mapping[bytes, bytes | None]


@dataclass(frozen=True, slots=True)
class Write:
    """A client's write. `ended`: infinite if its outcome is unknown. `revision`: 0 if none was told."""

    values: Pairs
    begun: float
    ended: float = math.inf
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """All keys as a client read them at a revision."""

    values: Pairs
    revision: int
    begun: float
    ended: float


def faults_of(
    writes: Iterable[Write], reads: Iterable[Read], watched: Sequence[tuple[int, Pairs]]
) -> list[str]:
    """What is wrong; no two writes may have the same values."""
    faults = list[str]()
    by_values = {frozenset(write.values.items()): write for write in writes}
    placed = list[tuple[int, Write]]()
    before = 0
    for revision, values in watched:
        if revision <= before:
            faults.append(f"revision {revision} comes behind {before}")
        before = revision
        write = by_values.pop(frozenset(values.items()), None)
        if write is None:
            faults.append(f"revision {revision} is nobody's write, or comes twice: {dict(values)}")
            continue
        if write.revision not in (0, revision):
            faults.append(f"the write of {dict(values)} was told {write.revision}, and comes as {revision}")
        placed.append((revision, write))
    faults += [
        f"an acknowledged write is missing: {dict(write.values)}"
        for write in by_values.values()
        if write.ended < math.inf
    ]
    latest = -math.inf
    for revision, write in placed:
        if write.ended < latest:
            faults.append(f"revision {revision} ended before one of an earlier revision began")
        latest = max(latest, write.begun)
    for read in reads:
        faults += _of_read(read, placed)
    return faults


def _of_read(read: Read, placed: Sequence[tuple[int, Write]]) -> Iterable[str]:
    state = dict[bytes, bytes | None]()
    for revision, write in placed:
        if revision <= read.revision:
            state |= write.values
            if write.begun > read.ended:
                yield f"a read at revision {read.revision} saw {revision}, which began later"
        elif write.ended < read.begun:
            yield f"a read at revision {read.revision} did not see {revision}, which ended before"
    there = {key: value for key, value in state.items() if value is not None}
    if there != dict(read.values):
        yield f"a read at revision {read.revision} found {dict(read.values)}; the watch says {there}"
