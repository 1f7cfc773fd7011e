"""The verbs of the Kubernetes API that the operator needs. Called by observe, act, report and lease.

Owns the connection. Takes and returns plain dicts; knows no kind's meaning. Invariant: a missing object is
None, a changed object is `Conflict`, and any other failure is `KubeError` with the server's own message.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio import config as untyped_config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from stele_operator.api import API_VERSION

config: Any = untyped_config  # the package claims to be typed, but these functions are not
Json = dict[str, Any]
_TIMEOUT_S = 15.0
_MERGE = "application/merge-patch+json"
_PAGE = 100
"""The most objects in one answer. To parse the JSON of more would block the event loop for longer than 5 ms."""
UNREACHABLE = "Unreachable"
_LOG_BYTES = 16_384
_DRY_RUN: list[tuple[str, Any]] = [("dryRun", "All")]


class KubeError(Exception):
    """The API server refused a request or did not answer. `status`: the HTTP status; 0 if there was no
    answer.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Conflict(KubeError):
    """The object exists already (409), or has changed since it was observed (409, or 422 for another uid).
    Observe again.
    """


class NotFound(KubeError):
    """There is no object of that name. A 404 that names no object is a `KubeError` instead: the kind is not
    served.
    """


class BadKubeconfig(Exception):
    """The kubeconfig is wrong. The message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Resource:
    """The API path of a kind."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        """The URL path of a collection, an object or a subresource."""
        base = "/api" if "/" not in self.api_version else "/apis"
        parts = [base, self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace)]
        parts.append(self.plural)
        parts += [quote(part) for part in (name, sub) if part]
        return "/".join(parts)


RESOURCES: dict[str, Resource] = {
    "Pod": Resource("v1", "pods"),
    "PersistentVolumeClaim": Resource("v1", "persistentvolumeclaims"),
    "ConfigMap": Resource("v1", "configmaps"),
    "Service": Resource("v1", "services"),
    "Event": Resource("v1", "events"),
    "Node": Resource("v1", "nodes", namespaced=False),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
    "Job": Resource("batch/v1", "jobs"),
    "TabletBackup": Resource(API_VERSION, "tabletbackups"),
    "TabletBackupSchedule": Resource(API_VERSION, "tabletbackupschedules"),
    "TabletRestore": Resource(API_VERSION, "tabletrestores"),
    "TabletCluster": Resource(API_VERSION, "tabletclusters"),
    "TabletGroup": Resource(API_VERSION, "tabletgroups"),
}


def in_cluster(kubeconfig: str) -> bool:
    """Whether the pod's own account is used. Then no kubeconfig of the user can be wrong."""
    return not kubeconfig and bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


async def configuration(kubeconfig: str = "") -> Configuration:
    """How to reach Kubernetes: by the given file, else the pod's own account, else KUBECONFIG or
    ~/.kube/config.

    Raises:
        BadKubeconfig: the file is missing or unusable. The message is one line that says what to do.
    """
    made = Configuration()
    if kubeconfig and not os.path.isfile(kubeconfig):  # noqa: ASYNC240 - once, before anything is served
        raise BadKubeconfig(f"kubeconfig {kubeconfig}: no such file; pass the right path with --kubeconfig")
    try:
        if in_cluster(kubeconfig):
            config.load_incluster_config(client_configuration=made)
        else:
            await config.load_kube_config(config_file=kubeconfig or None, client_configuration=made)
    except Exception as exc:
        where = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        told = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise BadKubeconfig(
            f"kubeconfig {where} cannot be used ({told}); give a kubeconfig with --kubeconfig, or run inside Kubernetes"
        ) from exc
    return made


def _error(status: int, answer: Json) -> KubeError:
    reason, message = str(answer.get("reason", "")), str(answer.get("message", "no message"))
    details = answer.get("details") or {}
    # To the API server, a uid in a merge patch is not a precondition but a change of an immutable field.
    another = status == 422 and any(c.get("field") == "metadata.uid" for c in details.get("causes") or ())
    if status == 409 or another:
        return Conflict(status, reason, message)
    if status == 404 and details.get("name"):
        return NotFound(status, reason, message)
    return KubeError(status, reason, message)


