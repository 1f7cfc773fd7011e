"""`python -m tests.nodesim --seeds N [--start S] [--jobs J]`: run many seeds of whole simulated nodes; print failures, then
how often each kind of trouble was met.

`--seed N` runs one and prints its whole story. `--planted` plants each known fault and prints after how many seeds it is
found. Exits 1 if a seed failed, or a planted fault was not found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context

from tests.nodesim.bugs import BUGS, Bug
from tests.nodesim.world import SimulationFailure, World, run_seed, say_less, tell_seed
from tests.sim.plan import draw_plan

Result = tuple[int, int, Counter[str], str]


def _results(seeds: range, jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with get_context("spawn").Pool(jobs, say_less) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)


def _tell(seed: int) -> int:
    try:
        for part in tell_seed(seed):
            print(part)
    except SimulationFailure as exc:
        print(f"FAILED {exc}")
        return 1
    return 0


def found_after(bug: Bug, first: int, seeds_max: int) -> tuple[int, str] | None:
    """(how many seeds from `first` it takes until a run fails with the bug planted, what is told); None: more."""
    for count, seed in enumerate(range(first, first + seeds_max), 1):
        try:
            with bug.planted():
                World(draw_plan(seed)).run()
        except SimulationFailure as exc:
            text = str(exc)
            return count, text[text.rindex("\nseed ") + 1 :].split("\n", 1)[0]
    return None


def _planted(first: int, seeds_max: int) -> int:
    unseen = 0
    for bug in BUGS:
        found = found_after(bug, max(first, bug.first), seeds_max)
        unseen += found is None
        print(
            f"{bug.label:<32} {f'found after {found[0]} seeds: {found[1]}' if found else 'NOT FOUND'}"[:200],
            flush=True,
        )
    return 1 if unseen else 0


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.nodesim", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=100, help="how many seeds; with --planted, at most so many for each"
    )
    parser.add_argument("--start", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="this one alone, with its whole story")
    parser.add_argument("--planted", action="store_true", help="plant each known fault, and see it found")
    arguments = parser.parse_args()
    say_less()
    if arguments.seed is not None:
        return _tell(arguments.seed)
    if arguments.planted:
        return _planted(arguments.start, arguments.seeds)
    began = time.monotonic()
    failed: list[int] = []
    met: Counter[str] = Counter()
    writes = 0
    for seed, acknowledged, of_seed, failure in _results(
        range(arguments.start, arguments.start + arguments.seeds), arguments.jobs
    ):
        writes += acknowledged
        met += of_seed
        if failure:
            failed.append(seed)
            what = failure[failure.rindex("\nseed ") + 1 :]
            print(
                f"FAILED seed {seed}; its story: python -m tests.nodesim --seed {seed}\n{what}\n", flush=True
            )
    for what, count in sorted(met.items()):
        print(f"met {count:>8} times: {what}")
    took = time.monotonic() - began
    print(
        f"{arguments.seeds} seeds from {arguments.start}: {len(failed)} failed {sorted(failed)}, {writes} acknowledged "
        f"writes, {took:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
