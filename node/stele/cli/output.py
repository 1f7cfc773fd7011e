"""What commands print: tables and lines for people, JSON for programs, bytes for files. All of it goes through here.

Invariant: a terminal is given no control character that came from elsewhere: names, rows, errors and reasons are written by
other processes and other people.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, cast

import click

from stele.cli.width import fitted
from stele.model.texts import printable


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def say(text: object, *, err: bool = False) -> None:
    """Print one line, on standard error with `err`. Parts of it may come from other processes."""
    click.echo(printable(str(text)), err=err)


def raw_output() -> BinaryIO:
    """Where bytes go that are to leave as they are. A terminal gets what does not print in them as escapes."""
    return cast(BinaryIO, _Terminal()) if sys.stdout.isatty() else sys.stdout.buffer


class _Terminal(io.RawIOBase):
    """Standard output, for bytes of whatever kind."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data).decode("utf-8", "backslashreplace")
        click.echo("".join(c if c in "\n\t" else printable(c) for c in text), nl=False)
        return len(data)


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
        say(f"not shown: {', '.join(table.left_out)}; {all_shown_by} shows all")


def short(identifier: str) -> str:
    """The first eight digits of an identifier, "-" for none."""
    return identifier[:8] or "-"


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
