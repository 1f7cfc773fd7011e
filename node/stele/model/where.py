"""`carrier = 'UA' AND arr_delay > 30`: comparisons joined by AND, as predicates of a scan (`--where`,
`scan`). Pure.

Invariant: what is accepted has its SQL meaning. Everything else is refused, with what to write instead.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import re
from typing import Any

import pyarrow as pa

from stele.model import texts
from stele.model.column import Column, shown
from stele.model.errors import Rejected
from stele.model.nearest import in_any_case
from stele.model.schema import Schema

_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^']|'')*')|(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>==|=>|=<|<=|>=|!=|<>|&&|\|\||[=<>(),])"
    r"|(?P<quoted>\"[^\"]*\"|`[^`]*`)|(?P<other>\S))"
)
_COMPARE = {"=": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_OPERATORS = "=, !=, <, <=, >, >=, IN, IS NULL or IS NOT NULL"

# What people write out of habit, by its place in a comparison, and what to write instead. {c}: the column.
_FOR_OPERATOR = {
    "==": "use = instead of ==",
    "=>": "use >= instead of =>",
    "=<": "use <= instead of =<",
    "ILIKE": "there is no ILIKE; compare whole values, or read the rows and search there",
    "BETWEEN": "there is no BETWEEN; use {c} >= LOW AND {c} <= HIGH",
    "NOT": "there is no NOT IN; use {c} != A AND {c} != B",
}
_NO_OR = "conditions are joined by AND; there is no OR (for several values of one column use IN)"
_FOR_AND = {
    "OR": _NO_OR,
    "||": _NO_OR,
    "|": _NO_OR,
    "&&": "conditions are joined by AND, not &&",
    "&": "conditions are joined by AND, not &",
    ",": "conditions are joined by AND, not by commas",
    ";": "leave out the ;",
}
_FOR_COLUMN = {
    "(": "write conditions without parentheses, joined by AND",
    "NOT": "there is no NOT; use the opposite operator, such as != for =",
}
_EXAMPLES = {
    "bool": "true",
    "string": "'UA'",
    "binary": "'AAE=' (base64)",
    "date": "'2026-01-31'",
    "timestamp": "'2026-01-31T12:00:00Z'",
}

Token = tuple[str, str]


def parse_where(text: str, schema: Schema) -> list[tuple[str, str, Any]]:
    """(column, operator, value) of each comparison. A time without a zone is UTC. Columns may be named in any case.

    Raises:
        Rejected: an unknown column, or a value that does not fit its column. Also anything but comparisons,
            IN, IS NULL and IS NOT NULL joined by AND.
    """
    return _Reader(text, schema).conditions()


class _Reader:
    """Parses one text from its beginning to its end."""

    def __init__(self, text: str, schema: Schema) -> None:
        self._text = text
        self._schema = schema
        self._tokens = [(str(m.lastgroup), m.group(str(m.lastgroup))) for m in _TOKEN.finditer(text.rstrip())]
        if ("other", "'") in self._tokens:
            raise self._fault("a ' has no end; put text in '', and write a ' within it as ''")

    def conditions(self) -> list[tuple[str, str, Any]]:
        found = [self._comparison()]
        while self._tokens:
            _, word = self._take()
            if word.upper() != "AND":
                raise self._fault(_FOR_AND.get(word.upper(), f"expected AND before {word}"))
            found.append(self._comparison())
        return found

    def _fault(self, why: str) -> Rejected:
        return Rejected(f"where {shown(self._text)}: {why}")

    def _take(self) -> Token:
        if not self._tokens:
            raise self._fault("it ends too early; expected COLUMN OPERATOR VALUE")
        return self._tokens.pop(0)

    def _comparison(self) -> tuple[str, str, Any]:
        column = self._column()
        _, sign = self._take()
        word = sign.upper()
        if word == "IS":
            return column.name, self._null_test(column), None
        if word == "IN":
            return column.name, "in", self._values(column)
        if word == "LIKE":
            raise self._fault(f"there is no LIKE; {_for_pattern(column.name, self._take()[1])}")
        if sign not in _COMPARE:
            known = _FOR_OPERATOR.get(word)
            why = f"{sign} after {column.name}; expected {_OPERATORS}"
            raise self._fault(why if known is None else known.format(c=column.name))
        return column.name, _COMPARE[sign], self._value(column)

    def _column(self) -> Column:
        kind, name = self._take()
        known = self._schema.by_name
        if kind == "quoted":  # as SQL has it: exactly this name
            name = name[1:-1]
            found = name if name in known else None
        else:
            found = in_any_case(name, known) if kind == "word" else None
        if found is not None:
            return known[found]
        if name.upper() in _FOR_COLUMN and kind != "quoted":
            raise self._fault(_FOR_COLUMN[name.upper()])
        if kind not in ("word", "quoted"):
            raise self._fault(f"{name} where a column is expected; write COLUMN OPERATOR VALUE")
        raise self._fault(f"there is no column {name}; expected one of {', '.join(self._schema.by_name)}")

    def _null_test(self, column: Column) -> str:
        word = self._take()[1].upper()
        negated = word == "NOT"
        if negated:
            word = self._take()[1].upper()
        if word != "NULL":
            raise self._fault(f"expected IS NULL or IS NOT NULL after {column.name}")
        return "is_not_null" if negated else "is_null"

    def _values(self, column: Column) -> list[Any]:
        if self._take()[1] != "(":
            raise self._fault(f"expected ( after IN, like {column.name} IN ({_example(column)})")
        values = [self._value(column)]
        while (sign := self._take()[1]) != ")":
            if sign != ",":
                raise self._fault("expected , or ) in the list after IN")
            values.append(self._value(column))
        return values

    def _value(self, column: Column) -> Any:
        kind, raw = self._take()
        if kind == "sign" or kind == "other":
            raise self._fault(f"{raw} where a value of {column.name} is expected, like {_example(column)}")
        if kind == "quoted":
            raise self._fault(f"{raw}: put text in '', like {_example(column)}")
        if kind == "word" and raw.upper() == "NULL":
            raise self._fault(
                f"a comparison with null is never true; use {column.name} IS NULL or IS NOT NULL"
            )
        if kind == "word" and raw in self._schema.by_name:
            raise self._fault(f"{raw} is a column; {column.name} is compared with a value, not with a column")
        try:
            return _converted(kind, raw, column)
        except texts.Inexact as exc:
            raise self._fault(f"{raw} is not {column.a_type} ({exc})") from None
        except (ValueError, ArithmeticError):
            quotes = "; put text in ''" if kind == "word" and column.type == "string" else ""
            raise self._fault(
                f"{raw} is not {column.a_type}; column {column.name} is compared with one like "
                f"{_example(column)}{quotes}"
            ) from None


def _for_pattern(column: str, pattern: str) -> str:
    """Return what to write instead of LIKE with this pattern. `pattern` still has its quotes."""
    begin = pattern[1:-1].removesuffix("%")
    if pattern[0] != "'" or not begin or not begin.isascii() or set(begin) & set("%_'\\~"):
        return "compare whole values, or read the rows and search there"
    if not pattern.endswith("%'"):
        return f"use {column} = '{begin}'"
    return f"text that begins with {begin} is {column} >= '{begin}' AND {column} < '{begin[:-1]}{chr(ord(begin[-1]) + 1)}'"


def _example(column: Column) -> str:
    return _EXAMPLES.get(column.type, "7" if pa.types.is_integer(column.arrow) else "1.5")


def _converted(kind: str, raw: str, column: Column) -> Any:
    """The column's value for a word, number or string. Raises ValueError or ArithmeticError."""
    arrow = column.arrow
    text = raw[1:-1].replace("''", "'") if kind == "string" else raw
    if pa.types.is_string(arrow) and kind == "string":
        return text
    if pa.types.is_binary(arrow) and kind == "string":
        return base64.b64decode(text, validate=True)
    if pa.types.is_boolean(arrow) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if pa.types.is_integer(arrow) and kind == "number":
        return int(text)
    if pa.types.is_floating(arrow) and kind == "number":
        return texts.number(text)
    if pa.types.is_decimal(arrow) and kind in ("number", "string"):
        return decimal.Decimal(text)
    if pa.types.is_date(arrow) and kind == "string":
        return datetime.date.fromisoformat(text)
    if pa.types.is_timestamp(arrow) and kind == "string":
        return texts.moment(text)
    raise ValueError
