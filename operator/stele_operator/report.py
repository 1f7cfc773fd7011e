"""Writes statuses and events. Called by reconcile and errands; the only writer of both.

Remembers recent events; that memory may be lost at any time. Invariants: an unchanged status is not written,
so the operator's own writes wake no task. A repeated event raises the count of the first one, and creates no
other.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Coroutine, Iterable
from typing import Any

import structlog

from stele_operator.api import API_VERSION
from stele_operator.kube import Conflict, Kube, KubeError, NotFound
from stele_operator.plan.moments import timestamp as timestamp

log = structlog.get_logger("stele.operator.report")
Json = dict[str, Any]
_REPEAT_AFTER_S = 60.0
_REMEMBERED_MAX = 2_000
_MESSAGE_MAX = 1_000
PROGRESS_INTERVAL_S = 10.0
WRITES_AT_ONCE = 8
"""How many status writes may run at once. A cluster may have hundreds of TabletGroups."""
_NUMBERS = re.compile(r"(?<![\w-])\d[\d,]*(?![\w-])")
_PROGRESS_FIELDS = ("bytesDone", "etaSeconds", "reason")  # a copy's reason tells how much has arrived


def difference(there: Any, wanted: Any) -> Any:
    """The merge patch that turns one value into another, with null for fields to remove; None if they are
    equal.
    """
    if there == wanted:
        return None
    if not isinstance(there, dict) or not isinstance(wanted, dict):
        return wanted
    patch: Json = {key: None for key in there if key not in wanted}
    for key, value in wanted.items():
        if key not in there:
            patch[key] = value
        elif there[key] != value:
            patch[key] = difference(there[key], value)
    return patch


def without_progress(status: Json) -> Json:
    """A status without the parts that change all the time while copies run. These are bytes, the number of
    tablets left, and which of many are being healed now.
    """
    found = dict(status)
    found.pop("progress", None)
    if healing := status.get("healing"):
        active = healing.get("active") or ()
        if is_cut(healing):
            found["healing"] = "many"
        else:
            kept = [{k: v for k, v in h.items() if k not in _PROGRESS_FIELDS} for h in active]
            found["healing"] = {**healing, "active": kept}
    if tablets := status.get("tablets"):
        found["tablets"] = {k: n if k == "total" else n > 0 for k, n in tablets.items()}
        found.pop("worst", None)
    if "conditions" in status:
        found["conditions"] = [
            {**c, "message": _NUMBERS.sub("", c.get("message", ""))} for c in status["conditions"]
        ]
    return found


def is_cut(healing: Json) -> bool:
    """Whether the status lists only part of what is under way. Then each round of the driver lists other
    parts.
    """
    return int(healing.get("total", 0)) > len(healing.get("active") or ())


async def at_once(writes: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run the writes, up to WRITES_AT_ONCE at once. After each one, other tasks get a turn, even if nothing
    had to be written.

    Raises:
        KubeError: the first write that failed. Writes that had not begun by then are skipped.
    """
    left = iter(writes)

    async def work() -> None:
        for write in left:
            await write
            await asyncio.sleep(0)

    workers = [asyncio.create_task(work()) for _ in range(WRITES_AT_ONCE)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class Reporter:
    """Writes the results of passes. There is one per process."""

    def __init__(self, kube: Kube, instance: str) -> None:
        self._kube = kube
        self._instance = instance
        self._sent: OrderedDict[str, float] = OrderedDict()
        self._written_s: dict[str, float] = {}
        self._healing: dict[str, tuple[str, float]] = {}

    async def status(self, kind: str, raw: Json, wanted: Json, now_s: float) -> bool:
        """Write a status if it changed. If only progress changed (`without_progress`), write it at most every
        10 s. Returns whether it was written.
        """
        metadata, there = raw["metadata"], raw.get("status") or {}
        uid = metadata["uid"]
        too_soon = 0 <= now_s - self._written_s.get(uid, -PROGRESS_INTERVAL_S) < PROGRESS_INTERVAL_S
        if there == wanted or (too_soon and without_progress(there) == without_progress(wanted)):
            return False
        patch = {"metadata": {"uid": uid}, "status": difference(there, wanted) if there else wanted}
        try:
            await self._kube.patch(kind, metadata["namespace"], metadata["name"], patch, sub="status")
        except (Conflict, NotFound):
            return False  # deleted meanwhile, perhaps created again
        self._written_s[uid] = now_s
        return True

    async def healing(self, raw: Json, healing: Json) -> None:
        """Write the driver's present work in the middle of a pass, if its steps have changed. If the status
        cannot list all of it, write at most every 10 s.
        """
        uid, now_s = raw["metadata"]["uid"], self._kube.now_s()
        mark = str(without_progress({"healing": healing}))
        last, written_s = self._healing.get(uid, ("", now_s - PROGRESS_INTERVAL_S))
        # The API server's clock is known to a second.
        if last == mark and not (is_cut(healing) and abs(now_s - written_s) >= PROGRESS_INTERVAL_S):
            return
        self._healing[uid] = mark, now_s
        patch = {"metadata": {"uid": uid}, "status": {"healing": healing}}
        try:
            await self._kube.patch(
                "TabletCluster", raw["metadata"]["namespace"], raw["metadata"]["name"], patch, "status"
            )
        except KubeError as exc:
            log.info("status.healing was not written; the end of the pass writes it again", error=str(exc))

    async def event(
        self,
        kind: str,
        raw: Json,
        reason: str,
        message: str,
        now_s: float,
        warning: bool = False,
        about: str = "",
    ) -> None:
        """Send an event about a custom resource. A repeated event raises the count of the first one, at most
        once a minute.

        `about`: what identifies the event if its message changes; the newest message is kept.
        """
        metadata = raw["metadata"]
        text = message[:_MESSAGE_MAX]
        mark = hashlib.blake2b(
            f"{metadata['uid']}/{reason}/{about or text}".encode(), digest_size=8
        ).hexdigest()
        if 0 <= now_s - self._sent.get(mark, -_REPEAT_AFTER_S) < _REPEAT_AFTER_S:
            return
        self._sent[mark] = now_s
        self._sent.move_to_end(mark)
        while len(self._sent) > _REMEMBERED_MAX:
            self._sent.popitem(last=False)
        name, namespace, when = f"{metadata['name']}.{mark}", metadata["namespace"], timestamp(now_s)
        body: Json = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": kind,
                "name": metadata["name"],
                "namespace": namespace,
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": text,
            "type": "Warning" if warning else "Normal",
            "source": {"component": "stele-operator"},
            "reportingComponent": "stele-operator",
            "reportingInstance": self._instance,
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
        }
        try:
            await self._kube.create("Event", namespace, body)
        except Conflict:
            await self._again(namespace, name, text, when)
        except KubeError as exc:
            # A lost event is harmless: the status says the same.
            log.info("event not written", reason=reason, error=str(exc))

    async def _again(self, namespace: str, name: str, text: str, when: str) -> None:
        try:
            there = await self._kube.get("Event", namespace, name)
            if there is not None:
                count = int(there.get("count") or 1) + 1
                patch = {"count": count, "lastTimestamp": when, "message": text}
                await self._kube.patch("Event", namespace, name, patch)
        except KubeError as exc:
            log.info("event not counted", name=name, error=str(exc))

    def forget(self, uid: str) -> None:
        """Forget what was written about a deleted object."""
        self._written_s.pop(uid, None)
        self._healing.pop(uid, None)
