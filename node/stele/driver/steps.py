"""The steps that a driver can take. Each is safe to repeat. Made by planner, carried out by executor; no
behaviour here.

Invariant: a step has the configuration index on which it was planned, and a reason that users can read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TabletId

_ANY = NodeId("")


@dataclass(frozen=True, slots=True)
class Step:
    """The base of all steps. `cas`: the `opid_index` of the committed configuration on which it was planned."""

    title: ClassVar[str] = ""
    """The word that status, events and command line show."""

    tablet_id: TabletId
    cas: int
    reason: str
    cause: str = field(default="", kw_only=True)
    """The work of which the step is a part, in one word (`driver/causes.py`). All steps of a heal have the
    same cause.
    """

    @property
    def because(self) -> str:
        """Cause and reason, as nodes and masters log them."""
        return f"{self.cause}: {self.reason}" if self.cause else self.reason


@dataclass(frozen=True, slots=True)
class BeginIntent(Step):
    """Record in the catalog that a new replica is about to be made. The master assigns its replica_id."""

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
    """Order the target to fetch the tablet, first as a witness if `witness`. `log_only`: the witness fetches
    its rows later, when it has a slot."""

    title = "Copying"
    replica_id: ReplicaId
    target_node: NodeId
    source_node: NodeId
    witness: bool
    witness_start: OpId = OPID_NONE
    log_only: bool = False


@dataclass(frozen=True, slots=True)
class DemotePeer(Step):
    """Make a dead or FAILED voter a NON_VOTER, so that it no longer counts for majorities."""

    title = "Demoting"
    replica_id: ReplicaId
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class AddWitness(Step):
    """Add the prepared target as WITNESS, which logs and votes at once."""

    title = "AddingWitness"
    replica_id: ReplicaId
    target_node: NodeId
    witness_start: OpId


@dataclass(frozen=True, slots=True)
class AddPreFollower(Step):
    """Add the target, after its copy, as PRE_FOLLOWER. The leader makes it a voter once it has caught up."""

    title = "AddingPreFollower"
    replica_id: ReplicaId
    target_node: NodeId


@dataclass(frozen=True, slots=True)
class PromoteBack(Step):
    """Make a PRE_FOLLOWER of a demoted replica that is back. The leader makes it a voter once it has caught
    up.
    """

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
    """Order the leader to transfer leadership: its own replica must be removed, or its node leads too many
    tablets.

    `target_node` "": the leader chooses the voter that keeps up and whose node leads least. It refuses a
    target that is not caught up, because writes wait during a transfer. `removes`: whether its replica is
    removed afterwards.
    """

    title = "MovingLeader"
    target_node: NodeId = _ANY
    removes: bool = True


@dataclass(frozen=True, slots=True)
class EndIntent(Step):
    """End the intent with the committed configuration: its replica is a voter and nothing is left to do."""

    title = "Ending"
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class CancelCopy(Step):
    """Give up the intent: write a configuration without its replica, which fences late orders, then end
    it."""

    title = "Cancelling"
    replica_id: ReplicaId
    target_node: NodeId


@dataclass(frozen=True, slots=True)
class WaitCopy(Step):
    """Wait until more bytes of the copy have arrived."""

    title = "Copying"
    replica_id: ReplicaId
    target_node: NodeId
    bytes_done: int
    bytes_total: int
    witness: bool


@dataclass(frozen=True, slots=True)
class WaitPromotion(Step):
    """Wait until the leader has promoted the replica."""

    title = "Promoting"
    replica_id: ReplicaId
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Blocked(Step):
    """Report that the tablet is not healthy, but nothing may be done now. `code`: one word for conditions."""

    title = "Blocked"
    code: str


@dataclass(frozen=True, slots=True)
class DrainNode(Step):
    """Make a node DRAINING, so that nothing new is placed on it. `tablet_id` is empty.

    `given_up`: the node is silent, and returns to service with its next heartbeat. Otherwise it drains for
    good.
    """

    title = "Draining"
    node_id: NodeId
    given_up: bool


@dataclass(frozen=True, slots=True)
class ReturnNode(Step):
    """Make a node ACTIVE again that was given up as silent and sends heartbeats again. It keeps its replicas."""

    title = "Returning"
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class ParkNode(Step):
    """Let a node be away for a time. Its replicas are kept, and not replaced."""

    title = "Parking"
    node_id: NodeId
    for_ms: int


@dataclass(frozen=True, slots=True)
class EndWish(Step):
    """Take back a state that a driver wanted for a node, so that it is in service again."""

    title = "Returning"
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class RetireNode(Step):
    """Set a DRAINING node to RETIRED, which is final. No configuration and no intent names such a node."""

    title = "Retiring"
    node_id: NodeId


MEMBERSHIP_STEPS = (DemotePeer, AddWitness, AddPreFollower, PromoteBack, RemovePeer, CancelCopy)
"""Steps that write a configuration."""
NODE_STEPS = (DrainNode, ReturnNode, ParkNode, EndWish, RetireNode)
"""Steps about a whole node."""
WAITS = (WaitCopy, WaitPromotion, Blocked)
"""Steps that need no order from the driver."""


def next_title(step: Step) -> str:
    """The title of the step after `step`, for status; "" if none follows."""
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
        case WaitPromotion() | MoveLeader(removes=True):
            return RemovePeer.title
        case RemovePeer():
            return EndIntent.title
        case _:
            return ""
