"""Asks leaders what the holds of backups cost on the nodes' disks. Used by errands.

Remembers answers for at least EVERY_S seconds. Nothing is lost if it forgets them. Invariant: if one tablet
could not be asked, the whole answer is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from stele_operator.masters import MasterLink
from stele_operator.plan.errand_holds import HoldSeen

EVERY_S = 20.0
_EACH_TABLET_S = 0.1
"""Seconds for each tablet that was asked, until the next questions. So large clusters are asked less often."""
LinkOf = Callable[[str, str], MasterLink | None]


class Held:
    """What holds cost, by cluster. `link_of` returns the connections to a cluster by namespace and name, or
    None while there are none.
    """

    def __init__(self, link_of: LinkOf, clock: Callable[[], float] = time.monotonic) -> None:
        self._link_of = link_of
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[float, frozenset[str], dict[str, HoldSeen]]] = {}

    async def of(self, namespace: str, cluster: str, names: Collection[str]) -> dict[str, HoldSeen | None]:
        """The holds of these names. None stands for a hold that no tablet has. The result is empty if a
        tablet could not be asked.
        """
        wanted, key = frozenset(names), (namespace, cluster)
        until_s, asked, found = self._known.get(key, (0.0, frozenset[str](), {}))
        if self._clock() >= until_s or not wanted <= asked:
            link = self._link_of(namespace, cluster)
            answer = None if link is None else await link.holds()
            if answer is None:
                self._known.pop(key, None)
                return {}
            found, tablets = answer
            self._known[key] = self._clock() + max(EVERY_S, tablets * _EACH_TABLET_S), wanted, found
        return {name: found.get(name) for name in wanted}

    def keep(self, clusters: Collection[tuple[str, str]]) -> None:
        """Forget the answers of all clusters but these."""
        self._known = {key: known for key, known in self._known.items() if key in clusters}
