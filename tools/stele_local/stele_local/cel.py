"""Evaluates the CEL rules of a CRD (`x-kubernetes-validations`) with cel-python. Owns: compiling the rules,
and where each rule applies.

Invariant: no rule is skipped. Each rule is evaluated as it is written, or the request is answered 501. Not
supported: type checks when the CRD is created (except of defaults), cost limits, `optionalOldSelf`, and
Kubernetes' extension libraries other than `quantity`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.evaluation import CELEvalError

from stele_local import objects
from stele_local.schema import child, join
from stele_local.status import Cause, not_offered

Schema = Mapping[str, Any]
RULES = "x-kubernetes-validations"
_RESERVED = frozenset(
    [
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
    ]
)
_ENVIRONMENT = celpy.Environment()


class _Missing:
    """Stands for an old value that does not exist. Transition rules do not apply then."""


MISSING = _Missing()


def _quantity(text: celtypes.StringType) -> celtypes.StringType:
    objects.quantity(str(text))
    return text


def _compare(a: celtypes.StringType, b: celtypes.StringType) -> int:
    one, other = objects.quantity(str(a)), objects.quantity(str(b))
    return (one > other) - (one < other)


def _is_quantity(text: celtypes.StringType) -> celtypes.BoolType:
    try:
        objects.quantity(str(text))
    except ValueError:
        return celtypes.BoolType(False)
    return celtypes.BoolType(True)


# A quantity stays its text inside CEL: the library has no such type, and only these functions take one.
_FUNCTIONS: dict[str, Any] = {
    "quantity": _quantity,
    "isQuantity": _is_quantity,
    "compareTo": lambda a, b: celtypes.IntType(_compare(a, b)),
    "isGreaterThan": lambda a, b: celtypes.BoolType(_compare(a, b) > 0),
    "isLessThan": lambda a, b: celtypes.BoolType(_compare(a, b) < 0),
}


@dataclass(frozen=True, slots=True)
class _Rule:
    text: str
    program: Any
    transition: bool
    message: str
    message_program: Any
    reason: str
    field_path: str


class Rules:
    """The compiled rules of one schema, by the `id()` of the schema node that holds them."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema  # keeps the nodes alive, so that their Python ids stay unique
        self._compiled: dict[int, list[_Rule]] = {}
        self._compile(schema)

    def _compile(self, schema: Any) -> None:
        if isinstance(schema, Mapping):
            if isinstance(schema.get(RULES), list):
                self._compiled[id(schema)] = [_compile(rule) for rule in schema[RULES]]
            for value in schema.values():
                self._compile(value)
        elif isinstance(schema, list):
            for value in schema:
                self._compile(value)

    def check(self, value: Any, old: Any = MISSING, ratchets: bool = True) -> list[Cause]:
        """A cause for every rule that `value` breaks. `old`: the object before an update.

        With `ratchets`, parts that have not changed may break rules, because a rule may be newer than the
        object. Transition rules are always checked.
        """
        return list(self._check(value, old, self._schema, "", ratchets)) if self._compiled else []

    def _check(self, value: Any, old: Any, schema: Schema, path: str, ratchets: bool) -> Iterator[Cause]:
        same = ratchets and old is not MISSING and value == old
        for rule in self._compiled.get(id(schema), ()):
            if (rule.transition and old is MISSING) or (same and not rule.transition):
                continue
            yield from _evaluate(rule, value, old, schema, path)
        if isinstance(value, dict):
            for key, item in value.items():
                below = child(schema, key)
                if below is not None:
                    before = old[key] if isinstance(old, dict) and key in old else MISSING
                    yield from self._check(item, before, below, join(path, key), ratchets)
        elif isinstance(value, list) and "items" in schema:
            for index, item in enumerate(value):
                before = _correlate(item, old, schema)
                yield from self._check(item, before, schema["items"], f"{path}[{index}]", ratchets)


