"""Processor time of this program and of all that it started: Spark's JVM and workers, masters and nodes.

Called by turns.py. Reads /proc. Invariant: processor time from before the first look does not count. The time
of a process that has ended counts if its parent waited for it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _OWN, _OF_ENDED = 1, slice(11, 13), slice(13, 15)  # behind the name: see proc(5), stat
_LOOK_S = 0.4
_QUIET = 0.15
"""Nodes that use less of a processor than this have flushed what was written. Heartbeats alone use some of it."""
_QUIET_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it is now. `own_s`: its own processor time. `ended_s`: the processor time of its children
    that have ended."""

    parent: int
    own_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor time in seconds: of everything, and of masters and nodes among it."""

    all_s: float
    cluster_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """All processes of this program at a moment. `cluster`: those that are masters and nodes, or were started by them."""

    processes: Mapping[int, Process]
    cluster: frozenset[int]

    def since(self, before: Look) -> Spent:
        """Return the processor time that was spent after an earlier look, up to this one."""
        known = defaultdict[int, float](float)  # by parent: what children that have ended had used then
        for pid, was in before.processes.items():
            if pid not in self.processes:
                known[was.parent] += was.own_s + was.ended_s
        each = {}
        for pid, now in self.processes.items():
            was = before.processes.get(pid, Process(now.parent, 0.0, 0.0))
            each[pid] = now.own_s - was.own_s + max(0.0, now.ended_s - was.ended_s - known[pid])
        return Spent(sum(each.values()), sum(s for pid, s in each.items() if pid in self.cluster))


class Processor:
    """Looks at processor times. `members()` are the process ids of masters and nodes."""

    def __init__(self, members: Callable[[], Iterable[int]]) -> None:
        self._members = members

    def look(self) -> Look:
        """Return the processor times until now, in steps of 10 ms."""
        found: dict[int, Process] = {}
        children = defaultdict[int, list[int]](list)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parent, pid = int(fields[_PARENT]), int(entry.name)
            children[parent].append(pid)
            own, ended = (sum(map(int, fields[part])) / _TICKS for part in (_OWN, _OF_ENDED))
            found[pid] = Process(parent, own, ended)

        def below(pid: int) -> set[int]:
            return {pid}.union(*(below(child) for child in children[pid]))

        mine = below(os.getpid())
        cluster = set[int]().union(*(below(pid) for pid in self._members()))
        return Look({pid: found[pid] for pid in mine if pid in found}, frozenset(cluster))

    def settle(self) -> None:
        """Wait until the nodes do little, at most for half a minute."""
        until = time.monotonic() + _QUIET_WITHIN_S
        before = self.look()
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = self.look()
            if now.since(before).cluster_s / _LOOK_S < _QUIET:
                return
            before = now
