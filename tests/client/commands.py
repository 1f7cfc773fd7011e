"""Runs the command line in this process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TextIO

import pytest

from stele.cli import app

Run = Callable[..., Awaitable[tuple[int, str, str]]]


class Cluster(Protocol):
    """What commands are to be told of one."""

    @property
    def master_address(self) -> str: ...


class _OfThisThread:
    """What this thread writes goes to `own`, what others write to where it went before: nodes in this process log."""

    def __init__(self, own: TextIO, others: TextIO) -> None:
        self._thread, self._own, self._others = threading.get_ident(), own, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if threading.get_ident() == self._thread else self._others, name)


def runner(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs commands in a thread, as a process of their own would: what they print, and how they end."""

    def run(arguments: tuple[str, ...]) -> tuple[int, str, str]:
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with (
            contextlib.redirect_stdout(_OfThisThread(out, sys.stdout)),  # type: ignore[type-var]
            contextlib.redirect_stderr(_OfThisThread(err, sys.stderr)),  # type: ignore[type-var]
            pytest.raises(SystemExit) as ended,
        ):
            app.run(arguments)
        read = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return int(ended.value.code or 0), read[0], read[1]

    async def in_thread(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, arguments)

    monkeypatch.setenv("STELE_MASTERS", cluster.master_address)
    return in_thread
