"""Merges of one store's files: which is planned next, and how its end comes into use. Used by the store; the worker process carries
a merge out (compaction.py), from file names alone.

Threads: any; a plan never blocks.

Invariant: one merge at a time, and of neighbours: what it was made from is there until its result stands in the manifest.
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
    """What is merged of a store, and what was found not to be worth it. `history_mark`: the store's, as it is when asked."""

    def __init__(self, contents: Contents, history_mark: Callable[[], int]) -> None:
        self._contents = contents
        self._history_mark = history_mark
        self._under_way = False
        self._in_vain: Sequence[FileMeta] = ()
        """The manifest's files when there was nothing to merge of them, whatever room there was."""
        self.judged = Judgement()

    def plan(self, *, full: bool, room_bytes: int | None) -> CompactionJob | None:
        """As TabletStore.plan_compaction."""
        files = self._contents.state.manifest.files
        if self._under_way or (files is self._in_vain and not full):
            return None  # a look at many files takes longer than one at all other stores of a node
        if not self._contents.manifest_lock.acquire(blocking=False):
            return None  # a flush is writing: its file may be worth merging, too, so ask again later
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
        # A worker that outlives its node must never write a name that the next life of the node uses.
        job = CompactionJob(
            str(self._contents.directory),
            tuple(f.name for f in chosen),
            f"{NAME}{self._contents.reserve_number():08x}-{new_id()}",
            self._history_mark(),
            chosen[-1] == current.files[-1],
            current.schema.to_json(),
        )
        self._under_way = True
        return job

    @property
    def reclaim_due(self) -> bool:
        """As TabletStore.reclaim_due."""
        files = self._contents.state.manifest.files
        return not self._under_way and reclaim.due(files, self._history_mark(), self.judged)

    def judge_dead(self) -> None:
        """As TabletStore.judge_dead."""
        self.judged = reclaim.judge(self._contents.state.files, self._history_mark())

    def plan_reclaim(self, *, room_bytes: int | None) -> CompactionJob | None:
        """As TabletStore.plan_reclaim."""
        if self._under_way or not self._contents.manifest_lock.acquire(blocking=False):
            return None
        try:
            files = self._contents.state.manifest.files
            return self._job_of(files) if reclaim.worth(files, self.judged, room_bytes) else None
        finally:
            self._contents.manifest_lock.release()

    def abandon(self, job: CompactionJob) -> None:
        """As TabletStore.abandon_compaction."""
        contents = self._contents
        with contents.manifest_lock:
            self._under_way = False
            contents.remove_unlisted(*(path.name for path in contents.directory.glob(f"{job.output}*")))

    def install(self, result: CompactionResult) -> None:
        """As TabletStore.install_compaction."""
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
        ensure(tuple(names[at:end]) == job.inputs, "compaction: its files are not there")
        new = replace(
            current,
            history_mark=max(current.history_mark, job.history_mark),
            files=(*current.files[:at], *result.files, *current.files[end:]),
        )
        contents.install(new, slice(at, end), opened)
        self._under_way = False
        if len(result.files) >= len(job.inputs):  # versions of one key that fit into no fewer files
            self._in_vain = new.files
        for name in job.inputs:
            contents.files.remove(contents.directory / name)
