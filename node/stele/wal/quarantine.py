"""Segments that may tell of a damaged stream, out of the log's way. Owned by base.py; filled by collection and recovery.

No start reads them: a damaged stream stays FAILED until it is tombstoned or forgotten, whatever they hold. They are kept
for whoever wants to look, or to save rows by hand where no other replica is left, and go when no stream is FAILED any
more. Invariant: nothing here is part of the log; only what was written before the damage was found comes here, so it
takes no more space than the log did then.
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
    """Segments below this sequence may tell of damage that no tombstone has ended; 0 if there is none."""
    return max((segment_of(s.damaged_at) for s in streams if s.damaged_at and not s.tombstoned), default=0)


class Quarantine:
    """Not thread-safe: recovery uses it first, then one collection at a time."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._paths: list[Path] = []

    def find(self, names: Iterable[str]) -> None:
        """Take note of what earlier runs set aside."""
        self._paths = [self._directory / n for n in names if sequence_of(n, "damaged") is not None]

    def take(self, path: Path, sequence: int) -> None:
        """A segment that is no part of the log any more. A start that finds its old name again sets it aside again.

        Raises:
            OSError: it is where it was.
        """
        new = self._directory / damaged_name(sequence)
        self._files.rename(path, new)
        self._paths.append(new)
        _log.warning(
            "segment set aside: a replica whose log is damaged may have records there", path=str(new)
        )

    def clear(self) -> None:
        """No stream is FAILED any more.

        Raises:
            OSError: some are still there; call it again.
        """
        while self._paths:
            with contextlib.suppress(FileNotFoundError):  # whoever saved rows from it may have taken it away
                self._files.unlink(self._paths[-1])
            self._paths.pop()
