"""TabletCluster: what a user may ask of a cluster. Read by observe, written to crds/ by generate.

Invariants: every field has an effect today. Published defaults never change.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

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
    """What happens to the data when the resource is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class UpdateStrategy(StrEnum):
    """How running pods get a changed spec. The values have the names that StatefulSets use."""

    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


class MachineSpread(StrEnum):
    """Whether two nodes of a cluster may share a machine."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class LogLevel(StrEnum):
    """What members write to their output: this and whatever is worse."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Storage(Model):
    """The volume of one pod."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "!has(self.size) || quantity(string(self.size)).compareTo(quantity('1Gi')) >= 0",
                "storage.size must be at least 1Gi, because a volume with less than 512 MiB free gets no copies",
            ),
            rule(
                "(has(self.className) ? self.className : '') == (has(oldSelf.className) ? oldSelf.className : '')",
                "storage.className cannot change: a volume keeps the class it was made with",
            ),
        )
    )

    size: Quantity = Field(
        default="10Gi",
        description="Size of each volume, at least 1Gi. With less than 512 MiB free a volume gets no copies, with less than "
        "256 MiB it refuses writes. If it is raised, volumes grow, provided that the storage class allows expansion. If it is "
        "lowered, only new volumes are smaller.",
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
        f"resources.{part} may only name {', '.join(RESOURCE_NAMES)}",
    )


_AS_KUBERNETES = (*map(_named, ("requests", "limits")), *map(_covers, ("cpu", "memory")))
"""Rules that Kubernetes has, too. But it checks them only when it creates a pod. That may be a pod that must
replace a lost one.
"""


class Resources(Model):
    """What a container requests and may use, as in any pod."""

    requests: Annotated[dict[str, Quantity], Field(max_length=8)] | None = Field(
        default=None, description="What the scheduler reserves: cpu, memory."
    )
    limits: Annotated[dict[str, Quantity], Field(max_length=8)] | None = Field(
        default=None,
        description="What the container may not exceed. Recommended: memory equal to its request, no cpu.",
    )


def _at_least(least: str, who: str) -> dict[str, Any]:
    """CEL rules: the memory limit is at least `least`. Without a limit, the request counts as the limit."""
    wrong = f"{who}.resources: the memory limit must be at least {least}; without a limit the request is the limit"
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
    """Resources of a master's container."""

    model_config = ConfigDict(json_schema_extra=_at_least("256Mi", "masters"))


class NodeResources(Resources):
    """Resources of a node's container."""

    model_config = ConfigDict(json_schema_extra=_at_least("512Mi", "nodes"))


