"""Label and field selectors, from their query text to a test of an object. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from stele_local.objects import find
from stele_local.status import bad_request

Json = dict[str, Any]
Test = Callable[[Json], bool]
_SET = re.compile(r"([\w./-]+)\s+(in|notin)\s*\(([^)]*)\)")
_EQUAL = re.compile(r"([\w./-]+)\s*(==|=|!=)\s*([\w.-]*)")
_EXISTS = re.compile(r"(!?)\s*([\w./-]+)")
_WHOLE = re.compile(r"-?[0-9]+")


def _labels(obj: Json) -> Mapping[str, str]:
    labels: Mapping[str, str] = find(obj, "metadata", "labels", default={})
    return labels


def parse_labels(text: str) -> Test:
    """The test for a label selector such as `a=b,c!=d,e in (f,g),!h`.

    Raises:
        ApiError: bad request, the selector cannot be read.
    """
    tests: list[Test] = []
    for part in re.split(r",(?![^(]*\))", text) if text else []:
        part = part.strip()
        if match := _SET.fullmatch(part):
            key, operator, values = match[1], match[2], {value.strip() for value in match[3].split(",")}
            tests.append(_member(key, values, operator == "in"))
        elif match := _EQUAL.fullmatch(part):
            tests.append(_member(match[1], {match[3]}, match[2] != "!="))
        elif match := _EXISTS.fullmatch(part):
            tests.append(_exists(match[2], not match[1]))
        else:
            unknown = re.sub(r"^[\w./-]*", "", part)[:1]
            raise bad_request(
                f"unable to parse requirement: found '{unknown}', expected: in, notin, =, ==, !=, gt, lt"
            )
    return lambda obj: all(test(obj) for test in tests)


def _member(key: str, values: set[str], wanted: bool) -> Test:
    if wanted:
        return lambda obj: _labels(obj).get(key) in values
    return lambda obj: _labels(obj).get(key) not in values


def _exists(key: str, wanted: bool) -> Test:
    return lambda obj: (key in _labels(obj)) is wanted


def matches_selector(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector (matchLabels, matchExpressions), or a term of a node affinity, matches the
    labels.

    A selector of None matches nothing, and an empty one matches everything. An unknown operator matches
    nothing.
    """
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_requirement_holds(rule, labels) for rule in selector.get("matchExpressions") or ())


def _requirement_holds(rule: Json, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), rule.get("values") or ()
    if rule["operator"] in ("Gt", "Lt"):
        numbers = [value or "", *values]
        if len(numbers) != 2 or not all(map(_WHOLE.fullmatch, numbers)):
            return False
        more = int(numbers[0]) - int(numbers[1])
        return more > 0 if rule["operator"] == "Gt" else more < 0
    held = {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return held.get(rule["operator"], False)


def parse_fields(text: str, selectable: tuple[str, ...], custom: bool) -> Test:
    """The test for a field selector such as `metadata.name=x,spec.nodeName!=y`.

    Raises:
        ApiError: bad request, the kind does not offer such a field.
    """
    tests: list[Test] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"([\w.]+)(==|=|!=)(.*)", part)
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        path, operator, wanted = match[1], match[2], match[3]
        if path not in ("metadata.name", "metadata.namespace", *selectable):
            if selectable or custom:
                raise bad_request(f"field label not supported: {path}")
            raise bad_request(
                f'"{path}" is not a known field selector: only "metadata.name", "metadata.namespace"'
            )
        tests.append(_field(path.split("."), wanted, operator != "!="))
    return lambda obj: all(test(obj) for test in tests)


def _field(path: list[str], wanted: str, equal: bool) -> Test:
    return lambda obj: (str(find(obj, *path, default="")) == wanted) is equal
