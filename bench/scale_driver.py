"""The driver process of scale.py: `python -m bench.scale_driver MASTERS`. Prints a line of JSON for each pass.

It imports what a driver imports and no more, so its memory is a driver's. What an operator would tell users of a pass is
computed beside it, from the first pass on that has anything to tell, and counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from bench.processes import resident_bytes
from stele.driver.executor import Executor, Report
from stele.driver.policy import Policy
from stele.model.errors import SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity

if TYPE_CHECKING:
    from stele_operator.heals import Heals

POLICY = Policy(dead_after_ms=10_000, max_copies=8, balance_leaders=True, rebalance=True)
_PAUSE_S = 0.5


class Holds:
    """The longest time for which the event loop did not turn, in ms."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest_ms = max(self.longest_ms, (time.perf_counter() - before) * 1000 - 1)

    def take(self) -> float:
        """The longest since the last call."""
        found, self.longest_ms = self.longest_ms, 0.0
        return found


class Told:
    """What an operator would tell of the driver's passes: `events`, and writes of the cluster's `statuses`."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}
        self.statuses = 0
        self._heals: Heals | None = None
        self._status = ""

    def take(self, report: Report) -> None:
        """Count what is told of one pass."""
        if self._heals is None and not report.progress:
            return
        from stele_operator.heals import Heals, works_of
        from stele_operator.plan.status import healing_status
        from stele_operator.report import without_progress

        self._heals = self._heals or Heals()
        for news in self._heals.note(works_of(report, POLICY), {}, time.monotonic()):
            self.events[news.reason] = self.events.get(news.reason, 0) + 1
        mark = str(without_progress({"healing": healing_status(report.progress)}))
        self.statuses += mark != self._status
        self._status = mark


async def drive(masters: list[str]) -> None:
    """Passes until it is killed."""
    pool = ChannelPool(Identity())
    driver = Executor(pool, masters, holder="bench")
    holds, told = Holds(), Told()
    while True:
        began, cpu = time.perf_counter(), time.process_time()
        try:
            report = await driver.run_once(POLICY)
        except SteleError as exc:
            print(json.dumps({"error": str(exc)}), flush=True)
            await asyncio.sleep(1)
            continue
        found = {
            "seconds": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
            "steps": len(report.outcomes),
            "first": "".join(f"{p.step}: {p.reason}" for p in report.progress[:1]),
            "rss": resident_bytes(os.getpid()),
            "hold_ms": holds.take(),
        }
        told.take(report)
        print(json.dumps({**found, "events": told.events, "statuses": told.statuses}), flush=True)
        holds.take()
        await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    asyncio.run(drive(sys.argv[1].split(",")))
