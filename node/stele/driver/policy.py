"""What a driver may do. Used by planner; a plain value.

Invariant: a policy never overrides the planner's safety rules. It only slows the planner down, or names lost
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stele.driver.view import Holder


@dataclass(frozen=True, slots=True)
class Policy:
    """What a driver may do; times in ms. `lost`: nodes whose volume or machine the operator knows is gone.
    They count as lost only while they are silent.
    """

    dead_after_ms: int = 30_000
    """`witnessAfter`: silence after which a node's replicas are demoted and replaced."""
    unreached_after_ms: int = 60_000
    """How long a replica on a live node may fail to answer its leader before it counts as dead, if longer
    than `dead_after_ms`.

    The node may be busy opening its replicas. A node that cannot open them ends after 60 s.
    """
    lost: frozenset[str] = frozenset()
    unneeded: frozenset[str] = frozenset()
    """Masters beyond the wanted number: replaced masters have returned, or fewer are asked for. They retire,
    unless they hold replicas.
    """
    retiring: Mapping[str, str] | None = field(default=None, hash=False)
    """Nodes that this driver wants retired, and why. None: it wants no states, and changes none that another
    driver wanted.
    """
    parked: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Nodes that this driver wants parked, and why. Counts only if `retiring` is not None."""
    park_ms: int = 3_600_000
    """How long such a node stays parked if no driver works any more."""
    lost_after_ms: int = 5_000
    """Silence after which a node in `lost` counts as dead."""
    max_lost_nodes: int = 1
    """If more nodes in configurations than this are silent, nothing is demoted or removed. Nodes in `lost` do
    not count.
    """
    max_copies: int = 4
    bytes_per_second: int = 0
    """Limit of one copy; 0: unlimited."""
    min_disk_free_bytes: int = 512 << 20
    """Bytes that must stay free on a target besides the tablet: the log's low-water mark (256 MiB) and some
    log segments.
    """
    balance_leaders: bool = True
    """Whether leaders are spread over the nodes while nothing heals."""
    leader_moves_at_once: int = 8
    """The most leaders that one plan moves to spread them. Writes of a tablet wait while its leader moves."""
    leader_moves_per_minute: int = 480
    retire: bool = True
    """Whether nodes in `lost` become DRAINING, and DRAINING nodes that nothing names become RETIRED."""
    rebalance: bool = False
    """Whether replicas are moved for balance. The operator and `stele driver run` set it."""

    @property
    def max_moves(self) -> int:
        """The most moves of healthy replicas at once: half of the copies, so that heals find a slot."""
        return max(1, self.max_copies // 2)


_DEAD_AFTER_MIN_MS = 3_000
"""The least `dead_after_ms`: three heartbeats."""
HOLDERS_MAX, AWAY_MAX = 16, 256
"""The most holders of the budget that the catalog names, and the most absent nodes."""
TIME_MAX_MS = 100 * 365 * 86_400_000
"""The longest time in a policy: a hundred years."""


@dataclass(frozen=True, slots=True)
class StandingPolicy:
    """The part of a policy that the catalog keeps. The leading master drives by it while no driver is heard.

    - `drive_after_ms`: after this much silence of all drivers the master begins; 0: it never does.
    - `owner`: who set the policy, for people.
    - `held`: why no driver may work now, for example because the cluster hibernates; "": drivers may work.
    - `holding`, `waiting`: who holds the change budget, and who waits for it (budget.py).
    """

    dead_after_ms: int
    max_lost_nodes: int
    max_copies: int
    bytes_per_second: int
    drive_after_ms: int
    owner: str = ""
    balance_leaders: bool = True
    rebalance: bool = True
    held: str = ""
    holding: tuple[Holder, ...] = ()
    waiting: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the values, in words."""
        return tuple(
            f"{name} is {value}; expected {low} to {high}"
            for name, value, low, high in (
                ("dead_after_ms", self.dead_after_ms, _DEAD_AFTER_MIN_MS, TIME_MAX_MS),
                ("max_lost_nodes", self.max_lost_nodes, 0, 1_000),
                ("max_copies", self.max_copies, 1, 1_000),
                ("drive_after_ms", self.drive_after_ms, 0, TIME_MAX_MS),
                ("the number of holders of the budget", len(self.holding), 0, HOLDERS_MAX),
                ("the number of those who wait for the budget", len(self.waiting), 0, HOLDERS_MAX),
                ("the number of nodes away", sum(len(h.away) for h in self.holding), 0, AWAY_MAX),
            )
            if not low <= value <= high
        )

    def policy(self) -> Policy:
        """The policy of a driver that knows of no lost and no unneeded nodes."""
        return Policy(
            dead_after_ms=self.dead_after_ms,
            max_lost_nodes=self.max_lost_nodes,
            max_copies=self.max_copies,
            bytes_per_second=self.bytes_per_second,
            balance_leaders=self.balance_leaders,
            rebalance=self.rebalance,
        )
