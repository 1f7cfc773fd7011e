"""Level-triggered loops over the registry: each pass looks at all objects and does what is missing.

Owns: waking and running passes; events; garbage collection, which includes namespaces; disruption budgets.
These last two keep no state. Invariant: a pass may be repeated, or interrupted anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from stele_local.kinds import CRD, EVENT, NAMESPACE, POD, Kind
from stele_local.objects import find, now, random_suffix
from stele_local.registry import CRD_CLEANUP, FOREGROUND, ORPHAN, DeleteOptions, Registry
from stele_local.selection import matches_selector
from stele_local.status import ApiError
from stele_local.store import Change

Json = dict[str, Any]
log = structlog.get_logger("stele_local.controllers")
BATCH_SECONDS = 0.01  # changes that come together are looked at together


class Loop:
    """Runs `step` whenever something changed, and every `interval_seconds`, but at most once in
    `batch_seconds`.

    No `asyncio.wait_for` here or elsewhere: before Python 3.12 it can swallow a cancellation.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        interval_seconds: float,
        batch_seconds: float = BATCH_SECONDS,
    ) -> None:
        self._name, self._step = name, step
        self._interval, self._batch = interval_seconds, batch_seconds
        self._dirty = asyncio.Event()

    def wake(self, _: Change | None = None) -> None:
        self._dirty.set()

    async def run(self) -> None:
        while True:
            try:
                self._step()
            except ApiError as error:  # someone else changed or removed the object: look again
                log.info(
                    "an object changed meanwhile; the pass begins again", loop=self._name, why=error.message
                )
                self._dirty.set()
            except Exception:  # some object has an unexpected form; the next pass handles the others
                log.exception("pass failed", loop=self._name)
            await asyncio.sleep(self._batch)
            try:
                async with asyncio.timeout(self._interval):
                    await self._dirty.wait()
            except TimeoutError:
                continue
            finally:
                self._dirty.clear()


