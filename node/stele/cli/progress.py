"""A progress display on standard error if that is a terminal. Used by commands that read or write files."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class _Rows(ProgressColumn):
    """The number of rows so far, and the total if it is known."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f"/{int(task.total):,}"
        return Text(f"{int(task.completed):,}{total} rows")


def tablets_progress() -> Progress:
    """A progress display with a line for each table: tablets of their total, and a field `rows`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tablets, {task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def rows_progress() -> Progress:
    """A progress display with a line for each file."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Rows(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
