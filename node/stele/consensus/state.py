"""`Standing`: identity and state of a replica: life-cycle state, role, term, leader and configurations.

Each replica has one, made first and read by all its parts. Only its methods change it:
- `Replica`, which owns the life cycle, calls `waits`, `fail`, `stop` and `rows_arrived`.
- `StartedReplica` calls `begin` once its parts are made; then `role_changed`, `term_committed` and `tell`
  when the core says so.
- `Members` calls `configured` when the core says so.

Invariant: the state changes only through `next_state`, and each change is logged with its cause.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum

import structlog

from stele.consensus.ports import Host
from stele.consensus.superblock import Superblock
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, NotLeader, Retryable, SteleError, error_for
from stele.model.ids import ReplicaId, TabletId
from stele.raft.effects import Role, RoleChanged

RoleListener = Callable[[Role, int, ReplicaId | None], None]
"""Called with role, term and leader."""


class ReplicaState(IntEnum):
    """The life-cycle states. The numbers are those of ReplicaStatePB."""

    BOOTSTRAPPING = 1
    CONFIGURING = 2
    RUNNING = 3
    STOPPED = 4
    FAILED = 5


class LifeEvent(Enum):
    """Events that change the state of a replica."""

    STARTED = "bootstrap has ended"
    ROLE_CHANGED = "its role, term or leader has changed"
    TERM_COMMITTED = "an entry of the leader's term is known committed"
    FAILED = "its disk, log or rows are damaged"
    STOPPED = "it was removed, or its node stops"


_NEXT: dict[ReplicaState, dict[LifeEvent, ReplicaState]] = {
    ReplicaState.BOOTSTRAPPING: {
        LifeEvent.STARTED: ReplicaState.CONFIGURING,
        LifeEvent.FAILED: ReplicaState.FAILED,
        LifeEvent.STOPPED: ReplicaState.STOPPED,
    },
    ReplicaState.CONFIGURING: {
        LifeEvent.TERM_COMMITTED: ReplicaState.RUNNING,
        LifeEvent.FAILED: ReplicaState.FAILED,
        LifeEvent.STOPPED: ReplicaState.STOPPED,
    },
    ReplicaState.RUNNING: {
        LifeEvent.ROLE_CHANGED: ReplicaState.CONFIGURING,
        LifeEvent.FAILED: ReplicaState.FAILED,
        LifeEvent.STOPPED: ReplicaState.STOPPED,
    },
    ReplicaState.FAILED: {LifeEvent.STOPPED: ReplicaState.STOPPED},
    ReplicaState.STOPPED: {},
}
_TAKES_PART = (ReplicaState.CONFIGURING, ReplicaState.RUNNING)


def next_state(state: ReplicaState, event: LifeEvent) -> ReplicaState:
    """The state after `event`. An event that the table does not list for a state changes nothing."""
    return _NEXT[state].get(event, state)


class Standing:
    """Identity and state of one replica.

    `running`: it takes part in its group, as CONFIGURING or RUNNING. `leads`: it runs, leads and holds rows.
    `no_leader_after_ms`: a group that has had no leader for longer is taken to have no quorum.
    """

    def __init__(self, superblock: Superblock, host: Host, no_leader_after_ms: int) -> None:
        self.superblock = superblock
        self.raw_tablet_id = bytes.fromhex(superblock.tablet_id)
        """The tablet id as messages carry it."""
        self.log = structlog.get_logger("stele.consensus").bind(
            tablet=superblock.tablet_id[:8], replica=superblock.replica_id
        )
        self.state = ReplicaState.BOOTSTRAPPING
        self.error = ""
        """Why it FAILED, or why it could not be started yet."""
        self.role = Role.NON_PARTICIPANT
        self.term = 0
        self.leader: ReplicaId | None = None
        self.config = Configuration(-1, ())
        self.committed_config = Configuration(-1, ())
        self.running = False
        self.leads = False
        self._host = host
        self._no_leader_after_ms = no_leader_after_ms
        self._no_leader_since_ms = host.now_ms()
        self._serves = False
        self._listeners: list[RoleListener] = []

    @property
    def tablet_id(self) -> TabletId:
        """The tablet this is a replica of."""
        return self.superblock.tablet_id

    @property
    def replica_id(self) -> ReplicaId:
        """Its own id, which no other replica ever gets."""
        return self.superblock.replica_id

    # --- changes

    def begin(self, term: int, config: Configuration, committed: Configuration) -> None:
        """Become CONFIGURING: bootstrap has ended, and the core is made."""
        self.term = term
        self.config, self.committed_config = config, committed
        self._move(LifeEvent.STARTED, f"its log was replayed, at term {term}")

    def fail(self, reason: str) -> bool:
        """Become FAILED. If it was FAILED or STOPPED before, returns False and keeps the first reason."""
        if not self._move(LifeEvent.FAILED, reason):
            return False
        self.error = reason
        return True

    def stop(self, cause: str) -> bool:
        """Become STOPPED. Returns False if it was STOPPED before."""
        return self._move(LifeEvent.STOPPED, cause)

    def waits(self, error: str) -> None:
        """Note that the start failed because of `error`, and is tried again later. "": it is being tried now."""
        self.error = error

    def rows_arrived(self, superblock: Superblock) -> None:
        """Take the new superblock of a young witness, which has its rows now."""
        self.superblock = superblock

    def role_changed(self, change: RoleChanged) -> None:
        """Take over the core's new role, term or leader."""
        if change.leader is None and (self.leader is not None or self.role is Role.LEADER):
            self._no_leader_since_ms = self._host.now_ms()
        self.role, self.term, self.leader = change.role, change.term, change.leader
        self._serves = change.serves
        self._enter(LifeEvent.ROLE_CHANGED)
        self._derive()
        self.log.info(
            "role",
            role=self.role.name,
            term=self.term,
            leader=self.leader,
            state=self.state.name,
            cause=change.cause,
        )

    def term_committed(self) -> None:
        """Become RUNNING: the core knows that an entry of its leader's term is committed."""
        if self._move(LifeEvent.TERM_COMMITTED, f"an entry of term {self.term} is committed"):
            self.report()

    def configured(self, config: Configuration, committed: bool, cause: str) -> None:
        """Take over a configuration that the core reports as active, or as committed."""
        if committed:
            self.committed_config = config
        if not committed or self.config.opid_index <= config.opid_index:
            self.config = config
        self.log.info("configuration", index=config.opid_index, committed=committed, cause=cause)
        self.report()

    def _move(self, event: LifeEvent, cause: str) -> bool:
        """Enter the next state and log it. Returns whether it changed."""
        if not self._enter(event):
            return False
        tell = self.log.error if self.state is ReplicaState.FAILED else self.log.info
        tell("state", state=self.state.name, cause=cause)
        return True

    def _enter(self, event: LifeEvent) -> bool:
        state = next_state(self.state, event)
        if state is self.state:
            return False
        self.state = state
        self._derive()
        return True

    def _derive(self) -> None:
        self.running = self.state in _TAKES_PART
        self.leads = self.running and self._serves and self.role is Role.LEADER

    # --- reports and listeners

    def report(self) -> None:
        """Have the node report this replica to the masters."""
        self._host.changed(self)

    def add_role_listener(self, listener: RoleListener) -> None:
        """Call `listener` at each change of role, term or leader, and once now."""
        self._listeners.append(listener)
        listener(self.role, self.term, self.leader)

    def tell(self) -> None:
        """Call the listeners and report. Called after all parts have followed a change of role."""
        for listener in self._listeners:
            listener(self.role, self.term, self.leader)
        self.report()

    # --- refusals

    def leader_peer(self) -> Peer | None:
        """The leader, where known."""
        return self.config.peer(self.leader) if self.leader is not None else None

    def check_leader(self) -> None:
        """Raise `refusal` unless this replica leads and holds rows."""
        if not self.leads:
            raise self.refusal()

    def refusal(self) -> SteleError:
        """The error for a caller that needs the leader: NOT_READY during bootstrap, else as `not_leader`."""
        if self.state is ReplicaState.BOOTSTRAPPING:
            return Retryable("the replica replays its log; try another or wait", code=Code.NOT_READY)
        return self.not_leader()

    def not_leader(self) -> SteleError:
        """NOT_LEADER, with a hint if the leader is known; NO_QUORUM if there has been no leader for long."""
        where = f"replica {self.replica_id} of tablet {self.tablet_id}"
        peer = self.leader_peer()
        if peer is not None and peer.replica_id != self.replica_id:
            return NotLeader(f"{where} is {self.role.name}, not the leader", leader_hint=peer.node_id)
        silent_ms = self._host.now_ms() - self._no_leader_since_ms
        if self.running and self.leader is None and silent_ms > self._no_leader_after_ms:
            return Retryable(
                f"{where} has had no leader for {silent_ms} ms; check that a majority of its replicas runs",
                code=Code.NO_QUORUM,
            )
        return NotLeader(f"{where} is {self.role.name}, and knows no leader yet; try again")

    def error_of(self, code: Code, message: str) -> SteleError:
        """The error for a refusal of the core. NOT_LEADER gets a hint if the leader is known."""
        return self.not_leader() if code is Code.NOT_LEADER else error_for(code, message)
