"""Merges of one store's files: plans the next one and installs its result. Used by the store.

The worker process does the merge itself (compaction.py), given only file names. Any thread may call; a plan
never blocks. Invariant: one merge at a time, and only of neighbours. Its inputs stay until its result is in
the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from stele.model.errors import ensure
from stele.model.ids import new_id
from stele.tablet import reclaim
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import NAME, FileMeta
from stele.tablet.compaction import CompactionJob, CompactionResult, choose
from stele.tablet.contents import Contents
from stele.tablet.reclaim import Judgement

_log = structlog.get_logger("stele.tablet")


class Merges:
    """The running merge of a store, and which files were found not worth merging. `history_mark` gives the
    present mark, `file_version` the format to write."""

    def __init__(
        self, contents: Contents, history_mark: Callable[[], int], file_version: Callable[[], int]
    ) -> None:
        self._contents = contents
        self._file_version = file_version
        self._history_mark = history_mark
        self._under_way = False
        self.mark = 0
        """The history mark that the running merge uses; 0 if none runs."""
        self._in_vain: Sequence[FileMeta] = ()
        """The manifest's files when no merge was worth it, whatever the free space."""
        self.judged = Judgement()

    def plan(self, *, full: bool, room_bytes: int | None) -> CompactionJob | None:
        """See TabletStore.plan_compaction."""
        files = self._contents.state.manifest.files
        if self._under_way or (files is self._in_vain and not full):
            return None  # a look at many files takes longer than a look at all other stores
        if not self._contents.manifest_lock.acquire(blocking=False):
            return None  # a flush is writing, and its file may be worth merging too; ask again later
        try:
            files, mark = self._contents.state.manifest.files, self._history_mark()
            chosen = choose(files, mark, full=full, room_bytes=room_bytes)
            if not (chosen or full or choose(files, mark, full=False)):
                self._in_vain = files
            return self._job_of(chosen) if chosen else None
        finally:
            self._contents.manifest_lock.release()

    def _job_of(self, chosen: Sequence[FileMeta]) -> CompactionJob:
        current = self._contents.state.manifest
        # A worker that outlives its node must never write a file name that the restarted node uses.
        job = CompactionJob(
            str(self._contents.directory),
            tuple(f.name for f in chosen),
            f"{NAME}{self._contents.reserve_number():08x}-{new_id()}",
            self._history_mark(),
            chosen[-1] == current.files[-1],
            current.schema.to_json(),
            self._file_version(),
        )
        self._under_way, self.mark = True, job.history_mark
        return job

    @property
    def reclaim_due(self) -> bool:
        """See TabletStore.reclaim_due."""
        files = self._contents.state.manifest.files
        return not self._under_way and reclaim.due(files, self._history_mark(), self.judged)

    def judge_dead(self) -> None:
        """See TabletStore.judge_dead."""
        self.judged = reclaim.judge(self._contents.state.files, self._history_mark())

    def plan_reclaim(self, *, room_bytes: int | None) -> CompactionJob | None:
        """See TabletStore.plan_reclaim."""
        if self._under_way or not self._contents.manifest_lock.acquire(blocking=False):
            return None
        try:
            files = self._contents.state.manifest.files
            return self._job_of(files) if reclaim.worth(files, self.judged, room_bytes) else None
        finally:
            self._contents.manifest_lock.release()

    def abandon(self, job: CompactionJob) -> None:
        """See TabletStore.abandon_compaction."""
        contents = self._contents
        with contents.manifest_lock:
            self._under_way, self.mark = False, 0
            contents.remove_unlisted(*(path.name for path in contents.directory.glob(f"{job.output}*")))

    def install(self, result: CompactionResult) -> None:
        """See TabletStore.install_compaction."""
        job = result.job
        try:
            opened = tuple(ColumnFile(self._contents.directory / m.name, m) for m in result.files)
            with self._contents.manifest_lock:
                self._install(result, opened)
        except Exception:
            self.abandon(job)
            raise
        _log.debug("compacted", files=len(job.inputs), into=[m.name for m in result.files])

    def _install(self, result: CompactionResult, opened: Sequence[ColumnFile]) -> None:
        contents, job = self._contents, result.job
        current = contents.state.manifest
        names = [f.name for f in current.files]
        at = names.index(job.inputs[0])
        end = at + len(job.inputs)
        ensure(tuple(names[at:end]) == job.inputs, "compaction: the manifest does not list its inputs")
        new = replace(
            current,
            history_mark=max(current.history_mark, job.history_mark),
            files=(*current.files[:at], *result.files, *current.files[end:]),
        )
        contents.install(new, slice(at, end), opened)
        self._under_way, self.mark = False, 0
        if len(result.files) >= len(job.inputs):  # versions of one key that do not fit in fewer files
            self._in_vain = new.files
        for name in job.inputs:
            contents.files.remove(contents.directory / name)
