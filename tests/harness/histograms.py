"""Histograms read back from the text of /metrics, as Prometheus reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stele.metrics import REGISTRY


@dataclass(frozen=True)
class Durations:
    """What one histogram has counted. `buckets`: by upper bound, each with what is below it."""

    buckets: dict[float, float]
    count: float = 0
    sum_s: float = 0.0

    def over(self, bound_s: float) -> float:
        """How many took longer than this bound of a bucket."""
        return self.count - self.buckets[bound_s] if self.count else 0

    def since(self, before: Durations) -> Durations:
        """What it has counted since."""
        rest = {bound: n - before.buckets.get(bound, 0) for bound, n in self.buckets.items()}
        return Durations(rest, self.count - before.count, self.sum_s - before.sum_s)


NONE = Durations({})


def histograms(text: str, name: str) -> dict[tuple[str, ...], Durations]:
    """The histograms of this name, by the values of their labels in the order of their names. Each must be sound."""
    (family,) = (each for each in text_string_to_metric_families(text) if each.name == name)
    assert family.type == "histogram"
    found: dict[tuple[str, ...], tuple[dict[float, float], dict[str, float]]] = {}
    for sample in family.samples:
        labels = tuple(value for label, value in sorted(sample.labels.items()) if label != "le")
        buckets, others = found.setdefault(labels, ({}, {}))
        if sample.name == f"{name}_bucket":
            buckets[float(sample.labels["le"])] = sample.value
        else:
            others[sample.name.removeprefix(f"{name}_")] = sample.value
    for labels, (buckets, others) in found.items():
        bounds, counts = list(buckets), list(buckets.values())
        assert bounds == sorted(bounds) and bounds[-1] == math.inf, labels
        assert counts == sorted(counts) and counts[-1] == others["count"], labels
    return {labels: Durations(b, others["count"], others["sum"]) for labels, (b, others) in found.items()}


def here(name: str, *labels: str) -> Durations:
    """The histogram of these labels in this process."""
    return histograms(generate_latest(REGISTRY).decode(), name).get(labels, NONE)
