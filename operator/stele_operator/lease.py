"""Holds a Lease, so that only one operator acts. Called by app. It is written here because no library offers
a Lease that ends its holder in time.

Invariant: a process that could not renew for two thirds of the Lease's duration ends before another may take
the Lease. Requests that it sent before are fenced: they carry a uid, a resourceVersion or the driver's epoch.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

import structlog

from stele_operator.kube import Conflict, Kube, KubeError

log = structlog.get_logger("stele.operator.lease")
Json = dict[str, Any]
NAME = "stele-operator"
DURATION_S = 12
_AGAIN_S = 0.5
EXIT_LOST = 75


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _die(why: str) -> NoReturn:
    log.error("stopping at once", reason=why)
    os._exit(EXIT_LOST)  # no clean-up: another process may already be acting


class Lease:
    """Holds the Lease `stele-operator` of one namespace under `identity`. `die` is called when the Lease is
    lost, and does not return. `clock`: monotonic seconds, by the same clock as the event loop.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        identity: str,
        *,
        duration_s: int = DURATION_S,
        die: Callable[[str], NoReturn] = _die,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._identity = identity
        self._duration_s = duration_s
        self._die = die
        self._clock = clock
        self._renewed = 0.0
        """When the last successful renewal was sent. Other processes count from its arrival, which is later."""

    async def acquire(self) -> None:
        """Wait until this process holds the Lease. The holder counts as dead if, by this machine's clock, it
        has not renewed for the Lease's duration.

        Raises:
            KubeError: the API server forbids this process to use the Lease (403).
        """
        seen: tuple[str, str] | None = None
        since = self._clock()
        told = False
        while True:
            try:
                there = await self._kube.get("Lease", self._namespace, NAME)
                self._renewed = self._clock()
                if there is None:
                    await self._kube.create("Lease", self._namespace, self._manifest())
                    return
                spec = there.get("spec") or {}
                mark = (str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))
                if mark != seen:
                    seen, since = mark, self._clock()
                waited = self._clock() - since
                if mark[0] in ("", self._identity) or waited > float(
                    spec.get("leaseDurationSeconds") or self._duration_s
                ):
                    await self._take(there)
                    return
                if not told:
                    log.info("waiting for the lease", holder=mark[0], namespace=self._namespace)
                    told = True
            except Conflict:
                continue  # another process was faster; look again
            except KubeError as exc:
                if exc.status == 403:
                    raise
                log.warning("cannot read or write the lease; trying again", error=str(exc))
            await asyncio.sleep(1.0)

    def _manifest(self) -> Json:
        now = _now()
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._duration_s,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }

    async def _take(self, there: Json) -> None:
        spec, now = there.get("spec") or {}, _now()
        patch = {
            "metadata": {"resourceVersion": there["metadata"]["resourceVersion"]},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._duration_s,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1,
            },
        }
        await self._kube.patch("Lease", self._namespace, NAME, patch)
        log.info("lease taken", identity=self._identity, before=spec.get("holderIdentity"))

    async def keep_for_ever(self) -> None:
        """Renew the Lease until it is lost. Then end the process at once, because another may act from then
        on.
        """
        interval_s = self._duration_s / 4
        wait_s = interval_s
        while True:
            await asyncio.sleep(wait_s)
            asked = self._clock()
            rest_s = self._renewed + self._duration_s * 2 / 3 - asked
            try:
                async with asyncio.timeout(min(interval_s, rest_s)):
                    await self._renew()
            except Exception as exc:  # noqa: BLE001 - whatever the error (credentials too), the lease expires
                log.warning("lease not renewed; trying again", error=str(exc) or "no answer")
                wait_s = min(_AGAIN_S, interval_s)
                if self._clock() + wait_s - self._renewed >= self._duration_s * 2 / 3:
                    self._die("the lease could not be renewed in time")
            else:
                self._renewed, wait_s = asked, interval_s

    async def _renew(self) -> None:
        there = await self._kube.get("Lease", self._namespace, NAME)
        if there is None or (there.get("spec") or {}).get("holderIdentity") != self._identity:
            self._die("another operator holds the lease")
        patch = {
            "metadata": {"resourceVersion": there["metadata"]["resourceVersion"]},
            "spec": {"renewTime": _now()},
        }
        await self._kube.patch("Lease", self._namespace, NAME, patch)

    async def release(self) -> None:
        """Release the Lease, so that the next operator need not wait for it to expire."""
        try:
            there = await self._kube.get("Lease", self._namespace, NAME)
            if there is not None and (there.get("spec") or {}).get("holderIdentity") == self._identity:
                metadata = {"resourceVersion": there["metadata"]["resourceVersion"]}
                await self._kube.patch(
                    "Lease", self._namespace, NAME, {"metadata": metadata, "spec": {"holderIdentity": ""}}
                )
        except KubeError as exc:
            log.info("lease was not released; it will expire", error=str(exc))
