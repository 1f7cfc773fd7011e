"""Starts and tells programs of either release: writers (writer.py), and the `stele` command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.processes import Cluster

ROOT = Path(__file__).parents[2]
HEAD = ROOT / "node"
"""The folder with this checkout's package `stele`."""
_LINE_BYTES = 1 << 26


def environment(program: Path) -> dict[str, str]:
    """For a process that runs the package `stele` in that folder."""
    path = filter(None, (str(program), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@dataclass
class WriterProcess:
    """A writer.py that runs."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @classmethod
    async def start(cls, name: str, cluster: Cluster, program: Path) -> WriterProcess:
        """Start it with that release, and wait until it has imported it."""
        log = cluster.directory / f"writer-{name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(Path(__file__).with_name("writer.py")),
                name,
                ",".join(cluster.master_addresses),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment(program),
                limit=_LINE_BYTES,
            )
        writer = cls(name, process, log)
        loaded = (await writer._answer())["program"]
        assert Path(loaded).is_relative_to(program), f"writer {name} runs {loaded}, expected {program}"
        return writer

    async def ask(self, order: str) -> dict[str, Any]:
        """Give an order; its answer. Raises AssertionError if the writer failed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n".encode())
        return await self._answer()

    def must_run(self) -> None:
        """Raise AssertionError if it failed."""
        assert self.process.returncode is None, f"writer {self.name} failed:\n{self.log.read_text()}"

    async def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            await self.process.wait()
            raise AssertionError(f"writer {self.name} failed:\n{self.log.read_text()}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def kill(self) -> None:
        """End it at once, if it still runs."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def stele(program: Path, cluster: Cluster, *words: str) -> tuple[int, str]:
    """(exit code, output) of a command of that release."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stele.cli", *words, "--masters", ",".join(cluster.master_addresses)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(program),
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()
