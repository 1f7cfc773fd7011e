"""How notebooks show tables, scans and results. Pure; asks nobody.

Invariant: names, values and messages are escaped, so they cannot add markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from stele.client.reprs import at, many, read
from stele.model.block import RowError

if TYPE_CHECKING:
    from stele.client.locations import TableInfo
    from stele.client.tablet_scan import ScanPlan

_ROWS_SHOWN = 10


def of_table(info: TableInfo) -> str:
    """A table's columns and partitioning."""
    schema = info.schema
    columns = schema.columns if schema is not None else ()
    key = {int(i) for i in schema.key_column_ids} if schema is not None else set()
    rows = (
        (c.name, c.type, "yes" if c.nullable else "no", "yes" if int(c.id) in key else "", c.default or "")
        for c in columns
    )
    replicas = f"{info.replication_factor} replica{'' if info.replication_factor == 1 else 's'} each"
    title = f"table {info.name}: {many(info.partition_schema.tablets, 'tablet')}, {replicas}"
    return _page(title, ("column", "type", "null", "key", "default"), rows)


def of_scan(plan: ScanPlan) -> str:
    """The tablets that a scan would read."""
    title = f"scan of {read(len(plan.tablets), plan.ranges)} at {at(plan.snapshot)}"
    return _page(title, ("column", "type"), ((f.name, str(f.type)) for f in plan.arrow_schema))


def of_result(table: str, written: int, errors: Sequence[RowError]) -> str:
    """The result of a write, with the first refused rows."""
    title = f"table {table}: {many(written, 'row')} written"
    if not errors:
        return _page(title, (), ())
    shown = ((str(e.row), e.code.name, e.message) for e in errors[:_ROWS_SHOWN])
    more = len(errors) - _ROWS_SHOWN
    below = f", {len(errors)} refused{f', the first {_ROWS_SHOWN} of them' if more > 0 else ''}"
    return _page(title + below, ("row", "code", "why"), shown)


def _page(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if headers else ""
    return f"<div><p>{escape(title)}</p>{table}</div>"
