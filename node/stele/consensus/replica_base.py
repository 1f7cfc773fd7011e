"""What every part of a replica stands on: identity, state, who leads, what runs beneath.

A replica is one object in layers, each a class that knows the layers below: base, writes, reads, log, membership, replica.

Invariant: state, role, term and configurations change only where the core or bootstrap says so.
"""

from __future__ import annotations

import itertools
from enum import IntEnum
from pathlib import Path
from typing import Any

import structlog

from stele.consensus.applier import Applier
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.runtime import CoreRuntime
from stele.consensus.superblock import Superblock
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, NotLeader, Retryable, SteleError, error_for
from stele.model.ids import OPID_NONE, ReplicaId, TabletId
from stele.raft.core import RaftCore
from stele.raft.effects import Role
from stele.tablet.machine import StateMachine


class ReplicaState(IntEnum):
    """Numbers are those of ReplicaStatePB."""

    BOOTSTRAPPING = 1
    CONFIGURING = 2
    RUNNING = 3
    STOPPED = 4
    FAILED = 5


_TAKES_PART = (ReplicaState.RUNNING, ReplicaState.CONFIGURING)


class ReplicaBase:
    """Fields and questions that all parts share. `machine` is None while a young witness has no rows yet."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        self.superblock = superblock
        self.raw_tablet_id = bytes.fromhex(superblock.tablet_id)
        self.directory = directory
        self.host = host
        self.options = options or ReplicaOptions()
        self.state = ReplicaState.BOOTSTRAPPING
        self.error = ""
        self.machine: StateMachine | None = None
        self.stream: Any = None
        self.role = Role.NON_PARTICIPANT
        self.term = 0
        self.leader: ReplicaId | None = None
        self.config = Configuration(-1, ())
        self.committed_config = Configuration(-1, ())
        self.ticked_ms = host.now_ms()
        """The time of its node's last tick: near enough for what is counted in many of them, and no call."""
        self.active_ms = self.ticked_ms
        self.committed_opid = OPID_NONE
        self._serves = False
        self._leaderless_since_ms = host.now_ms()
        self._runtime: CoreRuntime | None = None
        self._applier: Applier | None = None
        self._contexts = itertools.count(1)
        self._log = structlog.get_logger("stele.consensus").bind(
            tablet=self.tablet_id[:8], replica=self.replica_id
        )

    @property
    def tablet_id(self) -> TabletId:
        """The tablet this is a replica of."""
        return self.superblock.tablet_id

    @property
    def replica_id(self) -> ReplicaId:
        """Its own id, never used again."""
        return self.superblock.replica_id

    @property
    def core(self) -> RaftCore | None:
        """The raft core, None before start and for a replica whose log is damaged."""
        return self._runtime.core if self._runtime is not None else None

    @property
    def runtime(self) -> CoreRuntime | None:
        """What feeds the core, None where there is none."""
        return self._runtime

    @property
    def applied_index(self) -> int:
        """The last log index that is applied."""
        return self._applier.applied_index if self._applier is not None else 0

    @property
    def staleness_ms(self) -> int | None:
        """How old what is applied here is at the most, by when the leader's last word came; None: not known."""
        runtime, applier = self._runtime, self._applier
        if runtime is None or applier is None or not self.running:
            return None
        if runtime.quiet:  # it had everything, and its leader's node was heard within an election timeout
            return self.options.raft.election_max_ms
        caught_up_ms = runtime.core.caught_up_ms
        if caught_up_ms is None or applier.applied_index < applier.committed_index:
            return None
        return max(0, runtime.now_ms() - caught_up_ms)

    @property
    def is_leader(self) -> bool:
        """Whether it leads and holds rows."""
        return self.role is Role.LEADER and self._serves and self.state in _TAKES_PART

    @property
    def running(self) -> bool:
        """Whether it takes part: neither BOOTSTRAPPING, STOPPED nor FAILED."""
        return self.state in _TAKES_PART

    def leader_peer(self) -> Peer | None:
        """The leader, where known."""
        return self.config.peer(self.leader) if self.leader is not None else None

    def check_leader(self) -> None:
        """Raise unless this replica leads and holds rows."""
        if self.is_leader:
            return
        if self.state is ReplicaState.BOOTSTRAPPING:
            raise Retryable("the replica replays its log; try another or wait", code=Code.NOT_READY)
        raise self._not_leader()

    def _not_leader(self) -> SteleError:
        where = f"replica {self.replica_id} of tablet {self.tablet_id}"
        peer = self.leader_peer()
        if peer is not None and peer.replica_id != self.replica_id:
            return NotLeader(f"{where} is {self.role.name}, not the leader", leader_hint=peer.node_id)
        silent_ms = self.host.now_ms() - self._leaderless_since_ms
        if self.running and self.leader is None and silent_ms > self.options.raft.election_max_ms:
            return Retryable(f"{where} has had no leader for {silent_ms} ms", code=Code.NO_QUORUM)
        return NotLeader(f"{where} is {self.role.name}, and knows no leader yet")

    def _error(self, code: Code, message: str) -> SteleError:
        if code is Code.NOT_LEADER:
            return self._not_leader()
        return error_for(code, message)
