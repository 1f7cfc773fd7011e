"""Where the replicas of a new tablet go. Pure; called by background.py.

Invariant: never two replicas of a tablet on one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import NodeId


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live ACTIVE node that is formed. `machine` is never empty: the node's own id where none was stated. `full`: its disk has hardly
    room for another replica."""

    node_id: NodeId
    machine: str
    zone: str
    replicas: int
    full: bool = False


class Placement:
    """Chooses for several tablets in a row, counting what it has chosen. Ties go to the smaller id."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = sorted(candidates, key=lambda c: c.node_id)
        self._replicas = Counter({c.node_id: c.replicas for c in candidates})
        self._leaders: Counter[NodeId] = Counter()

    @property
    def machines(self) -> int:
        """How many machines there are: the largest possible replication factor."""
        return len({c.machine for c in self._candidates})

    def choose(self, replication_factor: int) -> list[NodeId]:
        """Nodes for one tablet, the suggested leader first.

        Each further replica goes to the zone that has the fewest of this tablet, then to the node with the fewest
        replicas; to a full one only where all others are taken. Of the chosen, the one suggested least often leads.

        Raises:
            Retryable: NOT_READY if there are too few machines now.
        """
        chosen: list[Candidate] = []
        for _ in range(replication_factor):
            taken = {c.machine for c in chosen}
            zones = Counter(c.zone for c in chosen)
            free = [c for c in self._candidates if c.machine not in taken]
            if not free:
                raise Retryable(
                    f"{self.machines} machines with a live ACTIVE node, {replication_factor} are needed",
                    code=Code.NOT_READY,
                )
            chosen.append(
                min(free, key=lambda c: (c.full, zones[c.zone], self._replicas[c.node_id], c.node_id))
            )
        nodes = [c.node_id for c in chosen]
        self._replicas.update(nodes)
        leader = min(nodes, key=lambda n: (self._leaders[n], nodes.index(n)))
        self._leaders[leader] += 1
        return [leader, *(n for n in nodes if n != leader)]


def check_replication_factor(replication_factor: int, live: int, active: int) -> None:
    """Refuse what no placement could satisfy. `live`, `active`: machines with live ACTIVE nodes, with any ACTIVE nodes.

    Raises:
        Rejected: INVALID_ARGUMENT for an even one, or one larger than the machines with nodes.
        Retryable: NOT_READY if there are enough machines, and too few of them answer now.
    """
    if replication_factor < 1 or replication_factor % 2 == 0:
        raise Rejected(f"replication factor {replication_factor}: expected an odd number, 1 or more")
    if replication_factor > active:
        raise Rejected(
            f"replication factor {replication_factor}: there are ACTIVE nodes on {active} machines, and no two "
            "replicas share one; add nodes or ask for less"
        )
    if replication_factor > live:
        raise Retryable(
            f"replication factor {replication_factor}: of {active} machines with ACTIVE nodes {live} answer, and no two "
            "replicas share one; try again when more do",
            code=Code.NOT_READY,
        )
