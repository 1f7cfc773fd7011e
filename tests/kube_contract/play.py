"""Sends the scenarios to any API server and writes down what came back, made comparable.

Comparable means: uids become `<uid 1>`, `<uid 2>` in order of appearance, versions of objects their rank within the
scenario, times `<time>`, generated suffixes `<suffix>`, ages `<age>`; managedFields, Go diffs in messages and OpenAPI hashes go."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from tests.kube_contract.crd import GROUP
from tests.kube_contract.scenarios import SCENARIOS
from tests.kube_contract.steps import NAMESPACE, Step

Json = dict[str, Any]
POLL_SECONDS = 0.2
GIVE_UP_SECONDS = 40.0
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_AGE = re.compile(r"(\d+[smhdy])+|<unknown>|<invalid>")
_GO_DIFF = re.compile(r"\n@@.*", re.DOTALL)  # a refused change as a diff of Go structures: not for us
_OBJECT_SHOWN = re.compile(r'Invalid value: "\{.*\}": strict', re.DOTALL)
_VERSION_TOLD = re.compile(r"(resource version: |precondition \(|record \(|\()\d+(\)| \(\d+\))")


class Player:
    """Plays scenarios against one server."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None = None) -> None:
        self._url, self._headers, self._tls = url, headers, tls

    async def play_all(self) -> dict[str, list[Json]]:
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            self._session = session
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
            await self._send(Step("", "POST", "/api/v1/namespaces", namespace, "application/json"), {})
            try:
                return {name: await self._play(steps) for name, steps in SCENARIOS.items()}
            finally:
                await self._send(Step("", "DELETE", f"/api/v1/namespaces/{NAMESPACE}"), {})
                crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
                await self._send(Step("", "DELETE", f"{crds}/shelves.{GROUP}"), {})
                await self._named(Step("tidy", "GET", f"/api/v1/namespaces/{NAMESPACE}", until=404), {})

    async def _play(self, steps: Sequence[Step]) -> list[Json]:
        known: dict[str, Json] = {}
        answers: list[Json] = []
        for step in steps:
            answers += await self._take(step, known)
        return _Comparable().all(answers)

    async def _take(self, step: Step, known: dict[str, Json]) -> list[Json]:
        if step.alongside:
            watch = asyncio.create_task(self._send(step, known))
            await asyncio.sleep(0.3)  # the watch must be open before what it is to see
            told = [await self._named(other, known) for other in step.alongside]
            return [*told, {"step": step.name, **await watch}]
        return [await self._named(step, known)]

    async def _named(self, step: Step, known: dict[str, Json]) -> Json:
        deadline = asyncio.get_running_loop().time() + GIVE_UP_SECONDS
        while True:
            answer = await self._send(step, known)
            if step.until in (0, answer["code"]) and step.settled in json.dumps(answer):
                break
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"step {step.name!r}: still {answer}, expected {step.until}")
            await asyncio.sleep(POLL_SECONDS)
        if isinstance(answer.get("body"), dict):
            known[step.name] = answer["body"]
            known.setdefault(answer["body"].get("metadata", {}).get("name", ""), answer["body"])
        return {"step": step.name, **answer}

    async def _send(self, step: Step, known: Mapping[str, Json]) -> Json:
        def fill(text: str) -> str:
            text = re.sub(r"\$uid\((.*?)\)", lambda m: known[m[1]]["metadata"]["uid"], text)
            return re.sub(r"\$rv\((.*?)\)", lambda m: known[m[1]]["metadata"]["resourceVersion"], text)

        headers = {"Accept": step.accept, **(self._headers if step.token else {})}
        data = None
        if step.body is not None:
            data = fill(step.body if isinstance(step.body, str) else json.dumps(step.body))
            headers["Content-Type"] = step.type
        watch = "watch=1" in step.path
        path = fill(step.path)
        if path.count("timeoutSeconds=") > 1:  # the last one given counts
            path = re.sub(r"&timeoutSeconds=\d+(?=.*timeoutSeconds=)", "", path)
        tls = self._tls if step.token else _anonymous(self._tls)
        async with self._session.request(
            step.method, self._url + path, data=data, headers=headers, ssl=tls if tls is not None else True
        ) as response:
            text = await response.text()
            answer: Json = {"code": response.status}
            if warnings := response.headers.getall("Warning", []):
                answer["warnings"] = warnings
            if not text.startswith("{"):
                return {**answer, "text": text}
            if watch and response.status == 200:
                return {**answer, **_events([json.loads(line) for line in text.splitlines()])}
            return {**answer, "body": json.loads(text)}


