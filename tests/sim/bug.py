"""A fault that is planted in production's code while a run lasts, and how it is looked for. Used by bugs.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tests.sim.draw import draw_plan
from tests.sim.plan import Plan, Weather
from tests.sim.world import SimulationFailure, World


@dataclass(frozen=True)
class Bug:
    """Replaces `owner.name` by `instead`.

    `told`: the failure's message must contain one of these phrases (separated by bars); "" accepts any.
    `weather`: the weather that shows the fault. `first`: a seed that finds it soon. Without `strict`, only
    consequences of the fault count (see World). `older`: which nodes know no questions about leaders, as in a plan. `also`:
    what else is replaced, where two rules guard one promise.
    """

    label: str
    owner: Any
    name: str
    instead: Any
    told: str = ""
    first: int = 1
    weather: Weather | None = None
    strict: bool = True
    older: str = "all"
    also: tuple[tuple[Any, str, Any], ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Production's code has the fault while this context lasts."""
        with ExitStack() as stack:
            for owner, name, instead in ((self.owner, self.name, self.instead), *self.also):
                stack.enter_context(mock.patch.object(owner, name, instead))
            yield

    def plan(self, seed: int) -> Plan:
        """The kind of world in which the fault is looked for. In most of them the cores alone confirm reads."""
        return replace(draw_plan(seed, self.weather), older=self.older)

    def found_after(self, first: int, seeds_max: int) -> tuple[int, str] | None:
        """How many seeds, from `first` on, it takes until a run with the planted fault fails, and the
        failure's message. None: more than `seeds_max`."""
        for count, seed in enumerate(range(first, first + seeds_max), 1):
            try:
                with self.planted():
                    World(self.plan(seed), strict=self.strict).run()
            except SimulationFailure as exc:
                if any(phrase in exc.what for phrase in self.told.split("|")):
                    return count, exc.what
        return None
