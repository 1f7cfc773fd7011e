"""Settings of the algorithm. Read by the core; chosen by the owner.

Invariant: of all settings only `promised_ms` matters for safety. If replicas of a group have different settings, only
progress may suffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from stele.model.errors import Rejected


@dataclass(frozen=True, slots=True)
class RaftOptions:
    """Times in milliseconds, sizes in bytes.

    - `inflight_bytes_max` bounds what is on its way to one peer. `batch_bytes_max` bounds one message; a
      larger entry goes alone. `probe_bytes_max` bounds a message to a peer whose log is not known yet.
    - `tail_bytes_max` bounds the entries in memory that were handed out; `uncommitted_bytes_max` those that were
      not. Beyond the latter, proposals are THROTTLED.
    - `unreached_ms`: the owner gets PeerReached for a peer that has not answered its leader for this long. The
      algorithm does nothing else about it.
    - `lease_ms`: the length of the lease that a leader asks for, and the longest that a voter promises; 0: none.
      `promised_ms`: the longest that this replica may have promised before its start, or will promise. It must be durable
      before a core is made with it, and never less than in an earlier life.
    """

    heartbeat_ms: int = 75
    election_min_ms: int = 300
    election_max_ms: int = 600
    unreached_ms: int = 5_000
    inflight_bytes_max: int = 4 << 20
    batch_bytes_max: int = 512 << 10
    probe_bytes_max: int = 64 << 10
    tail_bytes_max: int = 4 << 20
    uncommitted_bytes_max: int = 16 << 20
    lease_ms: int = 0
    promised_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_ms < self.election_min_ms <= self.election_max_ms:
            raise Rejected(
                f"raft options: heartbeat {self.heartbeat_ms} ms, election {self.election_min_ms} to "
                f"{self.election_max_ms} ms; expected 0 < heartbeat < election min <= election max"
            )
        if not 0 <= self.lease_ms <= self.promised_ms:
            raise Rejected(
                f"raft options: lease_ms {self.lease_ms} is not between 0 and promised_ms {self.promised_ms}; store the longer promise "
                f"durably first"
            )
