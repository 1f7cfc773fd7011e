"""What commands print: tables for people, JSON for programs. Writes to standard output only."""

from __future__ import annotations

import datetime
import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from stele.cli.width import fitted

_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def show_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    all_shown_by: str = "a wider terminal, or a pipe",
) -> None:
    """Print rows under headers, columns aligned. On a terminal they fit its width: long cells are cut, and columns at the end
    that have no place are named below, with `all_shown_by`, what shows them."""
    lines = [[printable(str(cell)) for cell in row] for row in [headers, *rows]]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    table = fitted(lines, width)
    for line in table.lines:
        click.echo(line)
    if table.left_out:
        click.echo(f"not shown: {', '.join(table.left_out)}; {all_shown_by} shows all")


def printable(text: str) -> str:
    """A line is a row, and the terminal takes no orders from names or rows: what does not print, as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(identifier: str) -> str:
    """The first eight digits of an identifier, "-" for none."""
    return identifier[:8] or "-"


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def json_value(value: Any) -> Any:
    """What JSON has no word for is a string; NaN and Infinity too, which most readers refuse bare."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _NOT_FINITE[str(value)]
        case bytes():
            return value.hex()
        case datetime.date():
            return value.isoformat()
        case _:
            return str(value)
