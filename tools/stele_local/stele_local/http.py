"""The API server's HTTP: paths, media types, bodies in and out. All rules of the API itself are in
`registry`.

Invariant: a request for something that is not offered is answered 501 with a Status body. It is never carried
out in part.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
import yaml
from aiohttp import web

from stele_local import discovery, status
from stele_local.kinds import JOB, POD, Kind
from stele_local.objects import find
from stele_local.registry import (
    DeleteOptions,
    Registry,
    WriteOptions,
    Written,
)
from stele_local.selection import parse_fields, parse_labels
from stele_local.status import ApiError
from stele_local.table import render
from stele_local.watch import WatchOptions, stream

Json = dict[str, Any]
log = structlog.get_logger("stele_local.http")
BODY_BYTES_MAX = 3 * 1024 * 1024
MERGE = "application/merge-patch+json"
PROTOBUF = "application/vnd.kubernetes.protobuf"
_WRITE_TYPES = ("application/json", "application/yaml", PROTOBUF)
_PATCH_TYPES = ("application/json-patch+json", MERGE, "application/apply-patch+yaml")
_PARTS: web.RequestKey[list[str]] = web.RequestKey("parts", list)  # of the path, without the token
_WATCH_SECONDS = 1800.0  # where the client gives no timeoutSeconds
Control = Callable[[list[str]], Awaitable[Json]]
ReadLog = Callable[[Json, Mapping[str, str]], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Target:
    """The resource that a path names. `name`: "" for a collection."""

    kind: Kind
    namespace: str | None
    name: str
    sub: str


class ApiServer:
    """One aiohttp application in front of a Registry."""

    def __init__(self, registry: Registry, token: str, read_log: ReadLog, control: Control) -> None:
        self._registry, self._token, self._read_log, self._control = registry, token, read_log, control
        self._ending = False
        self.app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        self.app.router.add_route("*", "/{path:.*}", self._serve)

    def end(self) -> None:
        """End all watches, so that the server can stop at once."""
        self._ending = True
        self._registry.store.end_watches()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token. It is a bearer token or the first part of the path, since kubectl sends no bearer
        token over plain HTTP.
        """
        parts = [part for part in request.path.split("/") if part]
        request[_PARTS] = parts[1:] if parts[:1] == [self._token] else parts
        authorised = hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self._token}")
        try:
            if not authorised and parts[:1] != [self._token]:
                raise ApiError(401, "Unauthorized", "Unauthorized")
            return await handler(request)
        except ApiError as error:
            return _refusal(error)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(ApiError(413, "RequestEntityTooLarge", f"limit is {BODY_BYTES_MAX}"))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request[_PARTS][:1] == ["stele-local"]:
            return _json(await self._control(request[_PARTS][1:]))
        answer = self._discover(request)
        if answer is not None:
            return answer
        target = self._target(request)
        match request.method, bool(target.name):
            case "GET", True:
                return await self._get(request, target)
            case "GET", False if request.query.get("watch", "false") not in ("false", "0"):
                return await self._watch(request, target)
            case "GET", False:
                return self._list(request, target)
            case "POST", False:
                return await self._create(request, target)
            case "PUT", True:
                return await self._replace(request, target)
            case "PATCH", True:
                return await self._patch(request, target)
            case "DELETE", True if not target.sub:
                return await self._delete(request, target)
        raise status.not_offered(f"{request.method} on {_path(request)}")

    # -- what is served

    def _discover(self, request: web.Request) -> web.Response | None:
        kinds = self._registry.kinds()
        parts = request[_PARTS]
        body: Json | None
        match parts:
            case ["version"]:
                body = discovery.VERSION
            case ["api"]:
                body = discovery.core(request.host)
            case ["apis"]:
                body = discovery.groups(kinds)
            case ["api", "v1"]:
                body = discovery.resources("", "v1", kinds)
            case ["apis", group]:
                body = discovery.group(group, kinds)
            case ["apis", group, version]:
                body = discovery.resources(group, version, kinds)
            case ["openapi", "v3"]:
                body = discovery.openapi_index(kinds)
            case ["openapi", "v3", "api", "v1"]:
                body = discovery.openapi("", "v1", kinds)
            case ["openapi", "v3", "apis", group, version]:
                body = discovery.openapi(group, version, kinds)
            case ["livez" | "readyz" | "healthz"]:
                return web.Response(text="ok")
            case ["api", "v1", *_] | ["apis", _, _, *_]:
                return None
            case _:
                body = None
        if body is None:
            built_in = (
                parts[:1] == ["apis"]
                and len(parts) == 3
                and any(k.group == parts[1] and not k.custom for k in kinds)
            )
            if built_in:
                raise status.no_such_path()
            return web.Response(status=404, text="404 page not found\n")
        if request.method != "GET":
            raise status.not_offered(f"{request.method} on {_path(request)}")
        return _json(body)

    def _target(self, request: web.Request) -> Target:
        parts = request[_PARTS]
        group, version, rest = ("", "v1", parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
        namespace: str | None = None
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        kind = self._registry.kind(group, version, rest[0])
        if kind is None:
            if group and not any(k.group == group and k.version == version for k in self._registry.kinds()):
                raise web.HTTPNotFound(text="404 page not found\n")
            raise status.no_such_path()
        name, sub = [*rest[1:], "", ""][:2]
        known = (
            sub == ""
            or (sub == "status" and kind.status)
            or (sub == "scale" and kind.scale)
            or (sub == "log" and kind is POD)
        )
        if len(rest) > 3 or (name and kind.namespaced != (namespace is not None)):
            raise status.no_such_path()
        if not known:
            if kind.custom:
                raise status.not_found(kind.plural, kind.group, name)
            raise status.not_offered(f"{kind.plural}/{sub}")
        return Target(kind, namespace if kind.namespaced else None, name, sub)

    # -- reading

    async def _get(self, request: web.Request, target: Target) -> web.StreamResponse:
        obj = self._registry.get(target.kind, target.namespace or "", target.name)
        if target.sub == "log":
            return web.Response(text=await self._read_log(obj, request.query))
        if target.sub == "scale":
            return _json(_scale(target.kind, obj))
        if _wants_table(request):
            return _json(_table(request, target.kind, [obj], obj["metadata"]["resourceVersion"]))
        return _json(obj)

    def _list(self, request: web.Request, target: Target) -> web.StreamResponse:
        kind, query, store = target.kind, request.query, self._registry.store
        items = self._registry.list(
            kind, target.namespace, query.get("labelSelector", ""), query.get("fieldSelector", "")
        )
        metadata: Json = {"resourceVersion": str(store.version)}
        if kind.custom:
            metadata["continue"] = ""  # everything in one answer; a server may ignore the limit
        if _wants_table(request):
            body = _table(request, kind, items, metadata["resourceVersion"])
            return _json(body)
        listed = (
            items
            if kind.custom
            else [{k: v for k, v in i.items() if k not in ("kind", "apiVersion")} for i in items]
        )
        return _json(
            {
                "kind": f"{kind.kind}List",
                "apiVersion": kind.api_version,
                "metadata": metadata,
                "items": listed,
            }
        )

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query, kind = request.query, target.kind
        labels, fields = (
            parse_labels(query.get("labelSelector", "")),
            parse_fields(query.get("fieldSelector", ""), kind.selectable, kind.custom),
        )
        version = query.get("resourceVersion") or None
        if version is not None and not version.isdigit():
            raise ApiError(
                500,
                "",
                f'resourceVersion: Invalid value: "{version}": strconv.ParseUint: parsing "{version}": invalid syntax',
            )
        initial = query.get("sendInitialEvents") == "true"
        options = WatchOptions(
            namespace=target.namespace,
            chosen=lambda obj: labels(obj) and fields(obj),
            version=None if version is None or initial else int(version),
            timeout_seconds=float(query.get("timeoutSeconds") or _WATCH_SECONDS),
            bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
            initial=initial,
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        headed = True
        try:
            async for event in stream(self._registry.store, kind, options, lambda: self._ending):
                if _wants_table(request) and event["type"] not in ("ERROR", "BOOKMARK"):
                    obj = event["object"]
                    body = _table(request, kind, [obj], obj["metadata"]["resourceVersion"], headed)
                    event, headed = {**event, "object": body}, False
                await response.write(json.dumps(event).encode() + b"\n")
        except ConnectionError:
            log.debug("watcher left", plural=kind.plural)
        return response

    # -- writing

    async def _create(self, request: web.Request, target: Target) -> web.StreamResponse:
        body = await _read_object(request, target.kind)
        written = self._registry.create(target.kind, target.namespace or "", body, _options(request))
        return self._answer(request, target.kind, written, 201)

    async def _replace(self, request: web.Request, target: Target) -> web.StreamResponse:
        self._registry.get(target.kind, target.namespace or "", target.name)
        body = await _read_object(request, target.kind)
        if target.sub == "scale":
            return self._write_scale(request, target, body)
        written = self._registry.replace(
            target.kind, target.namespace or "", target.name, body, target.sub, _options(request)
        )
        return self._answer(request, target.kind, written)

    async def _patch(self, request: web.Request, target: Target) -> web.StreamResponse:
        if request.content_type != MERGE:
            if request.content_type in (*_PATCH_TYPES, "application/strategic-merge-patch+json"):
                raise status.not_offered(f"patches of type {request.content_type}")
            if not target.kind.custom:
                raise ApiError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})
            raise status.media_type(_PATCH_TYPES)
        patch = _decode(await request.text(), "error decoding patch: ")
        if not isinstance(patch, dict):
            raise status.bad_request("error decoding patch: a merge patch must be an object")
        if target.sub == "scale":
            return self._write_scale(request, target, patch)
        written = self._registry.patch(
            target.kind, target.namespace or "", target.name, patch, target.sub, _options(request)
        )
        return self._answer(request, target.kind, written)

    def _write_scale(self, request: web.Request, target: Target, body: Json) -> web.StreamResponse:
        assert target.kind.scale is not None
        replicas = find(body, "spec", "replicas")
        change: Any = replicas
        for key in reversed(target.kind.scale["specReplicasPath"].strip(".").split(".")):
            change = {key: change}
        if version := find(body, "metadata", "resourceVersion"):
            change["metadata"] = {"resourceVersion": version}
        written = self._registry.patch(
            target.kind, target.namespace or "", target.name, change, "", _options(request)
        )
        return _json(_scale(target.kind, written.obj))

    async def _delete(self, request: web.Request, target: Target) -> web.StreamResponse:
        kind = target.kind
        options = _delete_options(request, await _text(request, kind), kind)
        obj, gone = self._registry.delete(
            kind, target.namespace or "", target.name, options, _options(request).dry_run
        )
        if gone and not kind.returns_deleted:
            metadata = obj["metadata"]
            details = {
                "name": metadata["name"],
                "group": kind.group,
                "kind": kind.plural,
                "uid": metadata["uid"],
            }
            details = {key: value for key, value in details.items() if value}
            return _json(
                {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "metadata": {},
                    "status": "Success",
                    "details": details,
                }
            )
        return _json(obj)

    def _answer(self, request: web.Request, kind: Kind, written: Written, code: int = 200) -> web.Response:
        if _wants_table(request):
            return _json(
                _table(request, kind, [written.obj], written.obj["metadata"].get("resourceVersion", "")), code
            )
        response = _json(written.obj, code)
        if request.query.get("fieldValidation", "Warn") == "Warn":
            for path in written.unknown:
                response.headers.add("Warning", f'299 - "unknown field \\"{path}\\""')
        return response


