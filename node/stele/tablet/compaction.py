"""Which files to merge, and the merge itself. The store plans it; the worker process does it, given only file
names.

Files are kept newest first, and only neighbours are merged, so that "newer" is a matter of position.
Neighbours are merged once several have about the same size, so that each row is rewritten a logarithmic
number of times.

Invariant: a merge never changes its inputs. Its output becomes visible only through the manifest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stele.model.errors import Rejected
from stele.model.schema import Schema
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import FileMeta
from stele.tablet.colwriter import Format, write_layers
from stele.tablet.files import FILES, Files
from stele.tablet.sorted_runs import Kept, Run
from stele.tablet.sources import pieces

FILES_MIN = 4
"""A merge takes at least this many files of about one size."""
FILES_MAX = 12
"""A store with this many files merges even two of about one size. After that, each file is more than twice as large
as the next newer one, so the store has few more files than this."""


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A merge. `inputs` are newest first; output files are named after `output`. `bottom`: no older file lies
    below. `version`: the format of the output."""

    directory: str
    inputs: tuple[str, ...]
    output: str
    history_mark: int
    bottom: bool
    schema_json: str
    version: int

    def to_json(self) -> str:
        """One line of text for the worker."""
        return json.dumps(
            [
                self.directory,
                list(self.inputs),
                self.output,
                self.history_mark,
                self.bottom,
                self.schema_json,
                self.version,
            ]
        )

    @staticmethod
    def from_json(text: str) -> CompactionJob:
        """The inverse of `to_json`.

        Raises:
            Rejected: the text is not a job.
        """
        try:
            directory, inputs, output, mark, bottom, schema_json, version = json.loads(text)
            return CompactionJob(
                str(directory),
                tuple(map(str, inputs)),
                str(output),
                int(mark),
                bool(bottom),
                str(schema_json),
                int(version),
            )
        except (ValueError, TypeError) as exc:
            raise Rejected(
                f"compaction job: {exc!r}; the node and its worker must run the same program"
            ) from exc


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The files that replace the job's inputs; none if no row was left."""

    job: CompactionJob
    files: tuple[FileMeta, ...]


def choose(
    files: Sequence[FileMeta], mark: int, *, full: bool, room_bytes: int | None = None
) -> Sequence[FileMeta]:
    """The files to merge, newest first; empty if no merge is worth it.

    A merge is worth it if its result is at least 1.5 times as large as its largest input. So a row is rewritten
    at most log_1.5(size of the store / size of a flush) times. It also needs FILES_MIN files, or two if the
    store has FILES_MAX or more. Of all such merges, the one with the newest files is chosen, with as many files
    as possible.

    `full`: merge all files, or as many of the newest as fit. If there is only one, rewrite it if it has deletes or
    several versions of a key, and rows at or below `mark`.
    `room_bytes`: disk space that the merged file may take beside its inputs; None: unlimited.
    """
    if full:
        return _all_that_fit(files, mark, room_bytes)
    least = FILES_MIN if len(files) < FILES_MAX else 2
    for start in range(len(files) - least + 1):
        if chosen := _run(files, start, least, room_bytes):
            return chosen
    return ()


def _all_that_fit(files: Sequence[FileMeta], mark: int, room_bytes: int | None) -> Sequence[FileMeta]:
    """All files, or as many of the newest as fit; empty if these are too few."""
    if len(files) == 1:
        files = [f for f in files if (f.deletes or not f.unique) and f.min_time <= mark]
    ends = itertools.accumulate(file.merge_bytes for file in files)
    fitting = files[: sum(1 for end in ends if room_bytes is None or end <= room_bytes)]
    return fitting if len(fitting) >= min(FILES_MIN, len(files)) else ()


def _run(files: Sequence[FileMeta], start: int, least: int, room_bytes: int | None) -> Sequence[FileMeta]:
    """The longest run of files from `start` on that is worth a merge and fits; empty if there is none."""
    total = largest = room = 0
    end = start
    for at in range(start, len(files)):
        size = files[at].size
        total, largest, room = total + size, max(largest, size), room + files[at].merge_bytes
        if room_bytes is not None and room > room_bytes:
            break
        if at - start + 1 >= least and 2 * total >= 3 * largest:
            end = at + 1
    return files[start:end]


def run_job(job: CompactionJob, files: Files = FILES) -> CompactionResult:
    """Do the merge. Blocks. Memory is bounded by a few row groups of each input, however many rows there are.

    The files' names may not survive power loss yet; whoever installs the files syncs the directory.

    Raises:
        Corrupt: an input is damaged.
        Retryable: DISK_FULL. Whoever planned the job abandons it, which removes what was written.
    """
    directory = Path(job.directory)
    schema = Schema.from_json(job.schema_json)
    merge = Merge([ColumnFile(directory / name) for name in job.inputs], schema, job)
    wanted = Format(job.version, compress=True)
    return CompactionResult(job, write_layers(files, directory / job.output, schema, merge.layers(), wanted))


class Merge:
    """The output of a job, layer after layer, newest first. Drops versions that no snapshot at or above the
    mark sees.

    There is more than one layer only if a key has more versions than one run may hold (`Kept`)."""

    def __init__(self, sources: Sequence[ColumnFile], schema: Schema, job: CompactionJob) -> None:
        self._sources, self._schema, self._job = sources, schema, job
        self._number = 0
        self._ranges = pieces(sources, b"", b"")
        """Key ranges for which the next layer has rows."""

    def layers(self) -> Iterator[Iterator[Run]]:
        """The layers in order. Read each to its end before the next."""
        while self._ranges:
            yield self._layer()

    def _layer(self) -> Iterator[Run]:
        """The next layer: sorted runs, one key range after the other."""
        ranges, self._ranges = self._ranges, []
        number, self._number = self._number, self._number + 1
        for low, high in ranges:
            runs = list(self._runs(low, high))
            if not runs:
                continue
            kept = Kept(runs, self._job.history_mark, bottom=self._job.bottom)
            if number + 1 < len(kept.layers):
                self._ranges.append((low, high))
            yield from (kept.run(positions) for positions in kept.layers[number] if len(positions))

    def _runs(self, low: bytes, high: bytes) -> Iterator[Run]:
        columns, arrow = self._schema.columns, self._schema.to_arrow()
        for source in self._sources:
            for group in source.groups_between(low, high):
                run = source.run(group, columns, arrow).between(low, high)
                if run.rows:
                    yield run
