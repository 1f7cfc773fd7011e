"""Turns predicates as users write them into those of a scan. Pure; used by `Table.scan`.

Users give one or several: (column, operator, value), (column, "is_null"), or text as in where.py. Invariant:
a returned predicate fits the schema; a str is never iterated over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stele.model.column import shown
from stele.model.errors import Rejected
from stele.model.predicate import NULL_TESTS, OPERATORS, Predicate
from stele.model.schema import Schema
from stele.model.where import parse_where

PredicateLike = Predicate | tuple[str, str] | tuple[str, str, Any] | str
Predicates = PredicateLike | Sequence[PredicateLike] | None

_EXPECTED = "expected (column, operator, value), or text like 'id > 1'"


def parse_predicates(given: Predicates, schema: Schema) -> Iterator[Predicate]:
    """The predicates, one by one. A row must fulfil all of them.

    Raises:
        Rejected: an unknown column or operator, a value that does not fit, or something that is not a
            predicate.
    """
    if given is None:
        return
    several = isinstance(given, (list, tuple)) and not _is_comparison(given, schema)
    each: Any
    for each in given if several else [given]:  # type: ignore[union-attr]
        if isinstance(each, str):
            yield from (_comparison(parsed, schema) for parsed in parse_where(each, schema))
        elif isinstance(each, Predicate):
            each.array(schema)
            yield each
        else:
            yield _comparison(each, schema)


def _is_comparison(given: Sequence[Any], schema: Schema) -> bool:
    """Whether this is a single comparison: it begins with a column name, or its second part is an
    operator."""
    if not given or not isinstance(given[0], str):
        return False
    return given[0] in schema.by_name or (len(given) > 1 and _is_operator(given[1]))


def _is_operator(given: Any) -> bool:
    return isinstance(given, str) and given in OPERATORS


def _comparison(given: Any, schema: Schema) -> Predicate:
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 3:
        raise Rejected(f"predicate {shown(given)}: {_EXPECTED}")
    name, op = given[:2]
    column = schema.by_name.get(name) if isinstance(name, str) else None
    if column is None:
        raise Rejected(
            f"predicate {shown(given)}: the table has no column {shown(name)}; "
            f"expected one of {', '.join(schema.by_name)}"
        )
    if len(given) == 2 and _is_operator(op) and op not in NULL_TESTS:
        raise Rejected(f"predicate {shown(given)}: {op!r} needs a value; {_EXPECTED}")
    predicate = Predicate(int(column.id), op, given[2] if len(given) == 3 else None)
    predicate.array(schema)
    return predicate
