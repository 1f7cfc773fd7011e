"""What the operator can do, one immutable value each. Made by plan, carried out by act.

Invariant: each is safe to repeat, carries the uid and resourceVersion it was planned on where it changes or deletes,
and its reason in words a user can read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from stele_operator.api.group import TabletGroupSpec
from stele_operator.plan.naming import LABEL_ROLE
from stele_operator.plan.observation import Role

Json = dict[str, Any]


def _role(manifest: Json) -> Role:
    return "master" if manifest["metadata"]["labels"][LABEL_ROLE] == "master" else "node"


@dataclass(frozen=True, slots=True)
class Base:
    """What all have. `event`: the one word its event shows; empty: not worth an event."""

    event: ClassVar[str] = ""
    reason: str


@dataclass(frozen=True, slots=True)
class CreateObject(Base):
    """Create a Kubernetes object; that its own exists already counts as done, unless `must_be_new`."""

    manifest: Json = field(repr=False)
    must_be_new: bool = False

    @property
    def kind(self) -> str:
        """Its kind."""
        return str(self.manifest["kind"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class CreatePod(CreateObject):
    """Start a pod on its claim."""

    event = "PodCreated"

    @property
    def role(self) -> Role:
        """Of the member that it is of."""
        return _role(self.manifest)


@dataclass(frozen=True, slots=True)
class CreateClaim(CreateObject):
    """Make a claim, with the node's identity on it."""

    event = "ClaimCreated"

    @property
    def role(self) -> Role:
        """Of the member that it is of."""
        return _role(self.manifest)


@dataclass(frozen=True, slots=True)
class PatchObject(Base):
    """Merge `patch` into an object, if it still is what was seen."""

    kind: str
    name: str
    uid: str
    resource_version: str
    patch: Json = field(repr=False)


@dataclass(frozen=True, slots=True)
class RetireClaim(PatchObject):
    """Note on a claim that its node is RETIRED: nothing starts on it again, also while no master leads."""


@dataclass(frozen=True, slots=True)
class ReleaseClaim(PatchObject):
    """Let a claim go: it is deleted after `keepFor`."""

    event = "ClaimReleased"


@dataclass(frozen=True, slots=True)
class GrowClaim(PatchObject):
    """Ask for a larger volume. `again`: it was refused before, and nothing has been done about that as far as is known."""

    size: str
    again: bool


@dataclass(frozen=True, slots=True)
class ReplaceIdentity(PatchObject):
    """Compare-and-set on the identity ConfigMap. Actions behind it in the plan count on it."""


@dataclass(frozen=True, slots=True)
class DeleteObject(Base):
    """Delete an object, if it still is what was seen."""

    kind: str
    name: str
    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class DeletePod(DeleteObject):
    """Delete a pod; by force only where its machine is lost or its node is retired."""

    event = "PodDeleted"
    force: bool = False


@dataclass(frozen=True, slots=True)
class DeleteClaim(DeleteObject):
    """Delete a claim."""

    event = "ClaimDeleted"


@dataclass(frozen=True, slots=True)
class RegisterNode(Base):
    """Make a node's UUID known to the masters before its pod starts."""

    node_id: str
    role: str
    name: str


@dataclass(frozen=True, slots=True)
class ConfirmFormation(Base):
    """Tell a first master who forms the cluster."""

    event = "FormationConfirmed"
    address: str
    node_id: str
    cluster_id: str
    masters: tuple[tuple[str, str, str], ...]
    """(UUID, format id, address) of each."""


@dataclass(frozen=True, slots=True)
class CreateTable(Base):
    """Create the table of a TabletGroup."""

    event = "TableCreated"
    group: str
    table_id: str
    name: str
    spec: TabletGroupSpec = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeleteTable(Base):
    """Delete the table of a TabletGroup."""

    event = "TableDeleted"
    group: str
    table_id: str
    name: str


@dataclass(frozen=True, slots=True)
class SetFinalizers(Base):
    """Put on, or take off, the one finalizer of a TabletGroup."""

    group: str
    uid: str
    resource_version: str
    finalizers: tuple[str, ...]


Action = (
    CreateObject
    | PatchObject
    | DeleteObject
    | RegisterNode
    | ConfirmFormation
    | CreateTable
    | DeleteTable
    | SetFinalizers
)
