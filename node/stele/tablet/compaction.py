"""Which files to merge, and how: planned by the store, carried out by the worker process from file names alone.

Files are kept newest first; only neighbours are merged, so that "newer" stays a matter of position. The newest files
are merged once there are several of about one size: each row is rewritten a logarithmic number of times.

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
from stele.tablet.colfile import ColumnFile, FileMeta, write_column_file
from stele.tablet.files import FILES, Files
from stele.tablet.runs import Run, compacted
from stele.tablet.sources import pieces

FILES_MIN = 4
FILES_MAX = 12


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

    `full`: all of them, or a single one that has deletes or versions to drop below `mark`. `room_bytes`: what the merged
    file may take beside those it is made of; where they are more, the newest of them that are less.
    """
    chosen = _worth_it(files, mark, full=full)
    if room_bytes is None:
        return chosen
    ends = itertools.accumulate(file.size for file in chosen)
    fitting = chosen[: sum(1 for end in ends if end <= room_bytes)]
    return fitting if len(fitting) >= min(FILES_MIN, len(chosen)) else ()


def _worth_it(files: Sequence[FileMeta], mark: int, *, full: bool) -> Sequence[FileMeta]:
    if full:
        if len(files) > 1:
            return files
        return [f for f in files if (f.deletes or not f.unique) and f.min_time <= mark]
    if len(files) >= FILES_MAX:
        return files
    best = 0
    total = 0
    for count, file in enumerate(files, start=1):
        if count > 1 and file.size > 2 * total:
            break
        total += file.size
        best = count
    return files[:best] if best >= FILES_MIN else ()


def run_job(job: CompactionJob, files: Files = FILES) -> CompactionResult:
    """Carry the merge out. Memory is bounded by a few row groups of each input. Blocks.

    Raises:
        Corrupt: an input is damaged.
        Retryable: DISK_FULL; nothing is left behind.
    """
    directory = Path(job.directory)
    schema = Schema.from_json(job.schema_json)
    sources = [ColumnFile(directory / name) for name in job.inputs]
    runs = (r for r in merge(sources, schema, job.history_mark, bottom=job.bottom) if r.rows)
    first = next(runs, None)
    if first is None:
        return CompactionResult(job, ())
    path = directory / job.output
    meta = write_column_file(files, path, schema, _chain(first, runs))
    files.sync_directory(directory)
    return CompactionResult(job, (meta,))


def _chain(first: Run, rest: Iterator[Run]) -> Iterator[Run]:
    yield first
    yield from rest


def merge(sources: Sequence[ColumnFile], schema: Schema, mark: int, *, bottom: bool) -> Iterator[Run]:
    """Sorted runs, one key range after the other, without what no snapshot at or above `mark` sees."""
    columns, arrow = schema.columns, schema.to_arrow()
    for low, high in pieces(sources, b"", b""):
        runs = []
        for source in sources:
            for group in source.groups_between(low, high):
                run = source.run(group, columns, arrow).between(low, high)
                if run.rows:
                    runs.append(run)
        if runs:
            yield compacted(runs, mark, bottom=bottom)