def _path(request: web.Request) -> str:
    parts: list[str] = request[_PARTS]
    return "/" + "/".join(parts)


def _json(body: Json, code: int = 200) -> web.Response:
    return web.json_response(body, status=code)


def _refusal(error: ApiError) -> web.Response:
    return _json(error.body(), error.code)


def _wants_table(request: web.Request) -> bool:
    return "as=Table" in request.headers.get("Accept", "").split(",")[0]


def _table(request: web.Request, kind: Kind, objects: list[Json], version: str, headed: bool = True) -> Json:
    return render(kind, objects, version, request.query.get("includeObject", "Metadata"), headed)


def _options(request: web.Request) -> WriteOptions:
    return WriteOptions(
        dry_run=request.query.get("dryRun") == "All",
        strict=request.query.get("fieldValidation") == "Strict",
        patch=request.method == "PATCH",
    )


def _decode(text: str, prefix: str = "") -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise status.bad_request(f"{prefix}{error}") from error


async def _text(request: web.Request, kind: Kind) -> str:
    """The body as text.

    Raises:
        ApiError: 501 for protobuf, which a real API server reads only for built-in kinds.
    """
    if request.content_type == PROTOBUF and not kind.custom:
        raise status.not_offered("bodies in protobuf, as kubectl drain sends them")
    return await request.text()


