"""What a driver may do. Called by planner; a plain value.

Invariant: a policy never overrides the planner's safety rules; it only slows them or names what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Times in ms. `lost` holds nodes whose volume or machine the operator knows is gone; silence is still required."""

    dead_after_ms: int = 30_000
    """`witnessAfter`: silence after which a node's replicas are demoted and replaced."""
    unreached_after_ms: int = 60_000
    """And how long, if that is longer, a replica on a node that is heard may not answer its leader: longer, since such a
    node may be busy opening its replicas, and one that cannot ends after 60 s."""
    lost: frozenset[str] = frozenset()
    unneeded: frozenset[str] = frozenset()
    """Nodes that the operator made for others which have returned: they retire, but for those that hold something."""
    lost_after_ms: int = 5_000
    """Silence that a node in `lost` must have kept before it counts as dead."""
    max_lost_nodes: int = 1
    """With more silent nodes than this still in a configuration (and not in `lost`), nothing is demoted or removed."""
    max_copies: int = 4
    bytes_per_second: int = 0
    """Of one copy; 0: unbounded."""
    min_disk_free_bytes: int = 512 << 20
    """What a target must keep free beside the tablet's own size: more than the logs' low-water mark (256 MiB), below
    which they refuse entries, and a few segments of theirs."""
    retire: bool = True
    """Whether DRAINING nodes that nothing names become RETIRED, and nodes in `lost` DRAINING."""
