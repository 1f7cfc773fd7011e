"""API discovery: versions, groups, resources, and the OpenAPI that `kubectl apply` needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stele_local.kinds import VERBS, Kind

Json = dict[str, Any]
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0+stele-local", "gitCommit": "", "gitTreeState": "", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64"}  # fmt: skip


def _group(name: str, kinds: Iterable[Kind]) -> Json:
    versions = list(
        dict.fromkeys(k.version for k in sorted(kinds, key=lambda k: not k.preferred) if k.group == name)
    )
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def core(server: str) -> Json:
    where = [{"clientCIDR": "0.0.0.0/0", "serverAddress": server}]
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": where}


def groups(kinds: list[Kind]) -> Json:
    names = dict.fromkeys(k.group for k in kinds if k.group)
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name, kinds) for name in names]}


def group(name: str, kinds: list[Kind]) -> Json | None:
    if not any(k.group == name for k in kinds):
        return None
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, kinds)}


def resources(group: str, version: str, kinds: list[Kind]) -> Json | None:
    served = [k for k in kinds if (k.group, k.version) == (group, version)]
    if not served:
        return None
    listed: list[Json] = []
    for kind in served:
        row: Json = {
            "name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced, "kind": kind.kind,
            "verbs": list(VERBS),
        }  # fmt: skip
        if kind.short_names:
            row["shortNames"] = list(kind.short_names)
        if kind.categories:
            row["categories"] = list(kind.categories)
        listed.append(row)
        sub: Json = {
            "singularName": "",
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": ["get", "patch", "update"],
        }
        if kind.status:
            listed.append({"name": f"{kind.plural}/status", **sub})
        if kind.scale:
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            listed.append({"name": f"{kind.plural}/scale", **sub, **scale})
        if kind.plural == "pods":
            listed.append({"name": "pods/log", **sub, "verbs": ["get"]})
    if not group:  # a real API server sends no apiVersion in the core list
        return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}",
        "resources": listed,
    }


def openapi_index(kinds: list[Kind]) -> Json:
    places = dict.fromkeys(f"apis/{k.api_version}" if k.group else "api/v1" for k in kinds)
    return {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in places}}


def openapi(group: str, version: str, kinds: list[Kind]) -> Json:
    """An OpenAPI document with only what kubectl looks for: that this server offers `fieldValidation`."""
    paths: Json = {}
    check = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string", "uniqueItems": True}}]
    for kind in (k for k in kinds if (k.group, k.version) == (group, version)):
        base = f"/apis/{kind.api_version}" if kind.group else "/api/v1"
        path = (
            f"{base}/namespaces/{{namespace}}/{kind.plural}/{{name}}"
            if kind.namespaced
            else f"{base}/{kind.plural}/{{name}}"
        )
        mark = {"group": kind.group, "kind": kind.kind, "version": kind.version}
        verb = {"parameters": check, "responses": {}, "x-kubernetes-group-version-kind": mark}
        paths[path] = {
            "patch": {**verb, "x-kubernetes-action": "patch"},
            "post": {**verb, "x-kubernetes-action": "post"},
        }
    return {
        "openapi": "3.0.0",
        "info": {"title": "stele_local", "version": "v1"},
        "paths": paths,
        "components": {"schemas": {}},
    }
