"""The node's side of the compaction worker: starts it, sends it one job at a time, and reports its death as
an error.

Asynchronous; reads and writes no rows. Invariant: a Compactor has at most one worker process, and none after
`close`.
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
        """Run a job in the worker.

        Raises:
            Retryable: UNAVAILABLE: the worker died or could not start; DISK_FULL. Nothing changed.
            Corrupt: an input is damaged.
        """
        async with self._turn:
            try:
                # An idle worker may exit while the job is sent; then a second worker gets the job.
                answer = await self._ask(job) or await self._ask(job)
            except BaseException:
                # Otherwise it would go on, and its answer would be taken for the next job's.
                await self.close()
                raise
        if not answer:
            raise Retryable(
                "the compaction worker died during a merge; no file changed; it will be tried again"
            )
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
        except OSError as exc:  # no memory, descriptor or process is left now
            raise Retryable(f"the compaction worker could not start: {exc}; it will be tried again") from exc

    @property
    def running(self) -> bool:
        """Whether a worker process is alive."""
        return self._process is not None and self._process.returncode is None

    async def close(self) -> None:
        """Kill the worker, even during a merge."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
