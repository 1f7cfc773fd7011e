"""Tablets that no pass looks at are well: each answer equals the one of a look at every tablet, whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stele.driver.view import ClusterView
from stele_operator.plan import Observation
from stele_operator.plan.fates import SILENT_S, members
from stele_operator.plan.health import in_danger, tablet_health, without_spare
from stele_operator.plan.majorities import lost_majorities
from stele_operator.plan.observation import Catalog
from stele_operator.plan.steady import Steady, is_steady, unwell
from tests.driver.test_known import changed, cluster_of
from tests.operator.test_large import instructions
from tests.operator.worlds import made


class LookAtAll(Steady):
    """No tablet is steady."""

    def _count(self, tablet: Any, number: int) -> None:
        self.others.pop(tablet.tablet_id, None)
        if number > 0:
            self.others[tablet.tablet_id] = tablet


def answers(o: Observation, catalog: Catalog) -> Any:
    """All that passes ask of the health of tablets."""
    seen = replace(o, catalog=catalog)
    everyone = members(seen)
    health = tablet_health(seen)
    return (
        health.counts,
        {table: of for table, of in health.tables.items() if of.counts.total},
        health.settled,
        [[t.tablet_id for t in without_spare(seen, role)] for role in ("node", "master")],  # type: ignore[arg-type]
        [[t.tablet_id for t in in_danger(seen, role)] for role in ("node", "master")],  # type: ignore[arg-type]
        [t.tablet_id for t in lost_majorities(seen, everyone)],
    )


def test_views_that_change_at_random() -> None:
    o = made().observe()
    assert o.catalog is not None
    looked_at: Counter[bool] = Counter()
    for seed in range(20):
        rng, steady = random.Random(seed), Steady()
        view = cluster_of(rng.randint(5, 14))
        for _ in range(40):
            view = changed(view, rng)
            catalog = replace(o.catalog, view=view, steady=steady)
            expected = answers(o, replace(catalog, steady=LookAtAll()))
            assert answers(o, catalog) == expected, f"seed {seed}"
            left = {t.tablet_id for t in unwell(catalog, SILENT_S * 1000)}
            looked_at.update(t.tablet_id in left for t in view.tablets)
            assert steady.by_table.total() == sum(is_steady(t) for t in view.tablets)
    assert looked_at[False] > 500 and looked_at[True] > 500


def cost(tablets: int, ask: Callable[[Observation], object]) -> int:
    """Instructions of a question, asked again after all nodes were heard again."""
    o = made().observe()
    assert o.catalog is not None
    steady, view = Steady(), cluster_of(tablets)
    catalog = replace(o.catalog, view=view, steady=steady)
    ask(replace(o, catalog=catalog))
    later: ClusterView = replace(view, nodes=tuple(replace(n, heartbeat_age_ms=700) for n in view.nodes))
    again = replace(o, catalog=replace(catalog, view=later))
    return instructions(lambda: ask(again))


def test_the_health_of_a_cluster_at_rest_hardly_costs_more_with_more_tablets() -> None:
    few, many = cost(60, tablet_health), cost(240, tablet_health)
    assert many - few < 180 * 20
