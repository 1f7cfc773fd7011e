"""TabletCluster: what a user may ask of a cluster. Read by observe, written to crds/ by generate.

Invariant: every field changes something that runs today; every default is published and never changes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from stele_operator.api.base import Model, rule, with_rules
from stele_operator.api.pods import (
    FROM_THEN,
    AffinityOfPods,
    NodeSelector,
    PodAnnotations,
    PodLabels,
    PriorityClass,
    PullSecret,
    RuntimeClass,
    SchedulerName,
    SpreadOfPods,
    Tolerations,
)
from stele_operator.api.scalars import Duration, ObjectName, Quantity, Zone


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
    affinity: AffinityOfPods | None = None
    topologySpreadConstraints: SpreadOfPods | None = None
    priorityClassName: PriorityClass | None = None
    runtimeClassName: RuntimeClass | None = None
    schedulerName: SchedulerName | None = None
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
        "replicas of a tablet never do. Pods that run go by what it was when they were made, and so does who waits beside them.",
    )
    nodeSelector: NodeSelector | None = None
    tolerations: Tolerations | None = None
    affinity: AffinityOfPods | None = None
    topologySpreadConstraints: SpreadOfPods | None = None
    priorityClassName: PriorityClass | None = None
    runtimeClassName: RuntimeClass | None = None
    schedulerName: SchedulerName | None = None
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
        + FROM_THEN,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    serviceAccountName: ObjectName | None = Field(
        default=None,
        description="ServiceAccount, in the namespace of the TabletCluster, of all pods; it must exist when one is made, and "
        "none is given its token. Absent: default. " + FROM_THEN,
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
