"""Takes measures by turns: in each round every system once, the first of a round being the last of the next.

Called by measures.py. Invariant: what a system does before and after a run is not timed, and a wrong result ends the
bench.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.spark.processor import Processor


def nothing() -> None:
    """Do nothing before or after a run."""


@dataclass(frozen=True, slots=True)
class System:
    """One system in one measure. `run()` is timed; the result must be `expected`."""

    name: str
    run: Callable[[], object]
    expected: object = None
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds: on the clock, of all processors, and of masters and nodes among them."""

    wall_s: float
    processor_s: float
    cluster_s: float


@dataclass(frozen=True, slots=True)
class Median:
    """The median of some runs, each figure by itself."""

    wall_s: float
    processor_s: float
    cluster_s: float

    @staticmethod
    def of(runs: Sequence[Run]) -> Median:
        """The median of one run or more."""
        return Median(
            statistics.median(run.wall_s for run in runs),
            statistics.median(run.processor_s for run in runs),
            statistics.median(run.cluster_s for run in runs),
        )

    def told(self, rows: int) -> str:
        """Describe the run: rows per second, and processor time for each row, of everything, and of masters
        and nodes."""
        each = 1e6 / rows
        rate = rows / self.wall_s / 1e6
        return f"{rate:.3g}M rows/s; {self.processor_s * each:.2f} ({self.cluster_s * each:.2f}) us"


class Turns:
    """Runs systems by turns. `progress(text)` is told each run."""

    def __init__(self, processor: Processor, rounds: int, progress: Callable[[str], None]) -> None:
        self._processor = processor
        self._rounds = rounds
        self._progress = progress

    def take(self, measure: str, systems: Sequence[System]) -> dict[str, Median]:
        """The medians of the systems by name. Before several rounds comes a run of each that does not count.

        Raises:
            RuntimeError: a result was wrong.
        """
        if self._rounds > 1:
            for system in systems:
                self._run(measure, "before the first round", system)
        found: dict[str, list[Run]] = {system.name: [] for system in systems}
        for turn in range(self._rounds):
            at = turn % len(systems)
            for system in (*systems[at:], *systems[:at]):
                found[system.name].append(self._run(measure, f"round {turn + 1}", system))
        return {name: Median.of(runs) for name, runs in found.items()}

    def _run(self, measure: str, turn: str, system: System) -> Run:
        system.before()
        self._processor.settle()
        before, started = self._processor.look(), time.perf_counter()
        result = system.run()
        wall_s = time.perf_counter() - started
        spent = self._processor.look().since(before)
        if result != system.expected:
            raise RuntimeError(f"{measure}, {system.name}: got {result!r}; expected {system.expected!r}")
        system.after()
        self._progress(
            f"{measure}, {turn}, {system.name}: {wall_s:.3f} s; {spent.all_s:.2f} s of processors, "
            f"{spent.cluster_s:.2f} s of them in the cluster"
        )
        return Run(wall_s, spent.all_s, spent.cluster_s)


def to_stderr(text: str) -> None:
    """Print progress on standard error, because the table is on standard output."""
    print(text, file=sys.stderr, flush=True)