def _events(events: list[Json]) -> Json:
    """Bookmarks come when the server thinks fit: only whether there were any can be compared."""
    plain = [e for e in events if e["type"] == "BOOKMARK" and "annotations" not in e["object"]["metadata"]]
    return {"events": [e for e in events if e not in plain], **({"bookmarks": True} if plain else {})}


def _anonymous(tls: ssl.SSLContext | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _Comparable:
    """Makes the answers of one scenario comparable; keeps what it has named."""

    def __init__(self) -> None:
        self._uids: dict[str, str] = {}
        self._ranks: dict[str, int] = {}

    def all(self, answers: list[Json]) -> list[Json]:
        versions = {v for answer in answers for v in _object_versions(answer)}
        self._ranks = {version: rank for rank, version in enumerate(sorted(versions, key=int), 1)}
        return [self._clean(answer, "") for answer in answers]

    def _clean(self, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if k != "managedFields"}
            value = _name(value)
            if value.get("kind") == "Table":
                value = _table(value)
            is_list = "items" in value or value.get("kind") in ("Table", "BOOKMARK")
            cleaned = {k: self._clean(v, k) for k, v in sorted(value.items())}
            if is_list and "resourceVersion" in cleaned.get("metadata", {}):
                cleaned["metadata"]["resourceVersion"] = "<version of all>"
            if value.get("type") == "BOOKMARK":
                cleaned["object"]["metadata"]["resourceVersion"] = "<version of all>"
            return _sort_causes(cleaned)
        if isinstance(value, list):
            return [self._clean(item, key) for item in value]
        if not isinstance(value, str):
            return value
        if key == "resourceVersion":
            return f"<version {self._ranks[value]}>" if value in self._ranks else "<version>"
        if key == "serverAddress":
            return "<server>"
        if key == "serverRelativeURL":
            return value.partition("?hash=")[0]
        return self._text(value)

    def _text(self, text: str) -> str:
        text = _UID.sub(lambda m: self._uids.setdefault(m[0], f"<uid {len(self._uids) + 1}>"), text)
        text = _VERSION_TOLD.sub(lambda m: re.sub(r"\d+", "<version>", m[0]), text)
        text = _GO_DIFF.sub("", _OBJECT_SHOWN.sub('Invalid value: "<object>": strict', text))
        return _TIME.sub("<time>", text)


def _object_versions(value: Any) -> list[str]:
    found: list[str] = []
    if isinstance(value, list):
        return [version for item in value for version in _object_versions(item)]
    if isinstance(value, dict):
        of_all = "items" in value or value.get("kind") == "Table" or value.get("type") == "BOOKMARK"
        metadata = value.get("metadata")
        if (
            isinstance(metadata, dict)
            and "uid" in metadata
            and not of_all
            and metadata.get("resourceVersion")
        ):
            found.append(metadata["resourceVersion"])
        for item in value.values():
            found += _object_versions(item)
    return found


def _name(value: Json) -> Json:
    start = value.get("generateName")
    if start and value.get("name", "").startswith(start):
        return {**value, "name": f"{start}<suffix>"}
    return value


def _table(table: Json) -> Json:
    definitions = [
        {k: v for k, v in column.items() if k != "description"} for column in table["columnDefinitions"]
    ]
    rows = []
    for row in table["rows"]:
        cells = ["<age>" if isinstance(c, str) and _AGE.fullmatch(c) else c for c in row["cells"]]
        rows.append({**row, "cells": cells})
    return {**table, "columnDefinitions": definitions, "rows": rows}


def _sort_causes(value: Json) -> Json:
    """The real one walks maps in random order: several causes are compared as a set."""
    causes = value.get("details", {}).get("causes") if isinstance(value.get("details"), dict) else None
    if not causes or len(causes) < 2:
        return value
    ordered = sorted(causes, key=lambda c: (c.get("field", ""), c["reason"], c["message"]))
    told = sorted({f"{c.get('field', '')}: {c['message']}" for c in causes})
    prefix, _, listed = value["message"].partition(" is invalid: ")
    if sorted(listed.strip("[]")) != sorted(", ".join(told).strip("[]")):
        return {**value, "details": {**value["details"], "causes": ordered}}
    return {
        **value,
        "message": f"{prefix} is invalid: <causes>",
        "details": {**value["details"], "causes": ordered},
    }
