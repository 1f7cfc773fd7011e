"""A world behind the operator's connections: whole passes of a ClusterTask with no process beside, and what they write.

`Desk` stands for the API server, `Kept` for the masters' answers. Invariant: what is written is there at the next look,
with another resourceVersion, so a status that is written again and again is seen.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stele_operator.act import Outcome
from stele_operator.kube import Kube, NotFound
from stele_operator.plan import Action, Observation, make_plan
from stele_operator.reconcile import ClusterTask
from stele_operator.report import Reporter
from tests.operator.world import World
from tests.operator.world_kube import merged
from tests.operator.world_masters import heal

Json = dict[str, Any]


class Desk(Kube):
    """The API server of a world. `written`: (kind, name) of each status; `events`: by name, as they stand."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.written: list[tuple[str, str]] = []
        self.events: dict[str, Json] = {}
        self._ready: dict[tuple[str, str], list[Json]] = {}

    def now_s(self) -> float:
        return self.world.now_s

    async def prepare(self) -> None:
        """Have the lists ready that the next pass asks for, so that to make them is no part of it."""
        selector = "stele.dev/cluster=flights"
        for kind in ("Pod", "PersistentVolumeClaim", "Service", "PodDisruptionBudget"):
            self._ready[kind, selector] = await self.list(kind, "data", selector)
        self._ready["TabletGroup", ""] = await self.list("TabletGroup", "data")

    def told(self, kind: str = "") -> list[Json]:
        """The events about a kind, or all."""
        return [e for e in self.events.values() if kind in ("", e["involvedObject"]["kind"])]

    def forget(self) -> None:
        """Count from here on."""
        self.written.clear()
        self.events.clear()

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        if kind == "Event":
            return self.events.get(name)
        return copy.deepcopy(self.world.objects.get((kind, name)))

    async def list(self, kind: str, namespace: str, selector: str = "") -> list[Json]:
        if (kind, selector) in self._ready:
            return self._ready.pop((kind, selector))
        if kind == "Node":
            return [_machine(m.name, m.ready, m.zone) for m in self.world.machines]
        key, _, value = selector.partition("=")
        found = (
            r for r in self.world.of(kind) if not key or r["metadata"].get("labels", {}).get(key) == value
        )
        return copy.deepcopy(list(found))

    async def create(self, kind: str, namespace: str, manifest: Json) -> Json:
        assert kind == "Event", "all else is done by the world"
        self.events[manifest["metadata"]["name"]] = manifest
        return manifest

    async def patch(self, kind: str, namespace: str, name: str, patch: Json, sub: str = "") -> Json:
        if kind == "Event":
            self.events[name] = merged(self.events[name], patch)
            return self.events[name]
        assert sub == "status", "all else is done by the world"
        raw = self.world.objects.get((kind, name))
        if raw is None:
            raise NotFound(404, "NotFound", name)
        raw["status"] = merged(raw.get("status"), patch["status"])
        self.world.touch(raw)
        self.written.append((kind, name))
        return raw


def _machine(name: str, ready: bool, zone: str) -> Json:
    labels = {"topology.kubernetes.io/zone": zone}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {"conditions": conditions}}


class Kept(ClusterTask):
    """The task over a world's cluster; each action happens in the world."""

    def __init__(self, world: World) -> None:
        self.desk = Desk(world)
        self.world = world
        super().__init__(
            self.desk, Reporter(self.desk, "test"), "data", "flights", "stele/node:test", _no_matter
        )

    async def _with_masters(self, o: Observation) -> Observation:
        seen = await asyncio.to_thread(self.world.observe)
        told = (seen.master_reports, seen.catalog, seen.catalog_problem)
        return replace(o, master_reports=told[0], catalog=told[1], catalog_problem=told[2])

    async def _act(self, o: Observation, actions: Sequence[Action]) -> list[Outcome]:
        for action in actions:
            self.world.apply(action)
        return [Outcome(action) for action in actions]

    async def seconds(self, count: int, *, heals: bool = False) -> None:
        """A pass, and a second of the world, so many times. `heals`: in each a driver does all that it may."""
        for _ in range(count):
            await self.run_pass()
            if heals:
                heal(self.world, make_plan(self.world.observe()))
            self.world.settle()
            self.world.now_s += 1


def _no_matter(done: bool) -> None:
    """What fleet would want to know."""
