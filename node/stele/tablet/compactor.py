"""The node's side of the compaction worker: starts it when there is a job, hands it jobs one at a time, and takes its
death for a failed job. Asynchronous; reads and writes no rows.

Invariant: at most one worker process runs per Compactor, and none survives `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from stele.model.errors import Code, Retryable, error_for
from stele.tablet.colformat import FileMeta
from stele.tablet.compaction import CompactionJob, CompactionResult


class Compactor:
    """Runs compaction jobs in a worker process, one after the other."""

    def __init__(self, *, idle_s: float = 10.0, python: str = sys.executable) -> None:
        self._idle_s = idle_s
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def run(self, job: CompactionJob) -> CompactionResult:
        """Carry out a job.

        Raises:
            Retryable: the worker died, or could not be started (UNAVAILABLE), or met a full disk; nothing changed.
            Corrupt: an input is damaged.
        """
        async with self._turn:
            try:
                # A worker that has just gone idle may be on its way out when the job is written: a second one gets it.
                answer = await self._ask(job) or await self._ask(job)
            except BaseException:
                await self.close()  # or its answer would be taken for the next job's, and it would write on
                raise
        if not answer:
            raise Retryable("the compaction worker died at its work; the files stand as they were")
        raw = json.loads(answer)
        if "files" not in raw:
            raise error_for(Code(raw["code"]), f"compaction: {raw['message']}")
        return CompactionResult(job, tuple(FileMeta.from_json(f) for f in raw["files"]))

    async def _ask(self, job: CompactionJob) -> bytes:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        if process.stdin is None or process.stdout is None:
            return b""
        try:
            process.stdin.write(job.to_json().encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            await process.wait()
            self._process = None
        return line

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self._python,
                "-m",
                "stele.tablet.worker",
                "--idle-s",
                str(self._idle_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as exc:  # no memory, no descriptor, no process to be had just now
            raise Retryable(f"the compaction worker could not be started: {exc}; it is tried again") from exc

    @property
    def running(self) -> bool:
        """Whether a worker process is alive."""
        return self._process is not None and self._process.returncode is None

    async def close(self) -> None:
        """End the worker, whatever it is at."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
