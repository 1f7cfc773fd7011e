"""Scalars of the custom resources: durations, quantities, names. Called by the models; knows no resource.

Invariant: `seconds` and `byte_count` can parse whatever the patterns accept.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from stele.model.durations import PATTERN
from stele.model.durations import seconds as seconds

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
_QUANTITY_PARTS = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]*)\Z")
_FACTOR = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** n for n, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** n for n, unit in enumerate("KMGTPE", start=1)},
}

CLUSTER_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Names of Services contain the cluster's name. Before Kubernetes 1.34 such names could not begin with a
digit.
"""


def byte_count(text: str) -> int:
    """Bytes in a Kubernetes quantity such as `10Gi`, `500M` or `1.5Ti`, rounded up.

    Raises:
        ValueError: the text is not such a quantity.
    """
    match = _QUANTITY_PARTS.match(text)
    if match is None or match.group(2) not in _FACTOR:
        raise ValueError(f"quantity {text!r}: expected a number of bytes such as 10Gi or 500M")
    exact = Decimal(match.group(1)) * _FACTOR[match.group(2)]
    return int(exact.to_integral_value(rounding="ROUND_CEILING"))


RATE_MIN = 64 << 10
RATE_MAX = 1 << 60


def bytes_per_second(text: str) -> int:
    """Bytes per second of a quantity, brought into the range from RATE_MIN to RATE_MAX."""
    return min(max(byte_count(text), RATE_MIN), RATE_MAX)


def _checked_quantity(text: str) -> str:
    byte_count(text)
    return text


def _checked_duration(text: str) -> str:
    seconds(text)
    return text


def _as_text(value: Any) -> Any:
    # Kubernetes accepts both `cpu: 2` and `cpu: "2"`; both become text here.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Duration = Annotated[
    str,
    AfterValidator(_checked_duration),
    WithJsonSchema({"type": "string", "pattern": PATTERN, "maxLength": 32}),
]
"""Text such as `90s`; `seconds()` reads it."""

Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    AfterValidator(_checked_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": _QUANTITY,
            "maxLength": 32,
        }
    ),
]
"""Text such as `10Gi`; `byte_count()` reads it."""

KeyText = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(max_length=1_024),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": 1_024,
        }
    ),
]
"""A value of a key column: a number, or text such as 2024-02-01."""

_DNS = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
OBJECT_NAME = f"^{_DNS}([.]{_DNS})*$"
LABEL_KEY = f"^({_DNS}([.]{_DNS})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
"""Keys of labels, annotations and taints. The part before the slash has at most 253 characters."""
KEY_LENGTH = "^([^/]{1,253}/)?[^/]{1,63}$"
_LABEL_VALUE = "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME)]
"""Name of a Kubernetes object."""

LabelValue = Annotated[str, Field(max_length=63, pattern=_LABEL_VALUE)]
"""Value of a label or a taint. It may be empty."""

LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY)]
"""Key of a label or a taint."""

Zone = Annotated[str, Field(min_length=1, max_length=63)]
"""A value of the machines' label topology.kubernetes.io/zone."""

ColumnName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of a column. The rules are those of stele.model.schema."""
