"""Carries out planned actions, in their order. Called by reconcile; decides nothing.

Invariants: an action that depends on a failed one is not done (plan/order.py); all others are. The next pass
plans again from the present state. A running pod is not deleted for a roll if the actions before took long:
by then another member may be away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from stele.model.errors import Code, Rejected, SteleError
from stele_operator import metrics
from stele_operator.kube import Conflict, Kube, KubeError, NotFound
from stele_operator.masters import MasterLink
from stele_operator.plan.actions import (
    Action,
    AlterTable,
    ConfirmFormation,
    CreateClaim,
    CreateObject,
    CreatePod,
    CreateTable,
    DeleteObject,
    DeletePod,
    DeleteTable,
    FinalizeVersion,
    PatchObject,
    RegisterNode,
    RollPod,
    SetDriverPolicy,
    SetFinalizers,
    SetMasterCount,
    SetReplicationFactor,
)
from stele_operator.plan.naming import ANNOTATION_NODE_ID
from stele_operator.plan.observation import MASTERS_REFUSED
from stele_operator.plan.order import Held

log = structlog.get_logger("stele.operator.act")
Json = dict[str, Any]
_REFUSALS = (400, 403, 422)
ROLL_WITHIN_S = 3.0
"""How many seconds after the first action of a pass a pod may still be deleted for a roll. It is the time of
three heartbeats: after that, masters may know of another silent member.
"""
_UNANSWERED = (Code.NOT_LEADER, Code.NOT_READY, Code.NO_QUORUM, Code.UNAVAILABLE, Code.TIMED_OUT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action. `error`: "" if the action was done. `changed_under`: an object had changed
    since it was observed.
    """

    action: Action
    error: str = ""
    changed_under: bool = False
    refused: bool = False
    """The API server refused the action for a lasting reason (no allowVolumeExpansion, a quota, an admission
    rule), or the masters refused an impossible table.
    """
    held: bool = False
    """The action was not tried in this pass. If it failed a moment ago, `error` is that failure. If it
    depends on a failed action, or is a roll that came too late in the pass, `changed_under` is set too.
    """
    unanswered: bool = False
    """Whether no master answered."""


def refusals(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], str]:
    """Why requests were refused. Pods and claims are found by kind and name, tables by TabletGroup, the
    number of masters by MASTERS_REFUSED.
    """
    found = {}
    for x in outcomes:
        if isinstance(x.action, CreatePod | CreateClaim) and x.error and not x.changed_under:
            found[x.action.kind, x.action.name] = x.error
        elif isinstance(x.action, CreateTable | AlterTable | SetReplicationFactor) and x.refused:
            found["TabletGroup", x.action.group] = x.error
        elif isinstance(x.action, SetMasterCount) and x.refused:
            found[MASTERS_REFUSED] = x.error
    return found


def _shared(has: Json, wanted: Json) -> bool:
    """Whether two objects' metadata name the same owner, or the identity of the same node."""
    owners = [{r["uid"] for r in m.get("ownerReferences") or ()} for m in (has, wanted)]
    ids = [(m.get("annotations") or {}).get(ANNOTATION_NODE_ID) for m in (has, wanted)]
    return bool(owners[0] & owners[1]) or (ids[0] is not None and ids[0] == ids[1])


def _log_outcome(outcome: Outcome) -> None:
    kind = type(outcome.action).__name__
    result = "held" if outcome.held else "failed" if outcome.error else "done"
    metrics.ACTIONS.labels(kind, result).inc()
    if not outcome.error:
        log.info("action done", action=kind, reason=outcome.action.reason)
    elif not outcome.held:
        log.info(
            "action not done; the next pass plans anew",
            action=kind,
            reason=outcome.action.reason,
            error=outcome.error,
        )


