"""`python -m tests.linear --rounds 20 [--seed N] [--seconds 15]`: real processes, faults, clients; is it linearizable?

A round is a cluster, drawn from its seed, under faults for some seconds; then everything is mended, every row is read
once more, all replicas must hold the same, and each row's history must have an order that explains it. The seed of the
next round is one higher.

Exit status 1 if it has none; then the seed, the row's history around the contradiction and the folder with all logs are
printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.driver.progress import Progress
from stele.model.errors import SteleError
from stele.rpc.logging import setup
from tests.harness.compare import rows_that_all_replicas_hold
from tests.harness.processes import Cluster
from tests.linear import cuts, network, report
from tests.linear.checker import Undecided, by_key, contradiction
from tests.linear.history import Operation
from tests.linear.keys import KeyWork
from tests.linear.nemesis import Nemesis
from tests.linear.plan import CUTS, Plan, draw
from tests.linear.record import Record
from tests.linear.workload import Workload

SETTLED_WITHIN_S = 120.0
HEALED_WITHIN_S = 150.0
_POLICY = Policy(dead_after_ms=2_500, lost_after_ms=1_500, max_lost_nodes=1, max_copies=8)


class Failure(Exception):
    """No order explains what clients were told, or the cluster did not come back."""


async def play(folder: Path, plan: Plan, tell: Callable[[str], None]) -> Record:
    """One round; what its clients did. `tell` takes the story, line by line.

    Raises:
        Failure: with what was wrong.
    """
    cutting = any(fault.deed in CUTS for fault in plan.faults)
    lease = (f"--leader-lease-ms={plan.lease_ms}",)
    async with Cluster(
        folder, masters=plan.masters, nodes=plan.nodes, groups=cutting, arguments=lease
    ) as cluster:
        with network.Network(cluster) if cutting else contextlib.nullcontext() as cutter:
            load = Workload(cluster.master_addresses, plan.seed)
            keys, record = KeyWork(cluster.master_addresses), load.record

            def say(words: str) -> None:
                tell(f"{record.now():9.4f} {words}")

            driver: asyncio.Task[None] | None = None
            try:
                await load.prepare(plan.tablets)
                await keys.prepare()
                if plan.healing:
                    driver = asyncio.create_task(_heal(cluster, say))

                nemesis = Nemesis(cluster, cutter, lambda: load.last.table.locations.tablets, say)
                try:
                    await asyncio.gather(
                        load.run(plan.seconds, filling=plan.filling),
                        keys.run(plan.seconds),
                        nemesis.run(plan.faults),
                    )
                finally:
                    await nemesis.end()
                say("all faults are over")
                await _settle(cluster, load, keys, nemesis.lost)
                record.surprises += keys.faults()
                if driver is not None and driver.done():
                    raise Failure(f"the driver ended by itself: {driver.exception()!r}")
                say(f"all rows were read again; {keys}")
            finally:
                if driver is not None:
                    driver.cancel()
                    await asyncio.gather(driver, return_exceptions=True)
                await load.close()
                await keys.close()
    return record


async def _heal(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Drive, and tell each step once."""
    told: set[tuple[str, str, str]] = set()

    def progress(step: Progress) -> None:
        this = (step.tablet_id, step.reason.split(":")[0], step.error)
        if this not in told:
            told.add(this)
            trouble = f" ({step.error})" if step.error else ""
            say(f"driver: tablet {step.tablet_id[:8]}: {step.step}, {step.reason}{trouble}")

    await drive(cluster.master_addresses, _POLICY, holder="linear", on_progress=progress)


async def _settle(cluster: Cluster, load: Workload, keys: KeyWork, lost: set[str]) -> None:
    living = [member for member in cluster.members if member.name not in lost]
    try:
        await cluster.wait_ready(*living, timeout_s=SETTLED_WITHIN_S)
        async with asyncio.timeout(SETTLED_WITHIN_S):
            await load.settle()
            await keys.settle()
        behind = asyncio.create_task(load.write_behind_history())
        try:
            table, client = load.last.table, load.last.client
            await rows_that_all_replicas_hold(client, table, timeout_s=HEALED_WITHIN_S)
        finally:
            behind.cancel()
            await asyncio.gather(behind, return_exceptions=True)
    except (RuntimeError, SteleError, TimeoutError, AssertionError) as exc:
        raise Failure(f"when all faults were over: {type(exc).__name__} {exc}") from exc


