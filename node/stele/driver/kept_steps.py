"""Keeps the steps found in earlier plans, for tablets of which nothing has changed since. Used by planner;
pure.

After the loss of a node thousands of tablets wait for their turn to copy. A plan looks at those that changed,
and takes the steps of the others from here. Most checks of a tablet depend on its situation alone. `Asked`
notes what else they asked for. A step is kept only if they asked for nothing that others may change. If they
asked for a slot and got none, the step is kept as long as no slot of that kind is free.

Invariant: a step that is found here is the one that the checks would find again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass

from stele.driver.situation import Situation
from stele.driver.steps import Step

Refuses = Callable[[str], bool]
"""A function that says whether a kind of slot would be refused now."""


class Asked:
    """Notes what a tablet's step depends on besides the tablet's situation, while its checks run.

    `others`: whether the checks asked for something that other tablets, time or a driver's memory may change.
    `refused`: the kinds of slots that they asked for and did not get.
    """

    def __init__(self) -> None:
        self.others = False
        self.refused: tuple[str, ...] = ()

    def clear(self) -> None:
        """Begin with the next tablet."""
        self.others, self.refused = False, ()


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a tablet's checks in this situation. `step` None: nothing is to be done. `waits`: the
    step is a heal that waits for a slot.
    """

    situation: Situation
    step: Step | None
    refused: tuple[str, ...]
    waits: bool


class KeptSteps:
    """The results of checks under one policy, by tablet."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}
        self._scene: Hashable = None
        self._tried: Set[str] = frozenset()

    def begin(self, scene: Hashable, tried: Set[str]) -> None:
        """Begin a plan.

        `scene`: everything on which all checks depend. If it has changed, no kept step is valid. `tried`:
        tablets whose copies the driver remembers. Each plan judges them anew.
        """
        if scene != self._scene:
            self._found.clear()
            self._scene = scene
        self._tried = tried

    def find(self, s: Situation, refuses: Refuses) -> Found | None:
        """The kept result for this situation, if the checks would find the same again; else None."""
        tablet_id = s.tablet.tablet_id
        found = self._found.get(tablet_id)
        if found is None or found.situation is not s or tablet_id in self._tried:
            return None
        return found if all(map(refuses, found.refused)) else None

    def keep(self, found: Found, asked: Asked) -> None:
        """Keep a result, if nothing but the situation and slots decided it."""
        tablet_id = found.situation.tablet.tablet_id
        if asked.others or tablet_id in self._tried:
            self._found.pop(tablet_id, None)
        else:
            self._found[tablet_id] = found

    def forget(self, tablet_id: str) -> None:
        """Forget the result of a tablet that was judged again."""
        self._found.pop(tablet_id, None)
