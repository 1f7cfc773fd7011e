"""A process that has imported all of a node and a master, or of the operator, and forks itself for each that a test starts: to
import takes a second or two of a processor, which is most of a start. Called by processes.py, commands.py, pods.py and
tests/operator/cluster.py.

What it starts is a process of its own, with the session, group, environment and output that were asked for, and every signal as
after an exec. It has one thread, no event loop yet, and chance of its own. The kernel shows the template's command line for it.

Invariant: none of them outlives the template (PR_SET_PDEATHSIG), and the template does not outlive the process that made it,
whose end closes their channel. Until that process has asked for an exit code, nobody else gets the pid.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_ORDER_BYTES = 1 << 17
_FDS = 3
_SEGMENT_BYTES = 4 << 20
_PR_SET_PDEATHSIG = 1
_FORK_SAFE = {"jemalloc_bg_thd"}
"""Threads whose library knows of forks. Those of OpenBLAS, which does too, bear the name of the process."""


class Forked:
    """A process that the template made, with the part of subprocess.Popen that tests use."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._asking = threading.Lock()
        self._fd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._fd)

    def poll(self) -> int | None:
        """Its exit code, once it has ended; that of a signal is below 0."""
        with self._asking:
            if self.returncode is None:
                self.returncode = self._template.ask({"ended": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        ends = select.poll()
        ends.register(self._fd, select.POLLIN)
        if self.returncode is None and not ends.poll(None if timeout is None else timeout * 1_000):
            raise subprocess.TimeoutExpired(f"stele, pid {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None, "its pidfd says that it has ended"
        return code

    async def ended(self, timeout_s: float) -> int:
        """Its exit code, once it has ended.

        Raises:
            TimeoutError: it still runs.
        """
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fd, over.set)
        try:
            async with asyncio.timeout(timeout_s):
                await over.wait()
        finally:
            loop.remove_reader(self._fd)
        return self.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._fd, number)


class Template:
    """A template of this process: of `stele` or of `stele-operator`. Starts take turns."""

    def __init__(self, program: str = "stele") -> None:
        self._turn = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -P: what lies beside this file is no module of a node.
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        atexit.register(self._end)

    def start(
        self,
        arguments: list[str],
        environment: dict[str, str],
        output: int,
        claim: int | None = None,
        group: int | None = None,
        folder: Path | None = None,
        errors: int | None = None,
    ) -> Forked:
        """The program with these arguments. `output`, `errors`, `claim`: descriptors for its output, for its errors if they go
        elsewhere, and one that it keeps open. `folder`: where it runs, if elsewhere than this process."""
        order = {
            "arguments": arguments,
            "environment": environment,
            "folder": str(folder or Path.cwd()),
            "group": group,
        }
        fds = (output, output if errors is None else errors)
        return Forked(self, self.ask(order, *(fds if claim is None else (*fds, claim))))

    def ask(self, order: dict[str, Any], *fds: int) -> Any:
        """The template's answer.

        Raises:
            RuntimeError: it has ended; standard error says why.
        """
        with self._turn:
            try:
                socket.send_fds(self._channel, [json.dumps(order).encode()], fds)
                answer = self._channel.recv(_ORDER_BYTES)
            except OSError:
                answer = b""
        if not answer:
            raise RuntimeError(f"the template of processes ended with {self._process.wait()}")
        return json.loads(answer)

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()


@cache
def template() -> Template:
    """The one of `stele` for this process, made when it is first asked for."""
    return Template()


@cache
def operator_template() -> Template:
    """The one of `stele-operator` for this process, made when it is first asked for."""
    return Template("stele-operator")


def _serve(channel: socket.socket, program: str) -> None:
    """Fork for each order; ends with the other end of the channel. Returns in each new process."""
    template_pid = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(channel, _ORDER_BYTES, _FDS)
        if not data:
            os._exit(0)
        order = json.loads(data)
        if "ended" in order:
            pid, status = os.waitpid(order["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            has_begun, begins = os.pipe()
            answer = os.fork()
            if answer == 0:
                channel.close()
                os.close(has_begun)
                os.setsid()
                os.close(begins)
                _become(program, order, fds, template_pid)
                return
            # Whoever is told of it may signal its group at once, as after a start by subprocess.
            os.close(begins)
            os.read(has_begun, 1)
            os.close(has_begun)
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps(answer).encode())


def _become(program: str, order: dict[str, Any], fds: list[int], template_pid: int) -> None:
    """What exec and subprocess do for a process. A change of the group would undo the death signal, so it comes first."""
    if order["group"] is not None:
        os.setgid(order["group"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template_pid:
        os._exit(1)
    output, errors, *_kept = fds
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = [program, *order["arguments"]]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in added if path and path not in sys.path]
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _import_stele() -> Callable[[], None]:
    """As the command line does it, which sets imports up before it imports more. Returns what runs it."""
    from stele.cli import keep_imports_few
    from stele.model.no_pandas import keep_pandas_out

    keep_imports_few()
    keep_pandas_out()
    import uvloop

    import stele.cli.app
    import stele.cli.processes
    import stele.client
    import stele.master.server
    import stele.rpc.logging
    import stele.rpc.masters
    import stele.tserver.opening
    import stele.tserver.process
    from stele.wal.options import LogOptions

    def small(*, segment_bytes: int, **more: Any) -> LogOptions:
        """As tests/harness/segments.py has it for nodes in a test's own process."""
        asked = segment_bytes != LogOptions().segment_bytes
        return LogOptions(segment_bytes=segment_bytes if asked else _SEGMENT_BYTES, **more)

    stele.tserver.opening.LogOptions = small  # type: ignore[misc, assignment]

    del uvloop
    return stele.cli.main


def _import_operator() -> Callable[[], None]:
    """As its command line does it. Returns what runs it."""
    import stele_operator.__main__

    return stele_operator.__main__.main


def _can_fork() -> None:
    """Fails if a fork would lose a thread. Makes forks cheap."""
    names = {Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")}
    lost = names - {Path("/proc/self/comm").read_text().strip(), *_FORK_SAFE}
    if lost:
        raise RuntimeError(f"imports started threads that a fork would lose: {', '.join(sorted(lost))}")
    # A collection in a fork would look at all of these, and copy each page that they lie on.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    main = {"stele": _import_stele, "stele-operator": _import_operator}[sys.argv[2]]()
    _can_fork()
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    main()