async def _read_object(request: web.Request, kind: Kind) -> Json:
    """The body as an object of `kind`.

    Raises:
        ApiError: 400, 415 or 501, if the body cannot be read as such an object.
    """
    text = await _text(request, kind)
    if request.content_type == "application/yaml":
        try:
            body = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise status.bad_request(f"the body is not YAML: {error}") from error
    elif request.content_type in ("application/json", "application/octet-stream"):
        body = _decode(text)
    else:
        raise status.media_type(_WRITE_TYPES)
    if not isinstance(body, dict):
        raise status.bad_request(f"the object provided is unrecognized (must be of type {kind.kind})")
    if body.get("kind") == "Scale":
        return body
    if body.get("apiVersion", kind.api_version) != kind.api_version:
        raise status.bad_request(
            f"the API version in the data ({body['apiVersion']}) does not match the expected API version "
            f"({kind.api_version})"
        )
    if body.get("kind", kind.kind) != kind.kind:
        name, cause = (
            find(body, "metadata", "name", default=""),
            f'Invalid value: "{body["kind"]}": must be {kind.kind}',
        )
        raise status.invalid(
            body["kind"], kind.group, name, [status.Cause("FieldValueInvalid", cause, "kind")]
        )
    return body


def _delete_options(request: web.Request, text: str, kind: Kind) -> DeleteOptions:
    body = _decode(text) if text.strip() else {}
    query = request.query
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    propagation = body.get("propagationPolicy") or query.get("propagationPolicy")
    if not propagation:  # a real API server orphans the pods of a Job unless it is told otherwise
        propagation = "Orphan" if kind is JOB else "Background"
    if body.get("orphanDependents"):
        propagation = "Orphan"
    return DeleteOptions(
        uid=find(body, "preconditions", "uid"),
        resource_version=find(body, "preconditions", "resourceVersion"),
        grace_seconds=None if grace is None else int(grace),
        propagation=propagation,
    )


def _scale(kind: Kind, obj: Json) -> Json:
    assert kind.scale is not None
    metadata = obj["metadata"]
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")

    def at(key: str) -> Any:
        path = (kind.scale or {}).get(key)
        return find(obj, *path.strip(".").split(".")) if path else None

    state = {"replicas": at("statusReplicasPath") or 0}
    if selector := at("labelSelectorPath"):
        state["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: metadata[key] for key in kept if key in metadata},
        "spec": {"replicas": at("specReplicasPath")} if at("specReplicasPath") is not None else {},
        "status": state,
    }
