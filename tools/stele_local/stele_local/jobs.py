"""The Job controller: one pod at a time, until one succeeds or the Job's policy is used up.

Owns: the pods and the status of Jobs. Offers completions of one, backoffLimit, activeDeadlineSeconds and
rules by exit code. Pods that have ended stay until the Job is deleted. Invariants: a Job has at most one
running pod. A finished Job gets no further pod.
"""

from __future__ import annotations

import copy
import datetime
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stele_local.container import Backoff
from stele_local.controllers import Recorder
from stele_local.kinds import JOB, POD
from stele_local.objects import find, now, parse_time, random_suffix
from stele_local.registry import DeleteOptions, Registry

Json = dict[str, Any]
_OVER = ("Succeeded", "Failed")
_DEADLINE = "Job was active longer than specified deadline"
_LIMIT = "Job has reached the specified backoff limit"
_DONE = "Reached expected number of succeeded pods"


@dataclass(slots=True)
class _Known:
    """What this process knows of a Job's pods. `before`: failures that an earlier process counted, of pods
    that are gone now. `since`: when a pod last failed.
    """

    before: int = 0
    failed: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    since: float = 0.0


class Jobs:
    """Runs the Jobs of all namespaces. `backoff`: the pauses between the pods of a Job."""

    def __init__(self, registry: Registry, backoff: Backoff) -> None:
        self._registry, self._backoff = registry, backoff
        self._recorder = Recorder(registry, "job-controller")
        self._known: dict[str, _Known] = {}

    def step(self) -> None:
        jobs = self._registry.store.objects(JOB.key)
        for uid in self._known.keys() - {job["metadata"]["uid"] for job in jobs}:
            del self._known[uid]
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"] and not _finished(job):
                self._drive(job)

    def _drive(self, job: Json) -> None:
        spec, pods = job["spec"], self._pods(job)
        known = self._counted(job, pods)
        failed = known.before + len(known.failed)
        active = [p for p in pods if find(p, "status", "phase") not in _OVER]
        going = [p for p in active if "deletionTimestamp" in p["metadata"]]
        started = find(job, "status", "startTime") or now()
        age = (datetime.datetime.now(datetime.UTC) - parse_time(started)).total_seconds()
        why = ("", "")
        succeeded = any(find(p, "status", "phase") == "Succeeded" for p in pods)
        if succeeded:
            why = ("CompletionsReached", _DONE)
        elif told := _refused(job, pods):
            why = ("PodFailurePolicy", told)
        elif failed > spec["backoffLimit"]:
            why = ("BackoffLimitExceeded", _LIMIT)
        elif spec.get("activeDeadlineSeconds") is not None and age >= spec["activeDeadlineSeconds"]:
            why = ("DeadlineExceeded", _DEADLINE)
            for pod in active:
                self._delete(pod)
        elif not active and _since_failure(known) >= self._backoff.pause(failed):
            active = [self._start(job)]
        state: Json = {
            "startTime": started,
            "active": len(active) - len(going),
            "terminating": len(going),
            "failed": failed,
            "succeeded": int(succeeded),
            "ready": sum(find(p, "status", "phase") == "Running" for p in active),
        }
        if why[0]:
            state |= {"active": 0, "ready": 0, "conditions": _conditions(succeeded, *why)}
            if succeeded:
                state["completionTime"] = now()
        self._registry.change(JOB, job, partial(_set, state), "status")
        if why[0]:
            self._recorder.tell(job, JOB, "Normal" if succeeded else "Warning", *_event(succeeded, *why))

    def _counted(self, job: Json, pods: list[Json]) -> _Known:
        """Count the Job's pods that failed. Pods that were deleted while they ran count too."""
        uid = job["metadata"]["uid"]
        there = {p["metadata"]["uid"]: find(p, "status", "phase") for p in pods}
        failed = {pod for pod, phase in there.items() if phase == "Failed"}
        running = {pod for pod, phase in there.items() if phase not in _OVER}
        if (known := self._known.get(uid)) is None:
            status = job.get("status") or {}
            before = int(status.get("failed", 0)) - len(failed)
            if int(status.get("active", 0)) and not there.keys() - failed:
                before += 1  # it was deleted while nobody looked
            known = self._known[uid] = _Known(before=max(0, before))
        lost = known.running - there.keys()
        if new := (failed | lost) - known.failed:
            known.failed |= new
            known.since = _clock()
        known.running = running
        return known

    def _pods(self, job: Json) -> list[Json]:
        uid = job["metadata"]["uid"]
        return [
            pod
            for pod in self._registry.store.objects(POD.key, job["metadata"]["namespace"])
            if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())
        ]

    def _start(self, job: Json) -> Json:
        metadata = job["metadata"]
        template = copy.deepcopy(job["spec"]["template"])
        name = f"{metadata['name']}-{random_suffix()}"
        owner = {
            "apiVersion": JOB.api_version, "kind": JOB.kind, "name": metadata["name"], "uid": metadata["uid"],
            "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        template["metadata"] = {**template.get("metadata", {}), "name": name, "ownerReferences": [owner]}
        made = self._registry.create(POD, metadata["namespace"], template).obj
        self._known[metadata["uid"]].running.add(made["metadata"]["uid"])
        self._recorder.tell(job, JOB, "Normal", "SuccessfulCreate", f"Created pod: {name}")
        return made

    def _delete(self, pod: Json) -> None:
        metadata = pod["metadata"]
        if "deletionTimestamp" not in metadata:
            self._registry.delete(
                POD, metadata["namespace"], metadata["name"], DeleteOptions(uid=metadata["uid"])
            )


def _clock() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


def _since_failure(known: _Known) -> float:
    """Seconds since a pod of the Job last failed."""
    return _clock() - known.since


def _finished(job: Json) -> bool:
    return any(c["type"] in ("Complete", "Failed") for c in find(job, "status", "conditions", default=[]))


def _refused(job: Json, pods: list[Json]) -> str:
    """Why the Job's rules for failed pods end the Job; "" if they do not."""
    rules = find(job, "spec", "podFailurePolicy", "rules", default=[])
    for pod in pods:
        for status in find(pod, "status", "containerStatuses", default=[]):
            code = find(status, "state", "terminated", "exitCode", default=0)
            for index, rule in enumerate(rules):
                codes = rule.get("onExitCodes")
                if codes is None or not code:
                    continue
                if (code in codes["values"]) == (codes["operator"] == "In"):
                    if rule["action"] != "FailJob":
                        break
                    metadata = pod["metadata"]
                    return (
                        f"Container {status['name']} for pod {metadata['namespace']}/{metadata['name']} failed with exit "
                        f"code {code} matching FailJob rule at index {index}"
                    )
    return ""


def _conditions(succeeded: bool, reason: str, message: str) -> list[Json]:
    types = ("SuccessCriteriaMet", "Complete") if succeeded else ("FailureTarget", "Failed")
    at = now()
    return [
        {"type": type_, "status": "True", "reason": reason, "message": message,
         "lastProbeTime": at, "lastTransitionTime": at}
        for type_ in types
    ]  # fmt: skip


def _event(succeeded: bool, reason: str, message: str) -> tuple[str, str]:
    return ("Completed", "Job completed") if succeeded else (reason, message)


def _set(state: Json, obj: Json) -> None:
    status = obj.setdefault("status", {})
    for key, value in state.items():
        if value in (0, None) and key not in ("ready", "terminating"):
            status.pop(key, None)
        else:
            status[key] = value
