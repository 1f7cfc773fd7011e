"""The options that a node is started with. Made by the command line.

Invariant: every NodeOptions is consistent. From faulty options none is made, and the error lists all faults
together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stele.consensus.ports import ReplicaOptions
from stele.model.errors import Rejected
from stele.model.ids import ClusterId, NodeId, is_id
from stele.rpc.resolve import join_address, split_address
from stele.tserver.memory import MemoryShares

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_VOLUME_EMPTY = 3
EXIT_VOLUME_FOREIGN = 4
EXIT_DISK = 5
EXIT_VOLUME_OLD = 6
EXIT_INVARIANT = 70
EXIT_TRY_AGAIN = 75
"""Exit code: nothing is damaged, but the disk is full, or a process that was needed did not answer."""

WAL_SYNC = ("always", "interval", "never")
LEASE_MIN_MS, LEASE_MAX_MS = 150, 5_000
"""Bounds on a leader's lease. A shorter one would end before the next heartbeats are answered."""


@dataclass(frozen=True, slots=True)
class FirstMaster:
    """A member of the first configuration of the catalog."""

    node_id: NodeId
    address: str


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of `stele node run` and `stele master run`.

    - `fork_id`: which copy of the cluster's volumes this is. "": as the volume says or, if it says nothing,
      as the masters say.
    - `first_masters` lets an empty volume be formatted as one of the first masters.
    - `join` lets an empty volume be formatted as a master that waits for a copy of the catalog.
    - Ports, also in `listen`: 0 lets the system choose. Heartbeats report the chosen port to the masters.
    - `wal_segment_mib`: the length of a segment of the log, in MiB. The next segment is always prepared.
    - `wal_spare_segments`: how many segments that nobody needs any more are kept for reuse.
    - `leader_lease_ms`: the length of the leases under which leaders answer reads alone; 0: no leases.
    """

    data_dir: Path
    node_id: NodeId
    cluster_id: ClusterId
    listen: str
    advertise: str = ""
    masters: tuple[str, ...] = ()
    machine: str = ""
    zone: str = ""
    role: str = "node"
    http_port: int = 7080
    flight_port: int = 7052
    stream_port: int = 7053
    wal_sync: str = "always"
    wal_segment_mib: int = 64
    wal_spare_segments: int = 4
    leader_lease_ms: int = 0
    first_masters: tuple[FirstMaster, ...] = ()
    join: bool = False
    fork_id: str = ""
    heartbeat_s: float = 1.0
    replica: ReplicaOptions = field(default_factory=ReplicaOptions)
    memory: MemoryShares = field(default_factory=MemoryShares)
    log_stall_ms: int = 20_000
    """A write or sync of the log that does not return for this long ends the node. A busy disk takes much
    less.
    """

    def __post_init__(self) -> None:
        faults = []
        if not is_id(self.node_id):
            faults.append(f"--node-id {self.node_id!r}: expected 32 hex digits")
        if not is_id(self.cluster_id):
            faults.append(f"--cluster-id {self.cluster_id!r}: expected 32 hex digits")
        if self.fork_id and not is_id(self.fork_id):
            faults.append(f"--fork-id {self.fork_id!r}: expected 32 hex digits")
        if self.role not in ("node", "master"):
            faults.append(f"role {self.role!r}: expected node or master")
        if self.wal_sync not in WAL_SYNC:
            faults.append(f"--wal-sync {self.wal_sync!r}: expected one of {', '.join(WAL_SYNC)}")
        if not 4 <= self.wal_segment_mib <= 1024:
            faults.append(f"--wal-segment-mib {self.wal_segment_mib}: expected 4 to 1024")
        if not 0 <= self.wal_spare_segments <= 64:
            faults.append(f"--wal-spare-segments {self.wal_spare_segments}: expected 0 to 64")
        if self.leader_lease_ms and not LEASE_MIN_MS <= self.leader_lease_ms <= LEASE_MAX_MS:
            faults.append(
                f"--leader-lease-ms {self.leader_lease_ms}: expected 0, or {LEASE_MIN_MS} to {LEASE_MAX_MS}"
            )
        if self.first_masters and self.join:
            faults.append("--first-masters and --join exclude each other; give one of them")
        if self.first_masters and self.node_id not in {m.node_id for m in self.first_masters}:
            faults.append(f"--first-masters does not name this node, {self.node_id}")
        for flag, address in (("--listen", self.listen), ("--advertise", self.advertise or self.listen)):
            try:
                split_address(address)
            except Rejected as exc:
                faults.append(f"{flag}: {exc.args[0]}")
        for flag, port in self.other_ports:
            if not 0 <= port <= 65_535:
                faults.append(f"{flag} {port}: expected 0 to 65535")
        if faults:
            raise Rejected("; ".join(faults))

    @property
    def other_ports(self) -> tuple[tuple[str, int], ...]:
        """The other ports with their flags; all are on the host of `listen`."""
        return (
            ("--http-port", self.http_port),
            ("--flight-port", self.flight_port),
            ("--stream-port", self.stream_port),
        )

    @property
    def advertised(self) -> str:
        """HOST:PORT that others dial, in its canonical form: only IPv6 addresses are in brackets."""
        return join_address(*split_address(self.advertise or self.listen))
