"""A progress display on standard error if that is a terminal. Used by commands that read or write files."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rows(ProgressColumn):
    """The number of rows so far, and the total if it is known."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f"/{int(task.total):,}"
        return Text(f"{int(task.completed):,}{total} rows")


def tablets_progress() -> Progress:
    """A progress display with a line for each table, and fields `tablets` and `rows`."""
    return _progress(TextColumn("{task.fields[tablets]} tablets, {task.fields[rows]:,} rows"))


def rows_progress() -> Progress:
    """A progress display with a line for each file."""
    return _progress(_Rows())


def _progress(count: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        count,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,  # otherwise rich writes an empty line before an error
    )
