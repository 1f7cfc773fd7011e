"""What a user may say of the pods of masters and nodes, but their resources. Imported by cluster; knows no resource.

Invariant: what these let through, Kubernetes takes of a pod; nothing in it stands in the place of what is the operator's own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from stele_operator.api.affinity import Affinity, SpreadConstraint
from stele_operator.api.base import Model, rule, with_keys, with_rules
from stele_operator.api.scalars import LabelKey, LabelValue, ObjectName

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

    key: LabelKey = Field(description="Key of the taint. Not one of Kubernetes' own, node.kubernetes.io/...")
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


FROM_THEN = "A change counts for pods made from then on; running ones show as RestartPending."

NodeSelector = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=with_keys(
            "nodeSelector",
            rule(
                "!('topology.kubernetes.io/zone' in self)",
                "nodeSelector must not name topology.kubernetes.io/zone: zones chooses zones, and one for each pod",
            ),
        ),
        description="Labels, and their values, that a machine must have to be given such pods. Zones are chosen by `zones`. "
        + FROM_THEN,
    ),
]
Tolerations = Annotated[
    list[Toleration],
    Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Taints of machines that do not keep such pods away. " + FROM_THEN,
    ),
]
PriorityClass = Annotated[
    ObjectName,
    Field(
        description="PriorityClass of such pods, which must exist when one is made. Absent: the default one of the Kubernetes "
        "cluster. " + FROM_THEN
    ),
]
PodLabels = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=with_keys("podLabels", _NOT_OURS),
        description="Labels of such pods, beside the operator's own. " + FROM_THEN,
    ),
]
PodAnnotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(
        max_length=16,
        json_schema_extra=with_keys("podAnnotations", _NO_NOTES_OF_OURS),
        description="Annotations of such pods, beside the operator's own. " + FROM_THEN,
    ),
]
AffinityOfPods = Annotated[
    Affinity,
    Field(
        description="Near what such pods run, as in any pod (but for matchLabelKeys). The operator's own terms stay beside it: "
        "zones, machines that are left to others, and that members keep apart. " + FROM_THEN
    ),
]
SpreadOfPods = Annotated[
    list[SpreadConstraint],
    Field(
        max_length=16,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["topologyKey", "whenUnsatisfiable"],
        },
        description="How evenly such pods are spread over places, as in any pod (but for matchLabelKeys). Zones are chosen by "
        "`zones`, machines by `machineSpread`. " + FROM_THEN,
    ),
]
RuntimeClass = Annotated[
    ObjectName,
    Field(
        description="RuntimeClass of such pods, which must exist when one is made. Absent: the machine's own runtime. "
        + FROM_THEN
    ),
]
SchedulerName = Annotated[
    ObjectName,
    Field(
        description="Scheduler of such pods. Absent: Kubernetes' own, default-scheduler. One that does not run places none. "
        + FROM_THEN
    ),
]
