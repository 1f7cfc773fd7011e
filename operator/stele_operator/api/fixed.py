"""Finds the fields that a new spec changes although they are fixed. Pure.

The rules are the models' own CEL rules that name `oldSelf`, so no rule is stated twice. Invariant: each form
of such a rule is known here (tests/operator/test_fixed.py). An unknown form is a bug of the operator, not of
the spec.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from stele_operator.api.structural import structural_schema

Json = dict[str, Any]
_SAME = "self == oldSelf"
_PRESENCE = re.compile(r"has\(self\.(\w+)\) == has\(oldSelf\.\1\)")
_FIELD = re.compile(r"\(has\(self\.(\w+)\) \? self\.\1 : ''\) == \(has\(oldSelf\.\1\) \? oldSelf\.\1 : ''\)")


def fixed_faults(before: BaseModel, after: BaseModel) -> tuple[str, ...]:
    """The faults of changing `before` to `after`: one message for each fixed field that differs, as the API
    server words it. Both are of one model.
    """
    old, new = (spec.model_dump(mode="json", exclude_none=True) for spec in (before, after))
    return tuple(dict.fromkeys(_faults(structural_schema(type(after)), old, new, "spec")))


def transition_rules(schema: Json) -> Iterator[Json]:
    """All CEL transition rules of a schema. These are the rules that use `oldSelf`."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"]:
            yield rule
    for child in (*schema.get("properties", {}).values(), schema.get("items")):
        if isinstance(child, dict):
            yield from transition_rules(child)


def holds(cel: str, old: Any, new: Any) -> bool:
    """Whether a transition rule holds between the old and the new value.

    Raises:
        ValueError: the rule has a form that is not known here.
    """
    if cel == _SAME:
        return bool(old == new)
    if match := _PRESENCE.fullmatch(cel):
        return (match[1] in old) == (match[1] in new)
    if match := _FIELD.fullmatch(cel):
        return bool(old.get(match[1], "") == new.get(match[1], ""))
    raise ValueError(f"a transition rule of an unknown form: {cel}")


def _faults(schema: Json, old: Any, new: Any, place: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and not holds(rule["rule"], old, new):
            yield f"{place}: {rule['message']}"
    if isinstance(old, dict) and isinstance(new, dict):
        for name, child in schema.get("properties", {}).items():
            if name in old and name in new:  # the API server compares a field only if both have it
                yield from _faults(child, old[name], new[name], f"{place}.{name}")
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys and isinstance(old, list) and isinstance(new, list):
        before = {tuple(item.get(k) for k in keys): item for item in old}
        for item in new:
            key = tuple(item.get(k) for k in keys)
            if key in before:
                yield from _faults(schema["items"], before[key], item, f"{place}[{', '.join(map(str, key))}]")
