"""docs/metrics.md lists each metric as it is declared, and each reason that a user may meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from stele import metrics as of_processes
from stele.driver import steps
from stele.rpc.http import metrics_route
from stele_operator import metrics as of_operator
from stele_operator.plan import actions, naming
from tests.docs.blocks import ROOT, blocks

DOCUMENT = ROOT / "docs" / "metrics.md"
OPERATOR = ROOT / "operator" / "stele_operator"
SERIES = re.compile(r"\bstele_\w+")
SUFFIXES = ("_bucket", "_count", "_sum")

TELLING = (
    *(f"plan/{name}.py" for name in ("budgets", "findings", "formation", "health", "cluster_plan", "status")),
    *(
        "plan/tables.py",
        "plan/diagnosis.py",
        "plan/member_objects.py",
        "plan/leaving.py",
        "plan/rolling.py",
        "plan/counting.py",
        "plan/holder.py",
        "plan/majorities.py",
        "plan/compared.py",
        "plan/hibernation.py",
    ),
    *("heal.py", "heals.py", "leaders.py", "movings.py", "reconcile.py", "errands.py"),
    *("plan/errands.py", "plan/schedules.py"),
)
"""The modules that say why, in one word."""
CONDITIONS = ("Ready", "Reconciling", "Degraded", "Stalled", "DrainBlocked", "CopiesEqual", "Drilled")
WORD = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)*")
NO_REASONS = {
    *("ConfigMap", "PersistentVolumeClaim", "Pod", "PodDisruptionBudget", "Service", "TabletCluster", "TabletGroup"),
    *(*CONDITIONS, "True", "False"),
    *("Bound", "Pending", "Failed", "Succeeded", "Lost"),  # what pods and volumes are
    *("TabletBackup", "TabletBackupSchedule", "TabletRestore", "Job"),
    *("AlreadyExists", "DeadlineExceeded", "PodScheduled", "Error"),  # what the API server and Jobs say
    *("Master", "Node", "Remark"),
}  # fmt: skip
"""Other words of that form in these modules."""


def declared(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(name, its line in the document) of each metric that a module declares."""
    for metric in vars(module).values():
        if isinstance(metric, MetricWrapperBase):
            kind, labels, text = metric._type, metric._labelnames, metric._documentation
            name = f"{metric._name}_total" if kind == "counter" else metric._name
        elif isinstance(metric, of_processes.Tally):
            kind, labels, text = "counter", metric._labels, metric._text
            name = f"{metric._name}_total"
        elif isinstance(metric, of_processes.Timing):
            kind, labels, text, name = "histogram", metric._labels, metric._text, metric._name
        else:
            continue
        yield name, f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"


def metric_lines() -> dict[str, str]:
    return {**dict(declared(of_operator)), **dict(declared(of_processes))}


def test_each_metric_has_its_line_and_no_other_is_named() -> None:
    text, lines = DOCUMENT.read_text(), metric_lines()
    assert [line for line in lines.values() if line not in text] == []
    named = {name for name in SERIES.findall(text) if name != "stele_operator"}
    whole = {next((n.removesuffix(s) for s in SUFFIXES if n.endswith(s)), n) for n in named}
    assert sorted(n for n in whole if n not in lines) == []


@pytest.mark.parametrize("registry", [of_processes.REGISTRY, of_operator.registry], ids=["node", "operator"])
async def test_each_series_that_is_shown_has_its_line(registry: CollectorRegistry) -> None:
    """`_created` of each counter was shown, and told nowhere."""
    shown = {
        re.split(r"[ {]", line)[0] for line in (await metrics_route(registry)()).body.decode().splitlines()
    }
    ours = {name for name in shown if name.startswith("stele_")}
    whole = {next((n.removesuffix(s) for s in SUFFIXES if n.endswith(s)), n) for n in ours}
    assert ours and sorted(whole - set(metric_lines())) == []


def words(path: Path) -> Iterator[str]:
    """Each word in a module that may be a reason; what is put in for a member's role is put in."""
    tree = ast.parse(path.read_text())
    made = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = ["{}" if isinstance(p, ast.FormattedValue) else str(p.value) for p in node.values]  # type: ignore[attr-defined]
            if parts[0] == "{}" and "".join(parts[1:]).isalpha():
                tail = "".join(parts[1:])
                found = [f"{name}{tail}" for name in _put_in(tail)]
            else:
                found = []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in made:
            found = [node.value]
        else:
            found = []
        yield from (word for word in found if WORD.fullmatch(word))


def _put_in(tail: str) -> tuple[str, ...]:
    """What may stand at the begin of a word that is made: the name of an action that failed, or else a role."""
    if tail != "Failed":
        return ("Master", "Node")
    return tuple(
        name
        for name, kind in vars(actions).items()
        if isinstance(kind, type) and issubclass(kind, actions.Base) and kind is not actions.Base
    )


def reasons() -> set[str]:
    """Whatever the operator may give as the reason of a condition, an event or a tablet in trouble."""
    found = {word for name in TELLING for word in words(OPERATOR / name)}
    found -= NO_REASONS
    found |= {
        kind.event
        for kind in vars(actions).values()
        if isinstance(kind, type) and issubclass(kind, actions.Base)
    }
    found |= {
        kind.title for kind in vars(steps).values() if isinstance(kind, type) and issubclass(kind, steps.Step)
    }
    return (found | {"Ready", "NotReady"}) - {""}


def test_each_reason_is_told_and_no_other() -> None:
    rows = [
        line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and "`stele_" not in line
    ]
    told = {word for row in rows for word in re.findall(r"[A-Z]\w+", row.split("|")[1])}
    assert sorted(reasons() - told) == []
    assert sorted(told - reasons()) == []


def parts_in_yaml() -> dict[str, Any]:
    """What may be copied from the page into Prometheus, by its first key."""
    parts = [yaml.safe_load(block.code) for block in blocks("docs/metrics.md", language="yaml", heading="")]
    return {key: value for part in parts for key, value in part.items()}


def test_the_rules_of_alarms_ask_for_what_there_is() -> None:
    (group,) = parts_in_yaml()["groups"]
    lines = metric_lines()
    for rule in group["rules"]:
        series = [name.removesuffix("_bucket") for name in SERIES.findall(rule["expr"])]
        assert series, rule
        for name in series:
            assert name in lines, name
        for label, value in re.findall(r'(\w+)="(\w+)"', rule["expr"]):
            (line,) = (lines[name] for name in series)
            assert f"`{label}`" in line, rule
            told = {"type": CONDITIONS, "reason": reasons()}.get(label, line)
            assert value in told, rule
        assert rule["for"] and rule["annotations"]["summary"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])


def test_the_job_of_prometheus_asks_for_labels_and_ports_that_pods_have() -> None:
    (job,) = parts_in_yaml()["scrape_configs"]
    asked = {name for rule in job["relabel_configs"] for name in rule["source_labels"]}
    labels = (naming.LABEL_ROLE, naming.LABEL_CLUSTER, "app.kubernetes.io/name")
    assert {f"__meta_kubernetes_pod_label_{re.sub(r'[./]', '_', label)}" for label in labels} <= asked
    ports = {rule["regex"] for rule in job["relabel_configs"] if rule.get("replacement")}
    assert ports == {"(master|node);http", "stele;metrics"}
    assert (
        '{"name": "http", "containerPort": naming.PORT_HTTP}' in (OPERATOR / "plan/manifests.py").read_text()
    )
    chart = ROOT / "charts" / "stele" / "templates"
    assert (
        "{name: metrics, containerPort: {{ .Values.metrics.port }}}"
        in (chart / "deployment.yaml").read_text()
    )
