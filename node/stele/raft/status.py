"""A frozen view of a core, for owners and tests. Built by `RaftCore.status`.

Invariant: it is a value, and does not change when the core does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stele.model.config import Configuration
from stele.model.ids import OpId, ReplicaId
from stele.raft.effects import Role


class PeerState(Enum):
    """How a leader sends to a peer."""

    PROBE = "PROBE"  # one message at a time, until the logs are known to meet
    REPLICATE = "REPLICATE"  # pipelined
    SNAPSHOT = "SNAPSHOT"  # its log ends before ours begins: heartbeats only, until a copy has come


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A peer, as the leader sees it.

    `last_heard_ms`: when it last answered; before its first answer in this term, when the leader began to ask
    it. `unreached`: that was longer ago than `RaftOptions.unreached_ms`.
    """

    replica_id: ReplicaId
    state: PeerState
    match_index: int
    next_index: int
    inflight_bytes: int
    last_heard_ms: int
    reachable: bool
    unreached: bool
    failed: bool
    has_data: bool


@dataclass(frozen=True, slots=True)
class RaftStatus:
    """What a core knows.

    - `pending_change_index`: log index of a membership change that is not committed, or None.
    - `term_committed`: a leader is known, and an entry of its term is known committed. So the replica is not
      CONFIGURING.
    - `serves`: it leads, holds rows, and has committed an entry of its own term.
    - `all_replicated_index`: the last index that every voter holds durably, as the leader last said.
    """

    self_replica: ReplicaId
    role: Role
    term: int
    voted_for: ReplicaId | None
    leader: ReplicaId | None
    config: Configuration
    committed_config: Configuration
    pending_change_index: int | None
    last_logged: OpId
    last_durable: OpId
    log_start: OpId
    commit_index: int
    term_committed: bool
    serves: bool
    failed: bool
    has_data: bool
    transferring_to: ReplicaId | None
    all_replicated_index: int
    peers: tuple[PeerStatus, ...]
