"""The actions of the operator, as immutable values. Made by plan, carried out by act.

Invariant: each action is safe to repeat and has a reason that users can read. A change or deletion carries
the uid and resourceVersion that it was planned on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from stele.driver.policy import StandingPolicy
from stele.model.ranges import RangeStep
from stele.model.steps import Step
from stele_operator.api.group import TabletGroupSpec
from stele_operator.plan.naming import LABEL_ROLE
from stele_operator.plan.observation import Identity, Role

Json = dict[str, Any]


def _role(manifest: Json) -> Role:
    return "master" if manifest["metadata"]["labels"][LABEL_ROLE] == "master" else "node"


@dataclass(frozen=True, slots=True)
class Base:
    """Base of all actions. `event` is the reason of its Kubernetes event; "" means that it has no event."""

    event: ClassVar[str] = ""
    reason: str


@dataclass(frozen=True, slots=True)
class CreateObject(Base):
    """Create a Kubernetes object. If the object exists and belongs to this cluster, that counts as done,
    unless `must_be_new`.
    """

    manifest: Json = field(repr=False)
    must_be_new: bool = False

    @property
    def kind(self) -> str:
        """The kind of the object."""
        return str(self.manifest["kind"])

    @property
    def name(self) -> str:
        """The name of the object."""
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class CreatePod(CreateObject):
    """Start a pod on its claim."""

    event = "PodCreated"

    @property
    def role(self) -> Role:
        """The role of the pod's member."""
        return _role(self.manifest)


@dataclass(frozen=True, slots=True)
class CreateClaim(CreateObject):
    """Create the claim of a member, with the member's identity on it."""

    event = "ClaimCreated"

    @property
    def role(self) -> Role:
        """The role of the claim's member."""
        return _role(self.manifest)


@dataclass(frozen=True, slots=True)
class PatchObject(Base):
    """Merge `patch` into an object, if it has not changed since it was observed."""

    kind: str
    name: str
    uid: str
    resource_version: str
    patch: Json = field(repr=False)


@dataclass(frozen=True, slots=True)
class RetireClaim(PatchObject):
    """Record on a claim that its node is RETIRED, so that no pod starts on it again, even while no master
    leads."""


@dataclass(frozen=True, slots=True)
class MarkPod(PatchObject):
    """Add or remove the label that marks the pod of a parked node."""

    parked: bool


@dataclass(frozen=True, slots=True)
class ReleaseClaim(PatchObject):
    """Release a claim: the operator deletes it after `keepFor`."""

    event = "ClaimReleased"


@dataclass(frozen=True, slots=True)
class GrowClaim(PatchObject):
    """Ask for a larger volume. `again`: the API server refused this before, and the cause seems to persist."""

    size: str
    again: bool


@dataclass(frozen=True, slots=True)
class ReplaceIdentity(PatchObject):
    """Replace the identity ConfigMap by compare-and-set. Later actions of the plan depend on this one.
    `identity` is the new content.
    """

    identity: Identity = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeleteObject(Base):
    """Delete an object, if it has not changed since it was observed."""

    kind: str
    name: str
    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class DeletePod(DeleteObject):
    """Delete a pod. `force` is used only if the pod's machine is lost or its node is retired."""

    event = "PodDeleted"
    force: bool = False


@dataclass(frozen=True, slots=True)
class RollPod(DeletePod):
    """Delete a pod with an older spec, so that it is made again from the present one."""

    event = "Rolling"


@dataclass(frozen=True, slots=True)
class DeleteClaim(DeleteObject):
    """Delete a claim."""

    event = "ClaimDeleted"


@dataclass(frozen=True, slots=True)
class RegisterNode(Base):
    """Register a node's UUID with the masters before its pod starts."""

    node_id: str
    role: str
    name: str


@dataclass(frozen=True, slots=True)
class ConfirmFormation(Base):
    """Tell a first master which masters form the cluster."""

    event = "FormationConfirmed"
    address: str
    node_id: str
    cluster_id: str
    masters: tuple[tuple[str, str, str], ...]
    """(UUID, format id, address) of each first master."""


@dataclass(frozen=True, slots=True)
class CreateTable(Base):
    """Create the table of a TabletGroup."""

    event = "TableCreated"
    group: str
    table_id: str
    name: str
    spec: TabletGroupSpec = field(repr=False)


@dataclass(frozen=True, slots=True)
class SetReplicationFactor(Base):
    """Set the replication factor of a TabletGroup's table. The driver adds or removes the replicas."""

    event = "ReplicationFactorSet"
    group: str
    table_id: str
    factor: int


@dataclass(frozen=True, slots=True)
class AlterTable(Base):
    """Change the table of a TabletGroup to the columns, ranges and history that the spec asks for. `notes`
    are the owner and comment, by name.
    """

    event = "TableAltered"
    group: str
    table_id: str
    name: str
    steps: tuple[Step | RangeStep, ...]
    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class DeleteTable(Base):
    """Drop the table of a TabletGroup. `kept`: the table can be recalled for a time; otherwise it is deleted
    for good.
    """

    event = "TableDeleted"
    group: str
    table_id: str
    name: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class SetFinalizers(Base):
    """Add or remove the finalizer of a TabletGroup."""

    group: str
    uid: str
    resource_version: str
    finalizers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetDriverPolicy(Base):
    """Store in the catalog the policy by which the masters heal while the operator is away. `only_holders`:
    only the holders of the change budget, and those that wait for it, differ from the stored policy.
    """

    policy: StandingPolicy
    only_holders: bool = False


@dataclass(frozen=True, slots=True)
class SetMasterCount(Base):
    """Tell the masters how many masters there are to be. The driver adds or removes them. `before` is the
    present number.
    """

    event = "MasterCountSet"
    masters: int
    before: int


@dataclass(frozen=True, slots=True)
class FinalizeVersion(Base):
    """End an upgrade: allow formats that the release before cannot read."""

    event = "VersionFinalized"
    version: int


Action = (
    CreateObject
    | PatchObject
    | DeleteObject
    | RegisterNode
    | ConfirmFormation
    | CreateTable
    | SetReplicationFactor
    | AlterTable
    | DeleteTable
    | SetFinalizers
    | SetDriverPolicy
    | SetMasterCount
    | FinalizeVersion
)
