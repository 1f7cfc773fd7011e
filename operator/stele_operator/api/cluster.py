"""TabletCluster: what a user may ask of a cluster. Read by observe, written to crds/ by generate.

Invariant: every field changes something that runs today; every default is published and never changes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from stele_operator.api.scalars import (
    KEY_LENGTH,
    LABEL_KEY,
    Duration,
    LabelValue,
    ObjectName,
    Quantity,
    TaintKey,
    Zone,
)


def rule(cel: str, message: str, **more: str) -> dict[str, str]:
    """One CEL validation rule of the API server, with the sentence it answers."""
    return {"rule": cel, "message": message, **more}


def with_rules(*rules: dict[str, str]) -> dict[str, Any]:
    """The schema extension that carries CEL rules."""
    return {"x-kubernetes-validations": list(rules)}


class Model(BaseModel):
    """Base of all parts of a custom resource: unknown fields are faults. Where the API server has them all the same, they
    are of later definitions, and observe leaves them out. So a field that is added must be one that an older operator may
    overlook; what it must not is another value of a field that is there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class DeletionPolicy(StrEnum):
    """What deleting the resource does to the data."""

    RETAIN = "Retain"
    DELETE = "Delete"


class MachineSpread(StrEnum):
    """Whether two nodes of a cluster may share a machine."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class Storage(Model):
    """The volume of one pod."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "!has(self.size) || quantity(string(self.size)).compareTo(quantity('1Gi')) >= 0",
                "storage.size must be at least 1Gi: a volume with less than 512 MiB free takes no copies",
            ),
            rule(
                "(has(self.className) ? self.className : '') == (has(oldSelf.className) ? oldSelf.className : '')",
                "storage.className cannot change: a volume keeps the class it was made with",
            ),
        )
    )

    size: Quantity = Field(
        default="10Gi",
        description="Size of each volume, 1Gi at least: with less than 256 MiB free a volume takes no writes, with less than "
        "512 MiB no copies. Volumes grow with it where the storage class allows expansion; taken back, it counts for new ones: a "
        "volume that is larger already stays so.",
    )
    className: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None,
        description="Storage class. Absent: the default class of the Kubernetes cluster. Cannot change.",
    )


RESOURCE_NAMES = ("cpu", "memory", "ephemeral-storage")


def _covers(name: str) -> dict[str, str]:
    both = f"has(self.requests) && has(self.limits) && '{name}' in self.requests && '{name}' in self.limits"
    more = (
        f"quantity(string(self.limits['{name}'])).compareTo(quantity(string(self.requests['{name}']))) >= 0"
    )
    return rule(
        f"!({both}) || {more}", f"resources.limits.{name} must not be less than resources.requests.{name}"
    )


def _named(part: str) -> dict[str, str]:
    known = ", ".join(f"'{name}'" for name in RESOURCE_NAMES)
    return rule(
        f"!has(self.{part}) || self.{part}.all(name, name in [{known}])",
        f"resources.{part} may name {', '.join(RESOURCE_NAMES)}, and nothing else",
    )


_AS_KUBERNETES = (*map(_named, ("requests", "limits")), *map(_covers, ("cpu", "memory")))
"""Without them Kubernetes refuses such a pod, too, but not before the next one is made, which is when another was lost."""


class Resources(Model):
    """What a container asks for and may use, as in any pod."""

    requests: Annotated[dict[str, Quantity], Field(max_length=8)] | None = Field(
        default=None, description="What the scheduler sets aside: cpu, memory."
    )
    limits: Annotated[dict[str, Quantity], Field(max_length=8)] | None = Field(
        default=None,
        description="What the container may not exceed. Best: memory equal to its request, no cpu.",
    )


def _at_least(least: str, who: str) -> dict[str, Any]:
    """A limit of memory is no less; where none is given, a request is the limit."""
    wrong = f"{who}.resources: a memory limit below {least} is not enough to live on, and a request is the limit where none is given"
    return with_rules(
        *_AS_KUBERNETES,
        rule(
            "!has(self.limits) || !('memory' in self.limits) || "
            f"quantity(string(self.limits['memory'])).compareTo(quantity('{least}')) >= 0",
            wrong,
        ),
        rule(
            "(has(self.limits) && 'memory' in self.limits) || !has(self.requests) || !('memory' in self.requests) || "
            f"quantity(string(self.requests['memory'])).compareTo(quantity('{least}')) >= 0",
            wrong,
        ),
    )


class MasterResources(Resources):
    """Of a master's container."""

    model_config = ConfigDict(json_schema_extra=_at_least("256Mi", "masters"))


class NodeResources(Resources):
    """Of a node's container."""

    model_config = ConfigDict(json_schema_extra=_at_least("512Mi", "nodes"))