class Kube:
    """A connection to one API server."""

    def __init__(self, settings: Configuration) -> None:
        self._api: Any = ApiClient(configuration=settings)
        self.settings = settings
        self._ahead_s: float | None = None
        """How many seconds the API server's wall clock is ahead of this process's monotonic clock; None
        before its first answer.
        """

    def now_s(self) -> float:
        """Seconds since 1970 by the API server's clock, from its last answer. Before the first answer, by the
        clock of this machine.

        Recorded times are compared with the API server's clock, which also stamps objects. This machine's
        clock may be a day wrong, and then a claim that was just released would be due for deletion.
        """
        return time.time() if self._ahead_s is None else time.monotonic() + self._ahead_s

    def _hear(self, date: str | None) -> None:
        with contextlib.suppress(ValueError):
            if date:
                self._ahead_s = parsedate_to_datetime(date).timestamp() - time.monotonic()

    async def close(self) -> None:
        """Close the connection."""
        await self._api.close()

    async def _request(
        self,
        method: str,
        path: str,
        query: list[tuple[str, Any]] | None = None,
        body: Any = None,
        content: str = "",
    ) -> Json:
        headers = {"Accept": "application/json", "Content-Type": content or "application/json"}
        parameters = await self._api.param_serialize(
            method,
            path,
            query_params=query or [],
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        status, raw = await self._call(method, path, parameters)
        try:
            answer: Json = json.loads(raw) if raw else {}
        except ValueError:
            answer = {"message": raw[:200].decode("utf-8", "replace")}
        if 200 <= status < 300:
            return answer
        raise _error(status, answer)

    async def _call(self, method: str, path: str, parameters: Any) -> tuple[int, bytes]:
        try:
            response = await self._api.call_api(*parameters, _request_timeout=_TIMEOUT_S)
            raw: bytes = await response.read()
            self._hear(response.getheader("Date"))
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise KubeError(0, UNREACHABLE, f"{method} {path}: {exc or type(exc).__name__}") from exc
        return response.status, raw

    async def _text(self, path: str, query: list[tuple[str, Any]]) -> str:
        headers = {"Accept": "*/*"}
        parameters = await self._api.param_serialize(
            "GET", path, query_params=query, header_params=headers, auth_settings=["BearerToken"]
        )
        status, raw = await self._call("GET", path, parameters)
        if 200 <= status < 300:
            return raw.decode("utf-8", "replace")
        raise _error(status, {"message": raw[:200].decode("utf-8", "replace")})

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """The object of this name, or None."""
        try:
            return await self._request("GET", RESOURCES[kind].path(namespace, name))
        except NotFound:
            return None

    async def list(self, kind: str, namespace: str, selector: str = "") -> list[Json]:
        """All objects of a kind as they are now, never from the API server's cache."""
        items: list[Json] = []
        token = ""
        while True:
            query: list[tuple[str, Any]] = [("limit", _PAGE)]
            if selector:
                query.append(("labelSelector", selector))
            if token:
                query.append(("continue", token))
            answer = await self._request("GET", RESOURCES[kind].path(namespace), query)
            items.extend(answer.get("items") or [])
            token = (answer.get("metadata") or {}).get("continue") or ""
            if not token:
                return items

    async def create(self, kind: str, namespace: str, manifest: Json, *, dry_run: bool = False) -> Json:
        """Create an object. `dry_run`: only let the API server check it.

        Raises:
            Conflict: with reason AlreadyExists, if the object exists.
            KubeError: the API server refused or did not answer.
        """
        query = _DRY_RUN if dry_run else None
        return await self._request("POST", RESOURCES[kind].path(namespace), query, manifest)

    async def patch(
        self, kind: str, namespace: str, name: str, patch: Json, sub: str = "", *, dry_run: bool = False
    ) -> Json:
        """Apply a merge patch. If the patch has metadata.uid or metadata.resourceVersion, these are
        preconditions. `dry_run`: only let the API server check it.
        """
        query = _DRY_RUN if dry_run else None
        return await self._request("PATCH", RESOURCES[kind].path(namespace, name, sub), query, patch, _MERGE)

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, resource_version: str, force: bool = False
    ) -> None:
        """Delete an object if it has not changed since it was observed. An object that is gone already counts
        as deleted.
        """
        preconditions = {"uid": uid}
        if resource_version:
            preconditions["resourceVersion"] = resource_version
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        if force:
            body["gracePeriodSeconds"] = 0
        if kind == "Job":  # otherwise the API server leaves its pods behind
            body["propagationPolicy"] = "Background"
        with contextlib.suppress(NotFound):
            await self._request("DELETE", RESOURCES[kind].path(namespace, name), body=body)

    async def log(self, namespace: str, pod: str, lines: int) -> str:
        """The last `lines` lines of the log of a pod's only container; "" if there is none yet."""
        path = RESOURCES["Pod"].path(namespace, pod, "log")
        try:
            return await self._text(path, [("tailLines", lines), ("limitBytes", _LOG_BYTES)])
        except KubeError as exc:
            if exc.status in (400, 404):  # it has not started, or is gone
                return ""
            raise

    async def serves_our_resources(self) -> bool:
        """Whether the API server has the CustomResourceDefinitions of TabletClusters and TabletGroups."""
        try:
            answer = await self._request("GET", f"/apis/{API_VERSION}")
        except KubeError as exc:
            if exc.status == 404:
                return False
            raise
        return {"tabletclusters", "tabletgroups"} <= {r.get("name") for r in answer.get("resources", ())}
