"""The custom resources, as models. crds/*.yaml are written from them.

Imports only pydantic, and knows nothing of how the operator acts. Invariant: every field has an effect.
"""

from stele_operator.api.backup import TabletBackupScheduleSpec, TabletBackupSpec, TabletRestoreSpec
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.group import TabletGroupSpec

GROUP = "stele.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CLUSTER_NAME_LENGTH_MAX = 40
"""Leaves room for `-master-` and a serial in the 63 characters that a label may have."""

__all__ = [
    "API_VERSION",
    "CLUSTER_NAME_LENGTH_MAX",
    "GROUP",
    "VERSION",
    "TabletBackupScheduleSpec",
    "TabletBackupSpec",
    "TabletClusterSpec",
    "TabletGroupSpec",
    "TabletRestoreSpec",
]