class Log(Model):
    """The log of a member. All its tablets share it."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "!has(self.segmentSize) || quantity(string(self.segmentSize)).compareTo(quantity('4Mi')) >= 0 && "
                "quantity(string(self.segmentSize)).compareTo(quantity('256Mi')) <= 0",
                "log.segmentSize must be from 4Mi to 256Mi; a fraction of 1Mi is dropped",
            )
        )
    )

    segmentSize: Quantity = Field(
        default="64Mi",
        description="Length of a segment, 4Mi to 256Mi. The next segment is prepared before it is needed. A change holds for "
        "new segments.",
    )
    spareSegments: int = Field(
        default=4,
        ge=0,
        le=64,
        description="How many segments are kept for reuse once nobody needs what they hold. They take at most a sixteenth of "
        "the volume.",
    )


LogOfPods = Annotated[
    Log,
    Field(
        description="The log. Absent: the defaults of the image. If it changes, pods are made again one at a time. Needs an "
        "image of release 0.2 or later."
    ),
]


class Masters(Model):
    """The masters, which keep the catalog."""

    replicas: int = Field(
        default=3,
        description="Number of masters: 1, 3 or 5. If it changes, masters are added or taken away one at a time, while nothing "
        "heals or is rolled. Until the change has ended, set the number back to keep them. Each master needs a machine of its own "
        "(Stalled=TooFewMachines).",
        json_schema_extra={"enum": [1, 3, 5]},
    )
    storage: Storage = Field(default_factory=Storage, description="The volume of each master.")
    resources: MasterResources | None = Field(
        default=None,
        description="Resources of each master's container. The memory limit must be at least 256Mi.",
    )
    log: LogOfPods | None = None
    nodeSelector: NodeSelector | None = None
    tolerations: Tolerations | None = None
    affinity: AffinityOfPods | None = None
    topologySpreadConstraints: SpreadOfPods | None = None
    priorityClassName: PriorityClass | None = None
    runtimeClassName: RuntimeClass | None = None
    schedulerName: SchedulerName | None = None
    podLabels: PodLabels | None = None
    podAnnotations: PodAnnotations | None = None


NodeNames = Annotated[list[ObjectName], Field(max_length=100)]


class Nodes(Model):
    """The nodes, which hold the tablets."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "!has(self.retire) || !has(self.park) || !self.retire.exists(name, name in self.park)",
                "nodes.retire and nodes.park name the same node; a node can only be one of both",
            )
        )
    )

    replicas: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Number of nodes in service. If it is lowered, the condition Reconciling names those that go: they are "
        "drained and then retired. Until then, set it back to keep them. Refused (Stalled=DrainRefused) where the others "
        "cannot take their replicas.",
    )
    retire: NodeNames = Field(
        default_factory=list,
        description="Names of nodes to drain and then retire, such as flights-node-2. Take a name away to keep a node that is "
        "not retired yet. They do not count towards replicas, so others are made for them.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    park: NodeNames = Field(
        default_factory=list,
        description="Names of nodes that may be away for a while. Leaders leave them, and they get nothing new. While one is "
        "away its replicas are kept, and not copied elsewhere. At most budget.maxUnavailable at a time. Refused "
        "(Stalled=ParkRefused) where tablets would stop.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    storage: Storage = Field(default_factory=Storage, description="The volume of each node.")
    resources: NodeResources | None = Field(
        default=None,
        description="Resources of each node's container. The memory limit must be at least 512Mi; kubernetes.md says how a "
        "node uses it.",
    )
    machineSpread: MachineSpread = Field(
        default=MachineSpread.REQUIRED,
        description="Required: two nodes never share a machine. Preferred: they may if there are too few machines, but two "
        "replicas of a tablet never do. A change applies to new pods.",
    )
    log: LogOfPods | None = None
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
    """When a silent node counts as lost, and the limit of automatic healing."""

    witnessAfter: Duration = Field(
        default="30s",
        description="A node silent for this long is lost: its voters are demoted, witnesses take their place, copies are made. "
        "Less than 3s (three heartbeats) counts as 3s.",
    )
    silentAfter: Duration = Field(
        default="5m",
        description="After this silence a lost node is retired and replaced if its machine is healthy. If the operator may not "
        "read machines, the longer one of this and machineLostAfter counts.",
    )
    machineLostAfter: Duration = Field(
        default="10m",
        description="After this silence a lost node is retired and replaced if its machine is not ready.",
    )
    machineDeletedAfter: Duration = Field(
        default="0s",
        description="After this silence a lost node is retired and replaced if its machine was removed from Kubernetes. For a "
        "machine that was drained first, silentAfter counts, because the pod may move with its volume.",
    )
    volumeLostAfter: Duration = Field(
        default="0s",
        description="After this silence a lost node is retired and replaced if its volume is gone or empty.",
    )
    maxLostNodes: int = Field(
        default=1,
        ge=0,
        le=100,
        description="If more nodes than this are lost at once, healing stops and waits for a human (Stalled=TooManyLost).",
    )
    mastersDriveAfter: Duration = Field(
        default="2m",
        description="If the operator is not heard for this long, the leading master heals the cluster itself, until the operator "
        "is back. 0s: it never does.",
    )
    keepFor: Duration = Field(
        default="24h",
        description="How long the claim of a retired node is kept before it is deleted. It is kept longer while a tablet has "
        "no leader, or could not lose another voter.",
    )


class Budget(Model):
    """How much may be away, and how much healing may cost."""

    maxUnavailable: int = Field(
        default=1,
        ge=1,
        le=100,
        description="The most masters, and the most nodes, that may be away at once because they are made again, evicted or parked. Fewer "
        "may be away where a tablet could lose its majority. A tablet with replicas on two nodes that are made again keeps a "
        "voter to spare. "
        "Masters are made again one at a time.",
    )
    copies: int = Field(default=4, ge=1, le=64, description="The most tablets that are copied at once.")
    bytesPerSecond: Quantity = Field(
        default="100Mi",
        description="Bytes per second of all copies together, at least 64Ki. If it gives a copy less than 64Ki, fewer copies "
        "run at once.",
        # 0 is refused, since it could mean nothing or no limit. A copy that never ends leaves its tablet
        # without a spare voter; a copy without limit takes the network from readers and writers.
        json_schema_extra=with_rules(
            rule(
                "quantity(string(self)).compareTo(quantity('64Ki')) >= 0 && "
                "quantity(string(self)).compareTo(quantity('1Ei')) <= 0",
                "budget.bytesPerSecond must be at least 64Ki, since slower copies would not end, and at most 1Ei; for no limit, "
                "give more than the network carries",
            )
        ),
    )


class Balance(Model):
    """What the operator spreads evenly over the nodes."""

    leaders: bool = Field(
        default=True,
        description="Whether leaders are spread over the nodes while nothing heals. false: they stay where elections and "
        "`stele tablet step-down` put them.",
    )
    replicas: bool = Field(
        default=True,
        description="Whether replicas are moved, while nothing heals, so that zones and nodes have equal shares. This also "
        "fills new nodes. At most half of budget.copies are moves.",
    )


class TabletClusterSpec(Model):
    """Masters and nodes that serve tables together."""

    version: Literal["0.1", "0.2"] | None = Field(
        default=None,
        description="Release to finalize. Once all masters and nodes run it or a later one, its formats and features are allowed, "
        "and the release before cannot come back. A lower one changes nothing. Absent: nothing is finalized.",
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Container image of masters and nodes. Absent: the operator's own setting. A change is rolled "
        "out by updateStrategy.",
    )
    imagePullSecrets: Annotated[list[PullSecret], Field(max_length=16)] | None = Field(
        default=None,
        description="Secrets in the namespace of the TabletCluster for pulling the image. " + FROM_THEN,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    serviceAccountName: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of all pods, in the namespace of the TabletCluster. It must exist before the pods; they do "
        "not get its token. Absent: default. " + FROM_THEN,
    )
    zones: Annotated[list[Zone], Field(max_length=16)] = Field(
        default_factory=list,
        description="Zones to spread over: values of the machines' label topology.kubernetes.io/zone. Empty: any.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    masters: Masters = Field(default_factory=Masters, description="The masters, which keep the catalog.")
    nodes: Nodes = Field(default_factory=Nodes, description="The nodes, which hold the tablets.")
    healing: Healing = Field(default_factory=Healing, description="What counts as lost, and when.")
    budget: Budget = Field(
        default_factory=Budget, description="How much may be away at once, and how much healing may cost."
    )
    balance: Balance = Field(default_factory=Balance, description="What is evened out over the nodes.")
    leaderLease: Duration | None = Field(
        default=None,
        description="How long voters promise to elect nobody else, 150ms to 5s. Then leaders answer reads without asking other nodes, and a lost "
        "leader is replaced up to this much later. leader-leases.md says what it relies on. Absent, or 0s: no leases. If it changes, pods are "
        "made again one at a time. Needs an image of release 0.2 or later, and version 0.2.",
        json_schema_extra=with_rules(
            rule(
                "self.matches('^([0-9]+(ms|s))+$') && (duration(self) == duration('0s') || "
                "duration(self) >= duration('150ms') && duration(self) <= duration('5s'))",
                "leaderLease must be 0s, or from 150ms to 5s",
            )
        ),
    )
    logLevel: LogLevel | None = Field(
        default=None,
        description="What masters and nodes write to their output, which `kubectl logs` shows: this and whatever is worse. Absent: as the "
        "image does, which is info. If it changes, pods are made again one at a time.",
    )
    updateStrategy: UpdateStrategy = Field(
        default=UpdateStrategy.ROLLING_UPDATE,
        description="How running pods get another image, other resources and other fields. RollingUpdate: they are made again "
        "one at a time, or as budget.maxUnavailable says, masters first, while the cluster is whole. OnDelete: they keep what they have until somebody deletes "
        "them.",
    )
    deletionPolicy: DeletionPolicy = Field(
        default=DeletionPolicy.RETAIN,
        description="Retain: volumes stay when the TabletCluster is deleted. Delete: they go with it.",
    )
    paused: bool = Field(
        default=False,
        description="While true the operator does nothing: it creates no pods, rolls none and heals nothing, and "
        "the masters do not heal in its place. Only a change to "
        "deletionPolicy: Retain takes effect.",
    )
    hibernate: bool = Field(
        default=False,
        description="While true there are no pods. Nodes stop first, then masters, and all claims are kept. false wakes the "
        "cluster: masters start first, then nodes, each on its own volume. Other changes to the spec take effect after that. "
        "Nothing happens while paused is true.",
    )
