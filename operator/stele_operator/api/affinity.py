"""Kubernetes' own types that say near what a pod runs: affinity and spread. Imported by pods; knows no resource.

As in any pod, but for `matchLabelKeys`, which tells the revisions of a Deployment apart. Invariant: what these let through,
Kubernetes takes; an absent part and an empty one stay apart, since an absent selector selects nothing and an empty one all.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from stele_operator.api.base import Model, rule, with_keys, with_rules
from stele_operator.api.scalars import LabelKey, LabelValue, ObjectName

_ATOMIC = {"x-kubernetes-list-type": "atomic"}
_PARTS_MAX = 16
_WEIGHT = "From 1 to 100."

Weight = Annotated[int, Field(ge=1, le=100, description=_WEIGHT)]


class LabelOperator(StrEnum):
    """How a selector of pods looks at a label."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeOperator(StrEnum):
    """How a term looks at a machine's label."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class FieldOperator(StrEnum):
    """How a term looks at a machine's name."""

    IN = "In"
    NOT_IN = "NotIn"


class FieldName(StrEnum):
    """The one field of a machine that terms may name."""

    NAME = "metadata.name"


_IN_WITH_VALUES = "!(self.operator in ['In', 'NotIn']) || (has(self.values) && self.values.size() > 0)"
_EXISTS_WITHOUT = (
    "!(self.operator in ['Exists', 'DoesNotExist']) || !has(self.values) || self.values.size() == 0"
)
_VALUED = (
    rule(_IN_WITH_VALUES, "matchExpressions: In and NotIn need values"),
    rule(_EXISTS_WITHOUT, "matchExpressions: Exists and DoesNotExist take no values"),
)
_COMPARED = rule(
    "!(self.operator in ['Gt', 'Lt']) || (has(self.values) && self.values.size() == 1 && "
    "self.values[0].matches('^[0-9]{1,18}$'))",
    "matchExpressions: Gt and Lt need one value, a whole number",
)

Values = Annotated[
    list[LabelValue],
    Field(max_length=64, json_schema_extra=_ATOMIC, description="Values that the operator speaks of."),
]


class LabelRequirement(Model):
    """What a label of pods must be."""

    model_config = ConfigDict(json_schema_extra=with_rules(*_VALUED))

    key: LabelKey = Field(description="Key of the label.")
    operator: LabelOperator = Field(description="In and NotIn: one of `values`, or none of them.")
    values: Values | None = None


class LabelSelector(Model):
    """Pods by their labels: all that is said must hold. An empty one selects all pods, an absent one none."""

    matchLabels: (
        Annotated[
            dict[str, LabelValue],
            Field(max_length=_PARTS_MAX, json_schema_extra=with_keys("matchLabels")),
        ]
        | None
    ) = Field(default=None, description="Labels, and their values, that must be there.")
    matchExpressions: (
        Annotated[list[LabelRequirement], Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)] | None
    ) = Field(default=None, description="What else must hold of a pod's labels.")


class NodeRequirement(Model):
    """What a label of a machine must be."""

    model_config = ConfigDict(json_schema_extra=with_rules(*_VALUED, _COMPARED))

    key: LabelKey = Field(description="Key of the label.")
    operator: NodeOperator = Field(
        description="In and NotIn: one of `values`, or none of them. Gt and Lt: a whole number above or below the value."
    )
    values: Values | None = None


class FieldRequirement(Model):
    """What a machine must be called."""

    key: FieldName = Field(description="metadata.name.")
    operator: FieldOperator = Field(description="In: this name. NotIn: any other.")
    values: Annotated[list[ObjectName], Field(min_length=1, max_length=1, json_schema_extra=_ATOMIC)] = Field(
        description="One name."
    )


