"""The base of all models of custom resources, and helpers for CEL rules. Called by the models; knows no
resource.

Invariant: a field that no model has is a fault.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from stele_operator.api.scalars import KEY_LENGTH, LABEL_KEY


def rule(cel: str, message: str, **more: str) -> dict[str, str]:
    """One CEL validation rule of the API server, with its error message."""
    return {"rule": cel, "message": message, **more}


def with_rules(*rules: dict[str, str]) -> dict[str, Any]:
    """The part of a schema that carries these CEL rules."""
    return {"x-kubernetes-validations": list(rules)}


def with_keys(field: str, *more: dict[str, str]) -> dict[str, Any]:
    """The part of a schema that requires valid label keys as keys of a map. It is a CEL rule, since a schema
    alone cannot restrict the keys of a map.
    """
    return with_rules(
        rule(
            f"self.all(key, key.matches('{LABEL_KEY}') && key.matches('{KEY_LENGTH}'))",
            f"{field}: a key is a name of at most 63 letters, digits, '-', '_' and '.', which begins and ends with a letter "
            "or digit; it may follow a DNS name in lower case and a slash",
        ),
        *more,
    )


class Model(BaseModel):
    """Base of all parts of a custom resource. Unknown fields are faults.

    If the API server has newer definitions, observe removes the fields that this operator does not know. So a
    new field must be one that an older operator may ignore. If ignoring it would do harm, add a new value to
    an existing field instead.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
