"""An order to copy a tablet, its progress, and what the receiver needs from its node.

Used by copy_target.py, which carries orders out, and by the node that accepts orders and reports on them.
Holds values and ports only.

Invariant: an order names a replica_id that no replica had before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stele.consensus.superblock import Superblock
from stele.model.config import Configuration
from stele.model.errors import Code, Rejected
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, StreamKey, TabletId


@dataclass(slots=True)
class CopyProgress:
    """How far a copy is. `state`: Waiting, Starting, Fetching, Verifying, Installing, Done, Failed.

    Waiting: a witness runs, and fetches its rows once it gets the order.
    """

    replica_id: ReplicaId
    source_node: NodeId
    bytes_done: int = 0
    bytes_total: int = 0
    state: str = "Starting"
    error: str = ""


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """The content of a StartTabletCopy request.

    - `witness_start`: where a witness's log begins. OPID_NONE: at the source's checkpoint.
    - `bytes_per_second`: 0 for no bound.
    - `caller_term`: the term of the tablet, as the caller knew it.
    - `log_only`: the witness fetches no rows yet.
    - `cause`: why the copy is made, for the log.
    """

    tablet_id: TabletId
    replica_id: ReplicaId
    source_node: NodeId
    source_address: str
    witness: bool = False
    witness_start: OpId = OPID_NONE
    bytes_per_second: int = 0
    caller_term: int = 0
    log_only: bool = False
    cause: str = ""


class CopyHome(Protocol):
    """What the copy needs from the node that it fills."""

    def room_bytes(self) -> int:
        """How many bytes the disk can take, without the space that is kept for the log. Blocks."""

    def replica_directory(self, key: StreamKey) -> Path:
        """Where the replica lives."""

    async def create_stream(self, key: StreamKey, start: OpId, config: Configuration) -> None:
        """Make the replica's stream in the node's log, unless it exists. On return it survives power loss."""

    async def start_replica(self, superblock: Superblock) -> None:
        """Start the replica in its data state."""

    def log_reaches(self, key: StreamKey, opid: OpId) -> bool:
        """Whether the log of a running witness holds `opid` durably.

        Raises:
            Retryable: it never will, as the witness was removed, FAILED, or has a log that begins later.
        """

    async def rows_arrived(self, superblock: Superblock) -> None:
        """Open the store that a running witness has received, and bring it up to the log."""

    def joined(self, key: StreamKey) -> bool:
        """Whether the replica knows of a committed configuration that names it. From then on its leader sends
        it the log.
        """


def refuse_over_live(order: CopyOrder, live: ReplicaId | None) -> None:
    """Refuse a copy over a live replica. A copy may replace only a tombstone or a FAILED replica.

    Raises:
        Rejected: ALREADY_PRESENT.
    """
    if live is not None and live != order.replica_id:
        raise Rejected(
            f"replica {live} of tablet {order.tablet_id[:8]} is alive on this node; remove it before copying "
            f"replica {order.replica_id} here",
            code=Code.ALREADY_PRESENT,
        )
