"""Names, labels and annotations. Imported by plan, observe and act.

Invariants: a name with a serial is never used again. The label `stele.dev/cluster` is on all objects that the
operator creates for a cluster, and on no others. Jobs have `stele.dev/errand` instead, so that no cluster
takes their pods for its own.
"""

from __future__ import annotations

from stele_operator.api import GROUP
from stele_operator.plan.observation import ROLES, Role

LABEL_CLUSTER = f"{GROUP}/cluster"
LABEL_ROLE = f"{GROUP}/role"
LABEL_PARKED = f"{GROUP}/parked"
"""On the pod of a parked node. The disruption budget does not count pods with this label. So this pod may be
evicted, and no other pod in its place.
"""
LABEL_ERRAND = f"{GROUP}/errand"
"""On a Job of a backup or restore, and on its pods."""
LABEL_SCHEDULE = f"{GROUP}/schedule"
"""On a TabletBackup: the TabletBackupSchedule that made it."""
LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "stele-operator"

ANNOTATION_NODE_ID = f"{GROUP}/node-id"
ANNOTATION_CLUSTER_ID = f"{GROUP}/cluster-id"
ANNOTATION_ZONE = f"{GROUP}/zone"
ANNOTATION_FORMAT_ID = f"{GROUP}/format-id"
ANNOTATION_RETIRED = f"{GROUP}/retired-at"
ANNOTATION_RELEASED = f"{GROUP}/released-at"
ANNOTATION_CLAIM_UID = f"{GROUP}/claim-uid"
"""On a pod: the uid of its claim. On a claim: its own uid. If a claim is copied, the copy carries the uid of
the original, so the two differ.
"""
ANNOTATION_FORK_ID = f"{GROUP}/fork-id"
ANNOTATION_HASH = f"{GROUP}/spec-hash"
ANNOTATION_KEEPS_OFF = f"{GROUP}/keeps-off"
ANNOTATION_DIGEST = f"{GROUP}/digest"
ANNOTATION_PLAN = f"{GROUP}/plan"
"""On a TabletCluster: changes of its spec whose effects somebody wants to know first (answers.py)."""
FINALIZER_BACKUP = f"{GROUP}/backup-data"
FINALIZER_TABLE = f"{GROUP}/table"

ANNOTATION_SELECTED_MACHINE = "volume.kubernetes.io/selected-node"
LABEL_ZONE = "topology.kubernetes.io/zone"
LABEL_HOST = "kubernetes.io/hostname"

CONTAINER = "stele"
PORT_NODE = 7050
PORT_MASTER = 7051
PORT_FLIGHT = 7052
PORT_STREAM = 7053
PORT_HTTP = 7080

EXIT_VOLUME_EMPTY = 3
EXIT_VOLUME_FOREIGN = 4
EXIT_DISK_CORRUPT = 5
EXIT_VOLUME_OLD = 6
EXITS_OF_VOLUMES = (EXIT_VOLUME_EMPTY, EXIT_VOLUME_FOREIGN, EXIT_DISK_CORRUPT, EXIT_VOLUME_OLD)


def member_name(cluster: str, role: Role, serial: int) -> str:
    """The name of a member's pod and claim."""
    return f"{cluster}-{role}-{serial}"


def member_of(cluster: str, name: str) -> tuple[Role, int] | None:
    """The role and serial in a member's name; None if no member of the cluster can have this name."""
    for role in ROLES:
        prefix = f"{cluster}-{role}-"
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
            return role, int(name.removeprefix(prefix))
    return None


def identity_name(cluster: str) -> str:
    """Name of the identity ConfigMap."""
    return f"{cluster}-identity"


def peers_service(cluster: str) -> str:
    """Name of the headless Service that gives every pod a DNS name, ready or not."""
    return f"{cluster}-peers"


def masters_service(cluster: str) -> str:
    """Name of the Service for clients. It lists ready masters only."""
    return f"{cluster}-masters"


def masters_host(cluster: str, namespace: str) -> str:
    """DNS name at which any ready master answers."""
    return f"{masters_service(cluster)}.{namespace}.svc"


def disruption_budget(cluster: str, role: Role) -> str:
    """Name of the PodDisruptionBudget of a role."""
    return f"{cluster}-{role}s"


def port_of(role: Role) -> int:
    """The gRPC port of a role."""
    return PORT_MASTER if role == "master" else PORT_NODE


def peer_host(cluster: str, namespace: str, member: str) -> str:
    """DNS name of a member. It stays the same wherever the member's pod runs."""
    return f"{member}.{peers_service(cluster)}.{namespace}.svc"


def labels(cluster: str, role: Role | None = None) -> dict[str, str]:
    """Labels of an object of this cluster. With `role`, also those of a member."""
    result = {LABEL_CLUSTER: cluster, LABEL_MANAGED: MANAGER}
    if role is not None:
        result[LABEL_ROLE] = role
    return result
