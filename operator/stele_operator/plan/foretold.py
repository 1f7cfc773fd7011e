"""What a new spec would do, as values and as text. Made by rehearsal; shown by `stele-operator plan` and in
status.plan. Pure.

Invariant: the text is the same wherever it is shown. One line names at most NAMED_MAX things.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, ClassVar

from stele.model.amounts import byte_size, duration, plural

NAMED_MAX = 20


@dataclass(frozen=True, slots=True)
class Restart:
    """A pod that is made again on its volume. `beside`: how many other pods are away at that time.
    `no_spare`: how many tablets could not lose another voter meanwhile. `stopped`: tablets that cannot be
    used meanwhile. `leaders`: how many leaders the pod hands over first.
    """

    kind: ClassVar[str] = "restart"
    pod: str
    machine: str
    leaders: int
    no_spare: int
    stopped: tuple[str, ...]
    beside: int = 0


@dataclass(frozen=True, slots=True)
class NewMember:
    """A new member. `machine`: an example of where it may run; "" if no machine can take it."""

    kind: ClassVar[str] = "new"
    pod: str
    zone: str
    machine: str


@dataclass(frozen=True, slots=True)
class NewReplica:
    """A replica that is copied. `from_pod`: the pod whose replica it replaces; "" if it is an additional
    replica.
    """

    kind: ClassVar[str] = "copy"
    tablet: str
    table: str
    from_pod: str
    to_pod: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    """An event that is described by a sentence. `kind`: one word, as for other events."""

    kind: str
    pod: str
    text: str


Event = Restart | NewMember | NewReplica | Said


@dataclass(frozen=True, slots=True)
class Unmet:
    """Something that the spec asks for and that would not be reached. `group` and `member`: what it is about,
    or "". `already`: it is not reached now either.
    """

    reason: str
    message: str
    group: str = ""
    member: str = ""
    already: bool = False

    def is_as(self, other: Unmet) -> bool:
        """Whether both are about the same subject. For a member the messages may differ, because the
        simulated scheduler words its own.
        """
        same = (self.reason, self.group, self.member) == (other.reason, other.group, other.member)
        return same and (bool(self.member) or self.message == other.message)


@dataclass(frozen=True, slots=True)
class Foretold:
    """The forecast for one cluster. `refused`: faults for which the spec is not accepted; then nothing else
    is known.

    `events`: what happens, in order. `unmet`: what is accepted but not reached. `notes`: what else users
    should know. `weaker`: tables that can lose fewer replicas at the end than now. `sleeps`: nothing can be
    used until the cluster is woken. `copying_s`: the least time of all copies, in seconds. `restarting_s`:
    about the time of all restarts, in seconds. None means unknown. `anyway`: what would happen without the
    change too. `complete`: whether the rehearsal reached its end.
    """

    cluster: str
    refused: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    notes: tuple[str, ...] = ()
    weaker: tuple[str, ...] = ()
    sleeps: bool = False
    copying_s: float | None = None
    restarting_s: float | None = None
    anyway: tuple[str, ...] = ()
    complete: bool = True

    @property
    def fine(self) -> bool:
        """Whether the spec is reached, apart from what is unmet already, and every tablet can be used
        meanwhile.
        """
        fresh = any(not u.already for u in self.unmet)
        stops = any(e.stopped for e in self.events if isinstance(e, Restart))
        return self.complete and not (self.refused or fresh or stops or self.sleeps)

    @property
    def bytes_copied(self) -> int:
        """The bytes of all copies."""
        return sum(e.bytes for e in self.events if isinstance(e, NewReplica))

    def lines(self) -> list[str]:
        """The whole answer as text."""
        lines = [f"{self.cluster}: what this spec would do. Nothing has been changed."]
        if self.refused:
            return [*lines, "REFUSED:", *(f"  {fault}" for fault in self.refused)]
        order = self.order()
        lines += [f"{number}. {line}" for number, line in enumerate(order, 1)]
        lines += [f"AT RISK: {line}" for line in self._risks()]
        lines += [f"AT THE END: {line}" for line in self.weaker]
        lines += [
            f"NOT REACHED: {_about(u)}{u.message} ({u.reason}{', as now' if u.already else ''})"
            for u in self.unmet
        ]
        lines += [f"NOTE: {note}" for note in self.notes]
        if not self.complete:
            lines.append("NOT KNOWN: what follows, because the rehearsal did not end")
        same = bool(order) and list(self.anyway) == order
        lines += [f"without this change too: {line}" for line in (["all of it"] if same else self.anyway)]
        if not (order or self.unmet or self.notes):
            lines.append("nothing: the cluster is as this spec asks")
        if self.fine:
            but = "apart from what is so now, " if self.unmet else ""
            lines.append(f"OK: {but}the spec is reached, and every tablet can be used meanwhile")
        return lines

    def as_json(self) -> dict[str, Any]:
        """The whole answer for programs, with the text."""
        events = [{"kind": e.kind, **asdict(e)} for e in self.events]
        totals = {"fine": self.fine, "bytes_copied": self.bytes_copied, "text": self.lines()}
        return {**totals, **asdict(self), "events": events}

    def order(self) -> list[str]:
        """What happens, in order, as lines. Neighbouring events of one kind share a line."""
        return [
            _line(kind, list(events), self) for kind, events in groupby(self.events, key=lambda e: e.kind)
        ]

    def _risks(self) -> Iterator[str]:
        if self.sleeps:
            yield "no tablet can be used until the cluster is woken"
        restarts = [e for e in self.events if isinstance(e, Restart)]
        stopped = dict.fromkeys(name for e in restarts for name in e.stopped)
        if stopped:
            yield f"these cannot be used while their pod restarts: {named(list(stopped))}"
        if most := max((e.no_spare for e in restarts), default=0):
            yield f"while pods restart ({_at_once(restarts)}), {plural(most, 'tablet')} at most could not lose another voter"


def named(texts: Sequence[str]) -> str:
    """The first texts and the number of the rest, like "a, b and 3 more"."""
    more = f" and {len(texts) - NAMED_MAX} more" if len(texts) > NAMED_MAX else ""
    return ", ".join(texts[:NAMED_MAX]) + more


def _about(unmet: Unmet) -> str:
    return f"TabletGroup {unmet.group}: " if unmet.group else ""


def _line(kind: str, events: Sequence[Event], told: Foretold) -> str:
    if kind == Restart.kind:
        restarts = [e for e in events if isinstance(e, Restart)]
        all_of_them = len(restarts) == sum(isinstance(e, Restart) for e in told.events)
        about = f", about {duration(told.restarting_s)}" if told.restarting_s and all_of_them else ""
        one = f", {_at_once(restarts)}" if len(restarts) > 1 else ""
        leaders = sum(e.leaders for e in restarts)
        hands = f"; they hand over {plural(leaders, 'leader')} before" if leaders else ""
        pods = named([e.pod for e in restarts])
        volumes = "its volume" if len(restarts) == 1 else "their volumes"
        return f"{plural(len(restarts), 'pod')} made again on {volumes}{one}{about}: {pods}{hands}"
    if kind == NewMember.kind:
        return f"new: {named([_member(e) for e in events if isinstance(e, NewMember)])}"
    if kind == NewReplica.kind:
        return _copies([e for e in events if isinstance(e, NewReplica)], told)
    said = [e for e in events if isinstance(e, Said)]
    texts: dict[str, list[str]] = {}
    for event in said:
        texts.setdefault(event.text, []).append(event.pod)
    return "; ".join(
        f"{named(pods)}: {text}" if all(pods) else (text if len(pods) == 1 else f"{text} ({len(pods)} times)")
        for text, pods in texts.items()
    )


def _at_once(restarts: Sequence[Restart]) -> str:
    most = 1 + max(e.beside for e in restarts)
    return "one at a time" if most == 1 else f"at most {most} at once"


def _member(member: NewMember) -> str:
    where = [f"zone {member.zone}"] if member.zone else []
    where.append(f"on a machine such as {member.machine}" if member.machine else "no machine for it")
    return f"{member.pod} ({', '.join(where)})"


def _copies(copies: Sequence[NewReplica], told: Foretold) -> str:
    count: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for copy in copies:
        count[copy.from_pod, copy.to_pod] += 1
        moved[copy.from_pod, copy.to_pod] += copy.bytes
    all_of_them = len(copies) == sum(isinstance(e, NewReplica) for e in told.events)
    least = f", in {duration(told.copying_s)} at least" if told.copying_s and all_of_them else ""
    ways = [
        f"{f'{source} to {target}' if source else f'one more on {target}'}: {number} ({byte_size(moved[source, target])})"
        for (source, target), number in sorted(count.items())
    ]
    total = byte_size(sum(c.bytes for c in copies))
    return f"{plural(len(copies), 'replica')} copied, {total}{least}: {named(ways)}"
