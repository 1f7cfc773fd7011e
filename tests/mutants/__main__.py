"""`python -m tests.mutants [--only N,N] [--share K/N] [--jobs J] [--list]`: plant faults, one at a time, and see which
test fails.

Each fault is planted in a copy of the tree. Exit status 1 if a fault survives, if its tests could not judge it, if they
fail without it, or if its old line does not stand exactly once.
"""

from __future__ import annotations

import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from tests.mutants.faults import ROOT, Fault, outdated, read_faults, share
from tests.mutants.plant import JAR, Tree, Verdict

LIMIT_S = 120.0
"""For the tests of one fault, which take seconds: who takes that long hangs."""
JAVA_LIMIT_S = 600.0
"""For those of a fault in Java: they start a Spark and a cluster."""
BASELINE_LIMIT_S = 1800.0
"""For all tests that saw a fault, without one."""


def run(
    faults: list[Fault], jobs: int, *, tell: Callable[[Verdict], None] = lambda verdict: None
) -> list[Verdict]:
    """Judge each fault, `jobs` at once, each job in a tree of its own; in the order of their numbers."""
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        waiting.put(fault)
    verdicts: list[Verdict] = []
    errors: list[Exception] = []

    def work(directory: Path) -> None:
        try:
            tree = Tree(directory)
            while not errors:
                fault = waiting.get_nowait()
                verdict = tree.judge(fault, JAVA_LIMIT_S if fault.is_java else LIMIT_S)
                verdicts.append(verdict)
                tell(verdict)
        except queue.Empty:
            return
        except Exception as exc:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(exc)

    with tempfile.TemporaryDirectory(prefix="stele-mutants-") as directory:
        threads = [
            threading.Thread(target=work, args=(Path(directory) / f"tree-{n}",), name=f"mutants-{n}")
            for n in range(min(jobs, len(faults)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return sorted(verdicts, key=lambda verdict: verdict.fault.number)


def unproven(verdicts: list[Verdict]) -> list[Verdict]:
    """The same verdicts. A test that fails without a fault, too, has judged nothing.

    Each test that saw a fault runs once without it; those that fail run again alone, so that a busy machine is not
    taken for a broken test.
    """
    tests = tuple(dict.fromkeys(v.saw for v in verdicts if "::" in v.saw))
    if not tests:
        return verdicts
    with tempfile.TemporaryDirectory(prefix="stele-mutants-") as directory:
        tree = Tree(Path(directory) / "tree")
        failing = {t for t in tree.failing(tests, BASELINE_LIMIT_S) if tree.failing((t,), JAVA_LIMIT_S)}
    return [
        replace(v, saw="", broken=f"{v.saw} fails without the fault, too") if v.saw in failing else v
        for v in verdicts
    ]


def row(verdict: Verdict) -> str:
    """One line of the table."""
    fault = verdict.fault
    saw = verdict.saw or ("NOT JUDGED" if verdict.broken else "SURVIVED")
    return f"{fault.number:>4}  {fault.promise}\n      {fault.file}\n      {verdict.seconds:5.1f} s  {saw}"


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> frozenset[int]:
    try:
        return frozenset(int(part) for part in value.split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{value!r}: expected numbers of the list, as 3,17") from None


def _share(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    number, slash, of = value.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and int(of) > 0):
        raise click.BadParameter(f"{value!r}: expected K/N, as 3/10")
    return int(number), int(of)


@click.command(help=__doc__)
@click.option("--only", default="", callback=_numbers, help="These numbers of the list, as 3,17.")
@click.option("--share", "part", default="0/1", callback=_share, help="Share K of N, as 3/10.")
@click.option("--jobs", default=2, type=click.IntRange(1), help="How many are judged at once.")
@click.option("--list", "listing", is_flag=True, help="Print the list and run nothing.")
def main(only: frozenset[int], part: tuple[int, int], jobs: int, listing: bool) -> None:
    faults = read_faults()
    if unknown := only - {fault.number for fault in faults}:
        raise click.BadParameter(f"no fault {min(unknown)}: the list has 1 to {len(faults)}")
    wrong = outdated(faults)
    chosen = [f for f in share(faults, *part) if not only or f.number in only]
    if listing:
        for fault in chosen:
            click.echo(
                f"{fault.number:>4}  {fault.promise}\n      {fault.file}\n      {' '.join(fault.tests)}"
            )
    for line in wrong:
        click.echo(line, err=True)
    if listing or wrong:
        sys.exit(bool(wrong))
    if not (ROOT / JAR).exists():
        java = [fault for fault in chosen if fault.is_java]
        chosen = [fault for fault in chosen if not fault.is_java]
        if java and only:
            raise click.ClickException(
                f"fault {java[0].number} is in Java, and the JVM reader is not built: make jar"
            )
        if java:
            told = f"{len(java)} faults in Java are left out, since the JVM reader is not built: make jar"
            click.echo(told, err=True)
    begun = time.monotonic()
    verdicts = unproven(run(chosen, jobs, tell=lambda verdict: click.echo(row(verdict))))
    survivors = [verdict for verdict in verdicts if verdict.survived]
    for verdict in survivors:
        click.echo(f"\n{row(verdict)}\n{verdict.broken}", err=True)
    seconds = time.monotonic() - begun
    click.echo(f"{len(verdicts)} faults, {len(survivors)} survived, {seconds:.0f} s")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
