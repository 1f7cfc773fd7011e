"""Measures the machine itself, before anything is measured on it. Called by __main__.

A virtual machine's processors and disk change from hour to hour by more than any change to the code. So
compare two runs only if these figures are alike.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

from bench.report import milliseconds, percentile
from stele.raft import core

_SYNCS, _ROUND_TRIPS, _LOOPS = 300, 3_000, 5
_BLOCK = 4_096
_ECHO = (
    "import socket, sys\n"
    "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
    "s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n"
    "while data := s.recv(64):\n"
    "    s.sendall(data)\n"
)


def described() -> str:
    """A line about the machine and the interpreter."""
    return (
        f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}, "
        f"{os.path.realpath(sys.executable)} {platform.python_version()}"
        f"{', Stele compiled' if core.__file__.endswith('.so') else ''}"
    )


def speed(directory: Path) -> str:
    """A line about its present speed: a sync, a round trip between two processes, a Python loop."""
    try:
        return (
            f"now: 4 KiB written and synced in {_sync_s(directory) * 1e6:.0f} us, 64 bytes to another "
            f"process and back in {_round_trip_s() * 1e6:.0f} us, a million turns of a loop in Python in "
            f"{milliseconds(_loop_s())}"
        )
    except OSError as exc:
        return f"the present speed of this machine could not be measured: {exc}"


def _sync_s(directory: Path) -> float:
    """Time to write and sync a block in a file that is filled with zeros already, as a log has it."""
    path = directory / "sync"
    block = bytes(_BLOCK)
    path.write_bytes(block * _SYNCS)
    times = []
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.fsync(descriptor)
        for number in range(_SYNCS):
            started = time.perf_counter()
            os.pwrite(descriptor, block, number * _BLOCK)
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - started)
    finally:
        os.close(descriptor)
        path.unlink()
    return percentile(times, 0.5)


def _round_trip_s() -> float:
    """Time to send 64 bytes over TCP to a process that sends them back."""
    times = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-S", "-c", _ECHO, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as echo:
            try:
                listener.settimeout(30)
                connection, _ = listener.accept()
                with connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for _ in range(_ROUND_TRIPS):
                        started = time.perf_counter()
                        connection.sendall(bytes(64))
                        if len(connection.recv(64, socket.MSG_WAITALL)) < 64:
                            raise ConnectionError("the echo process has ended")
                        times.append(time.perf_counter() - started)
            finally:
                echo.kill()
    return percentile(times, 0.5)


def _loop_s() -> float:
    """The best of several runs, so that it shows the processor and the interpreter, not other load."""
    best = float("inf")
    for _ in range(_LOOPS):
        started = time.perf_counter()
        total = 0
        for number in range(1_000_000):
            total += number
        best = min(best, time.perf_counter() - started)
    return best
