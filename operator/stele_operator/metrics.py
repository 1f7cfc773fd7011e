"""The operator's metrics, each declared here once, with a sentence. Set by reconcile, act and report; served by serve.

Invariant: a cluster that is gone leaves no series behind (`forget`).
"""

from __future__ import annotations

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

_CLUSTER = ["namespace", "cluster"]

PASSES = Counter(
    "stele_operator_passes_total", "Passes over a TabletCluster, by how they ended.", [*_CLUSTER, "outcome"]
)
PASS_SECONDS = Histogram(
    "stele_operator_pass_seconds",
    "How long a pass took: observe, plan, act, report.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
ACTIONS = Counter(
    "stele_operator_actions_total", "Actions carried out, by kind and outcome.", ["action", "outcome"]
)
STEPS = Counter(
    "stele_operator_driver_steps_total", "Steps of the driver, by title and outcome.", ["step", "outcome"]
)
MEMBERS = Gauge(
    "stele_operator_members", "Nodes and masters by role and state.", [*_CLUSTER, "role", "state"]
)
TABLETS = Gauge("stele_operator_tablets", "Tablets by health.", [*_CLUSTER, "health"])
HEALS = Gauge("stele_operator_heals", "Heals under way or waiting.", _CLUSTER)
STALLED = Gauge("stele_operator_stalled", "1 while something waits for a human.", _CLUSTER)
WATCH_LAG_SECONDS = Gauge(
    "stele_operator_watch_lag_seconds", "For how long a change seen in a list has not come through the watch."
)
REFUSED = Gauge(
    "stele_operator_namespace_refused",
    "1 while the API server refuses to list our resources in a namespace that we are to serve.",
    ["namespace"],
)
LAST_PASS = Gauge(
    "stele_operator_last_pass_timestamp_seconds", "When the last pass over any cluster was done."
)

registry = REGISTRY
_PER_CLUSTER = (PASSES, MEMBERS, TABLETS, HEALS, STALLED)


def forget(namespace: str, cluster: str) -> None:
    """Drop the series of a cluster that is gone."""
    for metric in _PER_CLUSTER:
        metric.remove_by_labels({"namespace": namespace, "cluster": cluster})
