"""Summarizes the driver's steps for single tablets as one heal per node. Used by heal; makes no calls or
decisions.

A machine has hundreds of tablets with six steps each, and single events would hide everything else. So a
node's heal is reported when it begins, from time to time while it runs, and when it ends. `status.healing`
lists single tablets. Invariant: the end of a heal is reported once, as soon as no tablet of its node needs
anything more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stele.driver.copy_checks import CopyCheck
from stele.driver.executor import Report
from stele.driver.policy import Policy
from stele.driver.progress import Progress, with_names
from stele.driver.situation import judge
from stele.driver.steps import WAITS, Blocked, WaitCopy
from stele.driver.view import NodeView
from stele_operator.plan.budgets import some

PROGRESS_S = 10.0
"""Shortest time, in seconds, between two progress reports of a heal. `Reporter` merges such events, and
updates their count at most once a minute.
"""
BLOCKED_MAX = 5
"""How many reasons of waiting tablets become an event each in one round. The others are only counted."""
_WAITS = frozenset(step.__name__ for step in WAITS)
_REPLICA = re.compile(r"\breplica \d+\b")
_NUMBERS = re.compile(r"\b\d+ s\b|\b\d+ of \d+ bytes\b")
"""Numbers in a reason that may change from round to round."""


@dataclass(frozen=True, slots=True)
class News:
    """An event for users. `about`: identifies the event if its message changes."""

    reason: str
    message: str
    warning: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """A record of the driver, with the node that is being healed and the bytes copied. `node`: "" if no node
    is at fault, for example when a replica is added or an unneeded one is removed. `fault`: what is wrong
    with the node.
    """

    record: Progress
    node: str = ""
    fault: str = ""
    bytes_done: int = 0


def works_of(report: Report, policy: Policy) -> list[Work]:
    """The records of a round of the driver, each with the node that is being healed."""
    nodes: dict[str, NodeView] = {n.node_id: n for n in report.view.nodes}
    found = []
    for record in report.progress:
        tablet = report.view.tablet(record.tablet_id) if record.tablet_id else None
        if tablet is None:
            found.append(Work(record))
            continue
        situation = report.situations.get(record.tablet_id) or judge(tablet, report.view, policy, nodes)
        at_fault = situation.at_fault
        intent = situation.intent
        joining = tablet.report(intent.replica_id, intent.target_node) if intent is not None else None
        arrived = joining.copy.bytes_done if joining is not None and joining.copy is not None else 0
        node, fault = (at_fault.peer.node_id, at_fault.fault) if at_fault is not None else ("", "")
        found.append(Work(record, node, fault, arrived))
    return found


@dataclass
class _Heal:
    """The state of the tablets of one node since its heal began."""

    began_s: float
    fault: str
    told_s: float
    tables: dict[str, str] = field(default_factory=dict)
    """Table names by tablet, for each tablet that was ever part of the heal."""
    open: dict[str, Progress] = field(default_factory=dict)
    """The newest record of each tablet that still needs something."""
    steps: dict[str, int] = field(default_factory=dict)
    """How often each step was done, in the order of their first use."""
    arrived: dict[str, int] = field(default_factory=dict)
    """Bytes of each tablet's copy."""
    causes: dict[str, None] = field(default_factory=dict)
    """Names of the heal's causes (`stele.driver.causes`): its own, and those of heals that an earlier driver
    began.
    """

    @property
    def size(self) -> str:
        tablets, tables = len(self.tables), len(set(self.tables.values()))
        return f"{tablets} tablet{'s' * (tablets != 1)} of {tables} table{'s' * (tables != 1)}"

    @property
    def named(self) -> str:
        """The heal's causes in brackets, as the logs of nodes name them; "" if there are none."""
        return f" ({', '.join(self.causes)})" if self.causes else ""

    def take(self, work: Work) -> None:
        record = work.record
        self.tables[record.tablet_id] = record.table_name
        self.open[record.tablet_id] = record
        self.fault = self.fault or work.fault
        if record.cause:
            self.causes[record.cause] = None
        self.arrived[record.tablet_id] = max(self.arrived.get(record.tablet_id, 0), work.bytes_done)
        if record.kind not in _WAITS and not record.error:
            self.steps[record.step] = self.steps.get(record.step, 0) + 1

    def how_far(self) -> str:
        """How many tablets are done, and at which steps the others are."""
        at = Counter(r.step for r in self.open.values() if r.kind != Blocked.__name__)
        copies = [r for r in self.open.values() if r.kind == WaitCopy.__name__]
        waits = [r for r in self.open.values() if r.kind == Blocked.__name__]
        refused = [r for r in self.open.values() if r.error]
        parts = [f"{len(self.tables) - len(self.open)} of {self.size} are done"]
        parts += [f"{step} {count}" for step, count in at.items()]
        if copies:
            done, total = sum(r.bytes_done for r in copies), sum(r.bytes_total for r in copies)
            parts.append(f"{done:,} of {total:,} bytes have arrived")
        if waits:
            parts.append(f"{len(waits)} wait: {waits[0].reason}")
        if refused:
            parts.append(f"{len(refused)} were refused a step: {refused[0].step}, {refused[0].error}")
        return "; ".join(parts)

    def sum(self, now_s: float) -> str:
        steps = ", ".join(f"{step} {count}" for step, count in self.steps.items())
        took = f"{max(0.0, now_s - self.began_s):.0f} s"
        return f"{self.size} in {took}: {steps}; {sum(self.arrived.values()):,} bytes copied{self.named}"


