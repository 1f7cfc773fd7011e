"""Ranges as a user types them: FROM..TO, either end left out for no bound. Used by `stele table alter` and `stele backup restore`.

Does no I/O. Invariant: a text is split the same way whatever the table's columns are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from stele.model.errors import Rejected
from stele.model.jsons import parse_json, parse_next_json
from stele.model.ranges import value_of_text
from stele.model.split_json import ENCODED, split_key

if TYPE_CHECKING:
    from stele.model.column import Column
    from stele.model.schema import Schema

EXPECTED = 'FROM..TO, like 1000..2000, 2024-01-01..2024-02-01, or 2000.. for no upper bound; several columns: \'["a",1]..["b",1]\''
_TEXTS = ("string", "binary", "date", "timestamp")
Ends = tuple[str, str]


def parse_ranges(option: str, texts: Iterable[str]) -> list[Ends]:
    """Split each text of the form FROM..TO into its two ends, still as text.

    Raises:
        click.UsageError: a text is not a range.
    """
    found = []
    for text in texts:
        if text.startswith(("[", '"')):
            try:
                _, at = parse_next_json(text, 0)
            except ValueError:
                at = -1
            start, rest = text[:at], text[at:]
        else:
            start, rest = text.partition("..")[0], text[len(text.partition("..")[0]) :]
        if not rest.startswith("..") or not (start or rest[2:]):
            raise click.UsageError(f"{option} {text}: expected {EXPECTED}")
        found.append((start, rest[2:]))
    return found


def parse_partition(option: str, texts: Sequence[str]) -> tuple[tuple[str, ...], list[Ends]]:
    """(Columns, ranges) of texts like day:2024-01-01..2024-02-01, which all have the same columns.

    Raises:
        click.UsageError: a text is not of this form.
    """
    columns: tuple[str, ...] = ()
    ranges = []
    for text in texts:
        names, separator, rest = text.partition(":")
        if not separator or not all(names.split(",")):
            raise click.UsageError(f"{option} {text}: expected COLUMN,...:RANGE, where RANGE is {EXPECTED}")
        if columns and tuple(names.split(",")) != columns:
            raise click.UsageError(
                f"{option} {text}: the other ranges have columns {','.join(columns)}; all ranges of a table have the same"
            )
        columns = tuple(names.split(","))
        ranges.append(rest)
    return columns, parse_ranges(option, ranges)


def bounds_for(
    schema: Schema, column_ids: Sequence[int], option: str, ends: Iterable[Ends]
) -> list[list[Any]]:
    """The ranges in the form that `AsyncTable.alter` takes.

    Raises:
        Rejected: an end is not a value of the range columns.
    """
    columns = [schema.by_id[i] for i in column_ids]
    found = []
    for pair in ends:
        try:
            found.append([{ENCODED: _key(text, columns).hex()} if text else None for text in pair])
        except Rejected as exc:
            raise Rejected(f"{option} {'..'.join(pair)}: {exc.args[0]}") from exc
    return found


def _key(text: str, columns: Sequence[Column]) -> bytes:
    plain = len(columns) == 1 and columns[0].type in _TEXTS and not text.startswith('"')
    value: Any = text
    if not plain:
        with contextlib.suppress(ValueError):
            value = parse_json(text)
        if isinstance(value, float):
            value = text  # a decimal
        values = value if isinstance(value, list) else [value]
        if len(values) == len(columns):
            value = [value_of_text(each, column.type) for each, column in zip(values, columns, strict=True)]
    return split_key(value, columns)
