"""What all models of custom resources are made of: their base, and rules in CEL. Called by the models; knows no resource.

Invariant: a field that no model has is a fault.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from stele_operator.api.scalars import KEY_LENGTH, LABEL_KEY


def rule(cel: str, message: str, **more: str) -> dict[str, str]:
    """One CEL validation rule of the API server, with the sentence it answers."""
    return {"rule": cel, "message": message, **more}


def with_rules(*rules: dict[str, str]) -> dict[str, Any]:
    """The schema extension that carries CEL rules."""
    return {"x-kubernetes-validations": list(rules)}


def with_keys(field: str, *more: dict[str, str]) -> dict[str, Any]:
    """The keys are as those of labels; a schema alone says nothing of the keys of a map."""
    return with_rules(
        rule(
            f"self.all(key, key.matches('{LABEL_KEY}') && key.matches('{KEY_LENGTH}'))",
            f"{field}: a key is a name of letters, digits, '-', '_' and '.', 63 characters at most, that begins and ends with a "
            "letter or digit, or such a name behind a DNS name in lower case and a slash",
        ),
        *more,
    )


class Model(BaseModel):
    """Base of all parts of a custom resource: unknown fields are faults. Where the API server has them all the same, they
    are of later definitions, and observe leaves them out. So a field that is added must be one that an older operator may
    overlook; what it must not is another value of a field that is there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