class Heals:
    """The heals of one cluster. This memory may be lost at any time; the remaining work then counts as a new
    heal.
    """

    def __init__(self) -> None:
        self._heals: dict[str, _Heal] = {}
        self._node_of: dict[str, str] = {}
        """The node of each tablet's heal. Once the lost replica is removed from the tablet, nothing else
        names that node.
        """
        self._told: set[tuple[str, str, str]] = set()

    def note(self, round_: Sequence[Work], names: Mapping[str, str], now_s: float) -> list[News]:
        """Record a round of the driver, and return its news. `names`: member names by the first eight digits
        of their UUIDs.
        """
        begun = []
        for heal in self._heals.values():
            heal.open = {}
        for work in round_:
            node = work.node or self._node_of.get(work.record.tablet_id, "")
            if not node:
                continue
            self._node_of[work.record.tablet_id] = node
            if node not in self._heals:
                if work.record.kind == Blocked.__name__:
                    continue  # its heal has not begun
                self._heals[node] = _Heal(now_s, work.fault, now_s)
                begun.append(node)
            self._heals[node].take(work)
        if begun:  # tablets that wait for a copy may precede, in the round, the one that began the heal
            self._take_waiting(round_, begun)
        news = [self._began(node, names) for node in begun]
        news += self._going_on(names, now_s)
        news += self._ended([node for node, heal in self._heals.items() if not heal.open], names, now_s)
        return news + self._others(round_, names)

    def over(self, names: Mapping[str, str], now_s: float) -> list[News]:
        """The events to send once the driver has nothing left to do: one for the end of each open heal."""
        self._told.clear()
        return self._ended(list(self._heals), names, now_s)

    def _take_waiting(self, round_: Sequence[Work], begun: Sequence[str]) -> None:
        for work in round_:
            heal = self._heals.get(work.node) if work.node in begun else None
            if heal is not None and work.record.tablet_id not in heal.open:
                heal.take(work)

    def _began(self, node: str, names: Mapping[str, str]) -> News:
        heal = self._heals[node]
        fault = f" ({heal.fault})" if heal.fault else ""
        return News("HealBegan", f"{_name(node, names)}{fault}: {heal.size}{heal.named}")

    def _going_on(self, names: Mapping[str, str], now_s: float) -> Iterable[News]:
        for node, heal in self._heals.items():
            if heal.open and not 0 <= now_s - heal.told_s < PROGRESS_S:
                heal.told_s = now_s
                yield News(
                    "Healing",
                    f"{_name(node, names)}: {with_names(heal.how_far(), names)}",
                    about=f"{node}/{heal.began_s}",
                )

    def _ended(self, nodes: Sequence[str], names: Mapping[str, str], now_s: float) -> list[News]:
        news = []
        for node in nodes:
            heal = self._heals.pop(node)
            self._node_of = {tablet: n for tablet, n in self._node_of.items() if n != node}
            news.append(News("HealEnded", f"{_name(node, names)}: {heal.sum(now_s)}"))
        return news

    def _others(self, round_: Sequence[Work], names: Mapping[str, str]) -> list[News]:
        """News of waiting tablets, by reason, and of steps without a tablet. Each is told once."""
        waiting: dict[tuple[str, str], list[tuple[Progress, str]]] = {}
        whys: dict[tuple[str, str], tuple[str, str]] = {}
        news = []
        for work in round_:
            record = work.record
            if record.kind == Blocked.__name__:
                said = work.node, record.reason  # by thousands of tablets, in a few ways
                why, same = whys.get(said) or whys.setdefault(said, _why(*said, names))
                waiting.setdefault((record.step, same), []).append((record, why))
            elif not record.tablet_id:
                where, why = with_names(record.where, names), with_names(record.reason, names)
                why += f" (not yet: {with_names(record.error, names)})" if record.error else ""
                if self._is_new(where, record.kind, _same(why)):
                    named = f" ({record.cause})" if record.cause else ""
                    news.append(News(record.step, f"{where}: {why}{named}"))
        fresh = [(step, found) for (step, same), found in waiting.items() if self._is_new("", step, same)]
        for step, found in fresh[:BLOCKED_MAX]:
            wheres = some([with_names(record.where, names) for record, _ in found])
            news.append(News(step, f"{wheres}: {found[0][1]}", warning=True))
        if len(fresh) > BLOCKED_MAX:
            news.append(
                News("Blocked", f"{len(fresh) - BLOCKED_MAX} more reasons: see status.healing", warning=True)
            )
        return news

    def _is_new(self, *what: str) -> bool:
        mark = (what[0], what[1], what[2])
        new = mark not in self._told
        self._told.add(mark)
        return new


