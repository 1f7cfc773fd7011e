"""What a backup tells while it runs: how far it is, and what is unusual. Knows no files and no tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one table is: rows and tablets so far, and tablets in all. `bytes`: of its files. `rows_expected`: about how many
    rows there will be; 0 if nobody knows. `holds`: names of the holds on its history that the backup has now."""

    table: str
    rows: int
    tablets_done: int
    tablets: int
    bytes: int = 0
    holds: tuple[str, ...] = ()
    rows_expected: int = 0


OnProgress = Callable[[Progress], None]
Note = Callable[[str], None]


def quiet(_: Any) -> None:
    """Do nothing, for callers who want no progress and no notes."""
