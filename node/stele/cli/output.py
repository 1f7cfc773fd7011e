"""What commands print: tables and lines for people, JSON for programs, bytes for files.

Invariant: control characters in names, rows, errors and reasons never reach a terminal. Other people wrote
those.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, cast

import click

from stele.cli.width import fitted
from stele.model.texts import printable


def show_json(value: Any, *, one_line: bool = False) -> None:
    """Print a value as JSON. `one_line`: on one line, for a command that prints several values."""
    click.echo(json.dumps(value, indent=None if one_line else 2, default=str))


def show_done(said: str, as_json: bool, done: Mapping[str, Any]) -> None:
    """Print what a command did: a line for people, or `done` as JSON for programs."""
    if as_json:
        show_json(done)
    else:
        say(said)


def confirm(question: str, what: str) -> None:
    """Ask on standard error before something that cannot be undone. `what`: what --yes would do.

    Raises:
        UsageError: nobody can answer.
        Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"standard input is not a terminal, so nobody can confirm; add --yes to {what}"
        )
    click.confirm(question, abort=True, err=True)


def say(text: object, *, err: bool = False) -> None:
    """Print one line; with `err`, to standard error. Control characters in it are escaped."""
    click.echo(printable(str(text)), err=err)


def raw_output() -> BinaryIO:
    """Standard output for raw bytes. On a terminal, unprintable bytes are escaped."""
    return cast(BinaryIO, _Terminal()) if sys.stdout.isatty() else sys.stdout.buffer


class _Terminal(io.RawIOBase):
    """A terminal as a sink for arbitrary bytes."""

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
    whole: int = 0,
) -> None:
    """Print rows under headers in aligned columns.

    On a terminal they fit its width. Long cells are cut, except in the first `whole` columns. Trailing
    columns that do not fit are left out. A line below says so and names `all_shown_by`, the way to see all.
    """
    lines = [[printable(str(cell)) for cell in row] for row in [headers, *rows]]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    table = fitted(lines, width, whole)
    for line in table.lines:
        click.echo(line)
    if table.left_out:
        say(f"not shown: {', '.join(table.left_out)}; {all_shown_by} shows all")
    elif table.cut:
        say(f"long values are cut (…); {all_shown_by} shows them whole")


def short(identifier: str) -> str:
    """The first eight digits of an identifier, "-" for none."""
    return identifier[:8] or "-"
