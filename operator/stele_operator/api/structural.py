"""Converts a pydantic model to the structural schema of a CustomResourceDefinition. Called by definitions.

Pure. Invariant: the result has no $ref, no title and no null type. It has the model's defaults, where JSON
can express them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_DROPPED = ("title", "additionalProperties", "$defs")


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI v3 schema of `model` in the structural form that the API server accepts."""
    raw = model.model_json_schema(mode="validation")
    schema = _walk(raw, raw.get("$defs", {}))
    _fill_defaults(schema)
    return schema


def _walk(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        siblings = {k: v for k, v in node.items() if k != "$ref"}
        return _walk({**target, **siblings}, definitions)
    if "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
        # An optional field is absent or has a value. Null would be a third case, so it is not allowed.
        (branch,) = [b for b in node["anyOf"] if b.get("type") != "null"]
        siblings = {k: v for k, v in node.items() if k != "anyOf"}
        return _walk({**branch, **siblings}, definitions)
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key == "additionalProperties" and isinstance(value, dict):
            result[key] = _walk(value, definitions)
        elif key in _DROPPED:
            continue
        elif key == "properties":
            result[key] = {name: _walk(child, definitions) for name, child in value.items()}
        elif key == "items":
            result[key] = _walk(value, definitions)
        elif key == "description":
            result[key] = " ".join(value.split())
        else:
            result[key] = value
    return result


def _fill_defaults(schema: dict[str, Any]) -> None:
    """Give objects whose fields all have defaults the default {}, so that the API server fills in those
    fields.
    """
    for child in schema.get("properties", {}).values():
        _fill_defaults(child)
        properties = child.get("properties")
        if "default" in child and child["default"] is None:
            del child["default"]  # an optional object without defaults stays absent
        elif properties and not child.get("required") and any("default" in p for p in properties.values()):
            child["default"] = {}
        elif child.get("type") == "array" and not child.get("minItems") and "default" not in child:
            child["default"] = []
    if "items" in schema:
        _fill_defaults(schema["items"])
