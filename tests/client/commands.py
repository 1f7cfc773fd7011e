"""Runs the command line in this process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TextIO

import pytest

from stele.cli import app

Run = Callable[..., Awaitable[tuple[int, str, str]]]


class Cluster(Protocol):
    """What commands are to be told of one."""

    @property
    def master_address(self) -> str: ...


class _ByThread:
    """A standard stream for all threads: what a command's thread writes is kept, what others write goes where it went before,
    because nodes in this process log.

    It stands in `sys` as long as the test runs. To change `sys.stdout` while another thread prints ends the process, in Python
    3.11: `print` holds no reference to it.
    """

    def __init__(self, others: TextIO) -> None:
        self._others = others
        self._kept: dict[int, TextIO] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept.get(threading.get_ident(), self._others), name)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[io.BytesIO]:
        """What this thread writes meanwhile."""
        kept = io.BytesIO()
        self._kept[threading.get_ident()] = io.TextIOWrapper(kept, write_through=True)
        try:
            yield kept
        finally:
            self._kept.pop(threading.get_ident()).detach()


def runner(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs commands in a thread, as a process of their own would: what they print, and how they end."""
    out, err = _ByThread(sys.stdout), _ByThread(sys.stderr)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def run(arguments: tuple[str, ...]) -> tuple[int, str, str]:
        with out.keeping() as printed, err.keeping() as told, pytest.raises(SystemExit) as ended:
            app.run(arguments)
        return int(ended.value.code or 0), printed.getvalue().decode(), told.getvalue().decode()

    async def in_thread(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, arguments)

    monkeypatch.setenv("STELE_MASTERS", cluster.master_address)
    return in_thread
