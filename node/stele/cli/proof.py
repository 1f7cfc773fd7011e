"""Keeps the result of a check as a file, as a proof for later. Used by `stele table verify` and `stele backup
verify`.

Invariant: the file is whole or absent, and has a checksum of its content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def record_option(command: F) -> F:
    """Add the option --record to a command."""
    return click.option(
        "--record",
        metavar="FOLDER",
        default="",
        help="Keep what was found in a file of this folder, a path or a URI such as s3://bucket/proofs.",
    )(command)


def keep(folder: str, what: str, found: Mapping[str, Any]) -> str:
    """Write the result into a new file of the folder. Returns its path. `what`: the beginning of its name.
    Raises SteleError."""
    from stele.backup.folder import Folder
    from stele.backup.manifest import seal

    place, now = Folder.at(folder), datetime.now(UTC)
    if not place.is_there():
        place.make()
    name = f"{what}-{now:%Y%m%dT%H%M%S.%fZ}.json"
    place.put(name, seal({"time": now.isoformat(), **found}))
    return place.called(name)
