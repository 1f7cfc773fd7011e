"""A node or master as a process: signals, exit codes, memory settings. Called by the command line.

Invariant: the process ends with one of the documented exit codes, and says why in one line. It ends within
END_S if it cannot continue, and within STOP_S after a signal to stop, whatever its disk does. The system
releases the volume's lock once no thread of the process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import structlog

from stele.model.errors import Corrupt, InvariantViolation, Rejected, Retryable, SteleError
from stele.tablet.files import NO_MEANS, NO_SPACE
from stele.tserver.extension import MakeExtension, NoExtension
from stele.tserver.node import Node, start_node
from stele.tserver.options import (
    EXIT_DISK,
    EXIT_INVARIANT,
    EXIT_OK,
    EXIT_TRY_AGAIN,
    EXIT_USAGE,
    NodeOptions,
)
from stele.tserver.volume import Fate

log = structlog.get_logger("stele.tserver")

TERMINATION_LOG = "STELE_TERMINATION_LOG"
END_S = 10.0
"""How long a node that cannot continue, or does not serve yet, may take to end."""
STOP_S = 30.0
"""How long a serving node may take to end; it hands its leaderships over first."""
_GC_THRESHOLDS = (50_000, 50, 100)
_FILES = 1 << 20


def run_process(options: NodeOptions, extend: MakeExtension = NoExtension) -> int:
    """Run a node until SIGTERM or SIGINT, or until it cannot continue. Returns the exit code."""
    import uvloop

    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options, extend))


def end_process(code: int) -> NoReturn:
    """End at once, after `run_process` closed everything that the node opened. The interpreter's own exit
    would wait for Flight's readers, which may hang.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def raise_file_limit() -> None:
    """Raise the limit of open files. Each open column file holds a descriptor, and shells and service
    managers give 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(options: NodeOptions, extend: MakeExtension) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gc.collect()
    sys.setswitchinterval(0.0001)
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    starting = asyncio.ensure_future(start_node(options, extend))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        _end_within(END_S, EXIT_OK)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return EXIT_OK
    error = starting.exception()
    if error is not None:
        stopping.cancel()
        return exit_code(error)
    node = starting.result()
    log.info("serving", address=node.address, node=node.node_id, incarnation=node.incarnation)
    await asyncio.wait((stopping, node.failed), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if node.failed.done():
        return await _end(node, node.failed.result())
    _end_within(STOP_S, EXIT_OK)
    await node.stop()
    if node.failed.done():
        return exit_code(node.failed.result())
    log.info("stopped")
    return EXIT_OK


async def _end(node: Node, error: Exception) -> int:
    _end_within(END_S, _code_of(error))
    code = exit_code(error)
    await node.stop()
    return code


def _end_within(seconds: float, code: int) -> None:
    """Exit with `code` after this long, even if threads still run.

    Threads that wait for a disk that hangs, or that recover a long log, keep the interpreter from ending.
    Work that is cut off here is recovered as after a crash.
    """
    at_last = threading.Timer(seconds, os._exit, (code,))
    at_last.daemon = True
    at_last.start()


def exit_code(error: BaseException) -> int:
    """Log the reason for the end, once and in one line. Returns the exit code."""
    line = str(error.args[0]) if isinstance(error, SteleError) else str(error) or repr(error)
    lacking = _lacking(error)
    if lacking is not None and lacking.errno in NO_SPACE:
        line = (
            f"the disk is full ({lacking.filename or line}); free space or grow the volume, then start again"
        )
    elif lacking is not None:
        line = f"{lacking.strerror} ({lacking.filename or line}); raise its limit, then start again"
    if isinstance(error, Fate):
        line = f"{error.fate}: {error}"
    print(f"stele: {line}", file=sys.stderr, flush=True)
    told_to = os.environ.get(TERMINATION_LOG)
    if told_to:
        Path(told_to).write_text(line + "\n")
    code = _code_of(error)
    if code == EXIT_INVARIANT and not isinstance(error, InvariantViolation):
        log.error("unexpected end", exc_info=error)
    return code


def _code_of(error: BaseException) -> int:
    if _lacking(error) is not None or isinstance(error, Retryable):
        return EXIT_TRY_AGAIN  # never EXIT_DISK: an operator would give up an intact volume
    if isinstance(error, Fate):
        return error.exit_code
    if isinstance(error, Rejected):
        return EXIT_USAGE
    if isinstance(error, Corrupt | OSError):
        return EXIT_DISK
    return EXIT_INVARIANT


def _lacking(error: BaseException | None) -> OSError | None:
    """The OSError or MemoryError that shows a lack of space, descriptors or memory. It may be the cause of
    `error`.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (*NO_SPACE, *NO_MEANS):
            return error
        error = error.__cause__ or error.__context__
    return None
