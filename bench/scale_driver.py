"""The operator's part of scale.py: `python -m bench.scale_driver MASTERS CLUSTER_ID`. Prints a line of JSON for each pass.

It imports what an operator imports, so its memory is an operator's. Of each pass it does what grows with the
tablets: the view, the health of the tablets, the driver, and the events and statuses. There is no Kubernetes,
so nothing is listed or written there; what would be written is counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from bench.long_steps import Turns
from bench.processes import resident_bytes
from stele.driver.policy import Policy
from stele.model.errors import SteleError
from stele.rpc.logging import setup
from stele_operator.app import prepare_interpreter
from stele_operator.heal import Healer
from stele_operator.masters import MasterLink
from stele_operator.observe import parse_cluster
from stele_operator.plan.health import Health, TableHealth, tablet_health
from stele_operator.plan.observation import Catalog, Observation
from stele_operator.plan.status import healing_status
from stele_operator.report import PROGRESS_INTERVAL_S, is_cut, without_progress

POLICY = Policy(dead_after_ms=10_000, max_copies=8, balance_leaders=True, rebalance=True)
_PAUSE_S = 0.5
_CLUSTER: dict[str, Any] = {
    "metadata": {"namespace": "bench", "name": "bench", "uid": "bench", "generation": 1},
    "spec": {
        "version": "0.2",
        "masters": {"replicas": 1, "storage": {"size": "10Gi"}},
        "nodes": {"replicas": 3, "storage": {"size": "10Gi"}},
        "healing": {"witnessAfter": "10s"},
    },
}


class Told:
    """Counts the events and statuses that an operator would write.

    `events`: of the cluster, by reason. `statuses`: how often the cluster's status is written. `of_tables`: how often each
    table's status is written."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.statuses = 0
        self.of_tables: Counter[str] = Counter()
        self._status, self._written_s = "", 0.0
        self._tables: dict[str, tuple[TableHealth, float]] = {}

    def round(self, healer: Healer) -> None:
        """Count the events of a round of the driver, and whether it writes the cluster's status."""
        self.events.update(news.reason for news in healer.news())
        status, now_s = healing_status(healer.progress), time.monotonic()
        mark = str(without_progress({"healing": status}))
        if mark != self._status or (is_cut(status) and now_s - self._written_s >= PROGRESS_INTERVAL_S):
            self.statuses += 1
            self._status, self._written_s = mark, now_s

    def health(self, health: Health) -> None:
        """Count the statuses of tables as `Reporter` writes them: if only numbers changed, every 10 s."""
        now_s = time.monotonic()
        for table_id, now in health.tables.items():
            last, written_s = self._tables.setdefault(table_id, (now, now_s))
            soon = now_s - written_s < PROGRESS_INTERVAL_S
            if last != now and not (soon and _state(last) == _state(now)):
                self.of_tables[table_id] += 1
                self._tables[table_id] = now, now_s


def _state(health: TableHealth) -> tuple[bool, bool]:
    return health.counts.under_replicated > 0, health.counts.unavailable > 0


def observed(catalog: Catalog) -> Observation:
    """Return an observation of the cluster, from which the health of its tablets is judged."""
    cluster = parse_cluster(_CLUSTER)
    assert cluster.spec is not None, cluster.faults
    return Observation(now_s=time.time(), cluster=cluster, default_image="", identity=None, catalog=catalog)


class Passes:
    """The passes over one cluster."""

    def __init__(self, masters: list[str], cluster_id: str) -> None:
        self._link = MasterLink(cluster_id, "bench")
        self._link.learn(masters)
        self._link.at_work = True
        self._healer = Healer()
        self._told = Told()
        self._turns = Turns()
        self._steps = 0
        self._first = ""

    async def one(self) -> dict[str, Any]:
        """Make one pass, with the same calls as `ClusterTask.run_pass`."""
        began, cpu = time.perf_counter(), time.process_time()
        self._steps, self._first = 0, ""
        self._turns.take()
        catalog = await self._link.catalog()
        self._told.health(await asyncio.to_thread(tablet_health, observed(catalog)))
        rests = await asyncio.to_thread(self._healer.rests, catalog.view, POLICY, self._link.driver.known)
        problem = await self._healer.run(self._link, None if rests else catalog.view, POLICY, {}, self._round)
        self._told.round(self._healer)
        hold_ms, holds = self._turns.take()
        return {
            "seconds": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
            "steps": self._steps,
            "first": problem or self._first,
            "rss": resident_bytes(os.getpid()),
            "hold_ms": hold_ms,
            "holds": holds,
            "events": self._told.events,
            "statuses": self._told.statuses,
            "tables": sum(count > 0 for count in self._told.of_tables.values()),
            "of_tables": self._told.of_tables.total(),
        }

    async def _round(self) -> None:
        self._steps += len(self._healer.progress)
        self._first = self._first or "".join(f"{p.step}: {p.reason}" for p in self._healer.progress[:1])
        self._told.round(self._healer)


async def drive(masters: list[str], cluster_id: str) -> None:
    """Make passes until the process is killed."""
    setup()
    prepare_interpreter()
    passes = Passes(masters, cluster_id)
    while True:
        try:
            print(json.dumps(await passes.one()), flush=True)
        except SteleError as exc:
            print(json.dumps({"error": str(exc)}), flush=True)
            await asyncio.sleep(1)
        await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    asyncio.run(drive(sys.argv[1].split(","), sys.argv[2]))
