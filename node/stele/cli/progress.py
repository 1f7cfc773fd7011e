"""Progress of rows on a terminal's standard error. Used by commands that write files."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class _Rows(ProgressColumn):
    """How many rows; of how many, where that is known."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f"/{int(task.total):,}"
        return Text(f"{int(task.completed):,}{total} rows")


def rows_progress() -> Progress:
    """A line for each file."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Rows(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