def judge(record: Record) -> list[str]:
    """What is wrong with what the clients were told, in words; nothing if all is well."""
    faults = list(record.surprises)
    for key, history in sorted(by_key(record.operations).items()):
        faults += _judge(key, history, "the beginning", "s")
    rows = [o for o in record.operations if o.key.startswith("row")]
    for key, history in sorted(cuts.in_hybrid_time(rows, record.scans, record.wall_us).items()):
        faults += _judge(key, history, "the beginning, by the rows' hybrid timestamps", "1/4096 µs")
    faults += [f"a scan shows row {key}, which nobody wrote" for key in cuts.strangers(rows, record.scans)]
    for one, other in cuts.unlike(record.scans):
        differing = sorted(
            k for k in one.rows.keys() | other.rows.keys() if one.rows.get(k) != other.rows.get(k)
        )
        faults.append(
            f"two scans at {one.snapshot}, by {one.ended:.3f} and {other.ended:.3f} s, differ: {differing}"
        )
    for write, scan in cuts.behind(rows, record.scans):
        faults.append(
            f"row {write.key} was written at {write.timestamp} by second {write.ended:.4f}; a snapshot that was "
            f"taken at the present, at second {scan.taken:.4f}, is {scan.snapshot}, below it"
        )
    return faults


def _judge(key: str, history: list[Operation], since: str, unit: str) -> list[str]:
    try:
        found = contradiction(history)
    except Undecided as exc:
        return [f"row {key} could not be judged: {exc}"]
    return [] if found is None else [report.told(found, since, unit)]


def run(folder: Path, seed: int, seconds: float, *, cutting: bool) -> str:
    """One round of a seed; a line about it.

    Raises:
        Failure: with the seed, what was wrong, and the story.
    """
    plan = draw(seed, seconds, cuts=cutting)
    story: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)

    def tell(line: str) -> None:
        story.append(line)
        with (folder / "story.log").open("a") as log:
            log.write(line + "\n")

    head = (
        f"seed {seed}: {plan.masters} masters, {plan.nodes} nodes, {plan.tablets} tablets, "
        f"{len(plan.faults)} faults{', healing' if plan.healing else ''}{', filling' if plan.filling else ''}"
        f"{f', leases of {plan.lease_ms} ms' if plan.lease_ms else ''}"
    )
    try:
        record = asyncio.run(play(folder, plan, tell))
        faults = judge(record)
    except (Failure, SteleError) as exc:
        faults, record = [str(exc)], None
    if faults:
        shown = "\n".join((head, *story, "", *faults))
        raise Failure(f"FAILED with {shown}\nlogs are in {folder}")
    assert record is not None
    return (
        f"{head}: {len(record.operations)} operations, {record.unknown} of unknown outcome, {record.not_done} not done, "
        f"{record.followed} reads at followers, "
        f"{len(record.scans)} scans"
    )


def regressions() -> list[tuple[int, float]]:
    """(seed, seconds) of the rounds that once found something."""
    lines = Path(__file__).with_name("regressions.txt").read_text().splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    return [(int(seed), float(seconds)) for seed, seconds, *_ in words]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=20, show_default=True)
@click.option("--seconds", default=15.0, show_default=True, help="How long faults strike in each round.")
@click.option("--seed", type=int, help="Of the first round; drawn if absent.")
@click.option("--regressions", "known", is_flag=True, help="Run what once found something instead.")
def main(rounds: int, seconds: float, seed: int | None, known: bool) -> None:
    """Check what clients of real processes are told under faults that seeds draw."""
    setup(level="error")  # of the driver and the clients here: the story has what they do
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # cuts of the network must not outlive this process
    first = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    why_not = network.unavailable()
    if why_not:
        click.echo(f"no cuts of the network: {why_not}")
    wanted = regressions() if known else [(number, seconds) for number in range(first, first + rounds)]
    failed = []
    for number, lasting in wanted:
        folder = Path(tempfile.mkdtemp(prefix=f"stele-linear-{number}-"))
        try:
            click.echo(run(folder, number, lasting, cutting=not why_not))
            shutil.rmtree(folder)
        except Failure as exc:
            click.echo(str(exc))
            failed.append(number)
    which = f": seeds {failed}" if failed else ""
    click.echo(f"{len(wanted) - len(failed)} passed, {len(failed)} failed{which}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
