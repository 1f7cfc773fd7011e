"""The Python of Spark's workers in tests: a template that has imported what they import, and forks itself for each. To import
takes a second of a processor, and Spark starts a daemon and a worker for each kind of work of each session.

Spark is given a small program in Python's place (PYSPARK_PYTHON). It hands its arguments, environment and standard files to the
template, and lives as long as the process that the template forks: it passes SIGTERM on, and ends with that one's exit code.
What is no worker of PySpark it runs with the real Python.

Invariant: no worker outlives its program, or the process that asked for the template (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_ORDER_BYTES = 1 << 17
_STANDARD_FILES = 3
_FORK_SAFE = {"jemalloc_bg_thd"}
"""Threads whose library knows of forks, as in template.py."""

_PROGRAM = r"""#!{python} -IS
import sys
arguments = sys.argv[1:]
if arguments[:1] != ["-m"] or not arguments[1].startswith("pyspark"):
    import os
    os.execv({python!r}, [{python!r}, *arguments])
import json, os, signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
    channel.connect({address!r})
    order = {{"arguments": arguments[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(channel, [json.dumps(order).encode()], [0, 1, 2])
    pid = int(channel.recv(64) or sys.exit("the template of Spark's workers has ended"))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    def pass_on(number, frame):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has ended, and its exit code is on its way
    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = int(channel.recv(64) or -signal.SIGKILL)
if code < 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def spark_python() -> str:
    """The program to name in PYSPARK_PYTHON. Its template begins with it, and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="stele-spark-"))
    program, address = folder / "python", str(folder / "socket")
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(128)
    ours, theirs = socket.socketpair()
    fds = (listening.fileno(), theirs.fileno())
    with listening, theirs:
        # -P: what lies beside this file is no module of a worker.
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "YES"},  # as Spark starts them
            pass_fds=fds,
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return str(program)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Sessions of Spark that are made meanwhile have forked workers, also later."""
    before = os.environ.get("PYSPARK_PYTHON")
    os.environ["PYSPARK_PYTHON"] = spark_python()
    try:
        yield
    finally:
        del os.environ["PYSPARK_PYTHON"]
        if before is not None:
            os.environ["PYSPARK_PYTHON"] = before


@dataclass
class _Worker:
    """One that runs: its program's channel, and its end."""

    channel: socket.socket
    pid: int
    pidfd: int


def _serve(listening: socket.socket, ours: socket.socket) -> dict[str, Any]:
    """Fork for each program that asks; ends with the other end of `ours`. Returns, in each new process, what was asked for."""
    template_pid = os.getpid()
    ready = select.poll()
    for waiting in (listening, ours):
        ready.register(waiting, select.POLLIN)
    workers: dict[int, _Worker] = {}
    while True:
        for fd, _ in ready.poll():
            if fd == ours.fileno():
                shutil.rmtree(Path(listening.getsockname()).parent, ignore_errors=True)
                os._exit(0)
            if fd == listening.fileno():
                channel, _ = listening.accept()
                data, fds, _, _ = socket.recv_fds(channel, _ORDER_BYTES, _STANDARD_FILES)
                if not data:
                    channel.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    listening.close()
                    ours.close()
                    for worker in {w.pid: w for w in workers.values()}.values():
                        worker.channel.close()
                        os.close(worker.pidfd)
                    order = json.loads(data)
                    _become(order, fds, template_pid)
                    return dict(order)
                for each in fds:
                    os.close(each)
                worker = _Worker(channel, pid, os.pidfd_open(pid))
                workers[channel.fileno()] = workers[worker.pidfd] = worker
                for waiting_fd in (channel.fileno(), worker.pidfd):
                    ready.register(waiting_fd, select.POLLIN)
                _tell(channel, pid)
            elif fd in workers:
                worker = workers[fd]
                if fd != worker.pidfd:  # its program has ended
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                _, status = os.waitpid(worker.pid, 0)
                _tell(worker.channel, os.waitstatus_to_exitcode(status))
                for waiting_fd in (worker.channel.fileno(), worker.pidfd):
                    ready.unregister(waiting_fd)
                    del workers[waiting_fd]
                worker.channel.close()
                os.close(worker.pidfd)


def _tell(channel: socket.socket, number: int) -> None:
    with suppress(OSError):  # its program has ended
        channel.send(str(number).encode())


def _become(order: dict[str, Any], fds: list[int], template_pid: int) -> None:
    """What exec and subprocess do for a process, and what Python does at its start with `-m`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template_pid:
        os._exit(1)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [order["folder"], *(path for path in added if path and path not in sys.path)]
    sys.argv = ["-m", *order["arguments"][1:]]


def _import_all() -> None:
    """What Spark's workers import, and their Python data source."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    import importlib
    import pkgutil

    import pandas
    import pyarrow.compute
    import pyspark.sql.streaming
    import pyspark.sql.worker
    import pyspark.worker

    for module in pkgutil.iter_modules(pyspark.sql.worker.__path__, "pyspark.sql.worker."):
        if not module.name.endswith("python_streaming_sink_runner"):
            importlib.import_module(module.name)
    import pyspark_stele
    import stele_spark.source

    del pandas, pyarrow, pyspark, pyspark_stele, stele_spark
    names = {Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")}
    lost = names - {Path("/proc/self/comm").read_text().strip(), *_FORK_SAFE}
    if lost:
        raise RuntimeError(f"imports started threads that a fork would lose: {', '.join(sorted(lost))}")
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _import_all()
    chosen = _serve(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:]))
    import runpy

    runpy.run_module(chosen["arguments"][0], run_name="__main__", alter_sys=True)
