"""Applies structural schemas: prunes unknown fields, fills in defaults, reports every fault. Pure; CEL rules
are in `cel`.

Messages and reasons are those of a real API server. Pruning and defaults change the caller's object in place.
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from stele_local.objects import parse_time
from stele_local.status import Cause

Json = dict[str, Any]
Schema = Mapping[str, Any]
INT_OR_STRING = "x-kubernetes-int-or-string"
PRESERVE = "x-kubernetes-preserve-unknown-fields"
ROOT_FIELDS = ("apiVersion", "kind", "metadata")
UNCHECKED = Cause(
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
    "<nil>",
)
_BLOCKING = (
    "FieldValueNotSupported",
    "FieldValueRequired",
    "FieldValueTooLong",
    "FieldValueTooMany",
    "FieldValueTypeInvalid",
)
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def blocks(causes: list[Cause]) -> bool:
    """Whether these faults prevent the evaluation of CEL rules."""
    return any(cause.reason in _BLOCKING for cause in causes)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def child(schema: Schema, key: str) -> Schema | None:
    """The schema of a field, from `properties` or `additionalProperties`; None if the field is unknown."""
    properties = schema.get("properties") or {}
    if key in properties:
        named: Schema = properties[key]
        return named
    extra = schema.get("additionalProperties")
    return extra if isinstance(extra, Mapping) else {} if extra else None


def prune(value: Any, schema: Schema, path: str = "", root: bool = True) -> list[str]:
    """Remove unknown fields in place. Returns their paths."""
    gone: list[str] = []
    if isinstance(value, dict):
        for key in list(value):
            if root and key in ROOT_FIELDS:
                continue
            below = child(schema, key)
            if below is not None:
                gone += prune(value[key], below, join(path, key), False)
            elif not schema.get(PRESERVE):
                del value[key]
                gone.append(join(path, key))
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            gone += prune(item, schema["items"], f"{path}[{index}]", False)
    return gone


def set_defaults(value: Any, schema: Schema) -> None:
    """Fill in defaults in place, and drop nulls where null is not allowed."""
    if isinstance(value, dict):
        for key in [k for k, v in value.items() if v is None]:
            below = child(schema, key)
            if below is not None and not below.get("nullable") and not below.get(PRESERVE):
                del value[key]
        for key, below in (schema.get("properties") or {}).items():
            if key not in value and "default" in below:
                value[key] = copy.deepcopy(below["default"])
        for key, item in value.items():
            set_defaults(item, child(schema, key) or {})
    elif isinstance(value, list):
        for item in value:
            set_defaults(item, schema.get("items") or {})


def validate(value: Any, schema: Schema, path: str = "") -> list[Cause]:
    """A cause for every fault of `value`. Each names the field."""
    if value is None and schema.get("nullable"):
        return []
    wrong_type = _check_type(value, schema, path)
    if wrong_type:
        return [*wrong_type, *_check_enum(value, schema, path)]
    causes = [*_check_enum(value, schema, path), *_check_combinations(value, schema, path)]
    match value:
        case str():
            causes += _check_string(value, schema, path)
        case bool():
            pass
        case int() | float():
            causes += _check_number(value, schema, path)
        case list():
            causes += _check_list(value, schema, path)
        case dict():
            causes += _check_object(value, schema, path)
    return causes


def _invalid(path: str, value: Any, why: str, reason: str = "FieldValueInvalid") -> Cause:
    shown = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Cause(reason, f"Invalid value: {shown}: {path} in body {why}", path)


def _check_type(value: Any, schema: Schema, path: str) -> Iterator[Cause] | list[Cause]:
    actual = _TYPES[type(value)]
    wanted = ("integer", "string") if schema.get(INT_OR_STRING) else (schema.get("type"),)
    fits = actual in wanted or wanted == (None,) or (wanted == ("number",) and actual == "integer")
    fits = fits or (wanted == ("integer",) and isinstance(value, float) and value.is_integer())
    if fits:
        return []
    why = f'must be of type {",".join(str(w) for w in wanted)}: "{actual}"'
    return [_invalid(path, actual, why, "FieldValueTypeInvalid")]


def _check_enum(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    allowed = schema.get("enum")
    if allowed and value not in allowed:
        shown = ", ".join(f'"{a}"' if isinstance(a, str) else f'"{json.dumps(a)}"' for a in allowed)
        message = f"Unsupported value: {json.dumps(value)}: supported values: {shown}"
        yield Cause("FieldValueNotSupported", message, path)


def _check_combinations(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    for below in schema.get("allOf") or ():
        yield from validate(value, below, path)
    shown = value if not isinstance(value, dict | list) else _TYPES[type(value)]
    if schema.get("anyOf") and all(validate(value, below, path) for below in schema["anyOf"]):
        yield _invalid(path, shown, "must validate at least one schema (anyOf)")
    if schema.get("oneOf") and sum(not validate(value, below, path) for below in schema["oneOf"]) != 1:
        yield _invalid(path, shown, "must validate one and only one schema (oneOf)")
    if schema.get("not") and not validate(value, schema["not"], path):
        yield _invalid(path, shown, "must not validate the schema (not)")


def _check_string(value: str, schema: Schema, path: str) -> Iterator[Cause]:
    if len(value) > schema.get("maxLength", len(value)):
        yield Cause("FieldValueTooLong", f"Too long: may not be more than {schema['maxLength']} bytes", path)
    if len(value) < schema.get("minLength", 0):
        yield _invalid(path, value, f"should be at least {schema['minLength']} chars long")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield _invalid(path, value, f"should match '{schema['pattern']}'")
    if schema.get("format") == "date-time":
        try:
            parse_time(value)
        except ValueError:
            yield _invalid(path, value, f'must be of type date-time: "{value}"', "FieldValueTypeInvalid")
    if schema.get("format") == "byte":
        try:
            base64.b64decode(value, validate=True)
        except ValueError:
            yield _invalid(path, value, f'must be of type byte: "{value}"', "FieldValueTypeInvalid")


def _check_number(value: int | float, schema: Schema, path: str) -> Iterator[Cause]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and (value <= low if schema.get("exclusiveMinimum") else value < low):
        yield _invalid(
            path,
            value,
            f"should be greater than {'' if schema.get('exclusiveMinimum') else 'or equal to '}{low}",
        )
    if high is not None and (value >= high if schema.get("exclusiveMaximum") else value > high):
        yield _invalid(
            path,
            value,
            f"should be less than {'' if schema.get('exclusiveMaximum') else 'or equal to '}{high}",
        )
    if "multipleOf" in schema and value % schema["multipleOf"]:
        yield _invalid(path, value, f"should be a multiple of {schema['multipleOf']}")


def _check_list(value: list[Any], schema: Schema, path: str) -> Iterator[Cause]:
    if len(value) > schema.get("maxItems", len(value)):
        message = f"Too many: {len(value)}: must have at most {_items(schema['maxItems'])}"
        yield Cause("FieldValueTooMany", message, path)
    if len(value) < schema.get("minItems", 0):
        yield _invalid(path, len(value), f"should have at least {schema['minItems']} items")
    for index, item in enumerate(value):
        yield from validate(item, schema.get("items") or {}, f"{path}[{index}]")


def _items(count: int) -> str:
    return f"{count} item{'' if count == 1 else 's'}"


def _check_object(value: Json, schema: Schema, path: str) -> Iterator[Cause]:
    if len(value) > schema.get("maxProperties", len(value)):
        message = f"Too many: {len(value)}: must have at most {_items(schema['maxProperties'])}"
        yield Cause("FieldValueTooMany", message, path)
    if len(value) < schema.get("minProperties", 0):
        yield _invalid(path, len(value), f"should have at least {schema['minProperties']} properties")
    for key in schema.get("required") or ():
        if key not in value:
            yield Cause("FieldValueRequired", "Required value", join(path, key))
    for key, item in value.items():
        below = child(schema, key)
        if below is not None and not (path == "" and key in ROOT_FIELDS):
            yield from validate(item, below, join(path, key))


def duplicates(value: Any, schema: Schema, path: str = "") -> Iterator[Cause]:
    """A cause for each item that stands twice in a list with `x-kubernetes-list-type: set` or `map`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from duplicates(item, child(schema, key) or {}, join(path, key))
    elif isinstance(value, list):
        keys, seen = schema.get("x-kubernetes-list-map-keys"), []
        for index, item in enumerate(value):
            if schema.get("x-kubernetes-list-type") in ("set", "map"):
                mark = {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
                if mark in seen:
                    shown = json.dumps(mark, separators=(",", ":"))
                    yield Cause("FieldValueDuplicate", f"Duplicate value: {shown}", f"{path}[{index}]")
                seen.append(mark)
            yield from duplicates(item, schema.get("items") or {}, f"{path}[{index}]")


def check_scale(value: Json, paths: Mapping[str, str]) -> Iterator[Cause]:
    """Check the value at the path from which the scale subresource reads replicas: it must be a whole number."""
    for name in ("specReplicasPath",):
        keys, current, walked = paths[name].strip(".").split("."), value, ""
        for key in keys:
            if not isinstance(current, dict):
                yield _scale_fault(paths[name], walked, current, "map[string]interface{}")
                return
            if current.get(key) is None:
                return
            current, walked = current[key], f"{walked}.{key}"
        if not isinstance(current, int) or isinstance(current, bool):
            yield _scale_fault(paths[name], walked, current, "int64")


def _scale_fault(path: str, walked: str, value: Any, wanted: str) -> Cause:
    go_type = {
        str: "string",
        bool: "bool",
        float: "float64",
        dict: "map[string]interface {}",
        list: "[]interface {}",
    }[type(value)]
    # the real accessor reports the path one step below the value that is not a map
    where = walked if wanted == "int64" else ".".join(path.split(".")[: walked.count(".") + 2])
    message = f"Invalid value: 0: {where} accessor error: {value} is of the type {go_type}, expected {wanted}"
    return Cause("FieldValueInvalid", message, path)
