"""The command `stele` in a process of its own, as a shell calls it: its exit code, and all that it prints.

The process is forked from the template. Invariant: none is left when the call ends, however it ends.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from tests.harness.processes import Cluster
from tests.harness.template import Forked, Template, template

ENDS_WITHIN_S = 300.0


async def stele(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """A command that calls this cluster."""
    with _running(arguments, cluster.master_addresses) as (process, output):
        code = await process.ended(ENDS_WITHIN_S)
        return code, _printed(output)


def command(*arguments: str) -> tuple[int, str]:
    """A command that is told of no cluster but in its arguments."""
    with _running(arguments, ()) as (process, output):
        code = process.wait(ENDS_WITHIN_S)
        return code, _printed(output)


async def outcome(
    program: Template, arguments: Sequence[str], environment: dict[str, str]
) -> tuple[int, str, str]:
    """A command of any program: its exit code, output and errors."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = program.start(list(arguments), environment, output.fileno(), errors=errors.fileno())
        try:
            return await process.ended(ENDS_WITHIN_S), _printed(output), _printed(errors)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextmanager
def _running(arguments: Sequence[str], masters: Sequence[str]) -> Iterator[tuple[Forked, IO[bytes]]]:
    environment = {**os.environ, **({"STELE_MASTERS": ",".join(masters)} if masters else {})}
    with tempfile.TemporaryFile() as output:
        process = template().start(list(arguments), environment, output.fileno())
        try:
            yield process, output
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _printed(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode()
