"""An API server's door that lets through what the chart's roles allow, and nothing else. Used by cluster.py.

The roles are read from the chart's templates as they stand, so a verb that the operator sends and the chart forgot is
refused here as on a real Kubernetes, and told at the end of the test.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

TEMPLATES = Path(__file__).resolve().parents[2] / "charts" / "stele" / "templates"
NAMESPACE = "default"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
Json = dict[str, Any]


def chart_rules() -> tuple[list[Json], list[Json]]:
    """(In each namespace, in the whole cluster): the rules with rbac.machines, the Lease's among the first."""
    helpers = (TEMPLATES / "_helpers.tpl").read_text()
    _, _, defined = helpers.partition('define "stele.rules" -}}')
    rules = yaml.safe_load(defined.partition("{{- end -}}")[0])
    literal = re.findall(r"^rules:\n((?:[- ] .*\n)+)", (TEMPLATES / "rbac.yaml").read_text(), re.M)
    others = [rule for text in literal for rule in yaml.safe_load(text)]
    everywhere = [rule for rule in others if rule["resources"] == ["nodes"]]
    return rules + [rule for rule in others if rule not in everywhere], everywhere


class Door:
    """`refused` holds what was asked for without a right."""

    def __init__(self, server: str, session: aiohttp.ClientSession) -> None:
        self._server, self._session = server, session
        self._namespaced, self._everywhere = chart_rules()
        self.refused: list[str] = []
        self.forbidden: dict[tuple[str, str], str] = {}
        """Resources, and how the names begin, of which none may be created, as a quota or a webhook has it; and a sentence."""
        self.forbade: list[str] = []
        self.url = ""

    def _allows(self, request: web.Request) -> bool:
        parts = [part for part in request.path.split("/") if part][1:]  # without the token
        group, rest = ("", parts[2:]) if parts[:1] == ["api"] else ("".join(parts[1:2]), parts[3:])
        if not rest:
            return True  # discovery, which everybody may read
        rules = self._everywhere
        if rest[0] == "namespaces" and len(rest) > 2:
            rules, rest = self._namespaced if rest[1] == NAMESPACE else [], rest[2:]
        name, resource = "".join(rest[1:2]), "/".join([rest[0], *rest[2:]])
        verb = _VERBS.get(request.method, "get")
        if not name and request.method == "GET":
            verb = "watch" if request.query.get("watch") in ("true", "1") else "list"
        elif not name and request.method == "DELETE":
            verb = "deletecollection"
        allowed = any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and name in rule.get("resourceNames", (name,))
            for rule in rules
        )
        if not allowed:
            self.refused.append(f"{verb} {request.path}")
        return allowed

    def _forbids(self, request: web.Request, body: bytes) -> str:
        if request.method != "POST" or request.path.endswith("/events"):
            return ""
        name = str(yaml.safe_load(body)["metadata"].get("name", ""))
        for (resource, begin), sentence in self.forbidden.items():
            if request.path.endswith(f"/{resource}") and name.startswith(begin):
                self.forbade.append(name)
                return sentence
        return ""

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not self._allows(request):
            told = {"kind": "Status", "reason": "Forbidden", "message": self.refused[-1], "code": 403}
            return web.json_response(told, status=403)
        body = await request.read()
        if self.forbidden and (sentence := self._forbids(request, body)):
            told = {"kind": "Status", "reason": "Forbidden", "message": sentence, "code": 403}
            return web.json_response(told, status=403)
        headers = {
            k: v for k, v in request.headers.items() if k in ("Authorization", "Accept", "Content-Type")
        }
        async with self._session.request(
            request.method, f"{self._server}{request.path_qs}", headers=headers, data=body
        ) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "")}
            )
            with contextlib.suppress(ConnectionError):  # whoever asked has left
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            return response


@asynccontextmanager
async def door(kubeconfig: Path, folder: Path) -> AsyncIterator[tuple[Door, Path]]:
    """A door in front of the API server of a kubeconfig, and a kubeconfig that leads through it."""
    found = yaml.safe_load(kubeconfig.read_text())
    (cluster,) = found["clusters"]
    server, _, token = cluster["cluster"]["server"].rpartition("/")
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
    )
    made = Door(server, session)
    app = web.Application(client_max_size=16 << 20)
    app.router.add_route("*", "/{path:.*}", made._serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{token}"
        cluster["cluster"]["server"] = made.url
        path = folder / "kubeconfig-with-the-chart's-rights"
        path.write_text(yaml.safe_dump(found))
        yield made, path
    finally:
        await runner.cleanup()
        await session.close()