def compared(checks: Sequence[CopyCheck], names: Mapping[str, str]) -> list[News]:
    """The news of new replicas that were compared with other voters."""
    equal = [check for check in checks if check.equal]
    unknown = [check for check in checks if check.problem]
    news = [
        News(
            "CopyDiffers",
            with_names(check.said, names),
            True,
            f"{check.made.tablet_id}/{check.made.new.replica_id}",
        )
        for check in checks
        if check.differs
    ]
    if equal:
        rows = sum(check.sums[0][0] for check in equal)
        told = f"replicas of {len(equal)} tablet{'s' * (len(equal) != 1)} hold the {rows:,} rows of another voter"
        news.append(News("CopiesCompared", f"{told}; {with_names(equal[0].said, names)}"))
    if unknown:
        told = f"new replicas of {len(unknown)} tablet{'s' * (len(unknown) != 1)} were not compared"
        news.append(News("CopiesNotCompared", f"{told}; {with_names(unknown[0].said, names)}"))
    return news


def _name(node: str, names: Mapping[str, str]) -> str:
    return with_names(f"node {node[:8]}", names)


def _why(node: str, reason: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Why a tablet waits, with the node that is healed. Then the same text without the parts that differ from
    tablet to tablet.
    """
    why, name = with_names(reason, names), _name(node, names)
    why = f"{name}: {why}" if node and name not in why else why
    return why, _same(why)


def _same(text: str) -> str:
    """The reason without the parts that differ between replicas and rounds."""
    return _NUMBERS.sub("", _REPLICA.sub("", text))
