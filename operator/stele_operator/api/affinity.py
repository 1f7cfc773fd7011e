"""Kubernetes' own types for affinity and topology spread. Imported by pods; knows no resource.

They are as in any pod, except that `matchLabelKeys` is left out, since it only matters for Deployments.
Invariants: Kubernetes accepts whatever these types accept. Absent and empty parts stay distinct: an absent
selector selects nothing, an empty one everything.
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
    """How a selector compares a pod's label with its values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeOperator(StrEnum):
    """How a term compares a machine's label with its values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class FieldOperator(StrEnum):
    """How a term compares a machine's name with its value."""

    IN = "In"
    NOT_IN = "NotIn"


class FieldName(StrEnum):
    """The only field of a machine that terms may use."""

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
    Field(max_length=64, json_schema_extra=_ATOMIC, description="Values to compare the label with."),
]


class LabelRequirement(Model):
    """A condition on a label of pods."""

    model_config = ConfigDict(json_schema_extra=with_rules(*_VALUED))

    key: LabelKey = Field(description="Key of the label.")
    operator: LabelOperator = Field(
        description="In: the label has one of `values`. NotIn: it has none of them."
    )
    values: Values | None = None


class LabelSelector(Model):
    """Selects pods by labels; all parts must match. An empty selector selects all pods, an absent one none."""

    matchLabels: (
        Annotated[
            dict[str, LabelValue],
            Field(max_length=_PARTS_MAX, json_schema_extra=with_keys("matchLabels")),
        ]
        | None
    ) = Field(default=None, description="Labels that a pod must have, with their values.")
    matchExpressions: (
        Annotated[list[LabelRequirement], Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)] | None
    ) = Field(default=None, description="Further conditions on a pod's labels.")


class NodeRequirement(Model):
    """A condition on a label of machines."""

    model_config = ConfigDict(json_schema_extra=with_rules(*_VALUED, _COMPARED))

    key: LabelKey = Field(description="Key of the label.")
    operator: NodeOperator = Field(
        description="In: the label has one of `values`. NotIn: it has none of them. Gt and Lt: a whole number above or below the value."
    )
    values: Values | None = None


class FieldRequirement(Model):
    """A condition on a machine's name."""

    key: FieldName = Field(description="metadata.name.")
    operator: FieldOperator = Field(description="In: this name. NotIn: any other.")
    values: Annotated[list[ObjectName], Field(min_length=1, max_length=1, json_schema_extra=_ATOMIC)] = Field(
        description="One name."
    )


class NodeTerm(Model):
    """Selects machines by labels and names. It needs at least one condition, and all must match."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    matchExpressions: (
        Annotated[
            list[NodeRequirement], Field(min_length=1, max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)
        ]
        | None
    ) = Field(default=None, description="Conditions on a machine's labels.")
    matchFields: (
        Annotated[
            list[FieldRequirement], Field(min_length=1, max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)
        ]
        | None
    ) = Field(default=None, description="Conditions on a machine's name.")


class RequiredMachines(Model):
    """The machines on which a pod may run."""

    # The operator adds a zone of its own for each pod. With a second condition on the zone no machine might
    # match.
    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "self.nodeSelectorTerms.all(term, !has(term.matchExpressions) || "
                "term.matchExpressions.all(e, e.key != 'topology.kubernetes.io/zone'))",
                "affinity.nodeAffinity must not require topology.kubernetes.io/zone; use zones, of which each pod gets one",
            )
        )
    )

    nodeSelectorTerms: Annotated[
        list[NodeTerm], Field(min_length=1, max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)
    ] = Field(description="One of these must match, in addition to the zone that the operator chose.")


class PreferredMachines(Model):
    """Machines that the scheduler prefers."""

    weight: Weight
    preference: NodeTerm = Field(description="Which machines.")


class NodeAffinity(Model):
    """The machines on which a pod may run, and those that it prefers."""

    requiredDuringSchedulingIgnoredDuringExecution: RequiredMachines | None = Field(
        default=None, description="The machines on which the pod may run."
    )
    preferredDuringSchedulingIgnoredDuringExecution: (
        Annotated[list[PreferredMachines], Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)] | None
    ) = Field(default=None, description="Machines that the scheduler prefers.")


class PodTerm(Model):
    """A set of pods, and the kind of place that they share."""

    labelSelector: LabelSelector | None = Field(default=None, description="Which pods. Absent: none.")
    topologyKey: LabelKey = Field(description="Machines with the same value of this label are one place.")
    namespaces: (
        Annotated[list[ObjectName], Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC)] | None
    ) = Field(
        default=None,
        description="Namespaces of those pods. Absent, without a selector: the TabletCluster's own.",
    )
    namespaceSelector: LabelSelector | None = Field(
        default=None,
        description="Namespaces of those pods, by their labels. An empty selector: all namespaces.",
    )


class PreferredPods(Model):
    """Pods near which, or away from which, a pod prefers to run."""

    weight: Weight
    podAffinityTerm: PodTerm = Field(description="Which pods, and the kind of place that they share.")


PodTerms = Annotated[
    list[PodTerm],
    Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC, description="Required terms; all must match."),
]
WeighedTerms = Annotated[
    list[PreferredPods],
    Field(max_length=_PARTS_MAX, json_schema_extra=_ATOMIC, description="Preferred terms."),
]


class PodAffinity(Model):
    """Other pods that a pod must run, or prefers to run, near (affinity) or away from (anti-affinity)."""

    requiredDuringSchedulingIgnoredDuringExecution: PodTerms | None = None
    preferredDuringSchedulingIgnoredDuringExecution: WeighedTerms | None = None


class Affinity(Model):
    """Where a pod may run. The operator adds its own terms."""

    nodeAffinity: NodeAffinity | None = Field(
        default=None, description="The machines on which the pod may run."
    )
    podAffinity: PodAffinity | None = Field(default=None, description="Other pods near which the pod runs.")
    podAntiAffinity: PodAffinity | None = Field(
        default=None,
        description="Other pods away from which the pod runs. The operator adds its own term, which keeps members apart.",
    )


class Unsatisfiable(StrEnum):
    """What happens to a pod that cannot be placed evenly."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class InclusionPolicy(StrEnum):
    """Whether the spread counts machines on which a pod cannot run."""

    HONOR = "Honor"
    IGNORE = "Ignore"


class SpreadConstraint(Model):
    """How evenly pods are spread over places, such as zones."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
                "topologySpreadConstraints: minDomains is for DoNotSchedule only",
            )
        )
    )

    maxSkew: int = Field(
        ge=1,
        le=2**31 - 1,
        description="The most pods that a place may have beyond the place with the fewest.",
    )
    topologyKey: LabelKey = Field(description="Machines with the same value of this label are one place.")
    whenUnsatisfiable: Unsatisfiable = Field(
        description="DoNotSchedule: the pod waits. ScheduleAnyway: it is placed all the same."
    )
    labelSelector: LabelSelector | None = Field(
        default=None, description="The pods that count. Absent: none."
    )
    minDomains: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None,
        description="If there are fewer places than this, the emptiest one counts as having no pod.",
    )
    nodeAffinityPolicy: InclusionPolicy | None = Field(
        default=None,
        description="Honor: machines that selectors or affinity exclude do not count. Absent: Honor.",
    )
    nodeTaintsPolicy: InclusionPolicy | None = Field(
        default=None,
        description="Honor: machines with taints that are not tolerated do not count. Absent: Ignore.",
    )
