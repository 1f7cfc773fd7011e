"""Segments set aside because they may hold records of a damaged stream. Owned by base.py.

Recovery and collection put them here. No start reads them: a damaged stream stays FAILED until it is
tombstoned or forgotten. They are kept for an administrator who wants to inspect them, or to save rows by hand
if no other replica is left. They are removed when no stream is FAILED any more. Invariant: nothing here is
part of the log. Only segments from before the damage was found come here, so they take no more space than the
log did then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import structlog

from stele.wal.files import Files
from stele.wal.segment import damaged_name, sequence_of
from stele.wal.state import Saved, State, segment_of

_log = structlog.get_logger("stele.wal")


def evidence_end(streams: Iterable[State | Saved]) -> int:
    """Return the sequence from which on no segment holds evidence of damage. 0: no stream is damaged, apart from
    tombstones."""
    return max((segment_of(s.damaged_at) for s in streams if s.damaged_at and not s.tombstoned), default=0)


class Quarantine:
    """Set-aside segments. Not thread-safe: recovery uses it first, then one collection at a time."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._paths: list[Path] = []

    def find(self, names: Iterable[str]) -> None:
        """List what earlier runs set aside."""
        self._paths = [self._directory / n for n in names if sequence_of(n, "damaged") is not None]

    def take(self, path: Path, sequence: int) -> None:
        """Set a segment aside that is no longer part of the log. Syncs no name: a start may have to repeat
        it.

        Raises:
            OSError: the segment is where it was.
        """
        new = self._directory / damaged_name(sequence)
        self._files.rename(path, new)
        self._paths.append(new)
        _log.warning("segment set aside, because a damaged replica may have records in it", path=str(new))

    def clear(self) -> None:
        """Remove all files here, because no stream is FAILED any more.

        Raises:
            OSError: some files are left; call it again.
        """
        while self._paths:
            with contextlib.suppress(FileNotFoundError):  # whoever saved rows from it may have removed it
                self._files.unlink(self._paths[-1])
            self._paths.pop()
