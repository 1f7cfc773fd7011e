"""The fields for pods of masters and nodes, except resources. Imported by cluster; knows no resource.

Invariants: whatever these fields accept, Kubernetes accepts in a pod. They cannot override what the operator
sets itself.
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
    "podAnnotations must not name stele.dev/...: the operator records there what a pod was made from",
)


class TaintEffect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class TolerationOperator(StrEnum):
    """How a toleration compares a taint's value."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(Model):
    """A taint of machines that the pods tolerate."""

    # Kubernetes' own taints mean that a machine is down, cordoned or short of something. A pod that tolerates
    # them (or everything) may be placed on a machine that is off, and its member is lost for good.
    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "self.operator != 'Exists' || !has(self.value) || self.value == ''",
                "tolerations: operator Exists tolerates any value, so none may be given",
            ),
            rule(
                "!self.key.startsWith('node.kubernetes.io/') && !self.key.startsWith('node.cloudprovider.kubernetes.io/')",
                "tolerations: key must not be one of Kubernetes' own (node.kubernetes.io/..., "
                "node.cloudprovider.kubernetes.io/...). Pods stay on machines that become unready anyway, and new pods must "
                "not be placed on unready or cordoned machines",
            ),
        )
    )

    key: LabelKey = Field(
        description="Key of the taint. Kubernetes' own keys (node.kubernetes.io/...) are not allowed."
    )
    operator: TolerationOperator = Field(
        default=TolerationOperator.EQUAL,
        description="Equal: tolerates only this value. Exists: tolerates any value.",
    )
    value: LabelValue | None = Field(
        default=None, description="Value of the taint. Absent: the empty value, or with Exists any value."
    )
    effect: TaintEffect | None = Field(default=None, description="Effect of the taint. Absent: all.")


class PullSecret(Model):
    """A Secret of the same namespace."""

    name: ObjectName = Field(description="Name of the Secret, of type kubernetes.io/dockerconfigjson.")


FROM_THEN = "A change is rolled out by updateStrategy."

NodeSelector = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=with_keys(
            "nodeSelector",
            rule(
                "!('topology.kubernetes.io/zone' in self)",
                "nodeSelector must not name topology.kubernetes.io/zone; use zones, of which each pod gets one",
            ),
        ),
        description="Labels that a machine must have, with their values. For zones use `zones`. " + FROM_THEN,
    ),
]
Tolerations = Annotated[
    list[Toleration],
    Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Taints of machines that these pods tolerate. " + FROM_THEN,
    ),
]
PriorityClass = Annotated[
    ObjectName,
    Field(
        description="PriorityClass of these pods. It must exist before them. Absent: the default of the Kubernetes "
        "cluster. " + FROM_THEN
    ),
]
PodLabels = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=with_keys("podLabels", _NOT_OURS),
        description="Labels of these pods, in addition to the operator's own. " + FROM_THEN,
    ),
]
PodAnnotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(
        max_length=16,
        json_schema_extra=with_keys("podAnnotations", _NO_NOTES_OF_OURS),
        description="Annotations of these pods, in addition to the operator's own. " + FROM_THEN,
    ),
]
AffinityOfPods = Annotated[
    Affinity,
    Field(
        description="Affinity of these pods, as in any pod (except matchLabelKeys). The operator adds its own terms for zones "
        "and machines, and to keep members apart. " + FROM_THEN
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
        description="How evenly these pods are spread, as in any pod (except matchLabelKeys). For zones use "
        "`zones`, for machines `machineSpread`. " + FROM_THEN,
    ),
]
RuntimeClass = Annotated[
    ObjectName,
    Field(
        description="RuntimeClass of these pods. It must exist before them. Absent: the machine's default runtime. "
        + FROM_THEN
    ),
]
SchedulerName = Annotated[
    ObjectName,
    Field(
        description="Scheduler of these pods. Absent: default-scheduler. If it does not run, the pods are not placed. "
        + FROM_THEN
    ),
]