def faults_of_defaults(schema: Schema, path: str) -> Iterator[Cause]:
    """A cause for every rule that a default breaks. Defaults are checked as written, without the defaults of
    fields inside them.
    """
    for name, below in (schema.get("properties") or {}).items():
        where = f"{path}.properties[{name}]"
        if "default" in below:
            for cause in Rules(below).check(below["default"], below["default"], ratchets=False):
                yield Cause(cause.reason, cause.message, f"{where}.default{cause.field.replace('<nil>', '')}")
        yield from faults_of_defaults(below, where)
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), Mapping):
            yield from faults_of_defaults(schema[word], f"{path}.{word}")


def _correlate(item: Any, old: Any, schema: Schema) -> Any:
    """The old value of a list item; MISSING if there is none. Items can be matched only in lists of type map."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(old, list) or not isinstance(item, dict):
        return MISSING
    return next(
        (o for o in old if isinstance(o, dict) and all(o.get(k) == item.get(k) for k in keys)), MISSING
    )


@functools.cache
def _program(text: str) -> Any:
    """The program of a rule's text. It is cached, because parsing takes milliseconds and definitions repeat
    rules.
    """
    try:
        return _ENVIRONMENT.program(_ENVIRONMENT.compile(text), functions=_FUNCTIONS)
    except CELParseError as error:
        raise not_offered(
            f"the CEL rule {text!r} (it cannot be parsed: {str(error).splitlines()[0]})"
        ) from error


def _compile(rule: Mapping[str, Any]) -> _Rule:
    if rule.get("optionalOldSelf"):
        raise not_offered(f"optionalOldSelf (CEL rule {rule['rule']!r})")
    expression = rule.get("messageExpression")
    return _Rule(
        text=rule["rule"],
        program=_program(rule["rule"]),
        transition=re.search(r"\boldSelf\b", rule["rule"]) is not None,
        message=rule.get("message", ""),
        message_program=_program(expression) if expression else None,
        reason=rule.get("reason", "FieldValueInvalid"),
        field_path=rule.get("fieldPath", ""),
    )


def _to_cel(value: Any, schema: Schema) -> Any:
    """A value as CEL sees it: only declared fields, names escaped, numbers typed by the schema."""
    if isinstance(value, dict):
        named = "properties" in schema
        return celtypes.MapType(
            {
                celtypes.StringType(_escape(key) if named else key): _to_cel(item, child(schema, key) or {})
                for key, item in value.items()
            }
        )
    if isinstance(value, list):
        return celtypes.ListType([_to_cel(item, schema.get("items") or {}) for item in value])
    if isinstance(value, int) and not isinstance(value, bool) and schema.get("type") == "number":
        return celtypes.DoubleType(value)
    return json_to_cel(value)


def _escape(name: str) -> str:
    if name in _RESERVED:
        return f"__{name}__"
    for sign, word in (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__")):
        name = name.replace(sign, word)
    return name


def _evaluate(rule: _Rule, value: Any, old: Any, schema: Schema, path: str) -> Iterator[Cause]:
    scope = {"self": _to_cel(value, schema)}
    if old is not MISSING:
        scope["oldSelf"] = _to_cel(old, schema)
    told = rule.message or f"failed rule: {rule.text}"
    try:
        if bool(rule.program.evaluate(scope)):
            return
        if rule.message_program is not None:
            told = str(rule.message_program.evaluate(scope))
    except CELEvalError as error:
        why = str(error.args[0] if error.args else error)
        if why.startswith("undeclared reference"):
            raise not_offered(f"the CEL rule {rule.text!r} ({why.split(' (')[0]})") from error
        why = re.sub(r"^no such member in mapping: '(.*)'$", r"no such key: \1", why)
        told = f"{why} evaluating rule: {rule.message or rule.text}"
        yield Cause("FieldValueInvalid", f"Invalid value: {_shown(value)}: {told}", path)
        return
    word = {
        "FieldValueForbidden": "Forbidden: ",
        "FieldValueRequired": "Required value: ",
        "FieldValueDuplicate": f"Duplicate value: {_shown(value)}: ",
    }.get(rule.reason)
    if word is None:
        scalar = not rule.field_path and not isinstance(value, dict | list)
        word = f"Invalid value: {_shown(value)}: " if scalar else "Invalid value: "
    yield Cause(rule.reason, word + told, (path + rule.field_path) or "<nil>")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return '"object"'
    return '"array"' if isinstance(value, list) else json.dumps(value)
