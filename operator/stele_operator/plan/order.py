"""What an action of a pass counts on. Called by act; pure.

A failure holds up what counts on it, and nothing else: a refused registration keeps one pod from starting, and neither
another pod nor a volume that has to grow. Invariant: what is held up holds up in its turn what counts on it.
"""

from __future__ import annotations

from typing import Protocol

from stele_operator.plan.actions import (
    Action,
    ConfirmFormation,
    CreateClaim,
    CreateObject,
    CreatePod,
    CreateTable,
    DeleteClaim,
    DeleteObject,
    DeletePod,
    DeleteTable,
    PatchObject,
    RegisterNode,
    ReplaceIdentity,
    SetFinalizers,
)

_SERIALS = "the serials are set aside"
_MASTERS = "a master leads"


def _registered(name: str) -> str:
    return f"the masters know {name}"


def _ended(name: str) -> str:
    return f"pod {name} is deleted"


def _held_by_finalizer(group: str) -> str:
    return f"TabletGroup {group} has the finalizer that its deletionPolicy asks for"


def grants(action: Action) -> str:
    """What others may count on once the action is done; empty: nothing."""
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
    """What must not have failed before it in the same pass."""
    match action:
        case CreateClaim():
            return (_SERIALS,)
        case CreatePod():
            return (_registered(action.name),)
        case DeleteClaim():
            return (_ended(action.name),)
        case CreateTable():
            return _MASTERS, _held_by_finalizer(action.group)
        case RegisterNode() | DeleteTable():
            return (_MASTERS,)
        case _:
            return ()


def identity(action: Action) -> tuple[str, ...]:
    """What makes an action the same one in the next pass, though it is planned anew."""
    kind = type(action).__name__
    match action:
        case CreateObject() | PatchObject() | DeleteObject():
            return kind, action.kind, action.name
        case RegisterNode() | ConfirmFormation():
            return kind, action.node_id
        case CreateTable():
            return kind, action.group, action.spec.model_dump_json()
        case DeleteTable() | SetFinalizers():
            return kind, action.group


class Failure(Protocol):
    """Why an action was not done. `unanswered`: no master answered, so none would answer the next call either."""

    @property
    def error(self) -> str: ...

    @property
    def unanswered(self) -> bool: ...


class Held:
    """What failed so far in a pass."""

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}

    def why(self, action: Action) -> str:
        """Why the action has to wait, in words; empty: it may be done."""
        for need in needs(action):
            if need in self._missing:
                return f"not before {need}: {self._missing[need]}"
        return ""

    def failed(self, action: Action, failure: Failure) -> None:
        """It was not done: what counts on it waits for a later pass."""
        if grant := grants(action):
            self._missing.setdefault(grant, failure.error)
        if failure.unanswered:
            self._missing.setdefault(_MASTERS, failure.error)
