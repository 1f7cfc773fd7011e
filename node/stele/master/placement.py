"""Chooses the nodes for the replicas of a new tablet. Pure; called by background.py.

Invariant: never two replicas of a tablet on one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import NodeId
from stele.model.schema import REPLICATION_FACTORS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live ACTIVE node that is formed. `machine` is never empty: it defaults to the node's id. `full`: its
    disk has little room for another replica. `leads`: how many tablets it leads.
    """

    node_id: NodeId
    machine: str
    zone: str
    replicas: int
    full: bool = False
    leads: int = 0


class Placement:
    """Chooses nodes for several tablets in a row, and counts its choices. Ties go to the smaller id."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = sorted(candidates, key=lambda c: c.node_id)
        self._replicas = Counter({c.node_id: c.replicas for c in candidates})
        self._leads = Counter({c.node_id: c.leads for c in candidates})
        self._of_machine: Counter[str] = Counter()
        for candidate in candidates:
            self._of_machine[candidate.machine] += candidate.replicas

    @property
    def machines(self) -> int:
        """The number of machines, which is the largest possible replication factor."""
        return len({c.machine for c in self._candidates})

    def choose(self, replication_factor: int) -> list[NodeId]:
        """Choose nodes for one tablet, the suggested leader first.

        Each further replica goes to the zone with the fewest replicas of this tablet, and there to the node
        with the fewest replicas. Of several such nodes it is the one whose machine has the fewest. A full
        node is used only if no other is left. The suggested leader is the node that leads least. Otherwise
        drivers would move thousands of leaders after many tables were created.

        Raises:
            Retryable: NOT_READY, there are too few machines now.
        """
        chosen: list[Candidate] = []
        for _ in range(replication_factor):
            taken = {c.machine for c in chosen}
            zones = Counter(c.zone for c in chosen)
            free = [c for c in self._candidates if c.machine not in taken]
            if not free:
                raise Retryable(
                    f"{self.machines} machines have a live ACTIVE node, but {replication_factor} are needed; add or start nodes",
                    code=Code.NOT_READY,
                )
            chosen.append(min(free, key=lambda c: (c.full, zones[c.zone], *self._load(c), c.node_id)))
        self._of_machine.update(c.machine for c in chosen)
        nodes = [c.node_id for c in chosen]
        self._replicas.update(nodes)
        leader = min(nodes, key=lambda n: (self._leads[n], nodes.index(n)))
        self._leads[leader] += 1
        return [leader, *(n for n in nodes if n != leader)]

    def _load(self, candidate: Candidate) -> tuple[int, int]:
        """The replicas of the node, and of its machine."""
        return self._replicas[candidate.node_id], self._of_machine[candidate.machine]


def check_replication_factor(replication_factor: int, live: int, active: int) -> None:
    """Refuse a replication factor that no placement can satisfy.

    `live`: machines with live ACTIVE nodes. `active`: machines with any ACTIVE nodes.

    Raises:
        Rejected: INVALID_ARGUMENT, it is not one of REPLICATION_FACTORS, or larger than the number of
            machines with nodes.
        Retryable: NOT_READY, there are enough machines but too few of them answer now.
    """
    if replication_factor not in REPLICATION_FACTORS:
        raise Rejected(f"replication factor {replication_factor}: expected 1, 3, 5 or 7")
    check_machines(f"replication factor {replication_factor}", replication_factor, live, active)


def check_machines(what: str, replicas: int, live: int, active: int) -> None:
    """Refuse more replicas than machines. `what`: the beginning of the message.

    `live`, `active` and the errors: as `check_replication_factor`.
    """
    if replicas > active:
        raise Rejected(
            f"{what}: only {active} machines have ACTIVE nodes, and each replica needs its own; add nodes or choose a "
            "smaller number"
        )
    if replicas > live:
        raise Retryable(
            f"{what}: only {live} of {active} machines with ACTIVE nodes answer and are not parked, and each replica needs "
            "its own; try again when more do",
            code=Code.NOT_READY,
        )
