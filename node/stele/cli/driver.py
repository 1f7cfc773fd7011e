"""`stele driver run`: the driver without an operator."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import click

from stele.cli.errors import INTERRUPTED
from stele.cli.options import json_option, masters_option
from stele.cli.output import say, show_json

if TYPE_CHECKING:
    from stele.driver.copy_checks import CopyCheck
    from stele.driver.progress import Progress


@click.command()
@masters_option
@click.option(
    "--until-healthy",
    is_flag=True,
    help="End when nothing is left to do and no tablet waits for a silent node.",
)
@click.option(
    "--dead-after",
    "dead_after_s",
    type=click.FloatRange(min=3, max=86_400),
    default=30.0,
    show_default=True,
    help="Seconds without a heartbeat after which a node counts as lost; nodes send one each second.",
)
@click.option(
    "--copies", type=click.IntRange(min=1), default=4, show_default=True, help="Copies at once, at most."
)
@click.option(
    "--max-lost-nodes",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="If more nodes than this are silent, do nothing.",
)
@click.option(
    "--balance-leaders/--no-balance-leaders",
    default=True,
    show_default=True,
    help="While nothing heals, spread leaders over the nodes.",
)
@click.option(
    "--rebalance/--no-rebalance",
    default=True,
    show_default=True,
    help="While nothing heals, move replicas so that nodes have equal shares.",
)
@click.option(
    "--override",
    is_flag=True,
    help="Work also while a TabletCluster hibernates or wakes, which holds drivers back.",
)
@click.option("--lost", multiple=True, metavar="HEX32", help="A node whose volume is known to be gone.")
@json_option
def run(
    masters: str,
    until_healthy: bool,
    dead_after_s: float,
    copies: int,
    max_lost_nodes: int,
    balance_leaders: bool,
    rebalance: bool,
    override: bool,
    lost: tuple[str, ...],
    as_json: bool,
) -> None:
    """Replace the replicas of lost nodes until stopped, or (--until-healthy) until all tablets are healthy.

    Then it spreads replicas and leaders: no node leads more than one tablet over its share. It needs the
    driver claim, so it does nothing while an operator holds the claim.

    Example: stele driver run --until-healthy --dead-after 10
    """
    from stele.driver.main import run as drive
    from stele.driver.policy import Policy
    from stele.model.errors import Rejected
    from stele.model.ids import is_id
    from stele.rpc.logging import setup
    from stele.rpc.masters import parse_masters

    if wrong := [node for node in lost if not is_id(node)]:
        raise Rejected(
            f"--lost {wrong[0]}: expected all 32 digits of a node's id, as `stele ksck --json` has it"
        )
    setup(level="warning")  # each step is printed to standard output already
    policy = Policy(
        dead_after_ms=int(dead_after_s * 1_000),
        lost=frozenset(lost),
        max_lost_nodes=max_lost_nodes,
        max_copies=copies,
        balance_leaders=balance_leaders,
        rebalance=rebalance,
    )

    steps = 0

    def show(progress: Progress) -> None:
        nonlocal steps
        steps += 1
        show_step(progress, as_json)

    async def until_told() -> None:
        driving = asyncio.ensure_future(
            drive(
                parse_masters(masters),
                policy,
                until_healthy=until_healthy,
                override_held=override,
                on_progress=show,
                on_copy=lambda check: show_check(check, as_json),
            )
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, driving.cancel)
        await asyncio.wait(
            [driving]
        )  # on cancellation it releases its claim, so that the next driver need not wait
        if not driving.cancelled():
            driving.result()
            done = f"ended after {steps} steps: nothing is left to do" if steps else "there was nothing to do"
            if as_json:
                show_json({"done": True, "steps": steps}, one_line=True)
            else:
                say(f"{done}; `stele ksck` shows the cluster's health")
        elif until_healthy:
            sys.exit(INTERRUPTED)

    asyncio.run(until_told())


def show_check(check: CopyCheck, as_json: bool) -> None:
    """Print how a new replica compares with another one. One that differs, or that was not compared, also to standard error."""
    if not as_json:
        say(f"compared: {check.said}", err=not check.equal)
        return
    (rows, checksum), (other_rows, other_checksum) = check.sums
    told = {
        "step": "Compared", "tablet": check.made.tablet_id, "table": check.made.table_name, "node": check.made.new.node_id,
        "with": check.other.node_id, "equal": None if check.problem else check.equal, "snapshot": str(check.record.snapshot),
        "index": check.record.index, "rows": rows, "checksum": f"{checksum:016x}", "otherRows": other_rows, "otherChecksum": f"{other_checksum:016x}",
        "error": check.problem or None, "cause": check.made.cause or None,
    }  # fmt: skip
    show_json(told, one_line=True)


def show_step(progress: Progress, as_json: bool = False) -> None:
    """Print one step of a driver: a line for people, or an object in one line for programs."""
    if as_json:
        show_json(
            {
                "tablet": progress.tablet_id or None,
                "table": progress.table_name or None,
                "node": progress.node_id or None,
                "step": progress.step,
                "reason": progress.reason,
                "bytesDone": progress.bytes_done,
                "bytesTotal": progress.bytes_total,
                "secondsLeft": progress.eta_s,
                "error": progress.error or None,
                "cause": progress.cause or None,
            },
            one_line=True,
        )
        return
    copied = f" {progress.bytes_done:,}/{progress.bytes_total:,} bytes" if progress.bytes_total else ""
    left = f", {progress.eta_s:.0f} s left" if progress.eta_s is not None else ""
    error = f" ({progress.error})" if progress.error else ""
    cause = f" ({progress.cause})" if progress.cause else ""
    say(f"{progress.where}: {progress.step}{copied}{left}, {progress.reason}{error}{cause}")