class Actor:
    """Carries out the actions for one cluster."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        link: MasterLink | None,
        waits: Callable[[Action], Outcome | None] = lambda action: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`waits` returns the outcome of an action that failed a moment ago and must not be tried yet. It
        returns None if the action may be tried.
        """
        self._kube = kube
        self._namespace = namespace
        self._link = link
        self._waits = waits
        self._now_s = now_s

    async def carry_out(self, actions: Sequence[Action]) -> list[Outcome]:
        """Carry out each action once, in order, except those that depend on a failed one. Returns all
        outcomes.
        """
        outcomes, held, began_s = [], Held(), self._now_s()
        for action in actions:
            outcome = self._not_now(action, held, began_s) or await self._one(action)
            outcomes.append(outcome)
            if outcome.error:
                held.failed(action, outcome)
            _log_outcome(outcome)
        return outcomes

    def _not_now(self, action: Action, held: Held, began_s: float) -> Outcome | None:
        if why := held.why(action):
            return Outcome(action, why, changed_under=True, held=True)
        if isinstance(action, RollPod) and self._now_s() - began_s > ROLL_WITHIN_S:
            why = "the actions before it took long, and another member may be away by now; the next pass looks again"
            return Outcome(action, why, changed_under=True, held=True)
        return self._waits(action)

    async def _one(self, action: Action) -> Outcome:
        try:
            await self._give(action)
        except Conflict as exc:
            return Outcome(action, str(exc), changed_under=True)
        except NotFound as exc:
            # When an object is created, NotFound means that its namespace is missing.
            return Outcome(action, str(exc), changed_under=not isinstance(action, CreateObject))
        except KubeError as exc:
            return Outcome(action, str(exc), refused=exc.status in _REFUSALS)
        except SteleError as exc:
            unanswered = exc.code in _UNANSWERED and isinstance(
                action,
                RegisterNode
                | CreateTable
                | AlterTable
                | SetReplicationFactor
                | DeleteTable
                | SetDriverPolicy
                | SetMasterCount
                | FinalizeVersion,
            )
            # A stale epoch is no lasting reason: the next pass claims again.
            refused = isinstance(exc, Rejected) and exc.code is not Code.STALE_EPOCH
            return Outcome(action, str(exc), refused=refused, unanswered=unanswered)
        return Outcome(action)

    async def _give(self, action: Action) -> None:
        match action:
            case CreateObject():
                await self._create(action)
            case PatchObject():
                metadata: dict[str, Any] = {"resourceVersion": action.resource_version}
                if action.uid:
                    metadata["uid"] = action.uid
                patch = {**action.patch, "metadata": {**action.patch.get("metadata", {}), **metadata}}
                await self._kube.patch(action.kind, self._namespace, action.name, patch)
            case DeleteObject():
                force = isinstance(action, DeletePod) and action.force
                await self._kube.delete(
                    action.kind, self._namespace, action.name, action.uid, action.resource_version, force
                )
            case SetFinalizers():
                metadata = {
                    "finalizers": list(action.finalizers) or None,
                    "uid": action.uid,
                    "resourceVersion": action.resource_version,
                }
                await self._kube.patch("TabletGroup", self._namespace, action.group, {"metadata": metadata})
            case RegisterNode():
                await self._masters().register(action.node_id, action.role, action.name)
            case ConfirmFormation():
                await self._masters().confirm(action.address, action.node_id, action.masters)
            case CreateTable():
                await self._masters().create_table(action.table_id, action.name, action.spec)
            case SetReplicationFactor():
                await self._masters().set_replication_factor(action.table_id, action.factor)
            case AlterTable():
                await self._masters().alter_table(action.table_id, action.steps, dict(action.notes))
            case DeleteTable():
                await self._masters().delete_table(action.table_id, kept=action.kept)
            case SetDriverPolicy():
                await self._masters().set_policy(action.policy)
            case SetMasterCount():
                await self._masters().set_master_count(action.masters)
            case FinalizeVersion():
                await self._masters().finalize_version(action.version)

    async def _create(self, action: CreateObject) -> None:
        try:
            await self._kube.create(action.kind, self._namespace, action.manifest)
        except Conflict as exc:
            if action.must_be_new or exc.reason != "AlreadyExists":
                raise
            await self._recognise(action, exc)

    async def _recognise(self, action: CreateObject, exists: Conflict) -> None:
        """Handle an object that exists but was not listed: it was created since, lost its labels, or belongs
        to somebody else.

        Raises:
            Conflict: the object has gone again.
            KubeError: the object belongs to somebody else.
        """
        everything = await self._kube.list(action.kind, self._namespace)
        there = next((raw for raw in everything if raw["metadata"]["name"] == action.name), None)
        if there is None:
            raise exists
        has, wanted = there["metadata"], action.manifest["metadata"]
        if wanted["labels"].items() <= (has.get("labels") or {}).items():
            return
        if not _shared(has, wanted):
            raise KubeError(
                exists.status,
                exists.reason,
                f"{action.kind} {action.name} exists, but does not belong to this TabletCluster; rename or "
                f"delete it",
            )
        metadata = {"uid": has["uid"], "resourceVersion": has["resourceVersion"], "labels": wanted["labels"]}
        await self._kube.patch(action.kind, self._namespace, action.name, {"metadata": metadata})

    def _masters(self) -> MasterLink:
        if self._link is None:
            raise KubeError(0, "NoMasters", "the cluster's identity is not known yet")
        return self._link
