"""The changes of columns that one can ask for. Used by client, master and operator; imports nothing, so that a process
that only asks for them stays small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AddColumn:
    """Add a column. Stored rows then read as if they had its `default`, else null. `default` is JSON text."""

    name: str
    type: str
    nullable: bool = False
    default: str | None = None


@dataclass(frozen=True, slots=True)
class DropColumn:
    """Drop a column with its values. Its id is never used again."""

    name: str


@dataclass(frozen=True, slots=True)
class RenameColumn:
    """Rename a column. It keeps its id, and with it all values."""

    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class ChangeDefault:
    """Change what later writes store in rows without the column. `default` is JSON text; None: no default.

    Stored rows keep what they have."""

    name: str
    default: str | None


@dataclass(frozen=True, slots=True)
class SetHistory:
    """Change how long old versions of rows are kept, in ms; 0: the default. Versions that are gone do not
    come back."""

    history_ms: int


Step = SetHistory | AddColumn | DropColumn | RenameColumn | ChangeDefault