class NodeTerm(Model):
    """Machines by their labels and names: all that is said must hold, and something must be said."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    matchExpressions: (
        Annotated[
            list[NodeRequirement], Field(min_length=1, max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)
        ]
        | None
    ) = Field(default=None, description="What must hold of a machine's labels.")
    matchFields: (
        Annotated[
            list[FieldRequirement], Field(min_length=1, max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)
        ]
        | None
    ) = Field(default=None, description="What must hold of a machine's name.")


class RequiredMachines(Model):
    """Machines of which a pod must be given one."""

    # One term for a zone would stand beside the operator's own, which chooses another for each pod: no machine would do.
    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "self.nodeSelectorTerms.all(term, !has(term.matchExpressions) || "
                "term.matchExpressions.all(e, e.key != 'topology.kubernetes.io/zone'))",
                "affinity.nodeAffinity must not require topology.kubernetes.io/zone: zones chooses zones, and one for each pod",
            )
        )
    )

    nodeSelectorTerms: Annotated[
        list[NodeTerm], Field(min_length=1, max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)
    ] = Field(description="One of these must hold, beside the zone that the operator chose.")


class PreferredMachines(Model):
    """Machines that are better than others."""

    weight: Weight
    preference: NodeTerm = Field(description="Which machines.")


class NodeAffinity(Model):
    """Which machines a pod takes."""

    requiredDuringSchedulingIgnoredDuringExecution: RequiredMachines | None = Field(
        default=None, description="Machines of which it must be given one."
    )
    preferredDuringSchedulingIgnoredDuringExecution: (
        Annotated[list[PreferredMachines], Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)] | None
    ) = Field(default=None, description="Machines that are better than others.")


class PodTerm(Model):
    """Pods, and what counts as the same place."""

    labelSelector: LabelSelector | None = Field(default=None, description="Which pods. Absent: none.")
    topologyKey: LabelKey = Field(description="Label of machines whose value says that they are one place.")
    namespaces: (
        Annotated[list[ObjectName], Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)] | None
    ) = Field(
        default=None,
        description="Namespaces of those pods. Absent, without a selector: the TabletCluster's own.",
    )
    namespaceSelector: LabelSelector | None = Field(
        default=None, description="Namespaces of those pods, by their labels. An empty one: all."
    )


class PreferredPods(Model):
    """A place that is better, or worse, than others."""

    weight: Weight
    podAffinityTerm: PodTerm = Field(description="Which pods, and what counts as the same place.")


PodTerms = Annotated[
    list[PodTerm],
    Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC, description="What must hold."),
]
WeighedTerms = Annotated[
    list[PreferredPods],
    Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC, description="What is better than its contrary."),
]


class PodAffinity(Model):
    """Beside which other pods, or away from which, a pod runs."""

    requiredDuringSchedulingIgnoredDuringExecution: PodTerms | None = None
    preferredDuringSchedulingIgnoredDuringExecution: WeighedTerms | None = None


class Affinity(Model):
    """Near what a pod runs, beside the operator's own terms."""

    nodeAffinity: NodeAffinity | None = Field(default=None, description="Which machines it takes.")
    podAffinity: PodAffinity | None = Field(default=None, description="Beside which other pods it runs.")
    podAntiAffinity: PodAffinity | None = Field(
        default=None,
        description="Away from which other pods it runs; beside the operator's own term, which keeps members apart.",
    )


class Unsatisfiable(StrEnum):
    """What becomes of a pod that cannot be placed evenly."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class InclusionPolicy(StrEnum):
    """Whether machines that a pod cannot take are looked at."""

    HONOR = "Honor"
    IGNORE = "Ignore"


class SpreadConstraint(Model):
    """How evenly pods are spread over places."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
                "topologySpreadConstraints: minDomains is for DoNotSchedule only",
            )
        )
    )

    maxSkew: int = Field(
        ge=1, le=2**31 - 1, description="How many pods more a place may have than the emptiest one."
    )
    topologyKey: LabelKey = Field(description="Label of machines whose value says that they are one place.")
    whenUnsatisfiable: Unsatisfiable = Field(
        description="DoNotSchedule: the pod waits. ScheduleAnyway: it does not."
    )
    labelSelector: LabelSelector | None = Field(
        default=None, description="Pods that are counted. Absent: none."
    )
    minDomains: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="With fewer places than these the emptiest one counts as having no pod."
    )
    nodeAffinityPolicy: InclusionPolicy | None = Field(
        default=None,
        description="Honor: machines that selectors and affinity leave out do not count. Absent: Honor.",
    )
    nodeTaintsPolicy: InclusionPolicy | None = Field(
        default=None,
        description="Honor: machines with taints that are not tolerated do not count. Absent: Ignore.",
    )
