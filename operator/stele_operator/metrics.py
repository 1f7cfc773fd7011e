"""The operator's metrics, each declared once with a description. Set by reconcile, act, heal, fleet and
errands; served by app.

Invariants: a deleted cluster, and a deleted backup, leave no series behind (`forget`, `backups`). A value
that is unknown has no series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from stele_operator.plan.moments import seconds_of

_CLUSTER = ["namespace", "cluster"]

PASSES = Counter(
    "stele_operator_passes_total",
    "Passes over a TabletCluster, by outcome (done, failed).",
    [*_CLUSTER, "outcome"],
)
PASS_SECONDS = Histogram(
    "stele_operator_pass_seconds",
    "Duration of a pass: observe, plan, act, heal, report.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
ACTIONS = Counter(
    "stele_operator_actions_total",
    "Actions of a pass, by kind and outcome (done, failed; held: it failed a moment ago, or depends on one that failed).",
    ["action", "outcome"],
)
STEPS = Counter(
    "stele_operator_driver_steps_total",
    "Steps of the driver, by title and outcome (done, failed); waiting does not count.",
    ["step", "outcome"],
)
MEMBERS = Gauge(
    "stele_operator_members",
    "Nodes and masters by role (master, node) and state, as in `status.members`.",
    [*_CLUSTER, "role", "state"],
)
TABLETS = Gauge(
    "stele_operator_tablets",
    "Tablets by health (healthy, under_replicated, unavailable); none while no master leads.",
    [*_CLUSTER, "health"],
)
HEALS = Gauge(
    "stele_operator_heals", "Heals by state (under_way, blocked: may not go on now).", [*_CLUSTER, "state"]
)
CONDITION = Gauge(
    "stele_operator_condition",
    "1 while a condition of the TabletCluster is True, else 0, with its reason. A condition that is Unknown also gives 0; "
    "use `reason`.",
    [*_CLUSTER, "type", "reason"],
)
STALLED = Gauge("stele_operator_stalled", "1 while something waits for a human.", _CLUSTER)
WATCH_LAG_SECONDS = Gauge(
    "stele_operator_watch_lag_seconds",
    "Age of the oldest change that a list has shown but the watch has not delivered.",
)
REFUSED = Gauge(
    "stele_operator_namespace_refused",
    "1 while the API server refuses to list our resources in a namespace that we are to serve.",
    ["namespace"],
)
BACKUP_CONDITION = Gauge(
    "stele_operator_backup_condition",
    "1 while a condition of a TabletBackup, TabletBackupSchedule or TabletRestore is True, else 0, with its reason.",
    ["namespace", "kind", "name", "type", "reason"],
)
LAST_BACKUP = Gauge(
    "stele_operator_last_backup_timestamp_seconds",
    "The moment of the rows in the newest complete backup of a TabletBackupSchedule.",
    ["namespace", "schedule"],
)
LAST_DRILL = Gauge(
    "stele_operator_last_drill_timestamp_seconds",
    "When a drill of a TabletBackupSchedule last passed.",
    ["namespace", "schedule"],
)
LAST_PASS = Gauge(
    "stele_operator_last_pass_timestamp_seconds",
    "When the last pass over any cluster was done, or when a sweep found that there is no cluster.",
)

registry = REGISTRY
_STATE = (MEMBERS, TABLETS, HEALS, STALLED, CONDITION)
_reasons: dict[tuple[str, str], dict[str, str]] = {}


def conditions(namespace: str, cluster: str, found: Sequence[Mapping[str, str]]) -> None:
    """Set the series of a TabletCluster's conditions from its status. Each condition has one series, with its
    present reason.
    """
    before = _reasons.setdefault((namespace, cluster), {})
    for condition in found:
        kind, reason = condition["type"], condition["reason"]
        CONDITION.labels(namespace, cluster, kind, reason).set(condition["status"] == "True")
        if before.get(kind, reason) != reason:
            CONDITION.remove(namespace, cluster, kind, before[kind])
        before[kind] = reason


def backups(namespace: str, found: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Set the series of all TabletBackups, TabletBackupSchedules and TabletRestores of a namespace. `found`
    has kind, name and status of each. Series of other such resources in the namespace are dropped.
    """
    for metric in (BACKUP_CONDITION, LAST_BACKUP, LAST_DRILL):
        metric.remove_by_labels({"namespace": namespace})
    for kind, name, status in found:
        for condition in status.get("conditions") or ():
            labels = (namespace, kind, name, condition["type"], condition["reason"])
            BACKUP_CONDITION.labels(*labels).set(condition["status"] == "True")
        if kind != "TabletBackupSchedule":
            continue
        if "lastSuccessTime" in status:
            LAST_BACKUP.labels(namespace, name).set(seconds_of(status["lastSuccessTime"]))
        if passed := (status.get("drill") or {}).get("lastPassTime"):
            LAST_DRILL.labels(namespace, name).set(seconds_of(passed))


def no_tablets(namespace: str, cluster: str) -> None:
    """Drop a cluster's series about tablets, because their state is unknown now."""
    TABLETS.remove_by_labels({"namespace": namespace, "cluster": cluster})


def gone(namespace: str, cluster: str) -> None:
    """Drop the series of a TabletCluster that does not exist, although TabletGroups still name it."""
    for metric in _STATE:
        metric.remove_by_labels({"namespace": namespace, "cluster": cluster})
    _reasons.pop((namespace, cluster), None)


def forget(namespace: str, cluster: str) -> None:
    """Drop all series of a cluster, once neither a TabletCluster nor a TabletGroup has its name."""
    gone(namespace, cluster)
    PASSES.remove_by_labels({"namespace": namespace, "cluster": cluster})
