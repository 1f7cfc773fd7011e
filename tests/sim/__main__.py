"""`python -m tests.sim --seeds N [--start S] [--jobs J]`: run many seeds of simulated nodes; print failures, then how often
each kind of fault was met.

A fifth of the seeds have one of the weathers that no seed draws by itself. `--weather NAME` gives all seeds this one.
`--seed N` runs one and prints its whole story; with `--shrink` the story of the smallest world that fails alike.
`--planted` plants each known fault and prints after how many seeds it is found. `--coverage` runs the seeds under a tracer
and prints the share of production's lines that ran. Exits 1 if a seed failed, or a planted fault was not found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context

from tests.sim.bugs import BUGS
from tests.sim.draw import draw_plan, weather_of
from tests.sim.lines import LinesRun
from tests.sim.plan import Plan, Weather
from tests.sim.shrink import shrink
from tests.sim.world import SimulationFailure, World, run_seed, say_less

_MEASURED = ("raft", "consensus", "wal", "tablet", "driver")
Result = tuple[int, int, Counter[str], str]


def _plan(seed: int, weather: Weather | None) -> Plan:
    return draw_plan(seed, weather or weather_of(seed))


def _results(plans: Iterator[Plan], jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(run_seed, plans)
        return
    with get_context("spawn").Pool(jobs, say_less) as pool:
        yield from pool.imap_unordered(run_seed, plans, chunksize=4)


def _commit() -> str:
    """The commit of the tree, so that a failure can be repeated."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return git.stdout.strip() or "unknown"


def _tell(plan: Plan) -> int:
    world = World(plan, story_lines=None)
    try:
        result = world.run()
    except SimulationFailure as exc:
        print(f"{exc}\nFAILED {exc.what}")
        return 1
    print(f"{world.story()}\n{world.plan}\n{result}")
    return 0


def _shrink(plan: Plan) -> int:
    found = shrink(plan)
    if found is None:
        print(f"seed {plan.seed} does not fail")
        return 0
    print(found.failure)
    print(f"without: {', '.join(found.without) or 'nothing'}")
    print(f"{found.strikes - len(found.spared)} of {found.strikes} strikes are left, after {found.runs} runs")
    print(f"FAILED {found.failure.what}")
    return 1


def _planted(first: int, seeds_max: int) -> int:
    print(f"{'planted fault':<38} {'seeds':>6}  told")
    unseen = 0
    for bug in BUGS:
        found = bug.found_after(max(first, bug.first), seeds_max)
        unseen += found is None
        count, told = found or (f"> {seeds_max}", "NOT FOUND")
        print(f"{bug.label:<38} {count:>6}  {told}"[:200], flush=True)
    print(f"{len(BUGS) - unseen} of {len(BUGS)} planted faults found")
    return 1 if unseen else 0


def _run(seeds: range, jobs: int, weather: Weather | None) -> int:
    again = f" --weather {weather.name.lower()}" if weather else ""
    plans = (_plan(seed, weather) for seed in seeds)
    began = last = time.monotonic()
    failed: list[int] = []
    met: Counter[str] = Counter()
    writes = 0
    for done, (seed, acknowledged, of_seed, failure) in enumerate(_results(plans, jobs), 1):
        writes += acknowledged
        met += of_seed
        if failure:
            failed.append(seed)
            print(
                f"FAILED {failure}\nat {_commit()}; its story: python -m tests.sim --seed {seed}{again}\n",
                flush=True,
            )
        now = time.monotonic()
        if now - last > 60:
            last = now
            print(
                f"{done} of {len(seeds)} seeds, {len(failed)} failed, {done / (now - began):.1f} seeds/s",
                flush=True,
            )
    for what, count in sorted(met.items()):
        print(f"met {count:>8} times: {what}")
    took = time.monotonic() - began
    print(
        f"{len(seeds)} seeds from {seeds.start}: {len(failed)} failed {sorted(failed)}, {writes} "
        f"acknowledged writes, "
        f"{took:.0f} s"
    )
    return 1 if failed else 0


def _measured(seeds: range, weather: Weather | None) -> int:
    with LinesRun(_MEASURED) as lines:
        code = _run(seeds, 1, weather)
    for package, (ran, of) in lines.shares().items():
        print(f"{ran / of:>6.1%} of the lines of stele.{package} ran ({ran} of {of})")
    for path, count in lines.missing().most_common(8):
        print(f"{count:>6} lines of {path} did not run")
    return code


def main() -> int:
    """Parse the arguments, run the seeds, print the result."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=100, help="how many seeds; with --planted, at most so many for each"
    )
    parser.add_argument("--start", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="this one alone, with its whole story")
    parser.add_argument(
        "--shrink", action="store_true", help="with --seed: remove the faults that do not matter"
    )
    parser.add_argument(
        "--planted", action="store_true", help="plant each known fault, and count the seeds until it is found"
    )
    parser.add_argument(
        "--coverage", action="store_true", help="print the share of production's lines that ran; slow"
    )
    parser.add_argument(
        "--weather",
        choices=[w.name.lower() for w in Weather],
        help="run all seeds in this weather; tests/sim/plan.py says what each is",
    )
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: expected 1 or more")
    say_less()
    weather = Weather[arguments.weather.upper()] if arguments.weather else None
    if arguments.seed is not None:
        plan = _plan(arguments.seed, weather)
        return _shrink(plan) if arguments.shrink else _tell(plan)
    if arguments.planted:
        return _planted(arguments.start, arguments.seeds)
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    return _measured(seeds, weather) if arguments.coverage else _run(seeds, arguments.jobs, weather)


if __name__ == "__main__":
    sys.exit(main())
