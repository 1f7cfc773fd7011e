"""What the model of a cluster is made of: nodes, replicas and groups, as plain records."""

from __future__ import annotations

from dataclasses import dataclass, field

from stele.driver.policy import Policy
from stele.driver.view import (
    NodeState,
    Wanted,
)
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.config import Configuration
from stele.model.ids import NodeId, TabletId

COPY_ROUNDS = 2


POLICY = Policy(dead_after_ms=10_000, max_lost_nodes=9, max_copies=3, balance_leaders=False)
"""Leaders stay where they are, so that the stories show only heals."""


class Refused(Exception):
    """The answer of a leader or the catalog to an order that is late, stale or unsafe."""


@dataclass
class ModelNode:
    """A node and whether it answers. `gone`: it never comes back. `hangs`: copies to it make no progress.
    `cut`: masters hear it, and it takes copies and orders, but no replica hears its replicas. `opening`:
    masters hear it after a restart, but it has reported none of its replicas, and no replica hears those
    yet."""

    node_id: NodeId
    machine: str
    zone: str
    role: str = "node"
    alive: bool = True
    gone: bool = False
    hangs: bool = False
    cut: bool = False
    opening: bool = False
    state: NodeState = NodeState.ACTIVE
    given_up: bool = False
    wanted: Wanted | None = None
    wanted_by: str = ""

    @property
    def parked(self) -> bool:
        """Whether it may be away."""
        return self.state is NodeState.ACTIVE and self.wanted is Wanted.PARKED


@dataclass
class ModelReplica:
    """A node's part of a tablet. `waiting`: a witness that fetches nothing yet. `said_failed`: what its
    leader last heard of it."""

    node_id: NodeId
    has_data: bool
    copied: int = COPY_ROUNDS
    waiting: bool = False
    failed: bool = False
    said_failed: bool = False
    tombstoned: bool = False
    caught_up_once: bool = False


@dataclass
class ModelTablet:
    """A group. `log_index` counts all entries, so that configuration indexes rise."""

    tablet_id: TabletId
    config: Configuration
    rf: int
    leader: str = ""
    log_index: int = 10
    next_replica_id: int = 1
    replicas: dict[int, ModelReplica] = field(default_factory=dict)
    by_hand: ByHand = NOT_BY_HAND
    size: int = 20
    """Bytes of each replica."""
    behind: set[str] = field(default_factory=set)
    """Nodes whose voters catch up too slowly to take over in time."""
    table: int = 0
    kept: bool = False
    """Whether an administrator has just moved its leader."""

    @property
    def wanted(self) -> int:
        """The number of voters that it should have."""
        return self.rf + self.by_hand.extra


def node_name(number: int) -> NodeId:
    """Identifier of the model's node `number`."""
    return NodeId(f"{number:032x}")
