"""`carrier = 'UA' AND arr_delay > 30`: comparisons joined by AND, as predicates of a scan (`--where`, `scan`). Pure.

Invariant: what is understood means what SQL means by it; what is not understood is refused with its place.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import re
from typing import Any

import pyarrow as pa

from stele.model.errors import Rejected
from stele.model.schema import Column, Schema

_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^']|'')*')|(?P<number>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign><=|>=|!=|<>|[=<>(),]))"
)
_COMPARE = {"=": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}

Token = tuple[str, str]


def parse_where(text: str, schema: Schema) -> list[tuple[str, str, Any]]:
    """(column, operator, value) of each comparison. A time without a zone is UTC.

    Raises:
        Rejected: an unknown column, a value that does not fit its column, or anything else than comparisons, IN,
            IS NULL and IS NOT NULL joined by AND.
    """
    tokens = _tokens(text)
    found: list[tuple[str, str, Any]] = []
    while True:
        found.append(_comparison(tokens, schema, text))
        if not tokens:
            return found
        if _take(tokens, text)[1].upper() != "AND":
            raise Rejected(f"where {text!r}: expected AND between comparisons (OR is not understood)")


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise Rejected(f"where {text!r}: not understood from {stripped[at : at + 20]!r} on")
        kind = str(match.lastgroup)
        found.append((kind, match.group(kind)))
        at = match.end()
    return found


def _take(tokens: list[Token], text: str) -> Token:
    if not tokens:
        raise Rejected(f"where {text!r}: ends too early; expected COLUMN OPERATOR VALUE")
    return tokens.pop(0)


def _comparison(tokens: list[Token], schema: Schema, text: str) -> tuple[str, str, Any]:
    _, name = _take(tokens, text)
    column = schema.by_name.get(name)
    if column is None:
        raise Rejected(f"where {text!r}: no column {name}; expected one of {', '.join(schema.by_name)}")
    _, sign = _take(tokens, text)
    if sign.upper() == "IS":
        word = _take(tokens, text)[1].upper()
        negated = word == "NOT"
        if negated:
            word = _take(tokens, text)[1].upper()
        if word != "NULL":
            raise Rejected(f"where {text!r}: expected IS NULL or IS NOT NULL after {name}")
        return name, "is_not_null" if negated else "is_null", None
    if sign.upper() == "IN":
        return name, "in", _values(tokens, column, text)
    if sign not in _COMPARE:
        raise Rejected(f"where {text!r}: {sign!r} after {name}; expected =, !=, <, <=, >, >=, IN or IS")
    return name, _COMPARE[sign], _value(_take(tokens, text), column)


def _values(tokens: list[Token], column: Column, text: str) -> list[Any]:
    if _take(tokens, text)[1] != "(":
        raise Rejected(f"where {text!r}: expected ( after IN")
    values = [_value(_take(tokens, text), column)]
    while (sign := _take(tokens, text)[1]) != ")":
        if sign != ",":
            raise Rejected(f"where {text!r}: expected , or ) in the list after IN")
        values.append(_value(_take(tokens, text), column))
    return values


def _value(token: Token, column: Column) -> Any:
    kind, raw = token
    arrow = column.arrow
    text = raw[1:-1].replace("''", "'") if kind == "string" else raw
    try:
        if pa.types.is_string(arrow) and kind == "string":
            return text
        if pa.types.is_binary(arrow) and kind == "string":
            return base64.b64decode(text, validate=True)
        if pa.types.is_boolean(arrow) and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if pa.types.is_integer(arrow) and kind == "number":
            return int(text)
        if pa.types.is_floating(arrow) and kind == "number":
            return float(text)
        if pa.types.is_decimal(arrow) and kind in ("number", "string"):
            return decimal.Decimal(text)
        if pa.types.is_date(arrow) and kind == "string":
            return datetime.date.fromisoformat(text)
        if pa.types.is_timestamp(arrow) and kind == "string":
            moment = datetime.datetime.fromisoformat(text)
            return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    except (ValueError, ArithmeticError) as exc:
        raise Rejected(f"where: {raw} is no {column.type} for column {column.name} ({exc})") from exc
    raise Rejected(f"where: {raw} is no {column.type}; column {column.name} wants one (text stands in '')")
