"""The loop of `stele driver run`, a driver without an operator.

Invariant: the driver may be stopped at any moment, because everything it has begun is recorded in the
catalog.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from stele.driver.copy_checks import CopyCheck
from stele.driver.executor import Executor, StaleEpoch
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.progress import Progress
from stele.model.bounds import HOLDER_CHARS_MAX, cut
from stele.model.errors import SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity

log = structlog.get_logger("stele.driver")

PASS_INTERVAL_S = 0.5
IDLE_INTERVAL_S = 1.0


async def run(
    masters: Sequence[str],
    policy: Policy,
    *,
    holder: str = "",
    until_healthy: bool = False,
    override_held: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_copy: Callable[[CopyCheck], None] = lambda check: None,
) -> None:
    """Drive the cluster until cancelled.

    `until_healthy`: return once nothing is left to do and all copies are compared. It does not return while a
    node is silent or a leader does not reach a replica, since that may soon cause work. `on_copy`: called
    with each comparison of a replica that a driver made. `override_held`: drive although the policy in the
    catalog holds drivers back.

    Raises:
        StaleEpoch: another driver has taken the claim.
    """
    pool = ChannelPool(Identity())
    name = cut(holder or f"cli/{socket.gethostname()}/{os.getpid()}", HOLDER_CHARS_MAX)
    executor = Executor(
        pool, masters, holder=name, on_progress=on_progress, override_held=override_held, on_copy=on_copy
    )
    soon_ms = min(policy.dead_after_ms, policy.lost_after_ms)
    soon = replace(policy, dead_after_ms=soon_ms, unreached_after_ms=0, balance_leaders=False)
    told = ""
    try:
        while True:
            try:
                report = await executor.run_once(policy)
                told = ""
            except StaleEpoch:
                raise
            except SteleError as exc:
                if str(exc) != told:
                    told = str(exc)
                    log.warning("the driver cannot run a round; it keeps trying", error=told)
                await asyncio.sleep(IDLE_INTERVAL_S)
                continue
            at_rest = report.idle and not report.leaders_rest and not executor.checks.busy
            if until_healthy and at_rest and not plan(report.view, soon):
                return
            await asyncio.sleep(IDLE_INTERVAL_S if report.idle else PASS_INTERVAL_S)
    finally:
        await executor.close()
        await pool.close()
