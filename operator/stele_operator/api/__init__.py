"""The custom resources `TabletCluster` and `TabletGroup`, as models; crds/*.yaml are written from them.

Imports pydantic only. Must not know how anything is carried out. Invariant: no field that does nothing.
"""

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.group import TabletGroupSpec

GROUP = "stele.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CLUSTER_NAME_LENGTH_MAX = 40
"""Leaves room for `-master-` and a serial in the 63 characters of a label."""

__all__ = [
    "API_VERSION",
    "CLUSTER_NAME_LENGTH_MAX",
    "GROUP",
    "VERSION",
    "TabletClusterSpec",
    "TabletGroupSpec",
]
