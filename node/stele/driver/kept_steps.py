"""The steps that a driver found in earlier plans, for tablets of which nothing has changed since. Used by planner; pure.

After the loss of a node thousands of tablets wait for their turn to copy. A plan looks at those that changed, and
takes the steps of the others from here. Most checks of a tablet depend on its situation alone. What else they
ask is noted in `Asked`: a step is kept only if they asked for nothing that others may change. If they
asked for a slot and got none, the step is kept as long as no such slot is free.

Invariant: a step that is found here is the one that the checks would find again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass

from stele.driver.situation import Situation
from stele.driver.steps import Step

Refuses = Callable[[str], bool]
"""Whether a kind of slot would be refused now."""


class Asked:
    """What a tablet's step depends on beside the tablet's situation, noted while its checks run.

    `others`: whether they asked for what other tablets, time or a driver's memory may change. `refused`: the
    kinds of slots that were asked for and not free."""

    def __init__(self) -> None:
        self.others = False
        self.refused: tuple[str, ...] = ()

    def clear(self) -> None:
        """Begin with another tablet."""
        self.others, self.refused = False, ()


@dataclass(frozen=True, slots=True)
class Found:
    """What the checks of a tablet found in this situation; `step` is None if nothing is to be done. `waits`: it is a heal
    that waits for a slot."""

    situation: Situation
    step: Step | None
    refused: tuple[str, ...]
    waits: bool


class KeptSteps:
    """What was found under one policy, by tablet."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}
        self._scene: Hashable = None
        self._tried: Set[str] = frozenset()

    def begin(self, scene: Hashable, tried: Set[str]) -> None:
        """Begin a plan. `scene`: what every check depends on; if it has changed, no kept step is valid. `tried`: tablets
        whose copies the driver remembers. Each plan judges them anew."""
        if scene != self._scene:
            self._found.clear()
            self._scene = scene
        self._tried = tried

    def find(self, s: Situation, refuses: Refuses) -> Found | None:
        """What was found in this very situation, if the checks would find it again."""
        tablet_id = s.tablet.tablet_id
        found = self._found.get(tablet_id)
        if found is None or found.situation is not s or tablet_id in self._tried:
            return None
        return found if all(map(refuses, found.refused)) else None

    def keep(self, found: Found, asked: Asked) -> None:
        """Keep what was found, if nothing but the situation and slots decided it."""
        tablet_id = found.situation.tablet.tablet_id
        if asked.others or tablet_id in self._tried:
            self._found.pop(tablet_id, None)
        else:
            self._found[tablet_id] = found

    def forget(self, tablet_id: str) -> None:
        """The tablet was judged again."""
        self._found.pop(tablet_id, None)
