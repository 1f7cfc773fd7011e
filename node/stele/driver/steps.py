"""Steps: what a driver can do, each safe to repeat. Made by planner, carried out by executor; no behaviour here.

Invariant: a step names the configuration index it was planned on, and its reason in words a user can read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TabletId


@dataclass(frozen=True, slots=True)
class Step:
    """Base. `cas` is the `opid_index` of the committed configuration it was planned on."""

    title: ClassVar[str] = ""
    """The one word that status, events and command line show."""

    tablet_id: TabletId
    cas: int
    reason: str
    cause: str = field(default="", kw_only=True)
    """What it is a part of, in one word (`driver/causes.py`): the same for all steps of a heal."""

    @property
    def because(self) -> str:
        """Cause and reason, as nodes and masters log them."""
        return f"{self.cause}: {self.reason}" if self.cause else self.reason


@dataclass(frozen=True, slots=True)
class BeginIntent(Step):
    """Record in the catalog what is about to begin; the master assigns the replica_id."""

    title = "Beginning"
    kind: str
    target_node: NodeId
    source_node: NodeId
    replaces_replica: int
    witness: bool


@dataclass(frozen=True, slots=True)
class TakeOverIntent(Step):
    """Put this driver's epoch on an intent that an earlier driver left behind."""

    title = "TakingOver"
    replica_id: ReplicaId
    target_node: NodeId


@dataclass(frozen=True, slots=True)
class StartCopy(Step):
    """Prepare the target: tell it to fetch the tablet, as a witness first if `witness`. `log_only`: the witness fetches its rows
    when its turn comes."""

    title = "Copying"
    replica_id: ReplicaId
    target_node: NodeId
    source_node: NodeId
    witness: bool
    witness_start: OpId = OPID_NONE
    log_only: bool = False


@dataclass(frozen=True, slots=True)
class DemotePeer(Step):
    """A dead or FAILED voter becomes a NON_VOTER, so that a majority no longer counts it."""

    title = "Demoting"
    replica_id: ReplicaId
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class AddWitness(Step):
    """The prepared target joins as WITNESS: it logs and votes at once."""

    title = "AddingWitness"
    replica_id: ReplicaId
    target_node: NodeId
    witness_start: OpId


@dataclass(frozen=True, slots=True)
class AddPreFollower(Step):
    """The copied target joins as PRE_FOLLOWER; the leader makes it a voter once it has caught up."""

    title = "AddingPreFollower"
    replica_id: ReplicaId
    target_node: NodeId


@dataclass(frozen=True, slots=True)
class PromoteBack(Step):
    """A demoted replica that came back becomes a PRE_FOLLOWER; the leader makes it a voter again."""

    title = "PromotingBack"
    replica_id: ReplicaId
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class RemovePeer(Step):
    """Take a replica out of the configuration."""

    title = "Removing"
    replica_id: ReplicaId
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class MoveLeader(Step):
    """Have the leader hand over to whoever is most advanced, because its own replica must go. It alone knows who that is: while
    one that lags is waited for, nothing is written."""

    title = "MovingLeader"


@dataclass(frozen=True, slots=True)
class EndIntent(Step):
    """The intent's replica is a voter and nothing is left to do: end it with the committed configuration."""

    title = "Ending"
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class CancelCopy(Step):
    """Give the intent up: write a configuration without its replica (which fences late orders), then end it."""

    title = "Cancelling"
    replica_id: ReplicaId
    target_node: NodeId


@dataclass(frozen=True, slots=True)
class WaitCopy(Step):
    """Nothing to do until more bytes have arrived."""

    title = "Copying"
    replica_id: ReplicaId
    target_node: NodeId
    bytes_done: int
    bytes_total: int
    witness: bool


@dataclass(frozen=True, slots=True)
class WaitPromotion(Step):
    """Nothing to do until the leader has promoted the replica."""

    title = "Promoting"
    replica_id: ReplicaId
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Blocked(Step):
    """Something is wrong with the tablet and nothing may be done now. `code` is one word for conditions."""

    title = "Blocked"
    code: str


@dataclass(frozen=True, slots=True)
class DrainNode(Step):
    """A node leaves ACTIVE, so that nothing new is placed on it. `given_up`: for its silence, so that it returns if it is heard;
    else for good. `tablet_id` is empty."""

    title = "Draining"
    node_id: NodeId
    given_up: bool


@dataclass(frozen=True, slots=True)
class ReturnNode(Step):
    """A node that was given up for its silence is heard again: it is ACTIVE again, and keeps what it has."""

    title = "Returning"
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class RetireNode(Step):
    """No configuration and no intent names a DRAINING node: it becomes RETIRED, which is final."""

    title = "Retiring"
    node_id: NodeId


MEMBERSHIP_STEPS = (DemotePeer, AddWitness, AddPreFollower, PromoteBack, RemovePeer, CancelCopy)
"""Steps that write a configuration."""
WAITS = (WaitCopy, WaitPromotion, Blocked)
"""Steps that need no order from the driver."""


def next_title(step: Step) -> str:
    """What follows when `step` is done, as status shows it; empty when nothing does."""
    match step:
        case BeginIntent() | TakeOverIntent():
            return StartCopy.title
        case StartCopy(witness=True):
            return AddWitness.title
        case StartCopy() | WaitCopy(witness=False):
            return AddPreFollower.title
        case DemotePeer():
            return AddWitness.title
        case WaitCopy():
            return WaitPromotion.title
        case AddWitness():
            return WaitCopy.title
        case AddPreFollower() | PromoteBack():
            return WaitPromotion.title
        case WaitPromotion() | MoveLeader():
            return RemovePeer.title
        case RemovePeer():
            return EndIntent.title
        case _:
            return ""
