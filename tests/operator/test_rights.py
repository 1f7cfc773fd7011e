"""The rights that the chart gives, and those that the documentation tells to give: the same, and they are kept to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp

from stele_local.cluster import LocalCluster, Settings
from tests.operator.rights import TEMPLATES, chart_rules, door

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"
Right = tuple[str, str, str, str]


def granted(rules: list[dict[str, Any]]) -> set[Right]:
    """(API group, resource, name or "", verb) of each rule."""
    return {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ("",))
        for verb in rule["verbs"]
    }


def documented() -> set[Right]:
    """The same of the table in docs/kubernetes.md."""
    found = set()
    rows = re.findall(r"^\|([^|]*)\| (core|`[a-z.0-9]+`) \|([^|]*)\|([^|]*)\|$", DOCUMENTED.read_text(), re.M)
    for _, group, resources, verbs in rows:
        for resource in re.findall(r"`([^`]+)`", resources):
            anyone, _, named = verbs.partition("; of ")
            name, *of_one = re.findall(r"`([^`]+)`", named) or [""]
            rights = [("", verb) for verb in re.findall(r"`([^`]+)`", anyone)] + [(name, v) for v in of_one]
            found |= {("" if group == "core" else group.strip("`"), resource, *right) for right in rights}
    return found


def test_every_right_of_the_chart_is_documented_and_no_other() -> None:
    namespaced, everywhere = chart_rules()
    assert documented() == granted(namespaced) | granted(everywhere)


def test_no_right_is_a_star_and_secrets_are_not_read() -> None:
    namespaced, everywhere = chart_rules()
    for group, resource, _, verb in granted(namespaced) | granted(everywhere):
        assert "*" not in group + resource + verb
        assert resource.partition("/")[0] not in ("secrets", "roles", "rolebindings", "clusterroles"), (
            resource
        )
        assert resource not in ("pods/exec", "pods/attach", "serviceaccounts/token")


def test_no_role_of_the_chart_is_overlooked() -> None:
    """All that is read of them are literal rules in rbac.yaml, and those that it includes. That of Spark's drivers stands alone."""
    written = [p.name for p in TEMPLATES.rglob("*.yaml") if re.search(r"kind: \w*Role$", p.read_text(), re.M)]
    assert sorted(written) == ["rbac.yaml", "spark.yaml"]
    lines = re.findall(r"^ *rules:.*$", (TEMPLATES / "rbac.yaml").read_text(), re.M)
    assert set(lines) <= {"rules:"} | {
        f'rules: {{{{- include "stele.rules" {of} | nindent 0 }}}}' for of in (".", "$")
    }


async def test_what_the_chart_does_not_allow_is_refused_and_told(tmp_path: Path) -> None:
    """Else no test of the operator would notice a verb that the chart forgot."""
    async with (
        LocalCluster(tmp_path / "local", Settings(machines=1)) as local,
        door(local.kubeconfig, tmp_path) as (guard, _),
        aiohttp.ClientSession() as session,
    ):

        async def asked(method: str, path: str) -> int:
            async with session.request(method, f"{guard.url}/{path}") as answer:
                return answer.status

        assert await asked("GET", "api/v1/namespaces/default/pods") == 200
        assert await asked("GET", "api/v1/nodes") == 200
        assert await asked("GET", "apis") == 200
        assert not guard.refused
        for method, path in (
            ("GET", "api/v1/pods"),
            ("GET", "api/v1/namespaces/default/pods/p"),
            ("GET", "api/v1/namespaces/other/pods"),
            ("GET", "api/v1/nodes?watch=true"),
            ("GET", "apis/coordination.k8s.io/v1/namespaces/default/leases/another"),
            ("DELETE", "api/v1/namespaces/default/pods"),
        ):
            assert await asked(method, path) == 403, path
        assert len(guard.refused) == 6
