"""Several namespaces: one that goes away, and its Role with it, is told and waited for; the others are served on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stele_operator import metrics
from stele_operator.fleet import STUCK_S, Fleet
from stele_operator.handlers import settings
from stele_operator.kube import Kube, KubeError
from stele_operator.report import Reporter
from tests.operator.cluster import bench

Json = dict[str, Any]


class Guarded(Kube):
    """A connection that some namespaces are refused to, with a status."""

    refused: dict[str, int]

    async def list(self, kind: str, namespace: str, selector: str = "") -> list[Json]:
        if namespace in self.refused:
            raise KubeError(self.refused[namespace], "", f"no {kind} of namespace {namespace}")
        return await super().list(kind, namespace, selector)


def told(namespace: str) -> float:
    """What the metric says."""
    return metrics.REFUSED.labels(namespace)._value.get()


async def test_a_namespace_that_is_refused_stops_no_other_and_is_served_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, machines=1) as made:
        kube, now = Guarded(made.kube.settings), [1000.0]
        kube.refused = {"gone": 403, "broken": 500}
        names = ("gone", "broken", "default")
        fleet = Fleet(kube, Reporter(kube, "test"), names, "image", clock=lambda: now[0])
        fleet.lead()
        await made.apply("cluster", paused=True)

        async def looked_after() -> bool:
            return (await made.condition("TabletCluster", "flights", "Reconciling"))[1] == "Paused"

        try:
            now[0] += STUCK_S + 1
            await fleet.sweep()
            await made.until("the other namespace is looked after", looked_after)
            fleet.note_pass()
            assert not fleet.not_live()
            assert (told("gone"), told("default")) == (1, 0)

            kube.refused = {"default": 403, "gone": 500, "broken": 500}
            now[0] += STUCK_S + 1
            await fleet.sweep()
            assert told("default") == 1
            assert not fleet.not_live(), "no task is left that could end a pass"

            kube.refused = {}
            await made.kube.patch(
                "TabletCluster", "default", "flights", {"status": {"conditions": []}}, "status"
            )
            await fleet.sweep()
            await made.until("it is looked after again", looked_after)
            assert (told("gone"), told("default")) == (0, 0)

            kube.refused = dict.fromkeys(names, 500)
            now[0] += STUCK_S + 1
            await fleet.sweep()
            assert "no list" in fleet.not_live()
        finally:
            await fleet.close()
            await kube.close()


async def test_the_operator_starts_though_a_namespace_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        await made.start("--namespace", "gone")
        await made.apply("cluster", paused=True)

        async def looked_after() -> bool:
            return (await made.condition("TabletCluster", "flights", "Reconciling"))[1] == "Paused"

        await made.until("the other namespace is looked after", looked_after)
        assert any("/namespaces/gone/" in path for path in made.guard.refused)
        made.guard.refused[:] = [p for p in made.guard.refused if "/namespaces/gone/" not in p]


def test_a_watch_that_is_refused_never_ends_kopf() -> None:
    backoffs = settings().networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    for _ in range(2):  # requests
        waits = list(itertools.islice(backoffs, 10_000))
        assert len(waits) == 10_000
        assert waits[0] <= 1 and max(waits) <= 60
