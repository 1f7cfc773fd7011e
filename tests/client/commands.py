"""Runs the command line in this process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest

from stele.cli import app

Run = Callable[..., Awaitable[tuple[int, str, str]]]


class Cluster(Protocol):
    """What commands are to be told of one."""

    @property
    def master_address(self) -> str: ...


def runner(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs commands in a thread, as a process of their own would: what they print, and how they end."""

    def run(arguments: tuple[str, ...]) -> tuple[int, str, str]:
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            app.run(arguments)
        read = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return int(ended.value.code or 0), read[0], read[1]

    async def in_thread(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(run, arguments)

    monkeypatch.setenv("STELE_MASTERS", cluster.master_address)
    return in_thread
