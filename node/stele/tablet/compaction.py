"""Which files to merge, and how: planned by the store, carried out by the worker process from file names alone.

Files are kept newest first; only neighbours are merged, so that "newer" stays a matter of position. Neighbours are
merged once there are several of about one size: each row is rewritten a logarithmic number of times.

Invariant: the files a merge reads are never changed; its output becomes visible only through the manifest.
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
from stele.tablet.colwriter import write_layers
from stele.tablet.files import FILES, Files
from stele.tablet.sorted_runs import Kept, Run
from stele.tablet.sources import pieces

FILES_MIN = 4
"""So many files of about one size are merged."""
FILES_MAX = 12
"""Of a store with so many, two of about one size are merged: the others double in size, so there are few more."""


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A merge: `inputs` newest first, into files named after `output`. `bottom`: nothing older lies below."""

    directory: str
    inputs: tuple[str, ...]
    output: str
    history_mark: int
    bottom: bool
    schema_json: str

    def to_json(self) -> str:
        """One line, as the worker reads it."""
        return json.dumps(
            [self.directory, list(self.inputs), self.output, self.history_mark, self.bottom, self.schema_json]
        )

    @staticmethod
    def from_json(text: str) -> CompactionJob:
        """The inverse of `to_json`.

        Raises:
            Rejected: the text is no job.
        """
        try:
            directory, inputs, output, mark, bottom, schema_json = json.loads(text)
            return CompactionJob(
                str(directory),
                tuple(map(str, inputs)),
                str(output),
                int(mark),
                bool(bottom),
                str(schema_json),
            )
        except (ValueError, TypeError) as exc:
            raise Rejected(f"compaction job: {exc!r}; expected what CompactionJob.to_json wrote") from exc


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The files that hold what the job's inputs held; none if nothing was left."""

    job: CompactionJob
    files: tuple[FileMeta, ...]


def choose(
    files: Sequence[FileMeta], mark: int, *, full: bool, room_bytes: int | None = None
) -> Sequence[FileMeta]:
    """The files to merge, newest first; empty if none are worth it.

    A merge is worth it where it brings all its rows into a file half as large again as the largest that it is made of, so a
    row is rewritten a logarithmic number of times, log_1.5(size of the store / size of a flush) at most; and where it
    takes FILES_MIN files at least, or two while there are FILES_MAX and more. Of those the newest, as long as may be.

    `full`: all of them, or a single one that has deletes or versions to drop below `mark`. `room_bytes`: what the merged
    file may take beside those it is made of; None: any amount.
    """
    if full:
        return _all_that_fit(files, mark, room_bytes)
    least = FILES_MIN if len(files) < FILES_MAX else 2
    for start in range(len(files) - least + 1):
        if chosen := _run(files, start, least, room_bytes):
            return chosen
    return ()


def _all_that_fit(files: Sequence[FileMeta], mark: int, room_bytes: int | None) -> Sequence[FileMeta]:
    """All files; where they do not fit, the newest that do, unless they are too few."""
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
    """Carry the merge out. Memory is bounded by a few row groups of each input, however many rows there are. Blocks. The names of the files may not
    survive power loss yet: whoever installs them sees to that.

    Raises:
        Corrupt: an input is damaged.
        Retryable: DISK_FULL; whoever planned the job abandons it, which removes what was written.
    """
    directory = Path(job.directory)
    schema = Schema.from_json(job.schema_json)
    merge = Merge([ColumnFile(directory / name) for name in job.inputs], schema, job)
    return CompactionResult(job, write_layers(files, directory / job.output, schema, merge.layers()))


class Merge:
    """What the inputs of a job become: layer after layer, newest first, each without what no snapshot at or above the
    mark sees. There is more than one where a key has more versions than a run may hold (`Kept`)."""

    def __init__(self, sources: Sequence[ColumnFile], schema: Schema, job: CompactionJob) -> None:
        self._sources, self._schema, self._job = sources, schema, job
        self._number = 0
        self._ranges = pieces(sources, b"", b"")
        """Key ranges of which the next layer has something."""

    def layers(self) -> Iterator[Iterator[Run]]:
        """One layer after the other, each of which is read to its end before the next."""
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
