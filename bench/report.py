"""The table that `python -m bench` prints. Pure.

Invariant: a row without a measurement says why, instead of leaving a number out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Measure:
    """One line: what was asked for, what came out. `value` compares with the etcd peer's, higher is better if `rate`."""

    name: str
    wanted: str
    design: str
    result: str = "not measured"
    value: float = 0.0
    rate: bool = True
    etcd_result: str = ""
    etcd_value: float = 0.0

    @property
    def ratio(self) -> str:
        """How many times better than etcd."""
        if not self.value or not self.etcd_value:
            return ""
        ratio = self.value / self.etcd_value if self.rate else self.etcd_value / self.value
        return f"{ratio:.1f}x"


@dataclass(slots=True)
class Report:
    """Measures in the order in which they are printed."""

    measures: dict[str, Measure] = field(default_factory=dict)

    def add(self, key: str, name: str, wanted: str, design: str, *, rate: bool = True) -> None:
        """Announce a measure."""
        self.measures[key] = Measure(name, wanted, design, rate=rate)

    def put(self, key: str, result: str, value: float = 0.0) -> None:
        """What Stele did."""
        self.measures[key].result, self.measures[key].value = result, value

    def put_etcd(self, key: str, result: str, value: float) -> None:
        """What etcd did."""
        self.measures[key].etcd_result, self.measures[key].etcd_value = result, value

    def table(self) -> str:
        """The whole as a Markdown table."""
        peer = any(m.etcd_result for m in self.measures.values())
        head = ["measure", "now at least", "design must allow", "Stele"] + (["etcd", "ratio"] if peer else [])
        rows = [
            [m.name, m.wanted, m.design, m.result] + ([m.etcd_result or "-", m.ratio or "-"] if peer else [])
            for m in self.measures.values()
        ]
        return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines
    )


def milliseconds(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1_000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
