"""The table that `python -m bench` prints. Pure.

Invariant: a row without a measurement says why, instead of leaving a number out; a system that did not run has no
column, and a note says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one system: as text, and as a number for comparison; 0 if the two are not comparable."""

    result: str
    value: float = 0.0


@dataclass(slots=True)
class Measure:
    """One line: what was asked for, and the results. Of two numbers the higher is better if `rate`, otherwise
    the lower."""

    name: str
    wanted: str
    design: str
    rate: bool = True
    of: str = ""  # the key of the measure that also produces this line
    stele: Found = Found("not measured")
    peers: dict[str, Found] = field(default_factory=dict)

    def ratio(self, peer: str) -> str:
        """How many times better than this peer."""
        theirs = self.peers.get(peer, Found("")).value
        if not self.stele.value or not theirs:
            return "-"
        return f"{self.stele.value / theirs if self.rate else theirs / self.stele.value:.1f}x"


@dataclass(slots=True)
class Report:
    """Measures in the order in which they are printed, and sentences to stand below them."""

    measures: dict[str, Measure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warning: str = ""
    """Add a note that a reader needs before the figures; it stands above the table."""

    def add(self, key: str, name: str, wanted: str, design: str, *, rate: bool = True, of: str = "") -> None:
        """Add a line for a measure."""
        self.measures[key] = Measure(name, wanted, design, rate, of)

    def put(self, key: str, result: str, value: float = 0.0) -> None:
        """Add Stele's result."""
        self.measures[key].stele = Found(result, value)

    def put_peer(self, peer: str, key: str, result: str, value: float = 0.0) -> None:
        """Add another system's result."""
        self.measures[key].peers[peer] = Found(result, value)

    def leave_out(self, chosen: Iterable[str]) -> None:
        """Mark all but the chosen measures as not asked for."""
        wanted = set(chosen)
        for key, measure in self.measures.items():
            if (measure.of or key) not in wanted:
                measure.stele = Found("not asked for")

    def table(self) -> str:
        """The whole report as a Markdown table, with the notes below it."""
        peers = list(dict.fromkeys(peer for m in self.measures.values() for peer in m.peers))
        head = ["measure", "now at least", "design must allow", "Stele"]
        head += [title for peer in peers for title in (peer, f"to {peer}")]
        rows = []
        for m in self.measures.values():
            row = [m.name, m.wanted, m.design, m.stele.result]
            for peer in peers:
                row += [m.peers.get(peer, Found("-")).result, m.ratio(peer)]
            rows.append(row)
        above = [f"{self.warning}\n"] if self.warning else []
        return "\n".join([*above, _markdown(head, rows), *(f"\n{note}" for note in self.notes)])


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines
    )


def milliseconds(seconds: float) -> str:
    """A time in readable units."""
    return f"{seconds * 1_000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