def _keys(field: str, *more: dict[str, str]) -> dict[str, Any]:
    """The keys are as those of labels; a schema alone says nothing of the keys of a map."""
    return with_rules(
        rule(
            f"self.all(key, key.matches('{LABEL_KEY}') && key.matches('{KEY_LENGTH}'))",
            f"{field}: a key is a name of letters, digits, '-', '_' and '.', 63 characters at most, that begins and ends with a "
            "letter or digit, or such a name behind a DNS name in lower case and a slash",
        ),
        *more,
    )


_NOT_OURS = rule(
    "self.all(key, !key.startsWith('stele.dev/') && key != 'app.kubernetes.io/managed-by')",
    "podLabels must not name stele.dev/... or app.kubernetes.io/managed-by: the operator, Services and budgets find pods by these",
)
_NO_NOTES_OF_OURS = rule(
    "self.all(key, !key.startsWith('stele.dev/'))",
    "podAnnotations must not name stele.dev/...: the operator notes there what a pod was made from",
)


class TaintEffect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class TolerationOperator(StrEnum):
    """How a toleration looks at a taint's value."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(Model):
    """A taint of machines that pods bear, for as long as it is there."""

    # What Kubernetes itself puts on a machine says that it is down, cordoned or short of something. A pod that bears these, as
    # one that bears everything does, is placed on a machine that is off, and its member is lost for good.
    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "self.operator != 'Exists' || !has(self.value) || self.value == ''",
                "tolerations: with operator Exists any value is tolerated, and none may be given",
            ),
            rule(
                "!self.key.startsWith('node.kubernetes.io/') && !self.key.startsWith('node.cloudprovider.kubernetes.io/')",
                "tolerations: key must not be one of Kubernetes' own, node.kubernetes.io/... and "
                "node.cloudprovider.kubernetes.io/...: pods stay on machines that are not ready or unreachable as it is, and must "
                "not be put on such machines, nor on cordoned ones",
            ),
        )
    )

    key: TaintKey = Field(description="Key of the taint. Not one of Kubernetes' own, node.kubernetes.io/...")
    operator: TolerationOperator = Field(
        default=TolerationOperator.EQUAL,
        description="Equal: of this value only. Exists: of any value.",
    )
    value: LabelValue | None = Field(
        default=None, description="Value of the taint. Absent: the empty one; with Exists any."
    )
    effect: TaintEffect | None = Field(default=None, description="Effect of the taint. Absent: all.")


class PullSecret(Model):
    """A Secret of the same namespace."""

    name: ObjectName = Field(description="Name of the Secret, of type kubernetes.io/dockerconfigjson.")


_FROM_THEN = "A change counts for pods made from then on; running ones show as RestartPending."

NodeSelector = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=_keys(
            "nodeSelector",
            rule(
                "!('topology.kubernetes.io/zone' in self)",
                "nodeSelector must not name topology.kubernetes.io/zone: zones chooses zones, and one for each pod",
            ),
        ),
        description="Labels, and their values, that a machine must have to be given such pods. Zones are chosen by `zones`. "
        + _FROM_THEN,
    ),
]
Tolerations = Annotated[
    list[Toleration],
    Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Taints of machines that do not keep such pods away. " + _FROM_THEN,
    ),
]
PriorityClass = Annotated[
    ObjectName,
    Field(
        description="PriorityClass of such pods, which must exist when one is made. Absent: the default one of the Kubernetes "
        "cluster. " + _FROM_THEN
    ),
]
PodLabels = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=_keys("podLabels", _NOT_OURS),
        description="Labels of such pods, beside the operator's own. " + _FROM_THEN,
    ),
]
PodAnnotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(
        max_length=16,
        json_schema_extra=_keys("podAnnotations", _NO_NOTES_OF_OURS),
        description="Annotations of such pods, beside the operator's own. " + _FROM_THEN,
    ),
]


class Masters(Model):
    """The masters, which keep the catalog."""

    replicas: int = Field(
        default=3,
        description="How many masters: 1, 3 or 5. Cannot change.",
        json_schema_extra={
            "enum": [1, 3, 5],
            **with_rules(
                rule("self == oldSelf", "masters.replicas cannot change: adding masters is not there yet")
            ),
        },
    )
    storage: Storage = Field(default_factory=Storage, description="The volume of each master.")
    resources: MasterResources | None = Field(
        default=None,
        description="Resources of each master's container. A memory limit is 256Mi at least.",
    )
    nodeSelector: NodeSelector | None = None
    tolerations: Tolerations | None = None
    priorityClassName: PriorityClass | None = None
    podLabels: PodLabels | None = None
    podAnnotations: PodAnnotations | None = None


class Nodes(Model):
    """The nodes, which hold the tablets."""

    replicas: int = Field(
        default=3,
        ge=1,
        le=100,
        description="How many nodes. Can only grow.",
        json_schema_extra=with_rules(
            rule("self >= oldSelf", "nodes.replicas can only grow: taking nodes away is not there yet")
        ),
    )
    storage: Storage = Field(default_factory=Storage, description="The volume of each node.")
    resources: NodeResources | None = Field(
        default=None,
        description="Resources of each node's container. A memory limit is 512Mi at least; what a node makes of its limit "
        "is in kubernetes.md.",
    )
    machineSpread: MachineSpread = Field(
        default=MachineSpread.REQUIRED,
        description="Required: two nodes never share a machine. Preferred: they may, where machines are too few; two "
        "replicas of a tablet never do.",
    )
    nodeSelector: NodeSelector | None = None
    tolerations: Tolerations | None = None
    priorityClassName: PriorityClass | None = None
    podLabels: PodLabels | None = None
    podAnnotations: PodAnnotations | None = None


class Healing(Model):
    """When a silent node counts as lost, and how far healing goes by itself."""

    witnessAfter: Duration = Field(
        default="30s",
        description="A node silent for this long is lost: its voters are demoted, witnesses stand in, copies are made. "
        "Less than 3s, three heartbeats, counts as 3s.",
    )
    silentAfter: Duration = Field(
        default="5m",
        description="When a lost node whose machine is well is retired and replaced. Also where nothing is known of "
        "the machine, unless machineLostAfter is longer.",
    )
    machineLostAfter: Duration = Field(
        default="10m", description="When a lost node is retired and replaced whose machine is not ready."
    )
    machineDeletedAfter: Duration = Field(
        default="0s",
        description="When a lost node is retired and replaced whose machine was taken out of the cluster under its pod. "
        "For one that was drained before, silentAfter counts: its volume may follow it to another machine.",
    )
    volumeLostAfter: Duration = Field(
        default="0s", description="When a lost node is retired and replaced whose volume is gone or empty."
    )
    maxLostNodes: int = Field(
        default=1,
        ge=0,
        le=100,
        description="With more nodes lost at once than this, healing stops and waits for a human (Stalled=TooManyLost).",
    )
    keepFor: Duration = Field(
        default="24h",
        description="How long the claim of a retired node stays before it is deleted; longer while a tablet lacks its leader "
        "or has no voter to spare.",
    )


class Budget(Model):
    """How much healing may cost."""

    copies: int = Field(default=4, ge=1, le=64, description="How many tablets are copied at once.")
    bytesPerSecond: Quantity = Field(
        default="100Mi",
        description="What all copies together may move per second, at least 64Ki: below that it counts as 64Ki. Of less "
        "than 64Ki for each of `copies`, so many fewer are made at once.",
        # 0 might mean none or all there is, so it is refused: a copy that never ends leaves its tablet without a voter to
        # spare, and one that knows no limit takes the network from those who read and write.
        json_schema_extra=with_rules(
            rule(
                "quantity(string(self)).compareTo(quantity('64Ki')) >= 0 && "
                "quantity(string(self)).compareTo(quantity('1Ei')) <= 0",
                "budget.bytesPerSecond must be at least 64Ki, and at most 1Ei: with less no copy would end, and there is no "
                "value for no limit; where there is to be none, give more than the network has",
            )
        ),
    )


class TabletClusterSpec(Model):
    """Masters and nodes that serve tables together."""

    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Container image of masters and nodes. Absent: the operator's own setting. A change counts for "
        "pods made from then on; running ones keep theirs and show as RestartPending.",
    )
    imagePullSecrets: Annotated[list[PullSecret], Field(max_length=16)] | None = Field(
        default=None,
        description="Secrets, in the namespace of the TabletCluster, with which machines pull the image. "
        + _FROM_THEN,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    serviceAccountName: ObjectName | None = Field(
        default=None,
        description="ServiceAccount, in the namespace of the TabletCluster, of all pods; it must exist when one is made, and "
        "none is given its token. Absent: default. " + _FROM_THEN,
    )
    zones: Annotated[list[Zone], Field(max_length=16)] = Field(
        default_factory=list,
        description="Zones to spread over, values of the machines' label topology.kubernetes.io/zone. Empty: any.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    masters: Masters = Field(default_factory=Masters, description="The masters, which keep the catalog.")
    nodes: Nodes = Field(default_factory=Nodes, description="The nodes, which hold the tablets.")
    healing: Healing = Field(default_factory=Healing, description="What counts as lost, and when.")
    budget: Budget = Field(default_factory=Budget, description="How much healing may cost.")
    deletionPolicy: DeletionPolicy = Field(
        default=DeletionPolicy.RETAIN,
        description="Retain: volumes stay when the TabletCluster is deleted. Delete: they go with it.",
    )
    paused: bool = Field(
        default=False,
        description="Touch nothing: no pod is made, nothing is healed, until this is false. Only a change to "
        "deletionPolicy: Retain takes effect.",
    )
