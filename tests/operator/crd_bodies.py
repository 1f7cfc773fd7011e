"""Resources as users write them, with what tests change in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from tests.operator.cluster import EXAMPLES

Json = dict[str, Any]


def example(name: str) -> Json:
    """An example as a manifest."""
    loaded: Json = yaml.safe_load((Path(EXAMPLES) / f"{name}.yaml").read_text())
    return loaded


def changed(body: Json, path: str, value: Any) -> Json:
    """A copy with one field set, or dropped where value is ...; a path like spec.columns.0.type."""
    result = copy.deepcopy(body)
    *parents, last = path.split(".")
    place: Any = result
    for part in parents:
        place = place[int(part)] if part.isdigit() else place.setdefault(part, {})
    if value is ...:
        place.pop(last, None)
    elif last.isdigit():
        place[int(last)] = value
    else:
        place[last] = value
    return result


SPREAD = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "DoNotSchedule",
}


TERM = {"labelSelector": {}, "topologyKey": "kubernetes.io/hostname", "namespaceSelector": {}}


ONE = {"key": "disk", "operator": "In", "values": ["ssd", ""]}


AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {
                    "matchExpressions": [
                        {"key": "cores", "operator": "Gt", "values": ["8"]},
                        {"key": "gpu", "operator": "DoesNotExist"},
                    ],
                    "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}],
                }
            ]
        },
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "preference": {"matchExpressions": [ONE]}}
        ],
    },
    "podAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "rack", "namespaces": ["web"], "labelSelector": {"matchExpressions": [ONE]}}
        ]
    },
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}],
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": TERM}],
    },
}
"""Of its selectors some are empty, and select all, and some absent, and select none."""


def machines(**one: Any) -> Json:
    """An affinity that requires one thing of a machine's labels."""
    terms = [{"matchExpressions": [{"key": "disk", "operator": "In", **one}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def others(**one: Any) -> Json:
    """An affinity that requires something of other pods."""
    term = {"topologyKey": "rack", **one}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
