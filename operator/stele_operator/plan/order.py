"""Dependencies between the actions of a pass. Called by act; pure.

A failed action blocks only the actions that depend on it. For example, a refused registration keeps one pod
from starting, but no other pod, and no volume from growing. Invariant: a blocked action blocks in turn the
actions that depend on it.
"""

from __future__ import annotations

from typing import Protocol

from stele_operator.plan.actions import (
    Action,
    AlterTable,
    ConfirmFormation,
    CreateClaim,
    CreateObject,
    CreatePod,
    CreateTable,
    DeleteClaim,
    DeleteObject,
    DeletePod,
    DeleteTable,
    FinalizeVersion,
    PatchObject,
    RegisterNode,
    ReplaceIdentity,
    RollPod,
    SetDriverPolicy,
    SetFinalizers,
    SetMasterCount,
    SetReplicationFactor,
)

_SERIALS = "the serials are reserved"
_MASTERS = "a master leads"


def _registered(name: str) -> str:
    return f"the masters know {name}"


def _ended(name: str) -> str:
    return f"pod {name} is deleted"


def _held_by_finalizer(group: str) -> str:
    return f"TabletGroup {group} has the finalizer that its deletionPolicy asks for"


def grants(action: Action) -> str:
    """The condition that the action establishes for other actions; "" if none."""
    match action:
        case ReplaceIdentity():
            return _SERIALS
        case RegisterNode():
            return _registered(action.name)
        case DeletePod():
            return _ended(action.name)
        case SetFinalizers():
            return _held_by_finalizer(action.group)
        case _:
            return ""


def needs(action: Action) -> tuple[str, ...]:
    """The conditions on which the action depends."""
    match action:
        case CreateClaim():
            return (_SERIALS,)
        case CreatePod():
            return (_registered(action.name),)
        case DeleteClaim():
            return (_ended(action.name),)
        case CreateTable():
            return _MASTERS, _held_by_finalizer(action.group)
        case RegisterNode() | AlterTable() | DeleteTable() | SetReplicationFactor() | SetDriverPolicy():
            return (_MASTERS,)
        case (
            FinalizeVersion() | RollPod()
        ):  # masters that stopped answering may have lost one of them meanwhile
            return (_MASTERS,)
        case SetMasterCount():
            return _MASTERS, _SERIALS  # the identity records the number first
        case _:
            return ()


def identity(action: Action) -> tuple[str, ...]:
    """A key that is the same for the same action in later passes."""
    kind = type(action).__name__
    match action:
        case CreateObject() | PatchObject() | DeleteObject():
            return kind, action.kind, action.name
        case RegisterNode() | ConfirmFormation():
            return kind, action.node_id
        case CreateTable():
            return kind, action.group, action.spec.model_dump_json()
        case SetReplicationFactor():
            return kind, action.group, str(action.factor)
        case AlterTable():
            return kind, action.group, repr(action.steps)
        case DeleteTable() | SetFinalizers():
            return kind, action.group
        case SetDriverPolicy():
            return (kind,)
        case SetMasterCount():
            return kind, str(action.masters)
        case FinalizeVersion():
            return kind, str(action.version)


class Failure(Protocol):
    """The failure of an action. `unanswered`: no master answered, so the next call to masters would fail
    too."""

    @property
    def error(self) -> str: ...

    @property
    def unanswered(self) -> bool: ...


class Held:
    """The failures of a pass so far. They hold back the actions that depend on the failed ones."""

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}

    def why(self, action: Action) -> str:
        """Why the action must wait, in words; "" if it need not."""
        for need in needs(action):
            if need in self._missing:
                return f"waits until {need}: {self._missing[need]}"
        return ""

    def failed(self, action: Action, failure: Failure) -> None:
        """Record that the action was not done, so that dependent actions wait for a later pass."""
        if grant := grants(action):
            self._missing.setdefault(grant, failure.error)
        if failure.unanswered:
            self._missing.setdefault(_MASTERS, failure.error)
