"""`python -m tests.sim --seeds N [--start S] [--jobs J]`: run many seeds; print progress, failures, a closing line.

`--seed N` runs one and prints its whole story, whether it fails or not. Exits 1 if any seed failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context

from tests.sim.resting import say_less
from tests.sim.world import SimulationFailure, run_seed, tell_seed


def _results(seeds: range, jobs: int) -> Iterator[tuple[int, int, str]]:
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with get_context("spawn").Pool(jobs, say_less) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=8)


def _tell(seed: int) -> int:
    try:
        for part in tell_seed(seed):
            print(part)
    except SimulationFailure as exc:
        print(f"FAILED {exc}")
        return 1
    return 0


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--start", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="this one alone, with its whole story")
    arguments = parser.parse_args()
    say_less()
    if arguments.seed is not None:
        return _tell(arguments.seed)
    began = last = time.monotonic()
    failed: list[int] = []
    writes = 0
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    for done, (seed, acknowledged, failure) in enumerate(_results(seeds, arguments.jobs), start=1):
        writes += acknowledged
        if failure:
            failed.append(seed)
            what = failure[failure.rindex("\nseed ") + 1 :]
            print(f"FAILED seed {seed}; its story: python -m tests.sim --seed {seed}\n{what}\n", flush=True)
        now = time.monotonic()
        if now - last > 10:
            last = now
            print(
                f"{done} of {arguments.seeds} seeds, {len(failed)} failed, {done / (now - began):.1f} seeds/s",
                flush=True,
            )
    took = time.monotonic() - began
    print(
        f"{arguments.seeds} seeds from {arguments.start}: {len(failed)} failed {sorted(failed)}, {writes} acknowledged writes, {took:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