class Recorder:
    """Writes core/v1 Events. A repeated event about the same object only raises `count`."""

    def __init__(self, registry: Registry, component: str) -> None:
        self._registry, self._component = registry, component

    def tell(self, obj: Json, kind: Kind, type_: str, reason: str, message: str) -> None:
        metadata = obj["metadata"]
        namespace = metadata.get("namespace", "default")
        involved = {
            "kind": kind.kind, "apiVersion": kind.api_version, "name": metadata["name"], "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        }  # fmt: skip
        if kind.namespaced:
            involved["namespace"] = namespace
        for event in self._registry.store.objects(EVENT.key, namespace):
            same = (find(event, "involvedObject", "uid"), event.get("reason"), event.get("message"))
            if same == (metadata["uid"], reason, message):
                again = {"count": event.get("count", 1) + 1, "lastTimestamp": now()}
                self._registry.patch(EVENT, namespace, event["metadata"]["name"], again)
                return
        event = {
            "metadata": {"name": f"{metadata['name']}.{random_suffix()}{random_suffix()}"},
            "involvedObject": involved, "type": type_, "reason": reason, "message": message, "count": 1,
            "firstTimestamp": now(), "lastTimestamp": now(), "source": {"component": self._component},
            "reportingComponent": self._component, "reportingInstance": "",
        }  # fmt: skip
        try:
            self._registry.create(EVENT, namespace, event)
        except ApiError as error:  # the namespace is being deleted, and its events with it
            log.debug("event dropped", reason=reason, why=error.message)


def collect_garbage(registry: Registry) -> None:
    """Delete dependents of deleted owners; process the finalizers `foregroundDeletion` and `orphan`."""
    everything = [(registry.kind_of(table), obj) for table, obj in registry.store.everything()]
    living = {obj["metadata"]["uid"]: obj for _, obj in everything}
    for kind, obj in everything:
        metadata = obj["metadata"]
        owners = metadata.get("ownerReferences") or []
        if owners and "deletionTimestamp" not in metadata:
            _collect(registry, kind, obj, living)
        if "deletionTimestamp" in metadata:
            if FOREGROUND in metadata.get("finalizers", ()):
                _foreground(registry, kind, obj, everything)
            if ORPHAN in metadata.get("finalizers", ()):
                _orphan(registry, kind, obj, everything)
    for namespace in registry.store.objects(NAMESPACE.key):
        if "deletionTimestamp" in namespace["metadata"]:
            _empty(registry, namespace)
    for crd in registry.store.objects(CRD.key):
        if "deletionTimestamp" in crd["metadata"]:
            _finish_crd(registry, crd)


def _owns(metadata: Json, uid: str) -> Json | None:
    return next((owner for owner in metadata.get("ownerReferences") or () if owner["uid"] == uid), None)


def _delete(registry: Registry, kind: Kind, obj: Json, propagation: str = "Background") -> None:
    metadata = obj["metadata"]
    options = DeleteOptions(uid=metadata["uid"], propagation=propagation)
    registry.delete(kind, metadata.get("namespace", ""), metadata["name"], options)


def _collect(registry: Registry, kind: Kind, obj: Json, living: dict[str, Json]) -> None:
    owners = obj["metadata"]["ownerReferences"]
    solid = [owner for owner in owners if owner["uid"] in living]
    if not solid:
        _delete(registry, kind, obj)
    elif len(solid) < len(owners):
        registry.change(kind, obj, lambda new: new["metadata"].update(ownerReferences=solid))


def _foreground(registry: Registry, kind: Kind, owner: Json, everything: list[tuple[Kind, Json]]) -> None:
    uid, blocked = owner["metadata"]["uid"], False
    for dependent_kind, dependent in everything:
        reference = _owns(dependent["metadata"], uid)
        if reference is None:
            continue
        blocked = blocked or bool(reference.get("blockOwnerDeletion"))
        if (
            "deletionTimestamp" not in dependent["metadata"]
            and len(dependent["metadata"]["ownerReferences"]) == 1
        ):
            deeper = any(_owns(obj["metadata"], dependent["metadata"]["uid"]) for _, obj in everything)
            _delete(registry, dependent_kind, dependent, "Foreground" if deeper else "Background")
    if not blocked:
        _drop_finalizer(registry, kind, owner, FOREGROUND)


def _orphan(registry: Registry, kind: Kind, owner: Json, everything: list[tuple[Kind, Json]]) -> None:
    uid = owner["metadata"]["uid"]

    def let_go(new: Json) -> None:
        new["metadata"]["ownerReferences"] = [
            o for o in new["metadata"]["ownerReferences"] if o["uid"] != uid
        ]

    for dependent_kind, dependent in everything:
        if _owns(dependent["metadata"], uid):
            registry.change(dependent_kind, dependent, let_go)
    _drop_finalizer(registry, kind, owner, ORPHAN)


def _drop_finalizer(registry: Registry, kind: Kind, obj: Json, finalizer: str) -> None:
    def drop(new: Json) -> None:
        new["metadata"]["finalizers"] = [f for f in new["metadata"].get("finalizers", ()) if f != finalizer]

    registry.change(kind, obj, drop)


def _empty(registry: Registry, namespace: Json) -> None:
    name, left = namespace["metadata"]["name"], False
    for table, obj in list(registry.store.everything()):
        if obj["metadata"].get("namespace") == name:
            left = True
            if "deletionTimestamp" not in obj["metadata"]:
                _delete(registry, registry.kind_of(table), obj)
    if not left:
        registry.change(NAMESPACE, namespace, lambda new: new["spec"].pop("finalizers", None))


def _finish_crd(registry: Registry, crd: Json) -> None:
    table = (crd["spec"]["group"], crd["spec"]["names"]["plural"])
    left = registry.store.objects(table)
    for obj in left:
        if "deletionTimestamp" not in obj["metadata"]:
            _delete(registry, registry.kind_of(table), obj)
    if not registry.store.objects(table):
        _drop_finalizer(registry, CRD, crd, CRD_CLEANUP)


def count_budgets(registry: Registry, budgets: Kind) -> None:
    """Update the status of PodDisruptionBudgets whose `minAvailable` or `maxUnavailable` is an integer."""
    for budget in registry.store.objects(budgets.key):
        metadata, spec = budget["metadata"], budget.get("spec") or {}
        pods = [
            pod
            for pod in registry.store.objects(POD.key, metadata["namespace"])
            if matches_selector(spec.get("selector"), pod["metadata"].get("labels") or {})
        ]
        healthy = sum(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)
        least, most = spec.get("minAvailable"), spec.get("maxUnavailable")
        if isinstance(least, str) or isinstance(most, str):
            continue  # percentages need the controller that owns the pods, and pods here have none
        wanted = least if least is not None else max(0, len(pods) - (1 if most is None else most))
        state = {
            "observedGeneration": metadata["generation"], "expectedPods": len(pods), "currentHealthy": healthy,
            "desiredHealthy": wanted, "disruptionsAllowed": max(0, healthy - wanted) if pods else 0,
        }  # fmt: skip
        registry.change(budgets, budget, partial(_set_status, state), "status")


def _set_status(state: Json, obj: Json) -> None:
    obj["status"].update(state)


def is_ready(pod: Json) -> bool:
    conditions = find(pod, "status", "conditions", default=[])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
