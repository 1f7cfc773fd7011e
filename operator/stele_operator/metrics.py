"""The operator's metrics, each declared once with a description. Set by reconcile, act, heal and fleet;
served by app.

Invariant: a deleted cluster leaves no series behind (`forget`), and unknown values have no series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

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
    "1 while a condition of the TabletCluster is True, else 0, with its reason.",
    [*_CLUSTER, "type", "reason"],
)
STALLED = Gauge("stele_operator_stalled", "1 while something waits for a human.", _CLUSTER)
WATCH_LAG_SECONDS = Gauge(
    "stele_operator_watch_lag_seconds", "Age of the oldest change that a list showed and the watch did not."
)
REFUSED = Gauge(
    "stele_operator_namespace_refused",
    "1 while the API server refuses to list our resources in a namespace that we are to serve.",
    ["namespace"],
)
LAST_PASS = Gauge(
    "stele_operator_last_pass_timestamp_seconds",
    "When the last pass over any cluster was done, or it was seen that there is none.",
)

registry = REGISTRY
_STATE = (MEMBERS, TABLETS, HEALS, STALLED, CONDITION)
_reasons: dict[tuple[str, str], dict[str, str]] = {}


def conditions(namespace: str, cluster: str, found: Sequence[Mapping[str, str]]) -> None:
    """Set the conditions of a TabletCluster from its status. Each has one series, with its present reason."""
    before = _reasons.setdefault((namespace, cluster), {})
    for condition in found:
        kind, reason = condition["type"], condition["reason"]
        CONDITION.labels(namespace, cluster, kind, reason).set(condition["status"] == "True")
        if before.get(kind, reason) != reason:
            CONDITION.remove(namespace, cluster, kind, before[kind])
        before[kind] = reason


def no_tablets(namespace: str, cluster: str) -> None:
    """Drop the series of tablets, because their state is unknown now."""
    TABLETS.remove_by_labels({"namespace": namespace, "cluster": cluster})


def gone(namespace: str, cluster: str) -> None:
    """Drop the series of a TabletCluster that does not exist, although TabletGroups still name it."""
    for metric in _STATE:
        metric.remove_by_labels({"namespace": namespace, "cluster": cluster})
    _reasons.pop((namespace, cluster), None)


def forget(namespace: str, cluster: str) -> None:
    """Drop all series of a cluster that nothing names any more."""
    gone(namespace, cluster)
    PASSES.remove_by_labels({"namespace": namespace, "cluster": cluster})
